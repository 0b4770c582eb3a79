"""Running the trials of a search, one after the other, and writing down what they come to.

A trial is a run like any other: it resumes from its checkpoint. It is finished when its evaluation
is written; its weights and checkpoints then go, because sixteen models fill a disk.
"""

import dataclasses
import math
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from evenhand.config import to_toml
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation import Score, selected_score, selected_value
from evenhand.faults import explain_out_of_memory
from evenhand.files import write_text
from evenhand.locking import locked
from evenhand.report.tradeoff import write_tradeoff
from evenhand.run_folder import load_result, read_about
from evenhand.runs import begin_run, evaluate_run, resumable_config, train_run
from evenhand.tables import main_rows, row_title
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.choice import Trial, chosen_trial
from evenhand.tuning.search import PART, Search, open_search, record
from evenhand.tuning.space import with_settings


def run_trials(
    folder: Path,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> list[Trial] | None:
    """Runs the trials of a search that are not finished yet.

    Returns:
        All trials, or None: it was asked to stop, and can be resumed.
    """
    search, trials = open_search(folder)
    num_trials = len(search.planned)
    if trials:
        console.print(f"{len(trials)} of {num_trials} trials finished already")
    began, num_finished = time.monotonic(), len(trials)
    for number in range(len(trials) + 1, num_trials + 1):
        trial = None
        if not should_stop_fn():
            trial = _run_trial(
                folder, search, number, dataset,
                device=device, console=console, should_stop_fn=should_stop_fn,
            )  # fmt: skip
        if trial is None:
            return None
        trials.append(trial)
        record(folder, search, trials)
        seconds = (time.monotonic() - began) / (len(trials) - num_finished)
        left = duration(seconds * (num_trials - len(trials)))
        console.print(f"{_told(trial, search)}; {duration(trial.seconds)}, about {left} left")
    return trials


def _run_trial(
    folder: Path,
    search: Search,
    number: int,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: Callable[[], bool],
) -> Trial | None:
    planned, run = search.planned[number - 1], trial_folder(folder, number)
    trial = Trial(number=number, role=planned.role, settings=planned.settings)
    config = with_settings(search.config, planned.settings)
    title = f"trial {number} of {len(search.planned)}, k' {trial.num_hard_examples:,}"
    if not console.is_terminal:  # a line a trial is enough for a file
        console = Console(quiet=True)
    began = time.monotonic()
    if not (run / "evaluation" / PART / "scores.json").is_file():
        if run.exists():
            resumable_config(run, config, dataset)
        else:
            begin_run(run, config, dataset, device=device)
        try:
            with locked(run), explain_out_of_memory(config, dataset):
                is_complete = train_run(
                    run, config, dataset,
                    device=device, console=console, title=title, should_stop_fn=should_stop_fn,
                )  # fmt: skip
        except UserError as error:
            if NAN_REMEDY not in str(error):
                raise
            _forget_weights(run)
            reason, seconds = str(error).partition(";")[0], time.monotonic() - began
            return dataclasses.replace(trial, failure=reason, seconds=round(seconds, 1))
        if not is_complete:
            return None
        began = time.monotonic()
        evaluate_run(
            run, dataset, PART, device=device, console=console, title=f"{title}, evaluating"
        )
    about = read_about(run)
    seconds = sum(about.get(f"{name}_seconds", 0.0) for name in ("training", "ranker"))
    seconds += time.monotonic() - began
    trial = judged(trial, load_result(run, PART).scores, search, seconds=round(seconds, 1))
    _forget_weights(run)
    return trial


def trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:03d}"


def _forget_weights(run: Path) -> None:
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name, ignore_errors=True)


def judged(trial: Trial, scores: Sequence[Score], search: Search, *, seconds: float) -> Trial:
    """The trial with its figures."""
    criterion = selected_score(scores, search.criterion)
    return dataclasses.replace(
        trial,
        average=selected_value(scores, search.average),
        criterion=criterion.value,
        low=criterion.low,  # NaN where nothing is resampled
        high=criterion.high,
        figures={
            row_title(score): score.value
            for score in main_rows(scores)
            if score.metric == criterion.metric and not math.isnan(score.value)
        },
        seconds=seconds,
    )


def _told(trial: Trial, search: Search) -> str:
    title = f"trial {trial.number} of {len(search.planned)}"
    title += f" ({trial.role})" if trial.role else ""
    if trial.failure:
        return f"{title}: {trial.failure}, so it is out"
    return (
        f"{title}: {search.average} {trial.average:.4f}, {search.criterion} {trial.criterion:.4f}"
    )


def duration(seconds: float) -> str:
    """'45 s', '12 min', '3 h 20 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


# --- what they come to ----------------------------------------------------------------------------


def conclude(folder: Path, trials: Sequence[Trial]) -> Trial:
    """Writes best.toml and the picture, and returns the chosen trial."""
    search, _ = open_search(folder)
    chosen = chosen_trial(trials, max_drop=search.max_drop)
    if chosen is None:
        raise UserError(
            f"no trial of {folder} came to an end, so none can be chosen ({trials[0].failure}); "
            f"search lower values of training.learning_rate"
        )
    write_text(
        folder / "best.toml",
        f"# {next_command(folder)}\n"
        f"# trial {chosen.number} of {folder.name}: the highest {search.criterion} on the "
        f"{PART} part\n{to_toml(with_settings(search.config, chosen.settings))}",
    )
    write_tradeoff(
        trials,
        folder / "tradeoff.html",
        title=f"What {folder.resolve().name} found",
        criterion=search.criterion,
        average=search.average,
        max_drop=search.max_drop,
        next_command=next_command(folder),
    )
    return chosen


def next_command(folder: Path) -> str:
    """Trains with the chosen settings, and evaluates on the test part."""
    run = folder.with_name(f"{folder.name}-best")
    return shlex.join(["evenhand", "train", str(folder / "best.toml"), "--run", str(run)])
