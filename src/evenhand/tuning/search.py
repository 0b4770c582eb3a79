"""A search: what is varied, how a trial is chosen, and the folder that remembers both.

base.toml       the settings that every trial starts from
tuning.json     the search; its trials and their figures; the chosen one
trials/NNN/     a run folder each; once a trial is evaluated, its weights and checkpoints go
best.toml       the chosen settings, to train with
tradeoff.html   the picture
"""

import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evenhand.build import check_against_data
from evenhand.config import Config, build_config, read_settings, to_toml
from evenhand.data import Dataset
from evenhand.data.dataset import memberships
from evenhand.errors import UserError
from evenhand.evaluation import GroupColumn, check_selector, group_columns
from evenhand.evaluation.groups import BUILT_IN
from evenhand.evaluation.scores import MIN_PAIRS
from evenhand.files import atomic_folder, read_json, write_json, write_text
from evenhand.settings import typed
from evenhand.tuning.choice import NAN, Trial, chosen_trial, pareto_front
from evenhand.tuning.space import (
    METHOD,
    NUM_HARD_EXAMPLES,
    Planned,
    Space,
    default_space,
    parsed_space,
    planned_trials,
    with_number,
    with_settings,
)

PART = "validation"
NUM_TRIALS, MAX_DROP = 16, 0.005  # unless told otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    config: Config
    space: Space
    criterion: str  # made as high as it can be: any name that `selected_score` knows
    average: str  # must not fall far below its best
    max_drop: float
    seed: int
    planned: tuple[Planned, ...]
    fingerprint: str  # of the data
    command: str


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
        words: what is varied, as `parsed_space` reads it; if none, `default_space`.
        advised: the k' of a smallest group, which the default space then holds.
    """
    if num_trials < 2:
        raise UserError(f"--trials must be at least 2, got {num_trials}")
    if not 0 <= max_drop < math.inf:
        raise UserError(f"--max-drop must be at least 0, such as 0.005, got {max_drop}")
    if seed < 0:
        raise UserError(f"--seed must be at least 0, got {seed}")
    config = with_number(config)
    space = parsed_space(words, config) if words else default_space(config, advised=advised)
    planned = planned_trials(config, space, num_trials=num_trials, seed=seed)
    for trial in planned:
        check_against_data(with_settings(config, trial.settings), dataset)
    search = Search(
        config=config,
        space=space,
        criterion=criterion or default_criterion(config, dataset),
        average=average or _main_metric(config),
        max_drop=max_drop,
        seed=seed,
        planned=tuple(planned),
        fingerprint=dataset.fingerprint,
        command=shlex.join(["evenhand", *sys.argv[1:]]),
    )
    cutoffs, min_pairs = config.evaluation.cutoffs, config.evaluation.min_pairs
    for name in dict.fromkeys([search.criterion, search.average]):
        check_selector(name, dataset, PART, cutoffs=cutoffs, min_pairs=min_pairs)
    return search


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
    chosen = chosen_trial(trials, max_drop=search.max_drop)
    is_complete = len(trials) == len(search.planned)
    values = {name: getattr(search, name) for name in _NAMES}
    values |= {
        "space": {name: str(axis) for name, axis in search.space.items()},
        "planned": [trial._asdict() for trial in search.planned],
        "is_complete": is_complete,
        "chosen": chosen.number if chosen and is_complete else None,
        "front": [trial.number for trial in pareto_front(trials)],
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }
    write_json(folder / "tuning.json", values)


_NAMES: dict[str, type] = {
    "command": str, "criterion": str, "average": str, "max_drop": float, "seed": int,
    "fingerprint": str,
}  # fmt: skip


def open_search(folder: Path) -> tuple[Search, list[Trial]]:
    """What `record` wrote."""
    path = folder / "tuning.json"
    if not path.is_file():
        raise UserError(f"{folder} cannot be resumed: it holds no tuning.json")
    config, saved = build_config(read_settings(folder / "base.toml")), read_json(path)
    try:
        search = Search(
            config=config,
            space=parsed_space([f"{n}={axis}" for n, axis in saved["space"].items()], config),
            planned=tuple(_checked(Planned(**trial), config) for trial in saved["planned"]),
            **{name: typed(name, saved[name], kind) for name, kind in _NAMES.items()},
        )
        trials = [_checked(_trial(row), config) for row in saved["trials"]]
        if len(trials) > len(search.planned):
            raise ValueError(f"{len(trials)} trials, but only {len(search.planned)} were planned")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # not what `record` wrote
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return search, trials


def _trial(row: dict[str, Any]) -> Trial:
    values: dict[str, Any] = {key: NAN if value is None else value for key, value in row.items()}
    trial = Trial(**values)
    figures = (trial.average, trial.criterion, trial.low, trial.high, *trial.figures.values())
    for number in (trial.number, trial.seconds, *figures):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{str(number)[:40]!r} is no number")
    return trial


P = TypeVar("P", Planned, Trial)


def _checked(trial: P, config: Config) -> P:
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
    planned = tuple(
        planned_trials(search.config, search.space, num_trials=num_trials, seed=search.seed)
    )
    if num_trials < len(search.planned) or planned[: len(search.planned)] != search.planned:
        raise UserError(
            f"--trials must be at least {len(search.planned)} (those of {folder}), with the "
            f"version of Evenhand it was begun with, got {num_trials}"
        )
    search = dataclasses.replace(search, planned=planned)
    record(folder, search, trials)
    return search


def check_begun_on(folder: Path, search: Search, dataset: Dataset) -> None:
    """Refuses a data set that is not the one a search was begun on."""
    if dataset.fingerprint != search.fingerprint:
        raise UserError(
            f"{folder} was begun on another data set (fingerprint {search.fingerprint[:12]}, "
            f"{dataset.name} now has {dataset.fingerprint[:12]}); restore that data, or begin anew "
            f"in another --run folder"
        )
