"""Figures of groups as functions of how much each query counts, and the bootstrap over queries."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from evenhand.data.dataset import Dataset, Groups, IntArray, Part, memberships, pairs_of
from evenhand.data.groups import frequency_groups_by_labels, frequency_groups_by_pairs
from evenhand.errors import UserError
from evenhand.evaluation.outcome import Outcome

BUILT_IN = ("all", "frequency", "frequency over pairs")  # columns that every data set has
RESAMPLES_AT_ONCE = 50  # (Q, 50) weights: 24 MB for 60,000 queries

DoubleArray = NDArray[np.float64]


# --- groups ---------------------------------------------------------------------------------------


class GroupColumn(NamedTuple):
    """One way to divide the pairs of a part, and its queries where they can be divided.

    A pair may be in several groups, and a query in the groups of all its pairs.
    """

    name: str
    groups: Groups  # of the pairs: see `memberships`
    is_of_queries: bool  # False: it divides labels

    @property
    def group_names(self) -> tuple[str, ...]:
        return self.groups.names

    def pairs_of(self, group: str) -> IntArray:
        """Positions of the pairs in one group, in order."""
        pair_ids, group_ids = memberships(self.groups)
        return np.asarray(pair_ids[group_ids == self.group_names.index(group)])


def group_columns(dataset: Dataset, part_name: str) -> list[GroupColumn]:
    """Every column of groups: all, frequency (two kinds), those of labels, those of queries.

    A column of the data whose name is taken is called '<name> of labels' or '<name> of queries'.
    """
    part = dataset.parts[part_name]
    pairs, label_counts = pairs_of(part.positives), dataset.label_counts()
    everyone = Groups(np.zeros(len(pairs.query_ids), dtype=np.int32), ("all",))
    of_labels = [
        ("frequency", frequency_groups_by_labels(label_counts)),
        ("frequency over pairs", frequency_groups_by_pairs(label_counts)),
        *dataset.label_groups.items(),
    ]
    columns = {"all": GroupColumn("all", everyone, is_of_queries=True)}
    for name, groups in of_labels:
        while name in columns:
            name = f"{name} of labels"
        of_pairs = groups._replace(ids=groups.ids[pairs.label_ids])
        columns[name] = GroupColumn(name, of_pairs, is_of_queries=False)
    for name, groups in part.groups.items():
        while name in columns:
            name = f"{name} of queries"
        if groups.sets is None:
            groups = groups._replace(ids=groups.ids[pairs.query_ids])
        elif len(groups.ids) != len(pairs.query_ids):
            raise UserError(
                f"the groups of {name!r} have sets, so their ids must be of the "
                f"{len(pairs.query_ids)} pairs of the {part_name} part, got {len(groups.ids)}"
            )
        columns[name] = GroupColumn(name, groups, is_of_queries=True)
    return list(columns.values())


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
    members: Any  # sparse (G, N) or (G, Q): the pairs, or queries with a positive, of each group
    values_fn: Callable[[DoubleArray], DoubleArray]  # weights (Q, B) -> (G, M, B), NaN if empty

    @property
    def counts(self) -> IntArray:
        """How many pairs or queries each group has: (G,)."""
        return np.asarray(np.diff(self.members.indptr))

    def count(self, groups: Sequence[int]) -> int:
        """How many pairs or queries these groups have together; one in several counts once."""
        return len(np.unique(self.members[groups].indices))


def pair_statistics(outcome: Outcome, columns: list[GroupColumn]) -> Statistics:
    """recall@r over pairs. A pair is one entry of a sparse table, at (group, rank bin), query:

    the bins up to a cutoff sum to its hits, and all of them to the pairs.
    """
    num_bins = len(outcome.cutoffs) + 1
    bins = np.searchsorted(outcome.cutoffs, outcome.ranks)  # the last one: missed
    bins[outcome.ranks == 0] = num_bins - 1
    starts = np.cumsum([0, *(len(column.group_names) for column in columns)])
    found = [memberships(column.groups) for column in columns]
    pairs = np.concatenate([pair_ids for pair_ids, _ in found])  # (memberships,)
    rows = np.concatenate([ids + start for (_, ids), start in zip(found, starts, strict=False)])
    ones, num_groups = np.ones(len(pairs)), int(starts[-1])
    places = rows * num_bins + bins[pairs], outcome.query_ids[pairs]
    shape = num_groups * num_bins, len(outcome.retrieved_ids)
    table = csr_matrix((ones, places), shape=shape)  # (G * bins, Q)

    def values_fn(weights: DoubleArray) -> DoubleArray:
        sums = (table @ weights).reshape(num_groups, num_bins, -1).cumsum(1)  # (G, bins, B)
        return _ratio(sums[:, :-1], sums[:, -1:])

    members = csr_matrix((ones, (rows, pairs)), shape=(num_groups, len(outcome.ranks)))
    metrics = tuple(f"recall@{cutoff}" for cutoff in outcome.cutoffs)
    return Statistics(metrics, columns, members, values_fn)


def query_statistics(outcome: Outcome, columns: list[GroupColumn]) -> Statistics:
    """(Weighted) means of the query metrics, in the columns that divide queries.

    A query is in every group that one of its pairs is in, once.
    """
    columns = [column for column in columns if column.is_of_queries]
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
    queries = [ids for column in columns for ids in _queries_of_groups(column, outcome.query_ids)]
    tables = [table[ids] for ids in queries]

    def values_fn(weights: DoubleArray) -> DoubleArray:
        # einsum, because a threaded product of matrices this thin can stall on a busy machine.
        sums = np.stack(
            [
                np.einsum("qm,qb->mb", group_table, weights[ids])
                for group_table, ids in zip(tables, queries, strict=True)
            ]
        )  # (G, M + ..., B)
        return _ratio(sums[:, : len(metrics)], sums[:, places])

    indices, starts = np.concatenate(queries), np.cumsum([0, *map(len, queries)])
    shape = len(queries), len(values)
    members = csr_matrix((np.ones(len(indices)), indices, starts), shape=shape)
    return Statistics(metrics, columns, members, values_fn)


def _queries_of_groups(column: GroupColumn, query_ids: IntArray) -> list[IntArray]:
    """The queries of each group, in order, in one sort instead of one search a group."""
    pair_ids, group_ids = memberships(column.groups)
    num_queries = int(query_ids.max(initial=0)) + 1
    places = np.unique(group_ids * np.int64(num_queries) + query_ids[pair_ids])
    bounds = np.searchsorted(places, np.arange(len(column.group_names) + 1) * num_queries)
    return [places[start:stop] % num_queries for start, stop in itertools.pairwise(bounds)]


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
