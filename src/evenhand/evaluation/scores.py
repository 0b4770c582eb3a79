"""The scores of one run: every metric in every group, with intervals; and choosing by one."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from evenhand.data.dataset import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.outcome import CUTOFFS, Outcome, evaluate
from evenhand.evaluation.statistics import (
    DoubleArray,
    Statistics,
    check_belongs,
    group_columns,
    interval,
    pair_statistics,
    query_statistics,
    resamples,
)

MIN_PAIRS = 30  # a group with fewer is too small to judge, unless told otherwise
SUMMARIES = ("worst", "worst 3", "worst tenth")


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
    """One row with a value, asked for by name.

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
    selected_score(scores, name)


class _EmptyIndex:
    """An index without labels."""

    def search(self, queries: Tensor, num_results: int) -> tuple[Tensor, Tensor]:
        shape = (len(queries), 1)  # as of a single label: num_results may be any number
        return torch.full(shape, -1), torch.full(shape, -torch.inf)

    def scores_of(self, queries: Tensor, label_ids: Tensor) -> Tensor:
        return torch.full(label_ids.shape, -torch.inf)


def check_known(name: str, known: Sequence[str], what: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        few = f"known: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}"
        hint = f"did you mean {close[0]!r}?" if close else few
        raise UserError(f"unknown {what}: {name!r}; {hint}")
