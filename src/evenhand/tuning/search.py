"""A search: its plan, the folder that remembers it, and its trials.

base.toml       the settings that every trial starts from
tuning.json     the search; its trials and their figures; the chosen one
trials/NNN/     a run folder each; once a trial is evaluated, its weights and checkpoints go
best.toml       the chosen settings, to train with
tradeoff.html   the picture

A trial is a run like any other: it resumes from its checkpoint. It is finished when its evaluation
is written; its weights and checkpoints then go, because sixteen models fill a disk.
"""

import dataclasses
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console

from evenhand.build import check_against_data
from evenhand.config import Config, build_config, read_settings, to_toml, to_type
from evenhand.data import Dataset
from evenhand.data.dataset import memberships
from evenhand.errors import UserError
from evenhand.evaluation import (
    GroupColumn,
    Score,
    check_selector,
    group_columns,
    selected_score,
    selected_value,
)
from evenhand.evaluation.groups import BUILT_IN
from evenhand.evaluation.scores import MIN_PAIRS
from evenhand.faults import explain_out_of_memory
from evenhand.files import atomic_folder, read_json, write_json, write_text
from evenhand.locking import locked
from evenhand.report.rendering import format_duration
from evenhand.run_folder import load_result, read_about
from evenhand.runs import begin_run, evaluate_run, open_data, resumable_config, train_run
from evenhand.tables import main_rows, row_title
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.results import (
    NAN,
    Rule,
    Trial,
    choose_trial,
    describe_choice,
    pareto_front,
    write_search_page,
)
from evenhand.tuning.space import (
    METHOD,
    NUM_HARD_EXAMPLES,
    TAIL_FRACTION,
    PlannedTrial,
    Space,
    default_space,
    parse_space,
    plan_trials,
    with_settings,
)

