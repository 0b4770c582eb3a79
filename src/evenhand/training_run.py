"""From settings to a trained run folder, by one process or by many ranks."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from evenhand.build import build_training, check_against_data
from evenhand.config import Config, build_config, read_settings, to_toml
from evenhand.data import Dataset
from evenhand.distributed.ranks import ProcessRanks, Ranks
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import score_table, selected_value
from evenhand.evaluation.statistics import BUILT_IN
from evenhand.files import atomic_folder, write_json, write_text
from evenhand.models.retriever import Retriever
from evenhand.pipeline import evaluate_model
from evenhand.progress import step_bar
from evenhand.ranking import fitted_ranker, ranker_path, save_ranker
from evenhand.runs import about_run, check_trained_on, read_about
from evenhand.saved_models import has_model, load_model, save_model
from evenhand.training.checkpoint import CheckpointManager, load_latest_checkpoint
from evenhand.training.loop import train
from evenhand.training.metrics_file import last_logged_step, rewind_metrics
from evenhand.training.state import Training
from evenhand.training.step import ChosenStep


def begin_run(folder: Path, config: Config, dataset: Dataset, *, device: torch.device) -> None:
    """Makes a new run folder that says what will be run; an existing one is never touched.

    Settings that the data cannot meet are refused first, and a folder is made whole or not at all.
    """
    if folder.exists() or folder.is_symlink():  # a link may lead nowhere, or to itself
        raise UserError(
            f"{folder} exists already; choose another --run folder, continue it with --resume, or "
            f"remove it first"
        )
    check_against_data(config, dataset)
    command = f"evenhand train {shlex.quote(str(folder / 'config.toml'))}"
    with atomic_folder(folder) as staging:
        write_text(staging / "config.toml", f"# {command}\n{to_toml(config)}")
        write_json(staging / "run.json", about_run(folder, config, dataset, device))


def resumable_config(folder: Path, config: Config | None, dataset: Dataset | None = None) -> Config:
    """The config of a run that is to go on; another config or data set is refused."""
    if not (folder / "config.toml").exists():
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
    ranks: ProcessRanks | None = None,
) -> bool:
    """Trains into a run folder, from its newest checkpoint where there is one, then fits a ranker.

    Args:
        ranks: those that train together, each in this function.

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
            ranks=ranks,
        )
        if not is_complete or not wants_ranker:
            return is_complete
    return _add_ranker(
        folder, config, dataset, device=device, console=console, should_stop_fn=should_stop_fn
    )


def is_trained(folder: Path) -> bool:
    """Whether the model is complete, and only the ranker may be missing."""
    return "best_step" in read_about(folder) and has_model(folder)


def _train_model(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    title: str,
    should_stop_fn: Callable[[], bool],
    ranks: ProcessRanks | None,
) -> bool:
    built = build_training(config, dataset, device, ranks=ranks)
    training, is_first = built.training, ranks is None or ranks.rank == 0
    warnings = _load_checkpoint(folder, training, ranks)
    metrics_path = folder / "metrics.jsonl" if is_first else None
    chosen = built.choose_step(should_stop_fn)
    if metrics_path is not None:
        _note_start(folder, chosen, step=training.step, warnings=warnings)
        rewind_metrics(metrics_path, step=training.step)
    for warning in warnings:
        console.print(f"evenhand: {warning}", markup=False)
    console.print(f"{title}: {chosen.describe()}", markup=False)
    has_validation = "validation" in dataset.parts and built.plan.evaluate_every > 0
    began, began_at = time.monotonic(), training.step
    keeper = CheckpointManager(
        folder / "checkpoints",
        keep_last=config.training.keep_last,
        keep_best=config.training.keep_best,
        is_async=config.training.async_checkpoints,
        ranks=ranks,
    )

    def validate() -> tuple[float, dict[str, float]]:
        value, figures = _validate(training.model, config, dataset, ranks)
        if value > training.best_value:
            save_model(folder, training.model, ranks=ranks)
        return value, figures

    with (
        step_bar(console, title, total=built.plan.num_steps, done=training.step) as advance,
        keeper,
    ):
        is_complete = train(
            training,
            built.plan,
            chosen.step,
            metrics_path=metrics_path,
            keeper=keeper,
            validate_fn=validate if has_validation else None,
            progress_fn=advance,
            should_stop_fn=chosen.should_stop_fn,
            ranks=ranks,
        )
    if is_complete and not has_validation:
        save_model(folder, training.model, ranks=ranks)
    if is_first:
        _note_end(
            folder,
            training,
            is_complete=is_complete,
            wants_ranker=config.ranker.num_mined_labels > 0,
            seconds=time.monotonic() - began,
            num_steps=training.step - began_at,
            ranks=ranks,
        )
    return is_complete


