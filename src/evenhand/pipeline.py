"""From settings to a trained, evaluated run folder: what the commands have in common."""

import copy
import dataclasses
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from evenhand.building import (
    build_model,
    build_training,
    check_against_data,
    check_neighbours,
)
from evenhand.config import Config, DataConfig, build_config, read_settings, to_toml
from evenhand.data import Dataset, Rows, load_places, open_dataset, save_dataset
from evenhand.data.dataset import IntArray, taken_rows
from evenhand.data.weighting import weighted
from evenhand.errors import UserError
from evenhand.evaluation import (
    Outcome,
    Score,
    evaluate,
    score_table,
    selected_value,
)
from evenhand.files import atomic_path, write_json, write_text
from evenhand.models.retriever import Retriever
from evenhand.progress import count_bar, step_bar
from evenhand.ranking import (
    StoppedError,
    fitted_ranker,
    load_ranker,
    ranker_path,
    save_ranker,
)
from evenhand.runs import about_run, check_trained_on, read_about, save_result
from evenhand.search import (
    ExactIndex,
    LinearRanker,
    NeighbourIndex,
    RankedIndex,
    RankedQueries,
    VotedQueries,
)
from evenhand.training.checkpoint import load_latest_checkpoint
from evenhand.training.feed import features_of
from evenhand.training.loop import Places, rewind_metrics, train

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


# --- training -------------------------------------------------------------------------------------


def begin_run(folder: Path, config: Config, dataset: Dataset, *, device: torch.device) -> None:
    """Makes a new run folder that says what will be run; an existing one is never touched.

    Settings that the data cannot meet are refused first, and a folder is made whole or not at all.
    """
    if folder.exists():
        raise UserError(
            f"{folder} exists already; choose another --run folder, continue it with --resume, or "
            f"remove it first"
        )
    check_against_data(config, dataset)
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)  # what a crash may have left
    command = f"evenhand train {shlex.quote(str(folder / 'config.toml'))}"
    try:
        write_text(staging / "config.toml", f"# {command}\n{to_toml(config)}")
        write_json(staging / "run.json", about_run(folder, config, dataset, device))
        os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def resumable_config(folder: Path, config: Config | None, dataset: Dataset | None = None) -> Config:
    """The config of a run that is to go on; another config or data set is refused."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} cannot be resumed: it holds no config.toml")
    saved = build_config(read_settings(folder / "config.toml"))
    if config is not None and config != saved:
        ours, theirs = dataclasses.asdict(config), dataclasses.asdict(saved)
        name, ours_value, theirs_value = next(
            (f"{section}.{key}", ours[section][key], value)
            for section, values in theirs.items()
            for key, value in values.items()
            if ours[section][key] != value
        )
        raise UserError(
            f"{folder} was begun with {name} = {theirs_value!r}, and now it is {ours_value!r}; "
            f"resume it with its own settings (evenhand train --resume --run {folder}) or choose "
            f"another --run folder"
        )
    if dataset is not None:
        check_trained_on(folder, dataset)
    return saved


def train_run(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    title: str = "training",
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains into a run folder, from its newest checkpoint where there is one, then fits a ranker.

    Returns:
        Whether all is complete; if not, it was asked to stop and can be resumed.
    """
    wants_ranker = config.ranker.num_mined_labels > 0
    if not (wants_ranker and is_trained(folder)):
        ranker_path(folder).unlink(missing_ok=True)  # it would be that of another model
        is_complete = _train_model(
            folder,
            config,
            dataset,
            device=device,
            console=console,
            title=title,
            should_stop_fn=should_stop_fn,
        )
        if not is_complete or not wants_ranker:
            return is_complete
    return _add_ranker(
        folder, config, dataset, device=device, console=console, should_stop_fn=should_stop_fn
    )


def is_trained(folder: Path) -> bool:
    """Whether the model is complete, and only the ranker may be missing."""
    return "best_step" in read_about(folder) and weights_path(folder).is_file()


