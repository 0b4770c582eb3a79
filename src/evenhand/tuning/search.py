"""`evenhand tune`: runs planned trials, and chooses one by the validation part.

A trial is a run like any other. It is trained and scored without the test part, and one that
diverges is out. The folder of a search:

base.toml       the settings that every trial starts from
tuning.json     the search; its trials and their figures; the chosen one
trials/NNN/     a run folder for each; model and checkpoints, which fill a disk, go after evaluation
best.toml       the chosen settings, to train with
tradeoff.html   the picture
"""

import dataclasses
import math
import shlex
import shutil
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from evenhand.build import check_against_data
from evenhand.config import Config, build_config, read_settings, to_toml, to_type
from evenhand.data import Dataset, memberships
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import check_selector, group_columns, selected_score
from evenhand.evaluation.groups import BUILT_IN
from evenhand.evaluation.scores import MIN_PAIRS, main_cutoff
from evenhand.files import atomic_folder, locked, read_json, write_json, write_text
from evenhand.report.rendering import format_duration
from evenhand.result_tables import main_rows, row_title
from evenhand.run_folder import load_result
from evenhand.runs import begin_run, evaluate_run, open_data, resumable_config, train_run
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.results import Results, Rule, describe_choice, trials_table, write_search_page
from evenhand.tuning.space import (
    Space,
    Trial,
    default_space,
    parse_space,
    plan_trials,
    with_settings,
)

PART = "validation"
SAVED = {"command": str, "seed": int, "fingerprint": str, "data_folder": str}  # in tuning.json
StopFn = Callable[[], bool]


def without_test(dataset: Dataset) -> Dataset:
    """The data set as a search sees it, so that nothing in it can look at the test part."""
    if PART not in dataset.parts:
        raise UserError(
            f"tuning needs a validation part, and {dataset.name} has only "
            f"{', '.join(dataset.parts)}; make the data set with one"
        )
    parts = {name: dataset.parts[name] for name in ("train", PART)}
    return dataclasses.replace(dataset, parts=parts)


def train_trial(
    run: Path, config: Config, dataset: Dataset, *, should_stop_fn: StopFn, **how: Any
) -> str:
    """Trains a trial, or continues it; returns why it diverged, or "".

    Args:
        how: device, console and title, as `train_run` takes them.

    Raises:
        StoppedError: the user asked to stop.
    """
    if run.exists():
        resumable_config(run, config, dataset)
    else:
        begin_run(run, config, dataset, device=how["device"])
    try:
        with locked(run):
            if not train_run(run, config, dataset, should_stop_fn=should_stop_fn, **how):
                raise StoppedError
    except UserError as error:
        if NAN_REMEDY not in str(error):
            raise
        return str(error).partition(";")[0]
    return ""


# --- the plan -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search as it was planned; what `tuning.json` holds besides the trials."""

    config: Config
    space: Space
    planned: Sequence[Trial]
    rule: Rule
    command: str
    seed: int
    fingerprint: str  # of the data
    data_folder: str  # where the data lay when the search began


def plan_search(
    config: Config,
    dataset: Dataset,
    *,
    num_trials: int = 16,
    criterion: str | None = None,
    average: str | None = None,
    max_drop: float = 0.005,
    words: Sequence[str] = (),
    advised: int | None = None,
    seed: int = 0,
) -> Search:
    """Plans a search, and refuses what would fail in one of its trials.

    Args:
        criterion: by default the average, of `default_group`.
        average: by default recall@10 over all; of few labels, recall@1.
        words: what is varied, as `parse_space` reads it; by default `default_space`.
        advised: the k' of a smallest group, which the default space then holds.
    """
    for flag, low, value in ("trials", 2, num_trials), ("max-drop", 0, max_drop), ("seed", 0, seed):
        if not low <= value < math.inf:
            raise UserError(f"--{flag} must be at least {low}, got {value}")
    space = parse_space(words, config) if words else default_space(config, advised=advised)
    planned = plan_trials(config, space, num_trials=num_trials, seed=seed)
    for trial in planned:
        check_against_data(with_settings(config, trial.settings), dataset)
    main_metric = f"recall@{main_cutoff(config.evaluation.cutoffs, num_labels=dataset.num_labels)}"
    criterion = criterion or f"{main_metric} on {default_group(config, dataset)}"
    rule = Rule(criterion, average or main_metric, max_drop)
    cutoffs, min_pairs = config.evaluation.cutoffs, config.evaluation.min_pairs
    for name in (rule.criterion, rule.average):
        check_selector(name, dataset, PART, cutoffs=cutoffs, min_pairs=min_pairs)
    return Search(
        config=config,
        space=space,
        planned=planned,
        rule=rule,
        command=shlex.join(["evenhand", *sys.argv[1:]]),
        seed=seed,
        fingerprint=dataset.fingerprint,
        data_folder=str(config.data.folder.absolute()),
    )


