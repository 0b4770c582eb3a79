"""Data sets and evaluations of run folders: what the commands have in common."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from evenhand.build import check_all_ids, check_neighbours, table_dtype
from evenhand.config import Config, DataConfig
from evenhand.data import Dataset, Rows, load_places, open_dataset, save_dataset
from evenhand.data.dataset import IntArray, take_rows
from evenhand.data.weighting import weight_features
from evenhand.distributed.evaluation import evaluate_split
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.evaluation import (
    Outcome,
    Score,
    evaluate,
    score_table,
)
from evenhand.models.encoders import features_of
from evenhand.models.retriever import Retriever
from evenhand.progress import count_bar
from evenhand.ranking import (
    load_ranker,
)
from evenhand.runs import read_about, save_result
from evenhand.saved_models import load_model, run_config
from evenhand.search import (
    ExactIndex,
    LinearRanker,
    NeighbourIndex,
    RankedIndex,
    RankedQueries,
    VotedQueries,
)

ALL_ROWS = slice(None)
MOST_COPIED = 2**28  # numbers of a label table that is made vectors of once, not at every search


# --- data -----------------------------------------------------------------------------------------


def open_data(config: DataConfig, console: Console, *, folder: Path | None = None) -> Dataset:
    """The data set of a config; `places` is prepared the first time it is asked for.

    Args:
        folder: where it lies, if not where the config says; nothing is prepared there.
    """
    is_own = folder is None and config.dataset == "places"
    folder = config.folder if folder is None else folder
    if is_own and not folder.exists():
        with console.status(f"preparing {folder} (once)"):
            dataset = load_places(
                min_population=config.min_population, num_buckets=config.num_buckets
            )
            save_dataset(dataset, folder)
    dataset = open_dataset(folder)
    check_all_ids(dataset)
    return weight_features(dataset, config.weighting)


def open_run_data(run: Path, console: Console, *, data: str | Path | None = None) -> Dataset:
    """The data set of a run: where its settings say, or else where it lay when it was trained.

    Args:
        data: the folder that --data names; no other is then looked at.
    """
    config = run_config(run).data
    if data is not None:
        return open_data(config, console, folder=Path(data))
    recorded = read_about(run)["dataset"].get("folder")
    places = [config.folder.absolute()]
    if isinstance(recorded, str) and Path(recorded) not in places:
        places.append(Path(recorded))
    found = next((place for place in places if (place / "dataset.json").exists()), None)
    if found is None and config.dataset != "places":
        raise UserError(
            f"the data set of {run} is not there: no dataset.json in "
            f"{' nor in '.join(map(str, places))}; name its folder with --data"
        )
    return open_data(config, console, folder=None if found == places[0] else found)


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
    """Searches all labels for every query of a part; without a ranker, by the model alone.

    With ranks, the model is this rank's rows of it: all ranks evaluate together, each the whole.
    """
    if ranks is not None:
        if config.search.num_neighbours or ranker is not None:
            raise UserError(
                "neighbours and rankers are for one process, and the model is split between "
                f"{ranks.num_ranks}; evaluate it without torchrun"
            )
        rows = Shards(dataset.num_labels, ranks.num_ranks).rows_of(ranks.rank)
        return evaluate_split(
            model,
            label_index(model, dataset, config, rows=slice(*rows)),
            dataset,
            part_name,
            ranks=ranks,
            num_results=max(config.evaluation.cutoffs),
            cutoffs=config.evaluation.cutoffs,
            progress=progress_fn,
        )
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
        return index.asked(vectors, take_rows(part.features, row_ids))

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


def label_index(
    model: Retriever, dataset: Dataset, config: Config, *, rows: slice = ALL_ROWS
) -> ExactIndex:
    """All labels by the model's scores, less what the settings take off for being frequent.

    Args:
        rows: those of all labels that the model holds.
    """
    biases = model.biases()
    if config.search.frequency_discount:
        device = model.label_table.device
        counts = torch.from_numpy(dataset.label_counts()[rows]).to(device, torch.float32)
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
    ranks: Ranks | None = None,
) -> list[Score]:
    """Evaluates a trained run on a part and writes the result into its folder.

    With ranks, all of them together, each with its rows of the model; the first one writes.
    """
    if part_name not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no {part_name} part; it has {', '.join(dataset.parts)}"
        )
    config = run_config(folder)
    model = load_model(folder, dataset, device=device, dtype=table_dtype(config), ranks=ranks)
    ranker = load_ranker(folder, config, dataset)
    with count_bar(console, title or f"evaluating {folder} on {part_name}") as advance:
        outcome = evaluate_model(
            model, dataset, part_name, config, ranker=ranker, progress_fn=advance, ranks=ranks
        )
    with console.status("intervals"):
        scores = score_table(
            outcome,
            dataset,
            part_name,
            min_pairs=config.evaluation.min_pairs,
            num_resamples=config.evaluation.num_resamples,
        )
    if ranks is None or ranks.rank == 0:
        save_result(folder, part_name, outcome, scores)
    return scores
