"""The scores of one run: every metric in every group, with intervals; and choosing by one.

Figures of groups are functions of how much each query counts, which the bootstrap varies.
"""

import dataclasses
import difflib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix

from evenhand.data import Dataset, IntArray, memberships
from evenhand.errors import UserError
from evenhand.evaluation.groups import (
    SUMMARIES,
    DoubleArray,
    GroupColumn,
    check_belongs,
    group_columns,
)
from evenhand.evaluation.outcome import CUTOFFS, Outcome, evaluate

MIN_PAIRS = 30  # by default, a group with fewer is too small to judge
MAIN_CUTOFF, FEW_LABELS = 10, 20  # of so few, the first ten results say next to nothing
RESAMPLES_AT_ONCE = 50  # (Q, 50) weights: 24 MB for 60,000 queries


def main_cutoff(cutoffs: Iterable[int], *, num_labels: int) -> int:
    """The cut-off that reports and early stopping are about: the one nearest to 10, or to 1.

    Example:
        >>> main_cutoff((1, 5, 10), num_labels=1000), main_cutoff((1, 5, 10), num_labels=6)
        (10, 1)
    """
    wanted = 1 if num_labels <= FEW_LABELS else MAIN_CUTOFF
    return min(cutoffs, key=lambda cutoff: abs(cutoff - wanted))


# --- figures as functions of how much each query counts -------------------------------------------


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nothing but NaN: NaN
        low, high = np.nanquantile(draws, (0.025, 0.975), axis=-1)
    return low, high


# --- one run --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Score:
    metric: str
    column: str
    group: str  # of the column, or one of SUMMARIES
    value: float  # NaN: nothing to score
    low: float  # 95 % interval
    high: float
    count: int  # pairs; for a query metric, queries with a positive
    is_judged: bool  # False: too small to judge
    members: tuple[str, ...] = ()  # of a summary: the groups it averages


