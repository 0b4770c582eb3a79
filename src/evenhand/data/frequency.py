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
    return _frequency_groups(label_counts, np.ones_like(label_counts))


def frequency_groups_by_pairs(label_counts: IntArray) -> Groups:
    """Head, torso and tail by quantiles over training pairs: (L,) pairs of each -> (L,) groups.

    Example:
        >>> groups = frequency_groups_by_pairs(np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]))
        >>> [groups.names[group_id] for group_id in groups.ids[:4]]
        ['head', 'torso', 'torso', 'tail']
    """
    return _frequency_groups(label_counts, label_counts)


def _frequency_groups(label_counts: IntArray, weights: IntArray) -> Groups:
    if label_counts.min(initial=0) < 0:
        raise ValueError(f"label_counts must be at least 0, got {label_counts.min()}")
    head_above = _quantile(label_counts, weights, HEAD_PER_CENT)
    torso_above = _quantile(label_counts, weights, TORSO_PER_CENT)
    is_torso, is_head = label_counts > torso_above, label_counts > head_above  # (L,)
    ids = 2 - is_torso.astype(np.int32) - is_head.astype(np.int32)
    return Groups(ids, NAMES)


def _quantile(counts: IntArray, weights: IntArray, per_cent: int) -> int:
    """The smallest count c such that counts <= c have at least that share of the weight."""
    if not len(counts):
        return 0
    order = np.argsort(counts)
    weight_up_to = np.cumsum(weights[order], dtype=np.int64)  # (L,)
    needed = -(-weight_up_to[-1] * per_cent // 100)  # rounded up; integers, so no rounding error
    return int(counts[order][np.searchsorted(weight_up_to, needed)])
