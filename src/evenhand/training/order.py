"""The order in which an epoch goes through the pairs, as a function of a place in it.

Data in memory is read in any order: an epoch is a keyed permutation of all pairs. On a disk that
would be a seek for every row, so data that is stored in a random order (see `data.streaming`) is
read in blocks of consecutive pairs, a few megabytes each: the blocks in a random order, and so many
of them at a time, a pool, with their pairs mixed. Where the first block begins is drawn as well, so
that the blocks of two epochs are not the same, and every pair is as likely as any other to be at
any place.

A query of several labels may also stay whole: then the queries are permuted, and the pairs of each
follow one another. A batch's end may still come between them.

All of it follows from the epoch's key and the place: any rank can compute its share of any batch,
and training resumes at any place.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.permutation import keys_for, permute

POOL_BLOCKS = 64


class Order(NamedTuple):
    """How pairs are read; `block_pairs` = 0: in any order."""

    num_pairs: int
    block_pairs: int = 0
    pool_blocks: int = POOL_BLOCKS

    @property
    def num_blocks(self) -> int:
        """Full blocks; the pairs that are left are the last to be read."""
        return self.num_pairs // self.block_pairs

    @property
    def num_pools(self) -> int:
        """The last has the blocks that are left as well: up to twice as many as the others."""
        return max(1, self.num_blocks // self.pool_blocks)

    def pool_start(self, pool: int) -> int:
        """The place at which a pool begins; for one more than the last, the end."""
        is_end = pool >= self.num_pools
        return self.num_pairs if is_end else pool * self.pool_blocks * self.block_pairs

    def pool_of(self, place: int) -> int:
        return min(place // (self.pool_blocks * self.block_pairs), self.num_pools - 1)


def pairs_at(first: int, last: int, key: Tensor, order: Order) -> Tensor:
    """The pairs at places first .. last - 1 of the epoch with this key (1, 1): (last - first,)."""
    if not order.block_pairs:
        return permute(torch.arange(first, last).unsqueeze(0), key, order.num_pairs)[0]
    found = [torch.empty(0, dtype=torch.int64)]
    while first < last:
        pool = order.pool_of(first)
        start, end = order.pool_start(pool), order.pool_start(pool + 1)
        places = torch.arange(first - start, min(last, end) - start).unsqueeze(0)
        numbers = permute(places, _key(key, 2 + pool), end - start)[0]
        slots = (start + numbers) // order.block_pairs
        starts = _block_starts(slots, key, order)
        found.append((starts + (start + numbers) % order.block_pairs) % order.num_pairs)
        first = min(last, end)
    return torch.cat(found)


class WholeQueries:
    """The pairs query by query, the queries in any order; 16 bytes a query for one epoch."""

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self.offsets = offsets
        self.epoch: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def pairs_at(self, first: int, last: int, key: Tensor) -> Tensor:
        """`pairs_at` of this module, query by query."""
        if first >= last:
            return torch.empty(0, dtype=torch.int64)
        queries, ends = self._order_of(key)
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        own, own_ends = queries[low : high + 1], ends[low : high + 1]
        starts = self.offsets[own]
        lengths = self.offsets[own + 1] - starts
        before = own_ends - lengths  # places at which the queries begin
        pairs = np.repeat(starts - before, lengths) + np.arange(before[0], own_ends[-1])
        return torch.from_numpy(pairs[first - before[0] : last - before[0]])

    def _order_of(self, key: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The queries as the epoch has them, and where the pairs of each end: (N,), (N,)."""
        if self.epoch is None or self.epoch[0] != int(key):
            places = torch.arange(len(self.offsets) - 1).unsqueeze(0)
            queries = permute(places, key, places.numel())[0].numpy()
            self.epoch = int(key), queries, np.cumsum(np.diff(self.offsets)[queries])
        return self.epoch[1:]


def _block_starts(slots: Tensor, key: Tensor, order: Order) -> Tensor:
    """The first pair of the blocks that are read at these turns: (n,) -> (n,).

    A block that goes beyond the last pair continues at the first.
    """
    shift = int(_key(key, 0)) % order.num_pairs
    blocks = slots
    if order.num_blocks:
        is_full = slots < order.num_blocks
        turns = torch.where(is_full, slots, 0).unsqueeze(0)
        blocks = torch.where(is_full, permute(turns, _key(key, 1), order.num_blocks)[0], slots)
    return (blocks * order.block_pairs + shift) % order.num_pairs


def _key(key: Tensor, number: int) -> Tensor:
    """One of the epoch's keys (1, 1): 0 where blocks begin, 1 their order, then the pools'."""
    return torch.tensor([[keys_for(int(key), number) & (2**63 - 1)]])
