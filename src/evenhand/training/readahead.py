"""Asks the disk for the next pool of blocks while this one is being read (see `order`)."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import Part, Rows
from evenhand.training.order import Order, pool_ranges

PAGE = mmap.ALLOCATIONGRANULARITY


class ReadAhead:
    """What was asked for last, for data that is memory-mapped and read in blocks."""

    def __init__(self, part: Part, order: Order) -> None:
        self.part = part
        self.order = order
        self.asked: tuple[int, int] | None = None  # the epoch's key and the pool

    def before(self, place: int, key: Tensor) -> None:
        """Called before a place of an epoch is read."""
        if not self.order.block_pairs:
            return
        pool = self.order.pool_of(place)
        if self.asked == (int(key), pool):
            return
        is_first = self.asked is None or self.asked[0] != int(key)
        self.asked = (int(key), pool)
        for wanted in (pool, pool + 1) if is_first else (pool + 1,):
            if wanted < self.order.num_pools:
                for first, last in pool_ranges(wanted, key, self.order):
                    self._ask(first, last)

    def _ask(self, first: int, last: int) -> None:
        """Pages of the pairs first .. last - 1 and of their queries."""
        positives, features = self.part.positives, self.part.features
        first_row, last_row = np.searchsorted(positives.offsets, [first, last - 1], side="right")
        first_row, last_row = int(first_row) - 1, int(last_row)
        will_need(positives.ids, first, last)
        will_need(positives.offsets, first_row, last_row + 1)
        if not isinstance(features, Rows):
            will_need(features, first_row, last_row)
            return
        will_need(features.offsets, first_row, last_row + 1)
        start, end = int(features.offsets[first_row]), int(features.offsets[last_row])
        will_need(features.ids, start, end)
        if features.values is not None:
            will_need(features.values, start, end)


def will_need(array: NDArray[Any], first: int, last: int) -> None:
    """Tells the system that these entries of a memory-mapped array are read soon."""
    mapped = getattr(array, "_mmap", None)
    if mapped is None or not hasattr(mapped, "madvise") or last <= first:
        return
    row_bytes = array.itemsize * int(np.prod(array.shape[1:]))
    offset = array.offset % PAGE  # type: ignore[attr-defined]  # of the array in what is mapped
    start = (offset + first * row_bytes) // PAGE * PAGE
    end = min(len(mapped), offset + last * row_bytes)
    if end > start:
        mapped.madvise(mmap.MADV_WILLNEED, start, end - start)
