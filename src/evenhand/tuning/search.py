"""Runs trials: those of a plan (`evenhand tune`), or around a config (`train --minutes`).

A trial is a run like any other. It is trained and scored without the test part, and one that
diverges is out. The folder of `evenhand tune`:

base.toml       the settings that every trial starts from
tuning.json     the search; its trials and their figures; the chosen one
trials/NNN/     a run folder each; once evaluated, without model and checkpoints, which fill a disk
best.toml       the chosen settings, to train with
tradeoff.html   the picture

`train --minutes` tries one change at a time and keeps it if it helps; trials.json in its folder
lists what was tried.
"""

import dataclasses
import hashlib
import math
import shlex
import shutil
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from evenhand.build import check_against_data
from evenhand.config import Config, build_config, read_settings, to_toml, to_type, toml_value
from evenhand.data import Dataset, memberships
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import check_selector, group_columns, selected_score
from evenhand.evaluation.groups import BUILT_IN
from evenhand.evaluation.scores import MIN_PAIRS
from evenhand.files import atomic_folder, locked, read_json, write_json, write_text
from evenhand.methods import METHODS
from evenhand.report.rendering import format_duration
from evenhand.result_tables import main_rows, row_title
from evenhand.run_folder import has_model, load_result, read_about, run_config
from evenhand.runs import (
    begin_run,
    evaluate_run,
    open_data,
    resumable_config,
    train_run,
    validation_value,
)
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.results import Results, Rule, describe_choice, trials_table, write_search_page
from evenhand.tuning.space import (
    LEARNING_RATE,
    NUM_STEPS,
    Settings,
    Space,
    Trial,
    default_space,
    get_setting,
    parse_space,
    plan_trials,
    with_settings,
)

PART = "validation"
SAVED = {"command": str, "seed": int, "fingerprint": str, "data_folder": str}  # in tuning.json
# These change how a trained model's scores are combined, so they need no training.
SCORING = ("search.neighbour_weight", "search.frequency_discount", "ranker.weight")
StopFn = Callable[[], bool]
Row = dict[str, Any]  # of trials.json: key, change, value, seconds, training_seconds


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


# --- evenhand tune: the plan ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A search as it was planned; what `tuning.json` holds beside the trials."""

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
    """A search; all that can be checked before a trial is run has been.

    Args:
        criterion: by default `default_criterion`.
        average: by default recall@10 over all.
        words: what is varied, as `parse_space` reads it; by default `default_space`.
        advised: the k' of a smallest group, which the default space then holds.
    """
    least = {"trials": (2, num_trials), "max-drop": (0, max_drop), "seed": (0, seed)}
    for flag, (low, value) in least.items():
        if not low <= value < math.inf:
            raise UserError(f"--{flag} must be at least {low}, got {value}")
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
        planned=planned,
        rule=Rule(criterion, average, max_drop),
        command=shlex.join(["evenhand", *sys.argv[1:]]),
        seed=seed,
        fingerprint=dataset.fingerprint,
        data_folder=str(config.data.folder.absolute()),
    )


def default_criterion(config: Config, dataset: Dataset) -> str:
    """The worst tenth of the data's column with the most groups that can be judged, or the tail."""
    num_judged = {}
    for column in group_columns(dataset, PART):
        if column.name not in BUILT_IN:
            counts = np.bincount(memberships(column.groups)[1])
            fewest = config.evaluation.min_pairs.get(column.name, MIN_PAIRS)
            num_judged[column.name] = int((counts >= fewest).sum())
    name = max(num_judged, key=lambda name: num_judged[name], default="")
    where = f"worst tenth of {name}" if num_judged.get(name) else "tail"
    return f"{_main_metric(config)} on {where}"


def _main_metric(config: Config) -> str:
    cutoffs = config.evaluation.cutoffs
    return f"recall@{10 if 10 in cutoffs else max(cutoffs)}"