def score_table(
    outcome: Outcome,
    dataset: Dataset,
    part_name: str,
    *,
    min_pairs: Mapping[str, int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[Score]:
    """Every metric in every group, and for each column of groups how its worst ones fare.

    'worst', 'worst 3' and 'worst tenth' are unweighted means over the lowest groups that can be
    judged, lowest by the same metric; a tenth of n groups is max(1, n // 10) of them. Their
    intervals hold the members fixed. The interval of a group that is always right, or always
    wrong, has no width.

    Args:
        min_pairs: for a column, the least count with which a group is judged; 30 if not named.
        num_resamples: of the bootstrap; 0: no intervals (NaN).
    """
    check_belongs(outcome, dataset.parts[part_name], part_name)
    columns = group_columns(dataset, part_name)
    kinds = [pair_statistics(outcome, columns), query_statistics(outcome, columns)]
    num_queries = len(outcome.retrieved_ids)
    values = [kind.values_fn(np.ones((num_queries, 1)))[..., 0] for kind in kinds]  # (G, M)
    draws = [[np.empty((*value.shape, 0))] for value in values]
    for weights in resamples(num_queries, num_resamples, seed):
        for kind, blocks in zip(kinds, draws, strict=True):
            blocks.append(kind.values_fn(weights))  # (G, M, B)
    return [
        score
        for kind, value, blocks in zip(kinds, values, draws, strict=True)
        for score in _scores(kind, value, np.concatenate(blocks, axis=-1), min_pairs or {})
    ]


def _scores(
    kind: Statistics, values: DoubleArray, draws: DoubleArray, min_pairs: Mapping[str, int]
) -> Iterator[Score]:
    """Rows of the table from values (G, M) and draws (G, M, B)."""
    lows, highs = interval(draws)  # (G, M)
    start = 0
    for column in kind.columns:
        needed = min_pairs.get(column.name, MIN_PAIRS)
        for m, metric in enumerate(kind.metrics):
            rows = []
            for g, name in enumerate(column.group_names, start):
                numbers = float(values[g, m]), float(lows[g, m]), float(highs[g, m])
                count = int(kind.counts[g])
                rows.append(Score(metric, column.name, name, *numbers, count, count >= needed))
            yield from rows
            for summary in SUMMARIES if rows and column.name != "all" else ():
                yield _summary(summary, rows, draws[start : start + len(rows), m], kind, start)
        start += len(column.group_names)


def _summary(
    name: str, rows: list[Score], draws: DoubleArray, kind: Statistics, start: int
) -> Score:
    """Mean over the lowest groups of one column: its rows, at `start`, and their draws (G, B)."""
    members = _lowest(rows, {"worst": 1, "worst 3": 3, "worst tenth": None}[name])
    metric, column = rows[0].metric, rows[0].column
    if not members:
        return Score(metric, column, name, np.nan, np.nan, np.nan, 0, is_judged=False)
    low, high = interval(draws[members].mean(axis=0))
    return Score(
        metric,
        column,
        name,
        value=float(np.mean([rows[g].value for g in members])),
        low=float(low),
        high=float(high),
        count=kind.count([start + g for g in members]),
        is_judged=True,
        members=tuple(rows[g].group for g in members),
    )


def _lowest(rows: Sequence[Score], count: int | None) -> list[int]:
    """Positions of the lowest rows that can be judged, lowest first; None: a tenth of them."""
    judged = [position for position, row in enumerate(rows) if row.is_judged]
    judged.sort(key=lambda position: rows[position].value)
    return judged[: max(1, len(judged) // 10) if count is None else count]


def worst_members(
    scores: Iterable[Score], column: str, metric: str, *, count: int | None = None
) -> tuple[str, ...]:
    """The lowest groups of a column that can be judged, lowest first; no count: a tenth of them."""
    rows = [s for s in scores if (s.column, s.metric) == (column, metric)]
    rows = [row for row in rows if row.group not in SUMMARIES]
    if not rows:
        raise UserError(f"the scores hold no metric {metric!r} for the groups of {column!r}")
    return tuple(rows[position].group for position in _lowest(rows, count))


# --- choosing by one number -----------------------------------------------------------------------


def selected_score(scores: Iterable[Score], name: str) -> Score:
    """The row that a name selects; it has a value.

    Names: 'recall@10', 'mrr', 'recall@10 on tail' (of frequency over labels), 'recall@10 on
    script=THAI', 'recall@10 on worst of script', '... on worst 3 of script', '... on worst tenth
    of country'.
    """
    metric, _, where = (piece.strip() for piece in name.partition(" on "))
    summary, of, column = where.partition(" of ")
    if of and summary.startswith("worst"):
        group = summary
    elif "=" in where:
        column, _, group = where.partition("=")
    else:
        column, group = ("frequency", where) if where not in ("", "all") else ("all", "all")
    rows = list(scores)
    for kind, wanted in ("metric", metric), ("column", column), ("group", group):
        known = list(dict.fromkeys(getattr(row, kind) for row in rows))
        check_known(wanted, known, f"{kind} of {name!r}")
        rows = [row for row in rows if getattr(row, kind) == wanted]
    if np.isnan(rows[0].value):
        raise UserError(
            f"{name!r} has no value: the part holds no pair for it, or no group is large enough to "
            f"judge; choose another or lower the least number of pairs"
        )
    return rows[0]


def selected_value(scores: Iterable[Score], name: str) -> float:
    """The value of the row that `selected_score` finds."""
    return selected_score(scores, name).value


def check_selector(
    name: str,
    dataset: Dataset,
    part_name: str,
    *,
    cutoffs: Sequence[int] = CUTOFFS,
    min_pairs: Mapping[str, int] | None = None,
) -> None:
    """Refuses, before any training, a name that `selected_score` would refuse after it."""
    empty_index = SimpleNamespace(  # of a single label: num_results may be any number
        search=lambda queries, _: (torch.full((len(queries), 1), -1), torch.zeros(len(queries), 1)),
        scores_of=lambda _, label_ids: torch.zeros(label_ids.shape),
    )
    nothing_found = evaluate(
        lambda row_ids: torch.zeros(len(row_ids), 1),
        empty_index,
        dataset.parts[part_name],
        dataset.label_counts(),
        num_results=max(cutoffs),
        cutoffs=cutoffs,
        num_train_queries=max(1, len(dataset.parts["train"])),
    )
    scores = score_table(nothing_found, dataset, part_name, min_pairs=min_pairs, num_resamples=0)
    selected_score(scores, name)


def check_known(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        few = f"known: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}"
        hint = f"did you mean {close[0]!r}?" if close else few
        raise UserError(f"unknown {what}: {name!r}; {hint}")
