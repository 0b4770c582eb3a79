"""What an approximate index costs each subpopulation, against exact search.

An index misses labels, and not everybody's alike: a graph is built to reach what is dense, and the
queries of a rare script lie where it is not. So its effort is chosen by the group that fares worst,
and `check` says of which groups the index misses more than of the rest.

The recall of a query is the share of its first labels by exact search that the index finds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from evenhand.data import IntArray

CUTOFF = 10  # first labels by exact search that an index is held to
FEWEST_QUERIES = 100  # of a group that is looked at
ERROR_RATE = 0.05  # of the warnings: that one of them is by chance, where all groups are alike
LEAST_GAP = 0.01  # of recall, below which no warning is worth it

Floats = NDArray[np.float64]


class QueryGroup(NamedTuple):
    """Positions in a list of queries: a random sample of a group's, and of those not in it."""

    column: str
    name: str
    query_ids: IntArray  # (n,)
    rest_ids: IntArray  # (m,)


class GroupRecall(NamedTuple):
    column: str
    group: str
    num_queries: int
    recall: float
    rest: float  # the recall of the queries that are not in it; NaN: there are too few
    is_failed: bool  # below the rest, beyond chance

    @property
    def title(self) -> str:
        return "all queries" if self.column == "all" else f"{self.column} {self.group}"


def recall_of_queries(found_ids: Tensor, exact_ids: Tensor) -> Floats:
    """The share of exact search's labels (Q, R) that are found as well: (Q,)."""
    found = (exact_ids.unsqueeze(2) == found_ids.unsqueeze(1)).any(dim=2)  # (Q, R)
    return found.double().mean(dim=1).cpu().numpy()


def recall_by_group(recalls: Floats, groups: Sequence[QueryGroup]) -> list[GroupRecall]:
    """Recall (Q,) in every group, and whether it is below that of the queries not in it.

    It is if the difference is LEAST_GAP or more and a one-sided z-test of the two means rejects
    that they are equal, at ERROR_RATE divided by the number of groups (Bonferroni).
    """
    critical = norm.isf(ERROR_RATE / max(1, len(groups)))
    rows = []
    for group in groups:
        own, others = recalls[group.query_ids], recalls[group.rest_ids]
        rest, is_failed = np.nan, False
        if len(others) >= FEWEST_QUERIES:
            rest = float(others.mean())
            error = np.sqrt(own.var(ddof=1) / len(own) + others.var(ddof=1) / len(others))
            gap = rest - own.mean()
            is_failed = bool(gap >= LEAST_GAP and gap > critical * error)
        rows.append(
            GroupRecall(group.column, group.name, len(own), float(own.mean()), rest, is_failed)
        )
    return rows


def worst_recall(rows: Sequence[GroupRecall]) -> GroupRecall:
    """The group that fares worst."""
    return min(rows, key=lambda row: row.recall)


def choose_effort(
    recalls_fn: Callable[[int], Floats],
    groups: Sequence[QueryGroup],
    *,
    first: int,
    most: int,
    target: float,
) -> tuple[int, list[GroupRecall]]:
    """The least effort with which every group's recall is at least the target, and the recalls.

    Efforts grow by a half and a third in turns: 16, 24, 32, 48, ... Where even `most` falls short,
    that is returned: whoever called sees it in the recalls.

    Args:
        recalls_fn: effort -> recall of every query (Q,).
    """
    effort = min(first, most)
    while True:
        rows = recall_by_group(recalls_fn(effort), groups)
        if effort >= most or worst_recall(rows).recall >= target:
            return effort, rows
        is_power = effort & (effort - 1) == 0
        effort = min(most, max(effort + 1, effort * 3 // 2 if is_power else effort * 4 // 3))