def _train_model(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    title: str,
    should_stop_fn: Callable[[], bool],
) -> bool:
    built = build_training(config, dataset, device)
    training = built.training
    checkpoint = load_latest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        try:
            training.load(checkpoint)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the newest of {folder / 'checkpoints'} is damaged, or of another version "
                f"({type(error).__name__}: {error}); remove it, and --resume will begin anew"
            ) from error
    rewind_metrics(folder / "metrics.jsonl", step=training.step)
    has_validation = "validation" in dataset.parts and built.plan.evaluate_every > 0
    began, began_at = time.monotonic(), training.step
    with step_bar(console, title, total=built.plan.num_steps, done=training.step) as advance:
        is_complete = train(
            training,
            built.plan,
            sampler=built.sampler,
            loss_fn=built.loss_fn,
            places=Places(folder / "metrics.jsonl", folder / "checkpoints"),
            step_fn=built.step_fn(),
            validate_fn=_validator(config, dataset) if has_validation else None,
            save_best_fn=lambda model: save_model(folder, model),
            progress_fn=advance,
            should_stop_fn=should_stop_fn,
        )
    if is_complete and not has_validation:
        save_model(folder, training.model)
    about = read_about(folder)
    seconds, num_steps = time.monotonic() - began, training.step - began_at
    if num_steps:  # else it was complete already
        about["training_seconds"] = round(seconds + about.get("training_seconds", 0.0), 1)
        about["milliseconds_a_step"] = round(1000 * seconds / num_steps, 2)
    if is_complete:
        about |= {
            "is_complete": not config.ranker.num_mined_labels,
            "num_steps": training.step,
            "best_step": training.best_step or training.step,
        }
    write_json(folder / "run.json", about)
    return is_complete


def _add_ranker(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: Callable[[], bool],
) -> bool:
    """Fits the ranker of a trained run, if it has none yet. False: it was asked to stop."""
    about = read_about(folder)
    if not ranker_path(folder).is_file():
        began = time.monotonic()
        model = load_model(folder, dataset, device=device)
        try:
            ranker = fitted_ranker(
                model, dataset, config, console=console, should_stop_fn=should_stop_fn
            )
        except StoppedError:
            return False
        assert ranker is not None
        save_ranker(folder, ranker)
        about["ranker_seconds"] = round(time.monotonic() - began, 1)
    write_json(folder / "run.json", about | {"is_complete": True})
    return True


def _validator(
    config: Config, dataset: Dataset
) -> Callable[[Retriever], tuple[float, dict[str, float]]]:
    def validate(model: Retriever) -> tuple[float, dict[str, float]]:
        outcome = evaluate_model(model, dataset, "validation", config)
        scores = score_table(
            outcome,
            dataset,
            "validation",
            min_pairs=config.evaluation.min_pairs,
            num_resamples=0,
        )
        shown = f"recall@{10 if 10 in outcome.cutoffs else outcome.cutoffs[-1]}"
        figures = {
            shown
            if score.column == "all"
            else f"{shown} on {score.group} of {score.column}": score.value
            for score in scores
            if score.metric == shown
            and (score.column == "all" or score.group in ("worst 3", "worst tenth"))
            and not score.column.startswith("frequency")
            and not np.isnan(score.value)
        }
        value = selected_value(scores, config.training.select_by)
        return value, figures | {config.training.select_by: value}

    return validate


def weights_path(folder: Path) -> Path:
    return folder / "model" / "weights.safetensors"


def save_model(folder: Path, model: Retriever) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    with atomic_path(weights_path(folder)) as staging:
        try:
            safetensors.torch.save_file(tensors, staging)
        except SafetensorError as error:  # a full disk, said by the library in its own way
            raise OSError(str(error)) from error


def load_model(folder: Path, dataset: Dataset, *, device: torch.device) -> Retriever:
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
    )
    load_weights(model, path)
    return model.to(device)


def load_weights(model: Retriever, path: Path) -> None:
    """Fills a model with the weights of a file."""
    try:
        tensors = safetensors.torch.load_file(path)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise RuntimeError(f"{name} holds a number that is not finite")
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} does not fit this run's settings and data: {error}") from error


# --- evaluation -----------------------------------------------------------------------------------


def evaluate_model(
    model: Retriever,
    dataset: Dataset,
    part_name: str,
    config: Config,
    *,
    ranker: LinearRanker | None = None,
    progress_fn: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Searches all labels for every query of a part; without a ranker, by the model alone."""
    if model.label_table.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    part, device = dataset.parts[part_name], model.label_table.device
    index = model_index(model, dataset, config, ranker)

    def encode(row_ids: IntArray) -> Tensor | VotedQueries | RankedQueries:
        vectors = model.query_vectors(features_of(part, row_ids, device=device))
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
    return ExactIndex(model.label_vectors(), label_bias=biases)


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
    model = load_model(folder, dataset, device=device)
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
