"""Which rank holds which rows of a table, and which examples of a batch.

Rows are held in contiguous ranges, as `torch.chunk` cuts them: the owner of a row is one division,
sorted ids are grouped by owner, and a checkpoint's shard is a slice. Labels whose ids follow their
frequency would all be asked of the first rank; docs/scaling.md says how much that matters.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.models import RowRange


class Shards(NamedTuple):
    """A table of `num_rows` rows, cut for `num_ranks` ranks; the last ones may have none."""

    num_rows: int
    num_ranks: int

    @property
    def rows_a_rank(self) -> int:
        return -(-self.num_rows // self.num_ranks)

    def rows_of(self, rank: int) -> RowRange:
        """
        Example:
            >>> [tuple(Shards(5, 3).rows_of(rank)) for rank in range(3)]
            [(0, 2), (2, 4), (4, 5)]
        """
        first, last = rank * self.rows_a_rank, (rank + 1) * self.rows_a_rank
        return RowRange(min(first, self.num_rows), min(last, self.num_rows))

    def counts_of(self, sorted_ids: Tensor) -> list[int]:
        """How many of the ids, given in order, each rank holds.

        Example:
            >>> Shards(5, 3).counts_of(torch.tensor([0, 1, 4]))
            [2, 0, 1]
        """
        edges = torch.arange(self.num_ranks + 1, device=sorted_ids.device) * self.rows_a_rank
        return torch.searchsorted(sorted_ids, edges).diff().tolist()


def share_of(batch_size: int, rank: int, num_ranks: int) -> RowRange:
    """The examples of the global batch that are a rank's own; shares differ by one at most.

    Example:
        >>> [tuple(share_of(5, rank, 2)) for rank in range(2)]
        [(0, 2), (2, 5)]
    """
    return RowRange(rank * batch_size // num_ranks, (rank + 1) * batch_size // num_ranks)


def share_sizes(batch_size: int, num_ranks: int) -> list[int]:
    """How many of the examples are each rank's own.

    Example:
        >>> share_sizes(5, 2)
        [2, 3]
    """
    return [share_of(batch_size, rank, num_ranks).size for rank in range(num_ranks)]
