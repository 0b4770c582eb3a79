"""Two methods on the same queries: paired differences, over queries and over seeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.groups import BUILT_IN, DoubleArray, check_belongs, group_columns
from evenhand.evaluation.outcome import Outcome
from evenhand.evaluation.scores import (
    MIN_PAIRS,
    check_known,
    interval,
    pair_statistics,
    query_statistics,
    resamples,
    score_table,
    worst_members,
)


class GroupList(NamedTuple):
    column: str
    names: tuple[str, ...]  # fixed beforehand, on another part than the one compared on


@dataclasses.dataclass(frozen=True)
class Difference:
    """Contender minus baseline in a metric, mean over runs paired by position."""

    metric: str
    group: str  # 'all', 'head', 'torso', 'tail' (over labels), or the title of a list
    baseline: float
    contender: float
    difference: float
    low: float  # 95 %, over the queries: would it hold on other queries?
    high: float
    seed_low: float  # 95 %, over the runs: would it hold with other seeds? NaN below two
    seed_high: float
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
        if column.is_of_queries or is_of_pairs(metric)
    ]
    least = {
        name: max(1, round(share * (min_pairs or {}).get(name, MIN_PAIRS))) for name in columns
    }
    scores = score_table(outcome, dataset, chosen_on, min_pairs=least, num_resamples=0)
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
    metric: str | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[Difference]:
    """Differences in pair recall at every cutoff both sides have, or in a metric of queries.

    A list of several groups counts by the unweighted mean of their values. The interval over
    queries resamples whole queries, the same for both sides and all runs; the one over seeds is
    Student's t on the differences of the paired runs.

    Args:
        groups: title -> groups, such as 'worst 3 of script' -> what `worst_members` chose.
        metric: such as 'mrr' or 'ndcg@10', for all queries and groups of queries alone.
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
    every = group_columns(dataset, part_name)
    if metric is not None:
        every = [column for column in every if column.is_of_queries]
    frequencies = next((c.group_names for c in every if c.name == "frequency"), ())
    lists |= {name: GroupList("frequency", (name,)) for name in frequencies}
    lists |= groups or {}
    for chosen in lists.values():
        check_known(chosen.column, [column.name for column in every], "column")
        if not chosen.names:
            raise UserError(f"a list of groups of {chosen.column!r} is empty: nothing to compare")
    wanted = {chosen.column for chosen in lists.values()}
    columns = [column for column in every if column.name in wanted]
    starts = np.cumsum([0, *(len(column.group_names) for column in columns)]).tolist()
    known = {c.name: (start, c.group_names) for c, start in zip(columns, starts, strict=False)}
    members = []  # for each list, where its groups stand among the groups of all columns
    for chosen in lists.values():
        start, names = known[chosen.column]
        for name in chosen.names:
            check_known(name, names, f"group of {chosen.column!r}")
        members.append([start + names.index(name) for name in chosen.names])
    if metric is None:
        runs = [pair_statistics(dataclasses.replace(o, cutoffs=cutoffs), columns) for o in outcomes]
    else:
        runs = [query_statistics(_with_metric(o, metric), columns) for o in outcomes]

    def values_of(weights: DoubleArray) -> DoubleArray:
        """The unweighted mean over the groups of each list: (2, runs, lists, M, B)."""
        of_groups = [run.values_fn(weights) for run in runs]  # (G, M, B) each
        values = np.stack([[v[places].mean(axis=0) for places in members] for v in of_groups])
        return values.reshape(2, len(baseline), *values.shape[1:])

    num_queries = len(outcomes[0].retrieved_ids)
    values = values_of(np.ones((num_queries, 1)))[..., 0]  # (2, runs, lists, M)
    draws = [np.empty((*values.shape[2:], 0))]
    for weights in resamples(num_queries, num_resamples, seed):
        resampled = values_of(weights)  # (2, runs, lists, M, B)
        draws.append((resampled[1] - resampled[0]).mean(0))  # (lists, M, B)
    lows, highs = interval(np.concatenate(draws, axis=-1))  # (lists, M)
    differences = values[1] - values[0]  # (runs, lists, M)
    margins = np.full(differences.shape[1:], np.nan)  # (lists, M) of Student's 95 % interval
    if len(baseline) > 1:
        errors = differences.std(axis=0, ddof=1) / np.sqrt(len(baseline))
        margins = stdtrit(len(baseline) - 1, 0.975) * errors
    means, sides = differences.mean(0), values.mean(1)  # (lists, M), (2, lists, M)
    return [
        Difference(
            name,
            title,
            baseline=float(sides[0, t, m]),
            contender=float(sides[1, t, m]),
            difference=float(means[t, m]),
            low=float(lows[t, m]),
            high=float(highs[t, m]),
            seed_low=float(means[t, m] - margins[t, m]),
            seed_high=float(means[t, m] + margins[t, m]),
            count=runs[0].count(members[t]),
        )
        for m, name in enumerate(runs[0].metrics)
        for t, title in enumerate(lists)
    ]


def is_of_pairs(metric: str) -> bool:
    """Whether a metric is a mean over pairs; the others are over queries."""
    return metric.startswith("recall@")


def _with_metric(outcome: Outcome, metric: str) -> Outcome:
    """The outcome with one metric of queries alone."""
    check_known(metric, list(outcome.query_metrics), "metric")
    weights = {name: w for name, w in outcome.query_weights.items() if name == metric}
    values = {metric: outcome.query_metrics[metric]}
    return dataclasses.replace(outcome, query_metrics=values, query_weights=weights)
