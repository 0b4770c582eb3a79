"""Who is served and who is not: what a model finds, for every group, with intervals.

`evaluate` asks an index for every query of a part and keeps what happened to each (query,
positive) pair: an `Outcome`. All figures come from it, without the model: `score_table` for one
run, `compare_outcomes` for two methods, `selected_value` for the number that chooses a checkpoint.

Pair metrics are the paper's recall@r: the share of (query, label) pairs whose label is among the
first r results. A pair belongs to a group of labels by its label, to a group of queries by its
query. Query metrics ('query recall@r', 'precision@r', 'ndcg@r', 'psp@r', 'mrr') are means over
queries, and exist for all queries and for groups of queries.

Intervals are 95 % percentile intervals of the bootstrap over whole queries: the pairs of a query
stand or fall together, so resampling single pairs would make intervals too narrow.
"""

import dataclasses
import difflib
import itertools
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.special import stdtrit
from torch import Tensor

from evenhand.data.dataset import Dataset, FloatArray, Groups, IntArray, Part, padded_rows, pairs_of
from evenhand.data.frequency import frequency_groups_by_labels, frequency_groups_by_pairs
from evenhand.errors import UserError
from evenhand.metrics import label_propensities, pair_ranks, query_metrics

CUTOFFS = (1, 5, 10, 25, 50)
MIN_PAIRS = 30  # a group with fewer is too small to judge, unless told otherwise
NUM_SHOWN = 10  # results kept for each query
SUMMARIES = ("worst", "worst 3", "worst tenth")
RESAMPLES_AT_ONCE = 50  # (Q, 50) weights: 24 MB for 60,000 queries

DoubleArray = NDArray[np.float64]


