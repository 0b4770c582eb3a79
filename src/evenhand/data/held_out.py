"""Training queries that are held out to measure the generalisation gap, and bins to measure it in.

The validation part stays clean for early stopping and for choices: the gap is measured on a few
training queries, which are scored with the rest of their batch and teach nothing. `risk.EvenMining`
uses both.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, count_ids
from evenhand.data.pairs import pairs_of


class GapBins(NamedTuple):
    """The training pairs in bins that have a gap each."""

    pair_bins: IntArray  # (N_pairs,) twice the bin, plus 1 where the pair is held out
    shape: NDArray[np.float64]  # (G,) how the gaps of the bins compare before any is measured


def hold_out_queries(
    positives: Rows, *, num_labels: int, share: float, seed: int
) -> NDArray[np.bool_]:
    """Which queries are held out, at random: (Q,). Every label keeps a pair to be learnt from.

    So a query is never held out if it has the only pair of a label, and the gap of labels with one
    pair is measured on those that had two.
    """
    is_chosen = np.random.default_rng(seed).random(len(positives)) < share  # (Q,)
    pairs = pairs_of(positives)
    is_held_out = is_chosen[pairs.query_ids]  # (N_pairs,)
    num_left = count_ids(pairs.label_ids[~is_held_out], num_labels)  # (L,)
    is_chosen[pairs.query_ids[is_held_out & (num_left[pairs.label_ids] == 0)]] = False
    return is_chosen


def frequency_bins(positives: Rows, is_held_out: NDArray[np.bool_], *, num_labels: int) -> GapBins:
    """Bins of equally rare labels: those with 1, 2, 3-4, 5-8, ... pairs that are not held out.

    Args:
        is_held_out: (Q,) of the queries.

    Example:
        >>> positives = Rows(np.array([0, 1, 2, 3, 4]), np.array([7, 7, 7, 2]))
        >>> bins = frequency_bins(positives, np.array([True, False, False, False]), num_labels=8)
        >>> bins.pair_bins.tolist(), bins.shape.round(3).tolist()
        ([3, 2, 2, 0], [1.0, 0.707])
    """
    pairs = pairs_of(positives)
    is_out = is_held_out[pairs.query_ids]  # (N_pairs,)
    num_pairs = count_ids(pairs.label_ids[~is_out], num_labels)[pairs.label_ids]  # (N_pairs,)
    bins = np.ceil(np.log2(num_pairs)).astype(np.int64)
    counts = np.bincount(bins)
    shape = np.bincount(bins, weights=1 / np.sqrt(num_pairs)) / np.maximum(counts, 1)  # (G,)
    return GapBins(2 * bins + is_out, shape)
