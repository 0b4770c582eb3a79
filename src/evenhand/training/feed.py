"""Batches of (query, positive) pairs, reshuffled every epoch; the position can be checkpointed.

The next few batches are made by a thread while a step runs, so that a step finds its own ready.
What a batch holds follows from its place alone: an epoch has a key, the key an order of all pairs,
and a batch is the next few of them. So a batch made ahead is the one that would be made on demand,
and it can be thrown away; any rank can compute its share of any batch; training resumes anywhere.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import IntArray, Part, pad_rows
from evenhand.data.csr import PairIndex
from evenhand.kernels.random import keys_for, permute
from evenhand.models import Bags, Features, features_of

NUM_AHEAD = 3  # batches that are ready or in the making while a step runs
CPU = torch.device("cpu")


class Batch(NamedTuple):
    features: Features  # of B examples, or of U queries
    label_ids: Tensor  # (B,) the positive each example was drawn with
    positive_ids: Tensor  # (B or U, P) labels that may not be negatives, padded with -1
    group_ids: Tensor | None = None  # (B,) of groups or sets, for risks of known memberships alone
    query_rows: Tensor | None = None  # (B,) ascending: each example's of the U queries; None: own


T = TypeVar("T", Batch, Bags)


class FeedPlace(NamedTuple):
    """Between two batches."""

    epoch_state: Tensor  # of the generator, before it drew the key
    key: Tensor  # (1, 1) of the epoch's order
    position: int  # pairs of the epoch that were handed out


class PairFeed:
    """Draws batches without replacement; the last partial batch of an epoch is dropped."""

    def __init__(
        self,
        part: Part,
        *,
        batch_size: int,
        masks_all_positives: bool,
        generator: torch.Generator,
        device: torch.device,
        pair_groups: IntArray | None = None,
        share: tuple[int, int] = (0, 1),
        has_whole_queries: bool = False,
    ) -> None:
        """
        Args:
            batch_size: B, of all ranks together.
            generator: the feed's own; it runs ahead of the batches that were handed out.
            pair_groups: (N_pairs,) from 0, of groups or of sets of them, for the risks of known
                memberships.
            share: (rank, number of ranks): of every batch, only the examples of that rank.
            has_whole_queries: the pairs of a query follow one another, and its features and
                positives are in a batch once.
        """
        rank, num_ranks = share
        if not 0 <= rank < num_ranks:
            raise ValueError(f"share must be (rank, number of ranks), got {share}")
        self.part = part
        self.share = share
        self.pairs = PairIndex(part.positives)
        self.num_pairs = len(self.pairs)
        if not 1 <= batch_size <= self.num_pairs:
            raise ValueError(
                f"batch_size must be between 1 and {self.num_pairs} "
                f"(the number of training pairs), got {batch_size}"
            )
        if has_whole_queries and (part.block_pairs or not masks_all_positives):
            raise ValueError("whole queries are for data in memory, and mask all their positives")
        self.has_whole_queries = has_whole_queries
        self.order = (
            QueryOrder(self.pairs.offsets)
            if has_whole_queries
            else PairOrder(self.num_pairs, part.block_pairs)
        )
        self.batch_size = batch_size
        self.masks_all_positives = masks_all_positives
        self.generator = generator
        self.device = device
        self.pair_groups = None if pair_groups is None else pair_groups.astype(np.int64)
        # Its thread starts with the first batch, and ends when the feed is no longer held.
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evenhand feed")
        self.ahead: deque[tuple[FeedPlace, Future[Batch]]] = (
            deque()
        )  # each after the place behind it
        self.place = _new_epoch(self.generator)

    def next_batch(self) -> Batch:
        while len(self.ahead) <= NUM_AHEAD:
            place = self.ahead[-1][0] if self.ahead else self.place
            if place.position + self.batch_size > self.num_pairs:
                place = _new_epoch(self.generator)
            behind = place._replace(position=place.position + self.batch_size)
            self.ahead.append((behind, self.executor.submit(self._batch_at, place)))
        place, batch = self.ahead[0]
        ready = batch.result()  # an error of the thread is raised here
        self.ahead.popleft()
        self.place = place
        return map_tensors(ready, lambda tensor: tensor.to(self.device, non_blocking=True))

    def queries(self, num_queries: int) -> Features:
        """The features of some queries, spread over the training part: always the same."""
        count = min(num_queries, len(self.part))
        return features_of(
            self.part, np.arange(count) * len(self.part) // count, device=self.device
        )

    def state(self) -> dict[str, Tensor]:
        """Where the batches that were handed out end."""
        position = torch.tensor(self.place.position)
        return {"epoch_state": self.place.epoch_state, "position": position}

    def load(self, state: dict[str, Tensor]) -> None:
        for _, batch in self.ahead:
            batch.cancel()
        self.ahead.clear()
        self.generator.set_state(state["epoch_state"])
        self.place = _new_epoch(self.generator)._replace(position=int(state["position"]))

    def places_ahead(self, count: int) -> list[FeedPlace]:
        """The place behind each of the next batches, for those who make them elsewhere."""
        generator = torch.Generator()
        generator.set_state(self.place.epoch_state)
        place = _new_epoch(generator)._replace(position=self.place.position)
        places = []
        for _ in range(count):
            if place.position + self.batch_size > self.num_pairs:
                place = _new_epoch(generator)
            place = place._replace(position=place.position + self.batch_size)
            places.append(place)
        return places

    def close(self) -> None:
        """Ends the thread now; there are no batches after this."""
        self.executor.shutdown(cancel_futures=True)
        self.ahead.clear()

    def _batch_at(self, place: FeedPlace) -> Batch:
        """The batch of a place, in memory from which a GPU can copy while it computes.

        Of W ranks, rank r has the examples [r * B // W, (r + 1) * B // W) of it.
        """
        rank, num_ranks = self.share
        first, last = (place.position + self.batch_size * r // num_ranks for r in (rank, rank + 1))
        pair_ids = self.order.pairs_at(first, last, place.key).numpy()  # (B,)
        query_ids, label_ids = self.pairs.pairs_at(pair_ids)
        query_rows, positives = None, label_ids[:, None]  # (B, 1), the paper's mask
        if self.has_whole_queries:
            is_new = np.diff(query_ids, prepend=-1) != 0  # (B,)
            query_rows, query_ids = torch.from_numpy(np.cumsum(is_new) - 1), query_ids[is_new]
            positives = pad_rows(self.part.positives, query_ids)  # (U, P)
        elif self.masks_all_positives:
            # The drawn one first, as in-batch sampling needs.
            positives = pad_rows(self.part.positives, query_ids)  # (B, P)
            is_drawn = positives == label_ids[:, None]
            positives = np.where(is_drawn, positives[:, :1], positives)
            positives[:, 0] = label_ids
        groups = None if self.pair_groups is None else self.pair_groups[pair_ids]
        batch = Batch(
            features=features_of(self.part, query_ids, device=CPU),
            label_ids=torch.from_numpy(label_ids),
            positive_ids=torch.from_numpy(positives),
            group_ids=None if groups is None else torch.from_numpy(groups),
            query_rows=query_rows,
        )
        return map_tensors(batch, Tensor.pin_memory) if self.device.type == "cuda" else batch


def _new_epoch(generator: torch.Generator) -> FeedPlace:
    state = generator.get_state()
    key = torch.randint(2**63 - 1, (1, 1), generator=generator)
    return FeedPlace(state, key, position=0)


def map_tensors(tensors: T, function: Callable[[Tensor], Tensor]) -> T:
    """Applies a function to every tensor of a batch, or of the bags in it."""
    fields: dict[str, Any] = {}
    for name, field in tensors._asdict().items():
        if isinstance(field, Tensor):
            fields[name] = function(field)
        elif isinstance(field, Bags):
            fields[name] = map_tensors(field, function)
    return tensors._replace(**fields)


# --- the order of an epoch ------------------------------------------------------------------------

POOL_BLOCKS = 64


class PairOrder(NamedTuple):
    """The pairs in a random order, or in blocks.

    Data in memory is read in any order: an epoch is a keyed permutation of all pairs. On a disk
    that would be a seek for every row, so data that is stored in a random order (`data.stream`)
    is read in blocks of consecutive pairs, a few megabytes each: the blocks in a random order, and
    so many of them at a time, a pool, with their pairs mixed. Where the first block begins is drawn
    as well, so that two epochs have different blocks, and every pair is as likely as any other to
    be at any place.
    """

    num_pairs: int
    block_pairs: int = 0  # 0: in any order
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

    def pairs_at(self, first: int, last: int, key: Tensor) -> Tensor:
        """(last - first,) the pairs at places first .. last - 1 of the epoch with this key (1, 1).

        The epoch's key gives others: 0 where blocks begin, 1 their order, then one for each pool.
        """
        if not self.block_pairs:
            return permute(torch.arange(first, last).unsqueeze(0), key, self.num_pairs)[0]
        found = [torch.empty(0, dtype=torch.int64)]
        while first < last:
            pool = min(first // (self.pool_blocks * self.block_pairs), self.num_pools - 1)
            start, end = self.pool_start(pool), self.pool_start(pool + 1)
            places = torch.arange(first - start, min(last, end) - start).unsqueeze(0)
            numbers = start + permute(places, _derived_key(key, 2 + pool), end - start)[0]
            block_starts = self._block_starts(numbers // self.block_pairs, key)
            found.append((block_starts + numbers % self.block_pairs) % self.num_pairs)
            first = min(last, end)
        return torch.cat(found)

    def _block_starts(self, turns: Tensor, key: Tensor) -> Tensor:
        """(n,) the first pair of the blocks read at these turns (n,).

        A block that goes beyond the last pair continues at the first.
        """
        shift = int(_derived_key(key, 0)) % self.num_pairs
        blocks = turns
        if self.num_blocks:
            is_full = turns < self.num_blocks
            full = torch.where(is_full, turns, 0).unsqueeze(0)
            permuted = permute(full, _derived_key(key, 1), self.num_blocks)[0]
            blocks = torch.where(is_full, permuted, turns)
        return (blocks * self.block_pairs + shift) % self.num_pairs


class QueryOrder:
    """The queries in a random order, the pairs of each one after the other.

    A batch's end may still come between them. It takes 16 bytes a query.
    """

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self.offsets = offsets
        self.epoch: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def pairs_at(self, first: int, last: int, key: Tensor) -> Tensor:
        """As `PairOrder.pairs_at`."""
        if first >= last:
            return torch.empty(0, dtype=torch.int64)
        if self.epoch is None or self.epoch[0] != int(key):
            places = torch.arange(len(self.offsets) - 1).unsqueeze(0)
            order = permute(places, key, places.numel())[0].numpy()
            self.epoch = int(key), order, np.cumsum(np.diff(self.offsets)[order])
        _, queries, ends = self.epoch  # as the epoch has them, and where the pairs of each end
        low, high = np.searchsorted(ends, [first, last - 1], side="right")
        own, own_ends = queries[low : high + 1], ends[low : high + 1]
        starts = self.offsets[own]
        lengths = self.offsets[own + 1] - starts
        before = own_ends - lengths  # places at which the queries begin
        pairs = np.repeat(starts - before, lengths) + np.arange(before[0], own_ends[-1])
        return torch.from_numpy(pairs[first - before[0] : last - before[0]])


def _derived_key(key: Tensor, number: int) -> Tensor:
    return torch.tensor([[keys_for(int(key), number) & (2**63 - 1)]])
