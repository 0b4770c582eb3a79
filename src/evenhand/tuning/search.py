"""`evenhand tune`: runs planned trials, and chooses one by the validation part.

A trial is a run like any other. It is trained and scored without the test part, and one that
diverges is out. The run folders are all that a search remembers: the same command runs the trials
that are not finished yet. The folder of a search:

trials/NNN/     a run folder for each; model and checkpoints, which fill a disk, go after evaluation
tuning.json     the trials and their figures, and the chosen one
best.toml       the chosen settings, to train with

The rule: the best for the worst served, of those good enough for all.
"""

import dataclasses
import math
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.build import check_against_data
from evenhand.config import Config, to_toml
from evenhand.data import Dataset, memberships
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import check_selector, group_columns, selected_score
from evenhand.evaluation.groups import BUILT_IN
from evenhand.evaluation.scores import MIN_PAIRS, main_cutoff
from evenhand.files import locked, write_json, write_text
from evenhand.report.rendering import format_duration
from evenhand.result_tables import main_rows, row_title
from evenhand.run_folder import is_evaluated, load_result, read_about
from evenhand.runs import begin_run, evaluate_run, resumable_config, train_run
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.space import (
    NAN,
    Space,
    Trial,
    default_space,
    parse_space,
    plan_trials,
    with_settings,
)

PART = "validation"
ROUNDING = 1e-9  # 0.415 - 0.410 is a little more than 0.005 in floating point
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


# --- the plan -------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """Names of scores, as `selected_score` knows them, and how far the average may fall."""

    criterion: str  # made as high as it can be
    average: str  # must not fall far below its best
    max_drop: float


class Search(NamedTuple):
    """What is to be tried, around which settings, and by which rule one is chosen."""

    config: Config
    space: Space
    trials: Sequence[Trial]
    rule: Rule


def plan_search(
    config: Config,
    dataset: Dataset,
    *,
    num_trials: int = 16,
    criterion: str | None = None,
    average: str | None = None,
    max_drop: float = 0.005,
    words: Sequence[str] = (),
    seed: int = 0,
) -> Search:
    """Plans a search, and refuses what would fail in one of its trials.

    Args:
        criterion: by default the average, of `default_group`.
        average: by default recall@10 over all; of few labels, recall@1.
        words: what is varied, as `parse_space` reads it; by default `default_space`.
    """
    for flag, low, value in ("trials", 2, num_trials), ("max-drop", 0, max_drop), ("seed", 0, seed):
        if not low <= value < math.inf:
            raise UserError(f"--{flag} must be at least {low}, got {value}")
    space = parse_space(words, config) if words else default_space(config)
    trials = plan_trials(config, space, num_trials=num_trials, seed=seed)
    for trial in trials:
        check_against_data(with_settings(config, trial.settings), dataset)
    main_metric = f"recall@{main_cutoff(config.evaluation.cutoffs, num_labels=dataset.num_labels)}"
    criterion = criterion or f"{main_metric} on {default_group(config, dataset)}"
    rule = Rule(criterion, average or main_metric, max_drop)
    cutoffs, min_pairs = config.evaluation.cutoffs, config.evaluation.min_pairs
    for name in (rule.criterion, rule.average):
        check_selector(name, dataset, PART, cutoffs=cutoffs, min_pairs=min_pairs)
    return Search(config, space, trials, rule)


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


# --- the trials -----------------------------------------------------------------------------------


def run_search(
    folder: Path,
    search: Search,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn,
) -> None:
    """Runs the trials that are not finished yet; chooses one, and prints what was found.

    Raises:
        StoppedError: the user asked to stop.
    """
    rule, num_trials = search.rule, len(search.trials)
    console.print(
        f"{num_trials} trials, judged on the {PART} part: the highest {rule.criterion} of those "
        f"whose {rule.average} is at most {rule.max_drop:g} below the best"
    )
    searched = (f"{name}={','.join(map(str, values))}" for name, values in search.space.items())
    console.print(f"searched: {' '.join(searched)}")
    trials = []
    for planned in search.trials:
        if should_stop_fn():
            raise StoppedError
        trial = _run_trial(
            folder / "trials" / f"{planned.number:03d}",
            search,
            planned,
            dataset,
            device=device,
            console=console if console.is_terminal else Console(quiet=True),  # a line a trial
            should_stop_fn=should_stop_fn,
        )
        trials.append(trial)
        figures = f"{rule.average} {trial.average:.4f}, {rule.criterion} {trial.criterion:.4f}"
        if trial.failure:
            figures = f"{trial.failure}, so it is out"
        role = f" ({trial.role})" if trial.role else ""
        console.print(
            f"trial {trial.number} of {num_trials}{role}: {figures}; "
            f"{format_duration(trial.seconds)}"
        )
    _conclude(folder, search, Results(trials, rule), console)


def _run_trial(
    run: Path,
    search: Search,
    trial: Trial,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn,
) -> Trial:
    """The trial with its figures; it is trained and evaluated where it has not been yet."""
    config = with_settings(search.config, trial.settings)
    how: dict[str, Any] = {"device": device, "console": console}
    title = f"trial {trial.number} of {len(search.trials)}"
    if run.exists():
        resumable_config(run, config, dataset)
    if not is_evaluated(run, PART):
        if failure := train_trial(
            run, config, dataset, should_stop_fn=should_stop_fn, title=title, **how
        ):
            seconds = read_about(run).get("training_seconds", 0.0)
            _drop_models(run)
            return dataclasses.replace(trial, failure=failure, seconds=seconds)
        began = time.monotonic()
        evaluate_run(run, dataset, PART, **how, title=f"{title}, evaluating")
        seconds = round(time.monotonic() - began, 1)
        write_json(run / "run.json", read_about(run) | {"evaluation_seconds": seconds})
    _drop_models(run)
    result = load_result(run, PART)
    steps = ("training", "ranker", "evaluation")
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
        seconds=sum(result.about.get(f"{step}_seconds", 0.0) for step in steps),
    )