PART = "validation"
NUM_TRIALS, MAX_DROP = 16, 0.005  # unless told otherwise
SAVED = {  # fields of a search that tuning.json holds as they are
    "command": str, "criterion": str, "average": str, "max_drop": float, "seed": int,
    "fingerprint": str, "data_folder": str,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    config: Config
    space: Space
    planned: tuple[PlannedTrial, ...]
    command: str
    criterion: str
    average: str
    max_drop: float
    seed: int
    fingerprint: str  # of the data
    data_folder: str  # where the data lay when the search began

    @property
    def rule(self) -> Rule:
        return Rule(self.criterion, self.average, self.max_drop)


def open_search_data(
    folder: Path, search: Search, console: Console, *, place: Path | None = None
) -> Dataset:
    """The data that a search was begun on, without its test part.

    Args:
        place: where it lies, if not where the settings say, nor where it lay then.
    """
    data = search.config.data
    if place is None and search.data_folder and not data.folder.exists():
        place = Path(search.data_folder)  # the settings may name it from another working folder
    dataset = without_test(open_data(data, console, folder=place))
    if dataset.fingerprint != search.fingerprint:
        raise UserError(
            f"{folder} was begun on another data set (fingerprint {search.fingerprint[:12]}, "
            f"{dataset.name} now has {dataset.fingerprint[:12]}); restore that data, or begin anew "
            f"in another --run folder"
        )
    return dataset


# --- the plan -------------------------------------------------------------------------------------


def without_test(dataset: Dataset) -> Dataset:
    """The data set as a search sees it, so that nothing in it can look at the test part."""
    if PART not in dataset.parts:
        raise UserError(
            f"tuning needs a validation part, and {dataset.name} has only "
            f"{', '.join(dataset.parts)}; make the data set with one"
        )
    parts = {name: dataset.parts[name] for name in ("train", PART)}
    return dataclasses.replace(dataset, parts=parts)


def plan_search(
    config: Config,
    dataset: Dataset,
    *,
    num_trials: int = NUM_TRIALS,
    criterion: str | None = None,
    average: str | None = None,
    max_drop: float = MAX_DROP,
    words: Sequence[str] = (),
    advised: int | None = None,
    seed: int = 0,
) -> Search:
    """A search in which everything is checked that can be checked before a trial is run.

    Args:
        criterion: if not given, `default_criterion`.
        average: if not given, recall@10 over all.
        words: what is varied, as `parse_space` reads it; if none, `default_space`.
        advised: the k' of a smallest group, which the default space then holds.
    """
    if num_trials < 2:
        raise UserError(f"--trials must be at least 2, got {num_trials}")
    if not 0 <= max_drop < math.inf:
        raise UserError(f"--max-drop must be at least 0, such as 0.005, got {max_drop}")
    if seed < 0:
        raise UserError(f"--seed must be at least 0, got {seed}")
    if config.mining.tail_fraction:  # k' is searched as a number, not as a share of the batch
        k_prime = config.mining.num_counting
        config = with_settings(config, {NUM_HARD_EXAMPLES: k_prime, TAIL_FRACTION: 0.0})
    space = parse_space(words, config) if words else default_space(config, advised=advised)
    planned = plan_trials(config, space, num_trials=num_trials, seed=seed)
    for trial in planned:
        check_against_data(with_settings(config, trial.settings), dataset)
    criterion = criterion or default_criterion(config, dataset)
    average = average or _main_metric(config)
    cutoffs, min_pairs = config.evaluation.cutoffs, config.evaluation.min_pairs
    for name in dict.fromkeys([criterion, average]):
        check_selector(name, dataset, PART, cutoffs=cutoffs, min_pairs=min_pairs)
    return Search(
        config=config,
        space=space,
        planned=tuple(planned),
        command=shlex.join(["evenhand", *sys.argv[1:]]),
        criterion=criterion,
        average=average,
        max_drop=max_drop,
        seed=seed,
        fingerprint=dataset.fingerprint,
        data_folder=str(config.data.folder.absolute()),
    )


def describe_search(search: Search, *, num_asked: int | None = None) -> list[str]:
    """What is searched, and by which rule a trial will be chosen."""
    num_trials, rule = len(search.planned), search.rule
    lines = [
        f"{num_trials} trials, judged on the {PART} part: the highest {rule.criterion} of those "
        f"whose {rule.average} is at most {rule.max_drop:g} below the best",
        "searched: " + " ".join(f"{name}={axis}" for name, axis in search.space.items()),
    ]
    if num_asked is not None and num_trials < num_asked:
        lines.append(f"note: there are only {num_trials} different trials in what is searched")
    return lines


def default_criterion(config: Config, dataset: Dataset) -> str:
    """The worst tenth of the column of the data with the most judged groups, or else the tail."""

    def num_judged(column: GroupColumn) -> int:
        counts = np.bincount(memberships(column.groups)[1], minlength=len(column.group_names))
        needed = config.evaluation.min_pairs.get(column.name, MIN_PAIRS)
        return int((counts >= needed).sum())

    columns = [c for c in group_columns(dataset, PART) if c.name not in BUILT_IN]
    column = max(columns, key=num_judged, default=None)
    if column is None or not num_judged(column):
        return f"{_main_metric(config)} on tail"
    return f"{_main_metric(config)} on worst tenth of {column.name}"


def _main_metric(config: Config) -> str:
    cutoffs = config.evaluation.cutoffs
    return f"recall@{10 if 10 in cutoffs else max(cutoffs)}"


# --- its folder -----------------------------------------------------------------------------------


def begin_search(folder: Path, search: Search) -> None:
    """Makes the folder of a new search, whole or not at all; an existing one is never touched."""
    if folder.exists():
        raise UserError(
            f"{folder} exists already; choose another --run folder, continue it with --resume, or "
            f"remove it first"
        )
    with atomic_folder(folder) as staging:
        write_text(staging / "base.toml", to_toml(search.config))
        record(staging, search, [])


def record(folder: Path, search: Search, trials: Sequence[Trial]) -> None:
    """Writes down the search and the trials that are finished, which are its first ones."""
    chosen = choose_trial(trials, max_drop=search.rule.max_drop)
    is_complete = len(trials) == len(search.planned)
    values = {name: getattr(search, name) for name in SAVED}
    values |= {
        "space": {name: str(axis) for name, axis in search.space.items()},
        "planned": [trial._asdict() for trial in search.planned],
        "is_complete": is_complete,
        "chosen": chosen.number if chosen and is_complete else None,
        "front": [trial.number for trial in pareto_front(trials)],
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    write_json(folder / "tuning.json", values)


def open_search(folder: Path) -> tuple[Search, list[Trial]]:
    """What `record` wrote."""
    path = folder / "tuning.json"
    if not path.is_file():
        raise UserError(f"{folder} cannot be resumed: it holds no tuning.json")
    config, saved = build_config(read_settings(folder / "base.toml")), read_json(path)
    try:
        saved.setdefault("data_folder", "")  # which earlier searches did not note
        search = Search(
            config=config,
            space=parse_space([f"{n}={axis}" for n, axis in saved["space"].items()], config),
            planned=tuple(_check_trial(PlannedTrial(**t), config) for t in saved["planned"]),
            **{name: to_type(name, saved[name], kind) for name, kind in SAVED.items()},
        )
        trials = []
        for row in saved["trials"]:
            values: dict[str, Any] = {k: NAN if v is None else v for k, v in row.items()}
            trial = _check_trial(Trial(**values), config)
            figures = (trial.average, trial.criterion, trial.low, trial.high)
            for number in (trial.number, trial.seconds, *figures, *trial.figures.values()):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise ValueError(f"{str(number)[:40]!r} is no number")
            trials.append(trial)
        if len(trials) > len(search.planned):
            raise ValueError(f"{len(trials)} trials, but only {len(search.planned)} were planned")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # not what `record` wrote
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return search, trials


T = TypeVar("T", PlannedTrial, Trial)


def _check_trial(trial: T, config: Config) -> T:
    """The trial, if its settings are those of a trial."""
    if not isinstance(trial.role, str):
        raise ValueError("the role of a trial is no text")
    mining = with_settings(config, trial.settings).mining
    if (trial.settings[METHOD], trial.settings[NUM_HARD_EXAMPLES]) != (
        mining.method,
        mining.num_hard_examples,
    ):
        raise ValueError("a trial without its method and k'")
    return trial


def extend_search(folder: Path, num_trials: int) -> Search:
    """Plans more trials for a search; those it has stay as they are."""
    search, trials = open_search(folder)
    planned = plan_trials(search.config, search.space, num_trials=num_trials, seed=search.seed)
    num_before = len(search.planned)
    if num_trials < num_before or tuple(planned[:num_before]) != search.planned:
        raise UserError(
            f"--trials must be at least {num_before} (those of {folder}), with the "
            f"version of Evenhand it was begun with, got {num_trials}"
        )
    search = dataclasses.replace(search, planned=tuple(planned))
    record(folder, search, trials)
    return search


# --- its trials -----------------------------------------------------------------------------------


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
    num_trials, rule = len(search.planned), search.rule
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
        left = format_duration(seconds * (num_trials - len(trials)))
        figures = (
            f"{trial.failure}, so it is out"
            if trial.failure
            else f"{rule.average} {trial.average:.4f}, {rule.criterion} {trial.criterion:.4f}"
        )
        role = f" ({trial.role})" if trial.role else ""
        console.print(
            f"trial {number} of {num_trials}{role}: {figures}; "
            f"{format_duration(trial.seconds)}, about {left} left"
        )
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
    """Trains and evaluates one trial, or goes on with it; None: it was asked to stop."""
    planned, run = search.planned[number - 1], folder / "trials" / f"{number:03d}"
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
            _remove_weights(run)
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
    trial = with_figures(trial, load_result(run, PART).scores, search.rule)
    _remove_weights(run)
    return dataclasses.replace(trial, seconds=round(seconds, 1))


def _remove_weights(run: Path) -> None:
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name, ignore_errors=True)


def with_figures(trial: Trial, scores: Sequence[Score], rule: Rule) -> Trial:
    """The trial with what its evaluation found."""
    criterion = selected_score(scores, rule.criterion)
    return dataclasses.replace(
        trial,
        average=selected_value(scores, rule.average),
        criterion=criterion.value,
        low=criterion.low,  # NaN where nothing is resampled
        high=criterion.high,
        figures={
            row_title(score): score.value
            for score in main_rows(scores)
            if score.metric == criterion.metric and not math.isnan(score.value)
        },
    )


def conclude(folder: Path, search: Search, trials: Sequence[Trial]) -> list[str]:
    """Writes best.toml and the picture.

    Returns:
        What was chosen and why, how far to trust it, and what to do next.
    """
    chosen = choose_trial(trials, max_drop=search.rule.max_drop)
    if chosen is None:
        raise UserError(
            f"no trial of {folder} came to an end, so none can be chosen ({trials[0].failure}); "
            f"search lower values of training.learning_rate"
        )
    run = folder.with_name(f"{folder.name}-best")
    command = shlex.join(["evenhand", "train", str(folder / "best.toml"), "--run", str(run)])
    write_text(
        folder / "best.toml",
        f"# {command}\n"
        f"# trial {chosen.number} of {folder.name}: the highest {search.rule.criterion} on the "
        f"{PART} part\n{to_toml(with_settings(search.config, chosen.settings))}",
    )
    write_search_page(
        trials,
        folder / "tradeoff.html",
        title=f"What {folder.resolve().name} found",
        rule=search.rule,
        next_command=command,
    )
    return [
        *describe_choice(trials, search.rule),
        f"its figures flatter it, because it was chosen by them; honest ones, on the test part: "
        f"{command}",
        f"settings: {folder / 'best.toml'}",
        f"figures:  {folder / 'tuning.json'}",
        f"picture:  {folder / 'tradeoff.html'}",
    ]