def _load_checkpoint(folder: Path, training: Training, ranks: ProcessRanks | None) -> list[str]:
    """Continues from the newest sound checkpoint, if any; sentences on those that are not."""
    warnings: list[str] = []
    checkpoint = load_latest_checkpoint(
        folder / "checkpoints",
        training.checkpoint(),
        ranks=ranks,
        check_fn=training.check_belongs,
        warn_fn=warnings.append,
    )
    if checkpoint is not None:
        try:
            training.load(checkpoint)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the newest of {folder / 'checkpoints'} is damaged, or of another version "
                f"({type(error).__name__}: {error}); remove it, and --resume will begin anew"
            ) from error
    return warnings


def _note_start(folder: Path, chosen: ChosenStep, *, step: int, warnings: Sequence[str]) -> None:
    """Notes in run.json that it runs, by which step, and what an end without warning cost."""
    about = read_about(folder)
    if about.get("is_running") or warnings:
        lost = max(0, last_logged_step(folder / "metrics.jsonl") - step)
        interruption = {
            "resumed_at_step": step,
            "lost_steps": lost,  # by what was logged; they are trained once more
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "damaged_checkpoints": list(warnings),
        }
        before = about.get("interruptions")
        about["interruptions"] = [*(before if isinstance(before, list) else ()), interruption]
    about["step"] = {"kind": chosen.kind} | ({"reason": chosen.reason} if chosen.reason else {})
    write_json(folder / "run.json", about | {"is_running": True})


def _note_end(
    folder: Path,
    training: Training,
    *,
    is_complete: bool,
    wants_ranker: bool,
    seconds: float,
    num_steps: int,
    ranks: ProcessRanks | None,
) -> None:
    """Notes in run.json what was trained, how long that took and what the ranks sent."""
    about = read_about(folder) | {"is_running": False}
    if num_steps:  # else it was complete already
        about["training_seconds"] = round(seconds + about.get("training_seconds", 0.0), 1)
        about["milliseconds_a_step"] = round(1000 * seconds / num_steps, 2)
    if ranks is not None:
        about["num_ranks"] = ranks.num_ranks
        if num_steps:
            sent = {what: round(count / num_steps) for what, count in ranks.sent.items()}
            about["bytes_sent_a_step"] = sent
    if is_complete:
        about |= {
            "is_complete": not wants_ranker,
            "num_steps": training.step,
            "best_step": training.best_step or training.step,
        }
    write_json(folder / "run.json", about)


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


def _validate(
    model: Retriever, config: Config, dataset: Dataset, ranks: Ranks | None
) -> tuple[float, dict[str, float]]:
    """The value to select by, and every validation figure to be logged."""
    outcome = evaluate_model(model, dataset, "validation", config, ranks=ranks)
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
        and (
            score.column == "all"
            or (score.column not in BUILT_IN and score.group in ("worst 3", "worst tenth"))
        )
        and not np.isnan(score.value)
    }
    value = selected_value(scores, config.training.select_by)
    return value, figures | {config.training.select_by: value}
