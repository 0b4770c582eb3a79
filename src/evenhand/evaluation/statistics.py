"""Figures of groups as functions of how much each query counts, and the bootstrap over queries."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from evenhand.data.dataset import Dataset, Groups, IntArray, Part, pairs_of
from evenhand.data.frequency import frequency_groups_by_labels, frequency_groups_by_pairs
from evenhand.errors import UserError
from evenhand.evaluation.outcome import Outcome

RESAMPLES_AT_ONCE = 50  # (Q, 50) weights: 24 MB for 60,000 queries

DoubleArray = NDArray[np.float64]


# --- groups ---------------------------------------------------------------------------------------


class GroupColumn(NamedTuple):
    """One way to divide the pairs of a part, and its queries where they can be divided."""

    name: str
    group_names: tuple[str, ...]
    pair_groups: IntArray  # (N,), -1: belongs to none
    query_groups: IntArray | None  # (Q,); None: it divides labels


def group_columns(dataset: Dataset, part_name: str) -> list[GroupColumn]:
    """Every column of groups: all, frequency (two kinds), those of labels, those of queries.

    A column of the data whose name is taken is called '<name> of labels' or '<name> of queries'.
    """
    part = dataset.parts[part_name]
    pairs, label_counts = pairs_of(part.positives), dataset.label_counts()
    everyone = Groups(np.zeros(len(part), dtype=np.int32), ("all",))
    of_labels = [
        ("frequency", frequency_groups_by_labels(label_counts)),
        ("frequency over pairs", frequency_groups_by_pairs(label_counts)),
        *dataset.label_groups.items(),
    ]
    columns = {"all": _query_column("all", everyone, pairs.query_ids)}
    for name, groups in of_labels:
        name = name if name not in columns else f"{name} of labels"
        columns[name] = GroupColumn(name, groups.names, groups.ids[pairs.label_ids], None)
    for name, groups in part.groups.items():
        name = name if name not in columns else f"{name} of queries"
        columns[name] = _query_column(name, groups, pairs.query_ids)
    return list(columns.values())


def _query_column(name: str, groups: Groups, query_ids: IntArray) -> GroupColumn:
    return GroupColumn(name, groups.names, groups.ids[query_ids], groups.ids)


def check_belongs(outcome: Outcome, part: Part, part_name: str) -> None:
    pairs = pairs_of(part.positives)
    if (
        len(outcome.retrieved_ids) != len(part)
        or not np.array_equal(outcome.query_ids, pairs.query_ids)
        or not np.array_equal(outcome.label_ids, pairs.label_ids)
    ):
        raise UserError(
            f"the outcome ({len(outcome.retrieved_ids)} queries, {len(outcome.ranks)} pairs) is "
            f"not of the {part_name} part of this data set ({len(part)} queries, "
            f"{len(pairs.query_ids)} pairs); evaluate the run again on this data set"
        )


# --- statistics of weighted queries ---------------------------------------------------------------


class Statistics(NamedTuple):
    """M metrics in the G groups of some columns, as a function of how much each query counts."""

    metrics: tuple[str, ...]
    columns: list[GroupColumn]
    counts: IntArray  # (G,) pairs, or queries with a positive
    values_fn: Callable[[DoubleArray], DoubleArray]  # weights (Q, B) -> (G, M, B), NaN if empty


def pair_statistics(outcome: Outcome, columns: list[GroupColumn]) -> Statistics:
    """recall@r over pairs. A pair is one entry of a sparse table, at (group, rank bin), query:

    the bins up to a cutoff sum to its hits, and all of them to the pairs.
    """
    num_bins = len(outcome.cutoffs) + 1
    bins = np.searchsorted(outcome.cutoffs, outcome.ranks)  # the last one: missed
    bins[outcome.ranks == 0] = num_bins - 1
    starts = np.cumsum([0, *(len(column.group_names) for column in columns)])
    cells, query_ids = [], []
    for column, start in zip(columns, starts, strict=False):
        is_member = column.pair_groups >= 0
        cells.append((column.pair_groups[is_member] + start) * num_bins + bins[is_member])
        query_ids.append(outcome.query_ids[is_member])
    places = np.concatenate(cells), np.concatenate(query_ids)
    shape = starts[-1] * num_bins, len(outcome.retrieved_ids)
    table = csr_matrix((np.ones(len(places[0])), places), shape=shape)  # (G * bins, Q)

    def values_fn(weights: DoubleArray) -> DoubleArray:
        sums = (table @ weights).reshape(starts[-1], num_bins, -1).cumsum(1)  # (G, bins, B)
        return _ratio(sums[:, :-1], sums[:, -1:])

    counts = table.sum(1).A1.reshape(-1, num_bins).sum(1)  # (G * bins,) -> (G,)
    metrics = tuple(f"recall@{cutoff}" for cutoff in outcome.cutoffs)
    return Statistics(metrics, columns, counts.astype(np.int64), values_fn)


def query_statistics(outcome: Outcome, columns: list[GroupColumn]) -> Statistics:
    """(Weighted) means of the query metrics, in the columns that divide queries."""
    columns = [column for column in columns if column.query_groups is not None]
    metrics = tuple(outcome.query_metrics)
    values = np.stack([outcome.query_metrics[name] for name in metrics], axis=1)  # (Q, M)
    # Numerators of all metrics, then the denominator that most share, then those of the others.
    numerators = values.astype(np.float64)
    denominators = [(~np.isnan(values).any(axis=1, keepdims=True)).astype(np.float64)]  # (Q, 1)
    places = np.full(len(metrics), len(metrics))  # (M,) where each metric's denominator stands
    for name, weights in outcome.query_weights.items():
        numerators[:, metrics.index(name)] *= weights
        places[metrics.index(name)] += len(denominators)
        denominators.append(weights[:, None].astype(np.float64))
    table: DoubleArray = np.nan_to_num(np.hstack([numerators, *denominators]))  # (Q, M + ...)
    members = [rows for column in columns for rows in _queries_of_groups(column)]
    tables = [table[rows] for rows in members]

    def values_fn(weights: DoubleArray) -> DoubleArray:
        # einsum, because a threaded product of matrices this thin can stall on a busy machine.
        sums = np.stack(
            [
                np.einsum("qm,qb->mb", group_table, weights[rows])
                for group_table, rows in zip(tables, members, strict=True)
            ]
        )  # (G, M + ..., B)
        return _ratio(sums[:, : len(metrics)], sums[:, places])

    has_positive = np.bincount(outcome.query_ids, minlength=len(values)) > 0  # (Q,)
    counts = np.array([np.count_nonzero(has_positive[rows]) for rows in members])
    return Statistics(metrics, columns, counts, values_fn)


def _queries_of_groups(column: GroupColumn) -> list[IntArray]:
    """The queries of each group, in one sort instead of one search a group."""
    assert column.query_groups is not None
    order = np.argsort(column.query_groups, kind="stable")
    bounds = np.arange(len(column.group_names) + 1)
    starts = np.searchsorted(column.query_groups[order], bounds)
    return [order[start:stop] for start, stop in itertools.pairwise(starts)]


def _ratio(numerators: DoubleArray, denominators: DoubleArray) -> DoubleArray:
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: nothing there
        return numerators / denominators


def resamples(num_queries: int, num_resamples: int, seed: int) -> Iterator[DoubleArray]:
    """How often each query is drawn, Q of Q with replacement: blocks of (Q, at most 50)."""
    generator = np.random.default_rng(seed)
    for start in range(0, num_resamples, RESAMPLES_AT_ONCE):
        weights = np.empty((min(RESAMPLES_AT_ONCE, num_resamples - start), num_queries))
        for row in weights:
            drawn = generator.integers(num_queries, size=num_queries)
            row[:] = np.bincount(drawn, minlength=num_queries)
        yield np.ascontiguousarray(weights.T)


def interval(draws: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """95 % percentile interval over the last axis, skipping NaN: (..., B) -> (...), (...)."""
    if not draws.shape[-1]:
        nothing = np.full(draws.shape[:-1], np.nan)
        return nothing, nothing
    ordered = np.sort(draws, axis=-1)  # NaN last
    last = np.maximum(np.sum(~np.isnan(draws), axis=-1, keepdims=True) - 1, 0)

    def quantile(share: float) -> DoubleArray:
        below = np.floor(share * last).astype(np.int64)
        low, high = (
            np.take_along_axis(ordered, position, axis=-1)
            for position in (below, np.minimum(below + 1, last))
        )
        values: DoubleArray = low + (share * last - below) * (high - low)
        return values[..., 0]

    return quantile(0.025), quantile(0.975)