# --- evenhand tune: the folder --------------------------------------------------------------------


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
    results, is_complete = Results(trials, search.rule), len(trials) == len(search.planned)
    values = {name: getattr(search, name) for name in SAVED} | search.rule._asdict()
    values |= {
        "space": {name: str(axis) for name, axis in search.space.items()},
        "planned": [{"role": trial.role, "settings": trial.settings} for trial in search.planned],
        "is_complete": is_complete,
        "chosen": results.chosen.number if results.chosen and is_complete else None,
        "front": [trial.number for trial in results.front],
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
        saved = {"data_folder": ""} | saved  # earlier versions did not note it
        space = parse_space([f"{name}={axis}" for name, axis in saved["space"].items()], config)
        known = {name: to_type(name, saved[name], kind) for name, kind in SAVED.items()}
        rule = [to_type(n, saved[n], kind) for n, kind in typing.get_type_hints(Rule).items()]
        num_planned = len(saved["planned"])
        planned = plan_trials(config, space, num_trials=num_planned, seed=known["seed"])
        if [trial.settings for trial in planned] != [row["settings"] for row in saved["planned"]]:
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


# --- evenhand tune: the trials --------------------------------------------------------------------


def run_search(
    folder: Path,
    dataset: Dataset,
    *,
    num_trials: int | None = None,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn = lambda: False,
) -> bool:
    """Runs the trials of a search that are not finished yet, and prints what was found.

    Args:
        num_trials: at least as many as were planned, which stay as they are.

    Returns:
        Whether all are finished; if not, the user asked to stop, and it can be resumed.
    """
    search, trials = open_search(folder)
    num_planned, num_finished, rule = len(search.planned), len(trials), search.rule
    num_asked = num_planned if num_trials is None else num_trials
    if num_asked < num_planned:
        raise UserError(
            f"--trials must be at least {num_planned}, as many as {folder} has, got {num_asked}"
        )
    if num_asked > num_planned:
        planned = plan_trials(search.config, search.space, num_trials=num_asked, seed=search.seed)
        search, num_planned = dataclasses.replace(search, planned=planned), len(planned)
        record(folder, search, trials)
    console.print(
        f"{num_planned} trials, judged on the {PART} part: the highest {rule.criterion} of those "
        f"whose {rule.average} is at most {rule.max_drop:g} below the best"
    )
    console.print("searched: " + " ".join(f"{name}={axis}" for name, axis in search.space.items()))
    if num_planned < num_asked:
        console.print(f"note: there are only {num_planned} different trials in what is searched")
    if trials:
        console.print(f"{num_finished} of {num_planned} trials finished already")
    # A line a trial is enough for a file.
    of_trial = console if console.is_terminal else Console(quiet=True)
    began = time.monotonic()
    for planned_trial in search.planned[num_finished:]:
        if should_stop_fn():
            return False
        run = folder / "trials" / f"{planned_trial.number:03d}"
        try:
            trial = _run_trial(
                run, search, planned_trial, dataset, device, of_trial, should_stop_fn
            )
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
    began = time.monotonic()
    if not (run / "evaluation" / PART / "scores.json").is_file():
        how: dict[str, Any] = {"device": device, "console": console, "title": title}
        failure = train_trial(run, config, dataset, should_stop_fn=should_stop_fn, **how)
        if failure:
            seconds = round(time.monotonic() - began, 1)
            return dataclasses.replace(trial, failure=failure, seconds=seconds)
        began = time.monotonic()
        evaluate_run(run, dataset, PART, **how | {"title": f"{title}, evaluating"})
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
        f"its figures flatter it, because it was chosen by them; honest ones, on the test part: "
        f"{command}",
        f"settings: {best}",
        f"figures:  {folder / 'tuning.json'}",
        f"picture:  {page}",
    ):
        console.print(line)


# --- evenhand train --minutes ---------------------------------------------------------------------


def choose_within(
    minutes: float,
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn = lambda: False,
) -> Config:
    """The best settings around a config, with as many steps as the rest of the time allows.

    One change at a time: it stays if the validation part says so, and the next one is tried on top
    of it. Trials have a quarter of the steps, and then all of them while there is time.

    Args:
        minutes: for trials, and for the training and evaluation that follow.
        folder: of the trials; the same call continues what was stopped.

    Raises:
        StoppedError: the user asked to stop.
    """
    sizes = {name: len(part) for name, part in dataset.parts.items()}
    trials = _Trials(folder, config, without_test(dataset), device, should_stop_fn)
    ends = time.monotonic() + 60 * minutes - sum(row["seconds"] for row in trials.rows)
    rule = config.training.select_by
    console.print(f"trials for {minutes:g} minutes, by {rule} on the validation part, in {folder}")
    tried: list[Config] = []  # with their steps; undoing a change leads to one of them again
    seconds_a_step = seconds_to_score = 0.0  # of the last trial that was trained

    def try_out(candidate: Config, change: Settings, best_value: float) -> Row:
        nonlocal seconds_a_step, seconds_to_score
        tried.append(candidate)
        row, num_steps = trials.run(candidate, change, best_value), candidate.training.num_steps
        if row["training_seconds"]:
            seconds_a_step = row["training_seconds"] / num_steps
            seconds_to_score = row["seconds"] - row["training_seconds"]
        words = ", ".join(f"{name} = {toml_value(value)}" for name, value in change.items())
        verdict = " (kept)" if change and row["value"] > best_value else ""
        left = format_duration(max(0.0, ends - time.monotonic()))
        console.print(
            f"trial {len(tried)}, {num_steps:,} steps, {words or 'the best so far'}: "
            f"{row['value']:.4f}{verdict}; {format_duration(row['seconds'])}, {left} left"
        )
        return row

    def seconds_of_the_last(candidate: Config) -> float:
        """Of training with all steps, and evaluating on both parts."""
        training = seconds_a_step * candidate.training.num_steps
        return training + seconds_to_score * (1 + sizes.get("test", 0) / max(1, sizes[PART]))

    best, num_kept = config, 0
    for share in (0.25, 1.0):  # of the steps
        if ends - time.monotonic() < 2 * seconds_of_the_last(best):
            break
        best_value = try_out(with_steps(best, share), {}, -1.0)["value"]
        is_better = best_value >= 0
        while is_better:
            is_better = False
            for change in changes_around(best):
                if share < 1 and next(iter(change)) in (NUM_STEPS, LEARNING_RATE):
                    continue  # few steps would always want more, and a higher rate
                changed = with_settings(best, change)
                candidate = with_steps(changed, share)
                needed = seconds_of_the_last(changed) + seconds_to_score
                if trials.needs_training(candidate):
                    needed += seconds_a_step * candidate.training.num_steps
                if candidate in tried or ends - time.monotonic() < needed:
                    continue  # the next may take less
                value = try_out(candidate, change, best_value)["value"]
                if value > best_value:
                    best, best_value, is_better = changed, value, True
                    num_kept += 1
    for name in ("best", "trial"):
        shutil.rmtree(folder / name, ignore_errors=True)
    possible = (ends - time.monotonic()) / max(seconds_of_the_last(best), 1e-9)
    console.print(f"{len(tried)} trials, {num_kept} changes kept; training the best")
    if possible >= 1:
        return best
    console.print(f"there is time for {max(0.25, possible):.0%} of its steps")
    return with_steps(best, max(0.25, possible))


