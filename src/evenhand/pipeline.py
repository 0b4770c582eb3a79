"""Data sets, models and evaluations of run folders: what the commands have in common."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from evenhand.building import (
    build_model,
    check_neighbours,
    table_dtype,
)
from evenhand.config import Config, DataConfig, build_config, read_settings
from evenhand.data import Dataset, Rows, load_places, open_dataset, save_dataset
from evenhand.data.dataset import IntArray, taken_rows
from evenhand.data.weighting import weighted
from evenhand.distributed.ranks import Ranks
from evenhand.errors import UserError
from evenhand.evaluation import (
    Outcome,
    Score,
    evaluate,
    score_table,
)
from evenhand.files import atomic_path
from evenhand.models.retriever import Retriever
from evenhand.models.weights import read_weights, write_weights
from evenhand.progress import count_bar
from evenhand.ranking import (
    load_ranker,
)
from evenhand.runs import check_trained_on, save_result
from evenhand.search import (
    ExactIndex,
    LinearRanker,
    NeighbourIndex,
    RankedIndex,
    RankedQueries,
    VotedQueries,
)
from evenhand.training.feed import features_of

MOST_COPIED = 2**28  # numbers of a label table that is made vectors of once, not at every search
DATASETS_DIR = Path("datasets")  # where `places` is prepared, once


# --- data -----------------------------------------------------------------------------------------


def open_data(config: DataConfig, console: Console) -> Dataset:
    """The data set of a config; `places` is prepared the first time it is asked for."""
    if config.dataset != "places":
        return weighted(open_dataset(Path(config.dataset)), config.weighting)
    folder = DATASETS_DIR / f"places-{config.min_population}-{config.num_buckets}"
    if not folder.exists():
        with console.status(f"preparing {folder} (once)"):
            dataset = load_places(
                min_population=config.min_population, num_buckets=config.num_buckets
            )
            save_dataset(dataset, folder)
    return weighted(open_dataset(folder), config.weighting)


# --- models ---------------------------------------------------------------------------------------


def weights_path(folder: Path) -> Path:
    return folder / "model" / "weights.safetensors"


def save_model(folder: Path, model: Retriever, *, ranks: Ranks | None = None) -> None:
    with atomic_path(weights_path(folder)) as staging:
        write_weights(staging, model.state_dict())


def load_model(
    folder: Path,
    dataset: Dataset,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Retriever:
    """The trained model of a run, its tables as `dtype` whatever they were trained in."""
    config = run_config(folder)
    check_trained_on(folder, dataset)
    path = weights_path(folder)
    if not path.is_file():
        raise UserError(
            f"{folder} holds no trained model yet; finish it: "
            f"evenhand train --resume --run {folder}"
        )
    model = build_model(
        config,
        dataset.num_features,
        dataset.num_labels,
        is_sparse=isinstance(dataset.parts["train"].features, Rows),
        device="meta",  # nothing is drawn that would be overwritten
        dtype=dtype,
    ).to_empty(device=device)
    try:
        read_weights(path, model.state_dict())
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} does not fit this run's settings and data: {error}") from error
    return model


# --- evaluation -----------------------------------------------------------------------------------


def evaluate_model(
    model: Retriever,
    dataset: Dataset,
    part_name: str,
    config: Config,
    *,
    ranker: LinearRanker | None = None,
    progress_fn: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Searches all labels for every query of a part; without a ranker, by the model alone."""
    part, device = dataset.parts[part_name], model.label_table.device
    encoder = model.encoder
    if model.label_table.dtype != torch.float32:
        encoder = copy.deepcopy(encoder).float()
    index = model_index(model, dataset, config, ranker)

    def encode(row_ids: IntArray) -> Tensor | VotedQueries | RankedQueries:
        vectors = model.as_queries(encoder(features_of(part, row_ids, device=device)))
        if isinstance(index, ExactIndex):
            return vectors
        assert isinstance(part.features, Rows)
        return index.asked(vectors, taken_rows(part.features, row_ids))

    return evaluate(
        encode,
        index,
        part,
        dataset.label_counts(),
        num_results=max(config.evaluation.cutoffs),
        cutoffs=config.evaluation.cutoffs,
        num_train_queries=len(dataset.parts["train"]),
        progress=progress_fn,
    )


def label_index(model: Retriever, dataset: Dataset, config: Config) -> ExactIndex:
    """All labels by the model's scores, less what the settings take off for being frequent."""
    biases = model.biases()
    if config.search.frequency_discount:
        device = model.label_table.device
        counts = torch.from_numpy(dataset.label_counts()).to(device, torch.float32)  # (L,)
        discounts = config.search.frequency_discount * torch.log1p(counts)
        biases = -discounts if biases is None else biases - discounts
    table = model.label_table.detach()
    if table.numel() <= MOST_COPIED:
        return ExactIndex(model.unit(table.float()), label_bias=biases)
    return ExactIndex(table, label_bias=biases, vectors_fn=lambda rows: model.unit(rows.float()))


def model_index(
    model: Retriever, dataset: Dataset, config: Config, ranker: LinearRanker | None = None
) -> ExactIndex | NeighbourIndex | RankedIndex:
    """All labels by the model's scores and, where there are any, by the neighbours and a ranker."""
    index: ExactIndex | NeighbourIndex
    index = label_index(model, dataset, config)
    if config.search.num_neighbours:
        train_part = dataset.parts["train"]
        check_neighbours(config, dataset)
        assert isinstance(train_part.features, Rows)
        index = NeighbourIndex(
            index,
            train_part.features,
            train_part.positives,
            num_features=dataset.num_features,
            num_neighbours=config.search.num_neighbours,
            weight=config.search.neighbour_weight,
            power=config.search.neighbour_power,
        )
    if ranker is None:
        return index
    return RankedIndex(
        index, ranker, weight=config.ranker.weight, num_candidates=config.ranker.num_candidates
    )


def evaluate_run(
    folder: Path,
    dataset: Dataset,
    part_name: str,
    *,
    device: torch.device,
    console: Console,
    title: str | None = None,
) -> list[Score]:
    """Evaluates a trained run on a part and writes the result into its folder."""
    if part_name not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no {part_name} part; it has {', '.join(dataset.parts)}"
        )
    config = run_config(folder)
    model = load_model(folder, dataset, device=device, dtype=table_dtype(config))
    ranker = load_ranker(folder, config, dataset)
    with count_bar(console, title or f"evaluating {folder} on {part_name}") as advance:
        outcome = evaluate_model(
            model, dataset, part_name, config, ranker=ranker, progress_fn=advance
        )
    with console.status("intervals"):
        scores = score_table(
            outcome,
            dataset,
            part_name,
            min_pairs=config.evaluation.min_pairs,
            num_resamples=config.evaluation.num_resamples,
        )
    save_result(folder, part_name, outcome, scores)
    return scores


def run_config(folder: Path) -> Config:
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder: it holds no config.toml")
    return build_config(read_settings(folder / "config.toml"))
