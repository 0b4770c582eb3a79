"""Rows of a split table: fetched from their owners, and gradients sent back to them.

Nothing of the table's size is ever sent: what travels are the rows that a step touches, each once
for every rank that touches it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenhand.distributed.ranks import Ranks, Shards
from evenhand.kernels.sparse import Lists, distinct_ids, transposed_product
from evenhand.models import RowEncoder, RowGradients


class Request(NamedTuple):
    """Who asked whom for which rows."""

    asked: list[int]  # rows this rank asked of each rank
    owed: list[int]  # rows each rank asked of this one
    owed_rows: Tensor  # (n,) of this rank's shard, those for rank 0 first


class RowExchange:
    """The rows of one table that ranks ask of each other; `name` is what its bytes are counted as.

    Every method is called by all ranks at the same place, or none.
    """

    def __init__(self, name: str, num_rows: int, ranks: Ranks) -> None:
        self.name = name
        self.ranks = ranks
        self.shards = Shards(num_rows, ranks.num_ranks)
        self.first_row, _ = self.shards.rows_of(ranks.rank)

    def request(self, sorted_ids: Tensor) -> Request:
        """Tells every owner which of its rows are wanted: (n,) distinct, in order."""
        asked = self.shards.counts_of(sorted_ids)
        owed = self._counts_for(asked, sorted_ids.device)
        owed_ids = self.ranks.start_exchange(
            sorted_ids, sent=asked, received=owed, what=f"{self.name}: ids"
        )()
        return Request(asked, owed, owed_ids - self.first_row)

    def start_fetch(self, request: Request, table: Tensor) -> Callable[[], Tensor]:
        """Starts to fetch; call what is returned for the rows (n, D), in the order of the ids."""
        return self.ranks.start_exchange(
            table.index_select(0, request.owed_rows),
            sent=request.owed,
            received=request.asked,
            what=f"{self.name}: rows",
        )

    def sum_gradients(self, gradients: RowGradients) -> RowGradients:
        """Gradients of any rows -> those of this rank's own rows, summed over all ranks.

        The ids given are of the whole table, those returned of this rank's shard. Sums run over
        the ranks in their order: the same run gives the same bits.
        """
        ids, order = gradients.ids.sort()
        asked = self.shards.counts_of(ids)
        owed = self._counts_for(asked, ids.device)
        sizes = {"sent": asked, "received": owed}
        waits = [
            self.ranks.start_exchange(ids, **sizes, what=f"{self.name}: ids of gradients"),
            self.ranks.start_exchange(
                gradients.values.index_select(0, order), **sizes, what=f"{self.name}: gradients"
            ),
        ]
        all_ids, values = (wait() for wait in waits)
        rows, places = distinct_ids(all_ids - self.first_row)
        ones = values.new_ones(len(values))
        starts = torch.arange(len(values) + 1, device=values.device)
        summed = transposed_product(Lists(starts, places, ones), values, num_columns=len(rows))
        return RowGradients(rows, summed)

    def _counts_for(self, asked: list[int], device: torch.device) -> list[int]:
        """How many rows each rank is about to send, from how many each is about to be sent."""
        each = [1] * self.ranks.num_ranks
        counts = self.ranks.start_exchange(
            torch.tensor(asked, device=device), sent=each, received=each, what="counts"
        )
        return counts().tolist()


def fetch_rows(
    exchange: RowExchange, encoder: RowEncoder, features: Any
) -> tuple[Tensor, Tensor, Any]:
    """(n,) the ids of the rows that features use, (n, D) the rows, the features as of these alone.

    Called by all ranks at the same place; `encoder.weight` is this rank's shard.
    """
    ids, places = sorted_distinct_ids(encoder.row_ids(features))
    rows = exchange.start_fetch(exchange.request(ids), encoder.weight)()
    return ids, rows, encoder.renumber(features, places)


def sorted_distinct_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Every id once, in order (T,), and where each of the ids (n,) stands among them (n,).

    Example:
        >>> sorted_distinct_ids(torch.tensor([7, 3, 7]))
        (tensor([3, 7]), tensor([1, 0, 1]))
    """
    distinct, places = distinct_ids(ids)
    distinct, order = distinct.sort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return distinct, ranks[places]


def places_among(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """Where ids of any shape stand among sorted ones; -1 where they do not.

    Example:
        >>> places_among(torch.tensor([[7, 5], [-1, 3]]), torch.tensor([3, 7]))
        tensor([[ 1, -1],
                [-1,  0]])
    """
    if not len(sorted_ids):
        return torch.full_like(ids, -1)
    places = torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)
    return torch.where(sorted_ids[places] == ids, places, -1)
