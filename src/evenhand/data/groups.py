"""Subpopulations of queries, pairs and labels: columns of groups, and how they are made."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from evenhand.data.csr import IntArray, Rows, pairs_of, rows_from_lists, take_rows

# Of a list of queries: the value each has in every group column. None: belongs to no group.
GroupValues = Mapping[str, Sequence[str | None]]

FREQUENCY_NAMES = ("head", "torso", "tail")
HEAD_PER_CENT, TORSO_PER_CENT = 66, 33


class Groups(NamedTuple):
    """One named column of subpopulations: which group each query, or each label, belongs to.

    Groups belong to pairs: where those of one query differ, or one is in several groups, `ids` are
    of the pairs (in the order of `pairs_of`) and name sets of groups. Labels may have sets too.

    Example:
        >>> sets = Rows(np.array([0, 1, 3]), np.array([1, 0, 1]))  # US alone; AU and US
        >>> three_pairs = Groups(np.array([0, 1, -1]), ("AU", "US"), sets)
        >>> [ids.tolist() for ids in memberships(three_pairs)]  # of pairs, and of groups
        [[0, 1, 1], [1, 0, 1]]
    """

    ids: IntArray  # (N,) int32, -1: belongs to none
    names: tuple[str, ...]
    sets: Rows | None = None  # row i: the groups of set i, in order; None: set i is group i


def memberships(groups: Groups) -> tuple[IntArray, IntArray]:
    """Who belongs where: positions in `groups.ids` and group ids, (M,) and (M,)."""
    positions = np.flatnonzero(groups.ids >= 0)
    if groups.sets is None:
        return positions, groups.ids[positions]
    rows = take_rows(groups.sets, groups.ids[positions])
    return np.repeat(positions, rows.lengths()), rows.ids


def make_groups(values: Iterable[str | None], names: Iterable[str] | None = None) -> Groups:
    """A group column from the value of each query or label: (N,). None belongs to no group.

    `names` are those of all parts, so that an id means the same group in each of them.
    """
    values = list(values)
    if names is None:
        names = {value for value in values if value is not None}
    names = sorted(names)
    id_of = {name: index for index, name in enumerate(names)} | {None: -1}
    return Groups(np.array([id_of[value] for value in values], dtype=np.int32), tuple(names))


def make_shared_groups(values: Mapping[str, GroupValues]) -> dict[str, dict[str, Groups]]:
    """Part -> column -> groups, where a column has the same names in every part."""
    names: dict[str, set[str]] = {}
    for columns in values.values():
        for column, cells in columns.items():
            names.setdefault(column, set()).update(cell for cell in cells if cell is not None)
    return {
        part: {column: make_groups(cells, names[column]) for column, cells in columns.items()}
        for part, columns in values.items()
    }


def group_pairs(
    pair_ids: IntArray, group_ids: IntArray, positives: Rows, names: tuple[str, ...]
) -> Groups:
    """A group column from rows that say, each, that a pair is in a group; -1: in none.

    One id a query suffices where all its pairs are in one and the same group, or in none.
    """
    query_ids = pairs_of(positives).query_ids
    is_member = group_ids >= 0
    base = max(1, len(names))
    members = np.unique(pair_ids[is_member] * np.int64(base) + group_ids[is_member])
    of_pair, of_group = members // base, (members % base).astype(np.int32)
    counts = np.bincount(of_pair, minlength=len(query_ids))  # (N_pairs,)
    starts = np.cumsum(counts) - counts
    first_ids = np.full(len(query_ids), -1, dtype=np.int32)
    first_ids[counts > 0] = of_group[starts[counts > 0]]
    ids = np.full(len(positives), -1, dtype=np.int32)  # (N,)
    ids[query_ids] = first_ids
    if counts.max(initial=0) <= 1 and (ids[query_ids] == first_ids).all():
        return Groups(ids, names)
    several = np.flatnonzero(counts > 1)
    rows = [tuple(of_group[starts[p] : starts[p] + counts[p]].tolist()) for p in several]
    alone = np.unique(first_ids[counts == 1])
    sets = sorted({*rows, *((group,) for group in alone.tolist())})
    set_ids = {row: set_id for set_id, row in enumerate(sets)}
    of_alone = np.array([set_ids[group,] for group in alone.tolist()], dtype=np.int32)
    pair_sets = np.full(len(query_ids), -1, dtype=np.int32)
    pair_sets[counts == 1] = of_alone[np.searchsorted(alone, first_ids[counts == 1])]
    pair_sets[several] = [set_ids[row] for row in rows]
    return Groups(pair_sets, names, rows_from_lists(sets))


# --- head, torso and tail -------------------------------------------------------------------------
# With two thresholds q > q', a label is *head* if its count is above q, *torso* if it is above q'
# and not above q, and *tail* otherwise. q and q' are the 66 % and 33 % quantiles of the label
# frequencies, and the per cent are
#
# - over labels, the paper's text. On skewed data nearly all pairs are then head;
# - over training pairs, a label counting as often as it occurs. Each group then holds about a third
#   of the pairs, which is what the paper's Table 3 looks like.
#
# A quantile is an observed count: the smallest one such that labels with at most that many pairs
# make up the given share. Labels never seen in training count as labels, and are always tail.
# "Above" is strict: a label with more than a third of all pairs can leave its group empty.


def frequency_groups(label_counts: IntArray, *, over: Literal["labels", "pairs"]) -> Groups:
    """Head, torso and tail by quantiles over labels or over pairs: (L,) training pairs -> (L,).

    Example:
        >>> groups = frequency_groups(np.array([5, 1, 9]), over="labels")
        >>> [groups.names[group_id] for group_id in groups.ids]
        ['torso', 'tail', 'head']
    """
    if label_counts.min(initial=0) < 0:
        raise ValueError(f"label_counts must be at least 0, got {label_counts.min()}")
    # What is sorted are the labels that have pairs: of many millions they are few.
    counts, weights = np.unique(label_counts[label_counts > 0], return_counts=True)
    num_unseen = len(label_counts) - int(weights.sum())
    counts, weights = np.append(0, counts), np.append(num_unseen, weights)
    weight_up_to = np.cumsum(counts * weights if over == "pairs" else weights)
    group_ids = np.full(len(label_counts), 2, dtype=np.int32)
    for per_cent in (TORSO_PER_CENT, HEAD_PER_CENT):
        needed = -(-weight_up_to[-1] * per_cent // 100)  # rounded up; integers: no rounding error
        group_ids -= label_counts > counts[np.searchsorted(weight_up_to, needed)]
    return Groups(group_ids, FREQUENCY_NAMES)