class Index(Protocol):
    def search(self, queries: Tensor, num_results: int) -> tuple[Tensor, Tensor]:
        """Label ids (Q, R), best first, -1 where fewer were found, and their scores (Q, R)."""

    def scores_of(self, queries: Tensor, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels: (Q, D), (Q, P) -> (Q, P)."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to every query of a part, and to each of its N (query, positive) pairs."""

    query_ids: IntArray  # (N,) int64, in the order of `pairs_of`
    label_ids: IntArray  # (N,) int64
    ranks: IntArray  # (N,) int32, from 1; 0: not among the first num_results
    scores: FloatArray  # (N,) of the positive
    retrieved_ids: IntArray  # (Q, 10) int32, best first; -1 where fewer were found
    retrieved_scores: FloatArray  # (Q, 10), -inf where fewer were found
    query_metrics: dict[str, FloatArray]  # (Q,) each, NaN for a query without positives
    query_weights: dict[str, FloatArray]  # (Q,) each; a metric that is not here weighs all alike
    num_results: int
    cutoffs: tuple[int, ...]


@torch.no_grad()
def evaluate(
    encode_fn: Callable[[IntArray], Tensor],
    index: Index,
    part: Part,
    label_counts: IntArray,
    *,
    num_results: int = 50,
    cutoffs: Sequence[int] = CUTOFFS,
    batch_size: int = 1024,
    num_train_queries: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Searches for every query of a part and keeps what was found.

    Args:
        encode_fn: row numbers of queries (B,) -> their vectors (B, D).
        label_counts: (L,) training pairs of each label, for the propensities.
        num_train_queries: N in the propensities; without it there is no 'psp@r'.
        progress: called with the number of queries done and of all.
    """
    if not cutoffs or not 1 <= min(cutoffs) <= max(cutoffs) <= num_results:
        raise ValueError(
            f"cutoffs must lie between 1 and num_results ({num_results}), got {tuple(cutoffs)}"
        )
    cutoffs = tuple(sorted(set(cutoffs)))
    propensities = None
    if num_train_queries is not None:
        counts = torch.from_numpy(np.ascontiguousarray(label_counts))
        propensities = label_propensities(counts, num_train_queries)
    batches = []
    for start in range(0, len(part), batch_size):
        row_ids = np.arange(start, min(start + batch_size, len(part)))
        queries = encode_fn(row_ids)  # (B, D)
        positive_ids = torch.from_numpy(padded_rows(part.positives, row_ids)).to(queries.device)
        found_ids, found_scores = index.search(queries, num_results)  # (B, R)
        scores = index.scores_of(queries, positive_ids).float().cpu()  # (B, P)
        found_ids, positive_ids = found_ids.cpu(), positive_ids.cpu()
        ranks = pair_ranks(found_ids, positive_ids)  # (B, P)
        metrics = query_metrics(found_ids, positive_ids, cutoffs=cutoffs, propensities=propensities)
        is_pair = ranks >= 0
        arrays = {
            "ranks": ranks[is_pair].int(),  # (B, P) -> (pairs of the batch,)
            "scores": scores[is_pair],
            "retrieved_ids": _first(found_ids.int(), -1),
            "retrieved_scores": _first(found_scores.float().cpu(), -torch.inf),
            **{f"metric {name}": values for name, values in metrics.values.items()},
            **{f"weight {name}": values for name, values in metrics.weights.items()},
        }
        batches.append({name: array.numpy() for name, array in arrays.items()})
        if progress is not None:
            progress(int(row_ids[-1]) + 1, len(part))
    if not batches:
        raise UserError("the part to evaluate holds no query")
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    pairs = pairs_of(part.positives)
    return _outcome(
        {
            **joined,
            "query_ids": pairs.query_ids,
            "label_ids": pairs.label_ids,
            "num_results": num_results,
            "cutoffs": np.array(cutoffs),
        }
    )


def _first(values: Tensor, absent: float) -> Tensor:
    """The first NUM_SHOWN columns, filled up where there are fewer: (B, R) -> (B, 10)."""
    shown = values[:, :NUM_SHOWN]
    return torch.nn.functional.pad(shown, (0, NUM_SHOWN - shown.shape[1]), value=absent)


# --- on disk --------------------------------------------------------------------------------------


def _arrays(outcome: Outcome) -> dict[str, Any]:
    fields = ("query_ids", "label_ids", "ranks", "scores", "retrieved_ids", "retrieved_scores")
    return {
        **{name: getattr(outcome, name) for name in fields},
        "num_results": np.array(outcome.num_results),
        "cutoffs": np.array(outcome.cutoffs),
        **{f"metric {name}": values for name, values in outcome.query_metrics.items()},
        **{f"weight {name}": values for name, values in outcome.query_weights.items()},
    }


def _outcome(arrays: Mapping[str, Any]) -> Outcome:
    """The inverse of `_arrays`."""

    def of_kind(kind: str) -> dict[str, FloatArray]:
        names = [name for name in arrays if name.startswith(kind)]
        return {name.removeprefix(kind): arrays[name].astype(np.float32) for name in names}

    return Outcome(
        query_ids=arrays["query_ids"],
        label_ids=arrays["label_ids"],
        ranks=arrays["ranks"],
        scores=arrays["scores"],
        retrieved_ids=arrays["retrieved_ids"],
        retrieved_scores=arrays["retrieved_scores"],
        query_metrics=of_kind("metric "),
        query_weights=of_kind("weight "),
        num_results=int(arrays["num_results"]),
        cutoffs=tuple(arrays["cutoffs"].tolist()),
    )


def save_outcome(outcome: Outcome, folder: Path) -> None:
    """Writes folder/outcome.npz, all of it or nothing; an older one is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, staging = tempfile.mkstemp(prefix=".outcome.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **_arrays(outcome))  # numbers only: nothing pickled
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, folder / "outcome.npz")
    except BaseException:
        os.unlink(staging)
        raise


def load_outcome(folder: Path) -> Outcome:
    """Reads what `save_outcome` wrote."""
    path = folder / "outcome.npz"
    if not path.is_file():
        raise UserError(f"{folder} holds no outcome.npz; evaluate the run first")
    try:  # reading a member to its end checks its sum; zipfile raises RuntimeError for odd flags
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            outcome = _outcome({name: file[name] for name in file.files})
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"{path} is damaged ({error}); evaluate the run again") from error
    return outcome


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


def _check_belongs(outcome: Outcome, part: Part, part_name: str) -> None:
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


class _Statistics(NamedTuple):
    """M metrics in the G groups of some columns, as a function of how much each query counts."""

    metrics: tuple[str, ...]
    columns: list[GroupColumn]
    counts: IntArray  # (G,) pairs, or queries with a positive
    values_fn: Callable[[DoubleArray], DoubleArray]  # weights (Q, B) -> (G, M, B), NaN if empty


def _pair_statistics(outcome: Outcome, columns: list[GroupColumn]) -> _Statistics:
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
    return _Statistics(metrics, columns, counts.astype(np.int64), values_fn)


def _query_statistics(outcome: Outcome, columns: list[GroupColumn]) -> _Statistics:
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
    return _Statistics(metrics, columns, counts, values_fn)


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


def _resamples(num_queries: int, num_resamples: int, seed: int) -> Iterator[DoubleArray]:
    """How often each query is drawn, Q of Q with replacement: blocks of (Q, at most 50)."""
    generator = np.random.default_rng(seed)
    for start in range(0, num_resamples, RESAMPLES_AT_ONCE):
        weights = np.empty((min(RESAMPLES_AT_ONCE, num_resamples - start), num_queries))
        for row in weights:
            drawn = generator.integers(num_queries, size=num_queries)
            row[:] = np.bincount(drawn, minlength=num_queries)
        yield np.ascontiguousarray(weights.T)


def _interval(draws: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
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
    _check_belongs(outcome, dataset.parts[part_name], part_name)
    columns = group_columns(dataset, part_name)
    kinds = [_pair_statistics(outcome, columns), _query_statistics(outcome, columns)]
    num_queries = len(outcome.retrieved_ids)
    values = [kind.values_fn(np.ones((num_queries, 1)))[..., 0] for kind in kinds]  # (G, M)
    draws = [[np.empty((*value.shape, 0))] for value in values]
    for weights in _resamples(num_queries, num_resamples, seed):
        for kind, blocks in zip(kinds, draws, strict=True):
            blocks.append(kind.values_fn(weights))  # (G, M, B)
    return [
        score
        for kind, value, blocks in zip(kinds, values, draws, strict=True)
        for score in _scores(kind, value, np.concatenate(blocks, axis=-1), min_pairs or {})
    ]


def _scores(
    kind: _Statistics, values: DoubleArray, draws: DoubleArray, min_pairs: Mapping[str, int]
) -> Iterator[Score]:
    """Rows of the table from values (G, M) and draws (G, M, B)."""
    lows, highs = _interval(draws)  # (G, M)
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
                yield _summary(summary, rows, draws[start : start + len(rows), m])
        start += len(column.group_names)


def _summary(name: str, rows: list[Score], draws: DoubleArray) -> Score:
    """Mean over the lowest groups of one column: its rows and their draws (G, B)."""
    members = _lowest(rows, {"worst": 1, "worst 3": 3, "worst tenth": None}[name])
    metric, column = rows[0].metric, rows[0].column
    if not members:
        return Score(metric, column, name, np.nan, np.nan, np.nan, 0, is_judged=False)
    low, high = _interval(draws[members].mean(axis=0))
    return Score(
        metric,
        column,
        name,
        value=float(np.mean([rows[g].value for g in members])),
        low=float(low),
        high=float(high),
        count=sum(rows[g].count for g in members),
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


def selected_value(scores: Iterable[Score], name: str) -> float:
    """The value of one row, asked for by name.

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
        _check_known(wanted, known, f"{kind} of {name!r}")
        rows = [row for row in rows if getattr(row, kind) == wanted]
    if np.isnan(rows[0].value):
        raise UserError(
            f"{name!r} has no value: the part holds no pair for it, or no group is large enough to "
            f"judge; choose another or lower the least number of pairs"
        )
    return rows[0].value


def check_selector(
    name: str,
    dataset: Dataset,
    part_name: str,
    *,
    cutoffs: Sequence[int] = CUTOFFS,
    min_pairs: Mapping[str, int] | None = None,
) -> None:
    """Refuses, before any training, a name that `selected_value` would refuse after it."""
    nothing_found = evaluate(
        lambda row_ids: torch.zeros(len(row_ids), 1),
        _EmptyIndex(),
        dataset.parts[part_name],
        dataset.label_counts(),
        num_results=max(cutoffs),
        cutoffs=cutoffs,
        num_train_queries=max(1, len(dataset.parts["train"])),
    )
    scores = score_table(nothing_found, dataset, part_name, min_pairs=min_pairs, num_resamples=0)
    selected_value(scores, name)


class _EmptyIndex:
    """An index without labels."""

    def search(self, queries: Tensor, num_results: int) -> tuple[Tensor, Tensor]:
        shape = (len(queries), num_results)
        return torch.full(shape, -1), torch.full(shape, -torch.inf)

    def scores_of(self, queries: Tensor, label_ids: Tensor) -> Tensor:
        return torch.full(label_ids.shape, -torch.inf)


def _check_known(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        few = f"known: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}"
        hint = f"did you mean {close[0]!r}?" if close else few
        raise UserError(f"unknown {what}: {name!r}; {hint}")


# --- two methods ----------------------------------------------------------------------------------


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
        _check_belongs(outcome, dataset.parts[part_name], part_name)
    cutoffs = tuple(sorted(set.intersection(*(set(outcome.cutoffs) for outcome in outcomes))))
    if not cutoffs:
        raise UserError("the runs have no cutoff in common; evaluate them again with the same ones")
    lists = {"all": GroupList("all", ("all",))}
    lists |= {name: GroupList("frequency", (name,)) for name in ("head", "torso", "tail")}
    lists |= groups or {}
    columns = _columns_of(lists.values(), group_columns(dataset, part_name))
    members = [_positions(columns, chosen) for chosen in lists.values()]
    runs = [
        _pair_statistics(dataclasses.replace(outcome, cutoffs=cutoffs), columns)
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
    for weights in _resamples(num_queries, num_resamples, seed):
        resampled = recalls(weights)  # (2, runs, lists, M, B)
        draws.append((resampled[1] - resampled[0]).mean(0))  # (lists, M, B)
    lows, highs = _interval(np.concatenate(draws, axis=-1))  # (lists, M)
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
            count=int(runs[0].counts[members[t]].sum()),
        )
        for m, metric in enumerate(runs[0].metrics)
        for t, title in enumerate(lists)
    ]


def _columns_of(lists: Iterable[GroupList], columns: list[GroupColumn]) -> list[GroupColumn]:
    """The columns that some list is of."""
    wanted = {chosen.column for chosen in lists}
    for name in sorted(wanted):
        _check_known(name, [column.name for column in columns], "column")
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
        _check_known(name, column.group_names, f"group of {column.name!r}")
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
