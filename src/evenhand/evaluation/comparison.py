"""Two methods on the same queries: paired differences, over queries and over seeds."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.groups import (
    BUILT_IN,
    DoubleArray,
    GroupColumn,
    check_belongs,
    group_columns,
)
from evenhand.evaluation.outcome import Outcome
from evenhand.evaluation.scores import (
    MIN_PAIRS,
    check_known,
    interval,
    pair_statistics,
    resamples,
    score_table,
    worst_members,
)


class GroupList(NamedTuple):
    column: str
    names: tuple[str, ...]  # fixed beforehand, on another part than the one compared on


@dataclasses.dataclass(frozen=True)
class Difference:
    """Contender minus baseline in pair recall, mean over runs paired by position."""

    metric: str
    group: str  # 'all', 'head', 'torso', 'tail' (over labels), or the title of a list
    baseline: float
    contender: float
    difference: float
    low: float  # 95 %, over the queries: would it hold on other queries?
    high: float
    seed_low: float  # 95 %, over the runs: would it hold with other seeds? NaN below two
    seed_high: float
    num_runs: int  # a side
    count: int  # pairs


def worst_groups(
    outcome: Outcome,
    dataset: Dataset,
    *,
    chosen_on: str,
    compared_on: str,
    metric: str,
    min_pairs: Mapping[str, int] | None = None,
) -> dict[str, GroupList]:
    """The worst 3 and the worst tenth of every column of groups, chosen on another part.

    Choosing the worst on the part that is compared on would favour the contender: some groups are
    lowest there by chance. The least number of pairs shrinks with the part, so that the groups
    that can be judged are about the same.
    """
    sizes = [len(dataset.parts[name].positives.ids) for name in (chosen_on, compared_on)]
    share = sizes[0] / sizes[1]
    columns = [
        column.name
        for column in group_columns(dataset, chosen_on)
        if column.name not in BUILT_IN and len(column.group_names)
    ]
    least = {name: (min_pairs or {}).get(name, MIN_PAIRS) for name in columns}
    scores = score_table(
        outcome,
        dataset,
        chosen_on,
        min_pairs={name: max(1, round(share * count)) for name, count in least.items()},
        num_resamples=0,
    )
    lists = {
        f"{title} of {name}": GroupList(name, worst_members(scores, name, metric, count=count))
        for name in columns
        for title, count in (("worst 3", 3), ("worst tenth", None))
    }
    return {title: chosen for title, chosen in lists.items() if chosen.names}


def compare_outcomes(
    baseline: Sequence[Outcome],
    contender: Sequence[Outcome],
    dataset: Dataset,
    part_name: str,
    groups: Mapping[str, GroupList] | None = None,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[Difference]:
    """Differences in pair recall at every cutoff both sides have.

    A list of several groups counts by the unweighted mean of their recalls. The interval over
    queries resamples whole queries, the same for both sides and all runs; the one over seeds is
    Student's t on the differences of the paired runs.

    Args:
        groups: title -> groups, such as 'worst 3 of script' -> what `worst_members` chose.
    """
    if not baseline or len(baseline) != len(contender):
        raise ValueError(
            f"both sides must hold the same number of runs, at least one, paired by position, "
            f"got {len(baseline)} and {len(contender)}"
        )
    outcomes = [*baseline, *contender]
    for outcome in outcomes:
        check_belongs(outcome, dataset.parts[part_name], part_name)
    cutoffs = tuple(sorted(set.intersection(*(set(outcome.cutoffs) for outcome in outcomes))))
    if not cutoffs:
        raise UserError("the runs have no cutoff in common; evaluate them again with the same ones")
    lists = {"all": GroupList("all", ("all",))}
    lists |= {name: GroupList("frequency", (name,)) for name in ("head", "torso", "tail")}
    lists |= groups or {}
    columns = _columns_of(lists.values(), group_columns(dataset, part_name))
    members = [_positions(columns, chosen) for chosen in lists.values()]
    runs = [
        pair_statistics(dataclasses.replace(outcome, cutoffs=cutoffs), columns)
        for outcome in outcomes
    ]

    def recalls(weights: DoubleArray) -> DoubleArray:
        values = np.stack(
            [_list_means(run.values_fn(weights), members) for run in runs]
        )  # (2 * runs, lists, M, B)
        return values.reshape(2, len(baseline), *values.shape[1:])

    num_queries = len(outcomes[0].retrieved_ids)
    values = recalls(np.ones((num_queries, 1)))[..., 0]  # (2, runs, lists, M)
    draws = [np.empty((*values.shape[2:], 0))]
    for weights in resamples(num_queries, num_resamples, seed):
        resampled = recalls(weights)  # (2, runs, lists, M, B)
        draws.append((resampled[1] - resampled[0]).mean(0))  # (lists, M, B)
    lows, highs = interval(np.concatenate(draws, axis=-1))  # (lists, M)
    differences = values[1] - values[0]  # (runs, lists, M)
    margins = _seed_margins(differences)  # (lists, M)
    means, sides = differences.mean(0), values.mean(1)  # (lists, M), (2, lists, M)
    return [
        Difference(
            metric,
            title,
            baseline=float(sides[0, t, m]),
            contender=float(sides[1, t, m]),
            difference=float(means[t, m]),
            low=float(lows[t, m]),
            high=float(highs[t, m]),
            seed_low=float(means[t, m] - margins[t, m]),
            seed_high=float(means[t, m] + margins[t, m]),
            num_runs=len(baseline),
            count=runs[0].count(members[t]),
        )
        for m, metric in enumerate(runs[0].metrics)
        for t, title in enumerate(lists)
    ]


def _columns_of(lists: Iterable[GroupList], columns: list[GroupColumn]) -> list[GroupColumn]:
    """The columns that some list is of."""
    wanted = {chosen.column for chosen in lists}
    for name in sorted(wanted):
        check_known(name, [column.name for column in columns], "column")
    return [column for column in columns if column.name in wanted]


def _positions(columns: list[GroupColumn], chosen: GroupList) -> list[int]:
    """Where the groups of a list stand among the groups of all columns."""
    if not chosen.names:
        raise UserError(f"a list of groups of {chosen.column!r} is empty: nothing to compare")
    start = 0
    for column in columns:
        if column.name == chosen.column:
            break
        start += len(column.group_names)
    for name in chosen.names:
        check_known(name, column.group_names, f"group of {column.name!r}")
    return [start + column.group_names.index(name) for name in chosen.names]


def _list_means(values: DoubleArray, members: list[list[int]]) -> DoubleArray:
    """Unweighted mean over the groups of each list: (G, M, B) -> (lists, M, B)."""
    return np.stack([values[positions].mean(axis=0) for positions in members])


def _seed_margins(differences: DoubleArray) -> DoubleArray:
    """Half the width of Student's 95 % interval over runs: (runs, ...) -> (...)."""
    num_runs = len(differences)
    if num_runs < 2:
        return np.full(differences.shape[1:], np.nan)
    errors = differences.std(axis=0, ddof=1) / np.sqrt(num_runs)
    return np.asarray(stdtrit(num_runs - 1, 0.975) * errors)