def default_group(config: Config, dataset: Dataset) -> str:
    """The worst tenth of the data's column with the most groups that can be judged, or the tail."""
    num_judged = {"": 0}
    for column in group_columns(dataset, PART):
        if column.name not in BUILT_IN:
            counts = np.bincount(memberships(column.groups)[1])
            fewest = config.evaluation.min_pairs.get(column.name, MIN_PAIRS)
            num_judged[column.name] = int((counts >= fewest).sum())
    name = max(num_judged, key=lambda name: num_judged[name])
    return f"worst tenth of {name}" if num_judged[name] else "tail"


# --- the folder -----------------------------------------------------------------------------------


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
    """Writes tuning.json: the search, and the trials that are finished, which are its first."""
    chosen, is_complete = Results(trials, search.rule).chosen, len(trials) == len(search.planned)
    values = {name: getattr(search, name) for name in SAVED} | search.rule._asdict()
    values |= {
        "space": {name: str(axis) for name, axis in search.space.items()},
        "planned": [trial.settings for trial in search.planned],
        "is_complete": is_complete,
        "chosen": chosen.number if chosen and is_complete else None,
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
        space = parse_space([f"{name}={axis}" for name, axis in saved["space"].items()], config)
        known = {name: to_type(name, saved[name], kind) for name, kind in SAVED.items()}
        rule = [to_type(n, saved[n], kind) for n, kind in typing.get_type_hints(Rule).items()]
        num_planned = len(saved["planned"])
        planned = plan_trials(config, space, num_trials=num_planned, seed=known["seed"])
        if [trial.settings for trial in planned] != saved["planned"]:
            raise ValueError("its trials are not those that this version of Evenhand plans")
        kinds, trials = typing.get_type_hints(Trial), []
        for trial, row in zip(planned[: len(saved["trials"])], saved["trials"], strict=True):
            if (row.pop("number"), row.pop("settings")) != (trial.number, trial.settings):
                raise ValueError(f"trial {trial.number} is not the one that was planned")
            figures = {n: to_type(n, v, kinds[n]) for n, v in row.items() if v is not None}
            trials.append(dataclasses.replace(trial, **figures))
    except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return Search(config=config, space=space, planned=planned, rule=Rule(*rule), **known), trials


def open_search_data(folder: Path, console: Console, *, place: Path | None = None) -> Dataset:
    """The data that a search was begun on, without its test part.

    Args:
        place: where it is now, if neither where the settings say nor where it was then.
    """
    search, _ = open_search(folder)
    data = search.config.data
    if place is None and not data.folder.exists():
        place = Path(search.data_folder)  # the settings may name it from another working folder
    dataset = without_test(open_data(data, console, folder=place))
    if dataset.fingerprint != search.fingerprint:
        raise UserError(
            f"{folder} was begun on another data set (fingerprint {search.fingerprint[:12]}, "
            f"{dataset.name} now has {dataset.fingerprint[:12]}); restore that data, or begin anew "
            f"in another --run folder"
        )
    return dataset


# --- the trials -----------------------------------------------------------------------------------


def run_search(
    folder: Path,
    dataset: Dataset,
    *,
    num_trials: int | None = None,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn,
) -> bool:
    """Runs the trials of a search that are not finished yet, and prints what was found.

    Args:
        num_trials: at least as many as were planned, which stay as they are.

    Returns:
        Whether all are finished; if not, the user asked to stop, and it can be resumed.
    """
    search, trials = open_search(folder)
    num_planned, num_finished, rule = len(search.planned), len(trials), search.rule
    if num_trials is not None and num_trials < num_planned:
        raise UserError(
            f"--trials must be at least {num_planned}, as many as {folder} has, got {num_trials}"
        )
    if num_trials is not None and num_trials > num_planned:
        planned = plan_trials(search.config, search.space, num_trials=num_trials, seed=search.seed)
        search, num_planned = dataclasses.replace(search, planned=planned), len(planned)
        record(folder, search, trials)
    console.print(
        f"{num_planned} trials, judged on the {PART} part: the highest {rule.criterion} of those "
        f"whose {rule.average} is at most {rule.max_drop:g} below the best"
    )
    console.print("searched: " + " ".join(f"{name}={axis}" for name, axis in search.space.items()))
    if num_trials is not None and num_planned < num_trials:
        console.print(f"note: there are only {num_planned} different trials in what is searched")
    if trials:
        console.print(f"{num_finished} of {num_planned} trials finished already")
    began = time.monotonic()
    for planned_trial in search.planned[num_finished:]:
        run = folder / "trials" / f"{planned_trial.number:03d}"
        try:
            if should_stop_fn():
                raise StoppedError
            trial = _run_trial(run, search, planned_trial, dataset, device, console, should_stop_fn)
        except StoppedError:
            return False
        for name in ("checkpoints", "model"):
            shutil.rmtree(run / name, ignore_errors=True)
        trials.append(trial)
        record(folder, search, trials)
        seconds = (time.monotonic() - began) / (len(trials) - num_finished)
        left = format_duration(seconds * (num_planned - len(trials)))
        figures = f"{rule.average} {trial.average:.4f}, {rule.criterion} {trial.criterion:.4f}"
        if trial.failure:
            figures = f"{trial.failure}, so it is out"
        role = f" ({trial.role})" if trial.role else ""
        console.print(
            f"trial {trial.number} of {num_planned}{role}: {figures}; "
            f"{format_duration(trial.seconds)}, about {left} left"
        )
    _conclude(folder, search, Results(trials, rule), console)
    return True


def _run_trial(
    run: Path,
    search: Search,
    trial: Trial,
    dataset: Dataset,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn,
) -> Trial:
    """The trial with its figures; it is trained and evaluated where it has not been yet."""
    config = with_settings(search.config, trial.settings)
    title = f"trial {trial.number} of {len(search.planned)}, k' {trial.num_hard_examples:,}"
    # A line a trial is enough for a file.
    how: dict[str, Any] = {
        "device": device, "console": console if console.is_terminal else Console(quiet=True)
    }  # fmt: skip
    began = time.monotonic()
    if not (run / "evaluation" / PART / "scores.json").is_file():
        training = how | {"title": title, "should_stop_fn": should_stop_fn}
        if failure := train_trial(run, config, dataset, **training):
            seconds = round(time.monotonic() - began, 1)
            return dataclasses.replace(trial, failure=failure, seconds=seconds)
        began = time.monotonic()
        evaluate_run(run, dataset, PART, **how, title=f"{title}, evaluating")
    result = load_result(run, PART)
    seconds = sum(result.about.get(f"{name}_seconds", 0.0) for name in ("training", "ranker"))
    criterion = selected_score(result.scores, search.rule.criterion)
    return dataclasses.replace(
        trial,
        average=selected_score(result.scores, search.rule.average).value,
        criterion=criterion.value,
        low=criterion.low,  # NaN where nothing is resampled
        high=criterion.high,
        figures={
            row_title(score): score.value
            for score in main_rows(result.scores)
            if score.metric == criterion.metric and not math.isnan(score.value)
        },
        seconds=round(seconds + time.monotonic() - began, 1),
    )


def _conclude(folder: Path, search: Search, results: Results, console: Console) -> None:
    """Writes best.toml and the picture; prints what was chosen and why, and what to do next."""
    chosen = results.chosen
    if chosen is None:
        raise UserError(
            f"no trial of {folder} came to an end, so none can be chosen "
            f"({results.trials[0].failure}); search lower values of training.learning_rate"
        )
    best, page, run = folder / "best.toml", folder / "tradeoff.html", f"{folder.name}-best"
    command = shlex.join(["evenhand", "train", str(best), "--run", str(folder.with_name(run))])
    write_text(
        best,
        f"# {command}\n"
        f"# trial {chosen.number} of {folder.name}: the highest {search.rule.criterion} on the "
        f"{PART} part\n{to_toml(with_settings(search.config, chosen.settings))}",
    )
    write_search_page(results, page, title=f"What {folder.resolve().name} found", command=command)
    console.print(trials_table(results))
    for line in (
        *describe_choice(results),
        f"these figures are too good, because the trial was chosen by them; for honest ones, on "
        f"the test part: {command}",
        f"settings: {best}",
        f"figures:  {folder / 'tuning.json'}",
        f"picture:  {page}",
    ):
        console.print(line)
