"""Head, torso and tail: groups of labels by how often they occur in training.

With two thresholds q > q', a label is *head* if its count is above q, *torso* if it is above q'
and not above q, and *tail* otherwise. Both functions take q and q' as the 66 % and 33 % quantiles
of the label frequencies; they differ in what the per cent are of:

- over labels, the paper's text. On skewed data nearly all pairs are then head;
- over training pairs, a label counting as often as it occurs. Each group then holds about a third
  of the pairs, which is what the paper's Table 3 looks like.

A quantile is an observed count: the smallest one such that labels with at most that many pairs
make up the given share. Labels never seen in training count as labels, and are always tail.
"Above" is strict: a label with more than a third of all pairs can leave its group empty.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import Groups

IntArray = NDArray[np.integer[Any]]

NAMES = ("head", "torso", "tail")
HEAD_PER_CENT, TORSO_PER_CENT = 66, 33


def frequency_groups_by_labels(label_counts: IntArray) -> Groups:
    """Head, torso and tail by quantiles over labels: (L,) training pairs of each -> (L,) groups.

    Example:
        >>> groups = frequency_groups_by_labels(np.array([5, 1, 9]))
        >>> [groups.names[group_id] for group_id in groups.ids]
        ['torso', 'tail', 'head']
    """
    values, sizes = _seen(label_counts)
    return _frequency_groups(label_counts, values, sizes)


def frequency_groups_by_pairs(label_counts: IntArray) -> Groups:
    """Head, torso and tail by quantiles over training pairs: (L,) pairs of each -> (L,) groups.

    Example:
        >>> groups = frequency_groups_by_pairs(np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]))
        >>> [groups.names[group_id] for group_id in groups.ids[:4]]
        ['head', 'torso', 'torso', 'tail']
    """
    values, sizes = _seen(label_counts)
    return _frequency_groups(label_counts, values, values * sizes)


def _seen(label_counts: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The counts that occur, ascending, and how many labels have each.

    What is sorted are the labels that have pairs: of many millions they are few.
    """
    if label_counts.min(initial=0) < 0:
        raise ValueError(f"label_counts must be at least 0, got {label_counts.min()}")
    values, sizes = np.unique(label_counts[label_counts > 0], return_counts=True)
    num_unseen = len(label_counts) - int(sizes.sum())
    if num_unseen:
        values, sizes = np.append(0, values), np.append(num_unseen, sizes)
    return values.astype(np.int64), sizes.astype(np.int64)


def _frequency_groups(label_counts: IntArray, values: IntArray, weights: IntArray) -> Groups:
    head_above = _quantile(values, weights, HEAD_PER_CENT)
    torso_above = _quantile(values, weights, TORSO_PER_CENT)
    is_torso, is_head = label_counts > torso_above, label_counts > head_above  # (L,)
    ids = 2 - is_torso.astype(np.int32) - is_head.astype(np.int32)
    return Groups(ids, NAMES)


def _quantile(values: IntArray, weights: IntArray, per_cent: int) -> int:
    """The smallest of ascending counts such that those up to it have that share of the weight."""
    if not len(values):
        return 0
    weight_up_to = np.cumsum(weights, dtype=np.int64)
    needed = -(-weight_up_to[-1] * per_cent // 100)  # rounded up; integers, so no rounding error
    return int(values[np.searchsorted(weight_up_to, needed)])
