"""Batches of (query, positive) pairs, shuffled anew every epoch, from a place that can be saved.

The next few batches are made by a thread while a step runs, so that a step finds its own ready.
What a batch holds follows from its place alone: an epoch has a key, the key an order of all pairs,
and a batch is the next few of them. So a batch made ahead is the one that would be made on demand,
and it can be thrown away.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import IntArray, Part, padded_rows
from evenhand.data.pairs import PairIndex
from evenhand.models.encoders import Bags
from evenhand.models.features import features_of
from evenhand.training.order import Order, WholeQueries, pairs_at
from evenhand.training.step import Batch

NUM_AHEAD = 3  # batches that are ready or in the making while a step runs
CPU = torch.device("cpu")

T = TypeVar("T", Batch, Bags)


class Place(NamedTuple):
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
        self.order = Order(self.num_pairs, part.block_pairs)
        if not 1 <= batch_size <= self.num_pairs:
            raise ValueError(
                f"batch_size must be between 1 and {self.num_pairs} "
                f"(the number of training pairs), got {batch_size}"
            )
        if has_whole_queries and (part.block_pairs or not masks_all_positives):
            raise ValueError("whole queries are for data in memory, and mask all their positives")
        self.whole_queries = WholeQueries(self.pairs.offsets) if has_whole_queries else None
        self.batch_size = batch_size
        self.masks_all_positives = masks_all_positives
        self.generator = generator
        self.device = device
        self.pair_groups = None if pair_groups is None else pair_groups.astype(np.int64)
        # Its thread starts with the first batch, and ends when the feed is no longer held.
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evenhand feed")
        self.ahead: deque[tuple[Place, Future[Batch]]] = deque()  # each with the place behind it
        self.place = _new_epoch(self.generator)

    def next_batch(self) -> Batch:
        while len(self.ahead) <= NUM_AHEAD:
            self._prepare()
        place, batch = self.ahead[0]
        ready = batch.result()  # an error of the thread is raised here
        self.ahead.popleft()
        self.place = place
        return _mapped(ready, lambda tensor: tensor.to(self.device, non_blocking=True))

    def state(self) -> dict[str, Tensor]:
        """Where the batches that were handed out end."""
        return {
            "epoch_state": self.place.epoch_state,
            "position": torch.tensor(self.place.position),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        for _, batch in self.ahead:
            batch.cancel()
        self.ahead.clear()
        self.generator.set_state(state["epoch_state"])
        self.place = _new_epoch(self.generator)._replace(position=int(state["position"]))

    def places_ahead(self, count: int) -> list[Place]:
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

    def _prepare(self) -> None:
        place = self.ahead[-1][0] if self.ahead else self.place
        if place.position + self.batch_size > self.num_pairs:
            place = _new_epoch(self.generator)
        place_behind = place._replace(position=place.position + self.batch_size)
        self.ahead.append((place_behind, self.executor.submit(self._batch_at, place, self.share)))

    def _batch_at(self, place: Place, share: tuple[int, int] = (0, 1)) -> Batch:
        """The batch of a place, in memory from which a GPU can copy while it computes.

        Of W ranks, rank r has the examples [r * B // W, (r + 1) * B // W) of it.
        """
        rank, num_ranks = share
        first, last = (place.position + self.batch_size * r // num_ranks for r in (rank, rank + 1))
        if self.whole_queries is None:
            pair_ids = pairs_at(first, last, place.key, self.order).numpy()  # (B,)
        else:
            pair_ids = self.whole_queries.pairs_at(first, last, place.key).numpy()
        query_ids, label_ids = self.pairs.pairs_at(pair_ids)
        query_rows, positives = None, label_ids[:, None]  # (B, 1), the paper's mask
        if self.whole_queries is not None:
            is_new = np.diff(query_ids, prepend=-1) != 0  # (B,)
            query_rows, query_ids = torch.from_numpy(np.cumsum(is_new) - 1), query_ids[is_new]
            positives = padded_rows(self.part.positives, query_ids)  # (U, P)
        elif self.masks_all_positives:
            positives = self._all_positives(query_ids, label_ids)  # (B, P)
        groups = None if self.pair_groups is None else self.pair_groups[pair_ids]
        batch = Batch(
            features=features_of(self.part, query_ids, device=CPU),
            label_ids=torch.from_numpy(label_ids),
            positive_ids=torch.from_numpy(positives),
            pair_ids=torch.from_numpy(pair_ids),
            group_ids=None if groups is None else torch.from_numpy(groups),
            query_rows=query_rows,
        )
        return _mapped(batch, Tensor.pin_memory) if self.device.type == "cuda" else batch

    def _all_positives(self, query_ids: IntArray, label_ids: IntArray) -> NDArray[np.int64]:
        """(B, P) every positive of each query; the drawn one first, as in-batch sampling needs."""
        positives = padded_rows(self.part.positives, query_ids)
        is_drawn = positives == label_ids[:, None]  # (B, P)
        positives = np.where(is_drawn, positives[:, :1], positives)
        positives[:, 0] = label_ids
        return positives


def _new_epoch(generator: torch.Generator) -> Place:
    state = generator.get_state()
    key = torch.randint(2**63 - 1, (1, 1), generator=generator)
    return Place(state, key, position=0)


def _mapped(tensors: T, function: Callable[[Tensor], Tensor]) -> T:
    """The batch, or the bags in it, with a function applied to every tensor."""
    fields: dict[str, Any] = {}
    for name, field in tensors._asdict().items():
        if isinstance(field, Tensor):
            fields[name] = function(field)
        elif isinstance(field, Bags):
            fields[name] = _mapped(field, function)
    return tensors._replace(**fields)