def changes_around(config: Config) -> Iterator[Settings]:
    """The changes to try, one after the other; those that need no training come first."""
    search, ranker, training = config.search, config.ranker, config.training
    if search.num_neighbours:
        yield {"search.neighbour_weight": 2 * search.neighbour_weight}
        yield {"search.neighbour_weight": search.neighbour_weight / 2}
    if ranker.num_mined_labels:
        yield {"ranker.weight": 2 * ranker.weight}
        yield {"ranker.weight": ranker.weight / 2}
    if search.frequency_discount:
        yield {"search.frequency_discount": 2 * search.frequency_discount}
        yield {"search.frequency_discount": 0.0}
    yield {LEARNING_RATE: 2 * training.learning_rate}
    yield {LEARNING_RATE: training.learning_rate / 2}
    yield {NUM_STEPS: 2 * training.num_steps}
    yield {NUM_STEPS: math.ceil(training.num_steps / 2)}
    method = METHODS[config.mining.method]
    if method.mines_examples:
        yield {"mining.method": "snm" if method.samples_labels else "sgd"}
    if config.loss.name == "contrastive":
        yield {"loss.name": "softmax", "model.scale": 16.0}


def with_steps(config: Config, share: float) -> Config:
    """The config with a share of its steps, and of all that is counted in steps."""
    names = ("num_steps", "evaluate_every", "warmup_steps")
    values = {name: math.ceil(share * getattr(config.training, name)) for name in names}
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **values))


class _Trials:
    """The trials of `choose_within`: those in trials.json are known, others are run."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        dataset: Dataset,
        device: torch.device,
        should_stop_fn: StopFn,
    ) -> None:
        self.folder, self.dataset, self.device = folder, dataset, device
        self.should_stop_fn = should_stop_fn
        self.belongs_to = _digest(to_toml(config) + dataset.fingerprint)
        self.rows: list[Row] = []
        if (folder / "trials.json").exists():
            saved = read_json(folder / "trials.json")
            if not isinstance(saved, dict) or saved.get("belongs_to") != self.belongs_to:
                raise UserError(
                    f"{folder} holds trials of other data or settings; remove it, or choose "
                    f"another --run folder"
                )
            self.rows = saved["trials"]

    def needs_training(self, config: Config) -> bool:
        """Whether the best model so far differs from this config in more than SCORING."""
        best = self.folder / "best"
        if not has_model(best):
            return True
        own = {name: get_setting(config, name) for name in SCORING}
        return with_settings(run_config(best), own) != config

    def run(self, config: Config, change: Settings, best_value: float) -> Row:
        """The row of a trial, which is run unless it is known; the best one's model is kept."""
        key = _digest(to_toml(config))
        known = next((row for row in self.rows if row["key"] == key), None)
        if known is not None:
            return known
        began = time.monotonic()
        row: Row = {"key": key, "change": change, "training_seconds": 0.0}
        run, failure = self.folder / "best", ""
        if self.needs_training(config):
            run = self.folder / "trial"
            shutil.rmtree(run, ignore_errors=True)
            how = {"device": self.device, "console": Console(quiet=True)}
            failure = train_trial(
                run, config, self.dataset, should_stop_fn=self.should_stop_fn, **how
            )
            row["training_seconds"] = read_about(run).get("training_seconds", 0.0)
        row["value"] = -1.0  # it diverged
        if not failure:
            row["value"] = validation_value(run, self.dataset, config, device=self.device)
        row["seconds"] = time.monotonic() - began
        if row["value"] > best_value and run.name == "trial":
            shutil.rmtree(self.folder / "best", ignore_errors=True)
            run.rename(self.folder / "best")
        self.rows.append(row)
        found = {"belongs_to": self.belongs_to, "trials": self.rows}
        write_json(self.folder / "trials.json", found)
        return row


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
