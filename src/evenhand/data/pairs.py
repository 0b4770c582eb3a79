"""Multilabel data as multiclass: one training example for each (query, positive) pair."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, iterate_pieces
from evenhand.kernels.jit import jit

MOST_ENTRIES = 2**22  # of the index: 16 MB
PIECE = 2**17  # entries that are found at once


class Pairs(NamedTuple):
    """Examples: a query and one of its positives each."""

    query_ids: IntArray  # (N_pairs,) int64
    label_ids: IntArray  # (N_pairs,) int64


def pairs_of(positives: Rows) -> Pairs:
    """Every (query, positive) pair, in the order of the queries."""
    query_ids = np.repeat(np.arange(len(positives)), positives.lengths())
    return Pairs(query_ids, positives.ids.astype(np.int64))


class PairIndex:
    """Finds pairs by their number in `pairs_of`, without a number in memory for every pair.

    The pairs of query q are offsets[q] .. offsets[q + 1] - 1, so the query of a pair is found by
    a search in the offsets, which may stay on disk. An index of bounded size holds the query of
    every pair if there are few of them, else of every 2nd, 4th, ...: a search is between two of
    its entries.
    """

    def __init__(self, positives: Rows, *, most_entries: int = MOST_ENTRIES) -> None:
        self.positives = positives
        self.num_pairs = len(positives.ids)
        self.offsets: NDArray[np.int64] = np.asarray(positives.offsets, dtype=np.int64)
        self.shift = 0  # an entry every 2 ** shift pairs
        while self.num_pairs >> self.shift > most_entries:
            self.shift += 1
        num_entries = -(-self.num_pairs // (1 << self.shift))
        dtype = np.int32 if len(positives) < 2**31 else np.int64
        self.first_rows: NDArray[Any] = np.empty(num_entries + 1, dtype=dtype)
        for start, piece in iterate_pieces(self.first_rows[:-1], PIECE):
            marks = np.arange(start, start + len(piece)) << self.shift
            piece[:] = np.searchsorted(self.offsets, marks, side="right") - 1
        self.first_rows[-1] = max(0, len(positives) - 1)

    def __len__(self) -> int:
        return self.num_pairs

    def pairs_at(self, pair_ids: NDArray[np.int64]) -> Pairs:
        """The chosen pairs, as they are in `pairs_of`: (B,) -> (B,) and (B,)."""
        label_ids = np.asarray(self.positives.ids)[pair_ids].astype(np.int64)
        if self.shift == 0:
            return Pairs(self.first_rows[pair_ids].astype(np.int64), label_ids)
        query_ids = np.empty(len(pair_ids), dtype=np.int64)
        _find_rows(self.offsets, self.first_rows, self.shift, pair_ids, query_ids)
        return Pairs(query_ids, label_ids)


@jit
def _find_rows(
    offsets: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    shift: int,
    pair_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """The last row that begins at or before a pair: between those of two entries of the index."""
    for place in range(len(pair_ids)):
        pair = pair_ids[place]
        low, high = first_rows[pair >> shift], first_rows[(pair >> shift) + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if offsets[middle] <= pair:
                low = middle
            else:
                high = middle - 1
        rows[place] = low