def train_trial(
    run: Path, config: Config, dataset: Dataset, *, should_stop_fn: StopFn, **how: Any
) -> str:
    """Trains a trial, or continues it; returns why it diverged, or "".

    Args:
        how: device, console and title, as `train_run` takes them.

    Raises:
        StoppedError: the user asked to stop.
    """
    if not run.exists():
        begin_run(run, config, dataset, device=how["device"])
    about = read_about(run)
    if "diverged" in about:
        return str(about["diverged"])
    try:
        with locked(run):
            if not train_run(run, config, dataset, should_stop_fn=should_stop_fn, **how):
                raise StoppedError
    except UserError as error:
        if NAN_REMEDY not in str(error):
            raise
        failure = str(error).partition(";")[0]
        write_json(run / "run.json", read_about(run) | {"diverged": failure, "is_running": False})
        return failure
    return ""


def _drop_models(run: Path) -> None:
    for name in ("checkpoints", "model"):
        shutil.rmtree(run / name, ignore_errors=True)


# --- the choice -----------------------------------------------------------------------------------


class Results(NamedTuple):
    """The finished trials, by number, and what the rule makes of them."""

    trials: Sequence[Trial]
    rule: Rule

    @property
    def ranked(self) -> list[Trial]:
        """The best criterion first, then the average, then the first; unscored ones last."""
        return sorted(self.trials, key=lambda t: (not t.is_scored, -t.criterion, -t.average))

    @property
    def feasible(self) -> list[Trial]:
        """Those whose average is near enough to the best of all, the best criterion first."""
        scored = [trial for trial in self.ranked if trial.is_scored]
        best = max((trial.average for trial in scored), default=NAN)
        return [t for t in scored if best - t.average <= self.rule.max_drop + ROUNDING]

    def table(self) -> Table:
        """The trials, the best criterion first; the chosen one, the first feasible, is bold."""
        rule, feasible = self.rule, self.feasible
        varied = [
            n for n in self.trials[0].settings if len({t.settings[n] for t in self.trials}) > 1
        ]
        names = [name.partition(".")[2] for name in varied]
        table = Table(title=Text(f"trials by {rule.criterion}"), title_justify="left")
        for heading in ["trial", *names, rule.average, "criterion", "95 %", "tail", "seconds"]:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        table.add_column("")
        for trial in self.ranked:
            has_interval = trial.is_scored and not math.isnan(trial.low)
            figures = [trial.average, trial.criterion, trial.figures.get("tail", NAN)]
            shown = ["–" if math.isnan(figure) else f"{figure:.4f}" for figure in figures]
            shown.insert(2, f"{trial.low:.3f}–{trial.high:.3f}" if has_interval else "–")
            is_chosen, is_near = trial in feasible[:1], trial in feasible
            remarks = ["chosen" if is_chosen else "near the best" if is_near else ""]
            remarks += [trial.role, trial.failure]
            cells = [str(trial.number), *(str(trial.settings[name]) for name in varied), *shown]
            cells += [f"{trial.seconds:.0f}", ", ".join(filter(None, remarks))]
            style = "bold" if is_chosen else "" if is_near else "dim"
            table.add_row(*(Text(cell) for cell in cells), style=style)
        return table

    def describe(self) -> list[str]:
        """What was chosen and why, and how far to trust it; some trial must have its figures."""
        (chosen, *others), rule = self.feasible, self.rule
        best = max(trial.average for trial in self.feasible)
        sentences = [
            f"chosen: trial {chosen.number}, the highest {rule.criterion} of the trials near the "
            f"best average ({1 + len(others)} of {len(self.trials)}: {rule.average} at most "
            f"{rule.max_drop:g} below {best:.4f})"
        ]
        rivals = sorted(t.number for t in others if t.criterion >= chosen.low)  # NaN: none
        if chosen.criterion == 0:
            sentences.append(
                "note: it finds nothing by that criterion, so the average alone decided; give the "
                "trials more --steps, or name another --criterion"
            )
        elif rivals:
            named = f"trial{'s' * (len(rivals) > 1)} {', '.join(map(str, rivals))}"
            sentences.append(f"too close to call, by its 95 % interval: {named}")
        return sentences


def _conclude(folder: Path, search: Search, results: Results, console: Console) -> None:
    """Writes best.toml and tuning.json; prints what was chosen and why, and what to do next."""
    if not results.feasible:
        raise UserError(
            f"no trial of {folder} came to an end, so none can be chosen "
            f"({results.trials[0].failure}); search lower values of training.learning_rate"
        )
    chosen, best, figures = results.feasible[0], folder / "best.toml", folder / "tuning.json"
    run = folder.with_name(f"{folder.name}-best")
    command = shlex.join(["evenhand", "train", str(best), "--run", str(run)])
    write_text(
        best,
        f"# {command}\n"
        f"# trial {chosen.number} of {folder.name}: the highest {search.rule.criterion} on the "
        f"{PART} part\n{to_toml(with_settings(search.config, chosen.settings))}",
    )
    trials = [dataclasses.asdict(trial) for trial in results.trials]
    write_json(figures, {**search.rule._asdict(), "chosen": chosen.number, "trials": trials})
    console.print(results.table())
    for line in (
        *results.describe(),
        f"these figures are too good, because the trial was chosen by them; for honest ones, on "
        f"the test part: {command}",
        f"settings: {best}",
        f"figures:  {figures}",
    ):
        console.print(line)
