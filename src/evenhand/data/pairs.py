"""Which query a pair belongs to, without a number in memory for every pair.

Pairs are counted through the queries: those of query q are offsets[q] .. offsets[q + 1] - 1. So the
query of a pair is found by a search in the offsets, which may stay on disk. An index holds the
query of every 16th pair, so that a search has a few steps within a cache line or two.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import Pairs, Rows
from evenhand.kernels.compiled import compiled

SHIFT = 4  # an entry of the index every 2 ** SHIFT pairs: a quarter of a byte for each pair


class PairIndex:
    """The pairs of some rows of positives, found by their number."""

    def __init__(self, positives: Rows) -> None:
        self.positives = positives
        self.num_pairs = len(positives.ids)
        self.offsets: NDArray[np.int64] = np.asarray(positives.offsets, dtype=np.int64)
        marks = np.arange(0, self.num_pairs, 1 << SHIFT)
        dtype = np.int32 if len(positives) < 2**31 else np.int64
        self.first_rows: NDArray[Any] = np.empty(len(marks) + 1, dtype=dtype)
        self.first_rows[:-1] = np.searchsorted(self.offsets, marks, side="right") - 1
        self.first_rows[-1] = max(0, len(positives) - 1)

    def __len__(self) -> int:
        return self.num_pairs

    def pairs_at(self, pair_ids: NDArray[np.int64]) -> Pairs:
        """The chosen pairs, as they are in `pairs_of`: (B,) -> (B,) and (B,)."""
        label_ids = np.asarray(self.positives.ids)[pair_ids].astype(np.int64)
        query_ids = np.empty(len(pair_ids), dtype=np.int64)
        _find_rows(self.offsets, self.first_rows, pair_ids, query_ids)
        return Pairs(query_ids, label_ids)


@compiled
def _find_rows(
    offsets: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    pair_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """The last row that begins at or before a pair: between those of two entries of the index."""
    for place in range(len(pair_ids)):
        pair = pair_ids[place]
        low, high = first_rows[pair >> SHIFT], first_rows[(pair >> SHIFT) + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if offsets[middle] <= pair:
                low = middle
            else:
                high = middle - 1
        rows[place] = low
