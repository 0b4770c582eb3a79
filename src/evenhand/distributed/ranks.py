"""Ranks: the messages between them, counted in bytes, and which of them holds which rows.

`ProcessRanks` uses torch.distributed; in tests the ranks are threads of one process.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evenhand.errors import UserError
from evenhand.models import RowRange


class Ranks(Protocol):
    """What training asks of ranks; all of them make the same calls in the same order."""

    rank: int
    num_ranks: int
    sent: Counter[str]  # bytes sent to other ranks, by what they were

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        """Starts to send `sent[r]` rows to each rank r; call what is returned for theirs."""

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        """The rows of all ranks, in their order; rank r has counts[r]."""

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        """The sum over the ranks, in place; the same bits on every rank."""


class ProcessRanks:
    """Ranks that are processes, joined by torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.sent: Counter[str] = Counter()

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        shape = rows.shape[1:]
        own_bytes = _as_bytes(rows)  # (n, row in bytes): whatever the type, it travels
        others = own_bytes.new_empty(sum(received), own_bytes.shape[1])
        work = dist.all_to_all_single(others, own_bytes, list(received), list(sent), async_op=True)
        self.sent[what] += (sum(sent) - sent[self.rank]) * own_bytes.shape[1]

        def wait() -> Tensor:
            self._wait(work)
            return others.view(rows.dtype).view(len(others), *shape)

        return wait

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        own_bytes = _as_bytes(padded)
        everyone = [torch.empty_like(own_bytes) for _ in range(self.num_ranks)]
        self._wait(dist.all_gather(everyone, own_bytes, async_op=True))
        self.sent[what] += own_bytes.numel() * (self.num_ranks - 1)
        parts = [part.view(rows.dtype).view(most, *rows.shape[1:]) for part in everyone]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        self._wait(dist.all_reduce(values, async_op=True))
        self.sent[what] += reduction_bytes(values, self.num_ranks)
        return values

    def _wait(self, work: Any) -> None:
        """Waits for the others. A wrong call has failed before: what fails here is a rank.

        gloo and NCCL have a dozen wordings for it, and raise plain RuntimeErrors.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(self.rank, error) from error


def _lost(rank: int, error: Exception) -> UserError:
    return UserError(
        f"rank {rank} lost the others ({str(error).splitlines()[0]}); the run goes on from its "
        f"last checkpoint when torchrun starts it again, or with --resume"
    )


def are_any(ranks: Ranks | None, is_so: bool, *, device: torch.device) -> bool:
    """Whether it is so on any rank: what one rank alone decided would leave the others waiting."""
    if ranks is None:
        return is_so
    return bool(ranks.sum_(torch.tensor([float(is_so)], device=device), what="flags")[0])


def wait_for_all(ranks: Ranks | None) -> None:
    """Returns when every rank has come so far."""
    are_any(ranks, False, device=torch.device("cpu"))


def reduction_bytes(values: Tensor, num_ranks: int) -> int:
    """What a rank sends for a sum over a ring: every part twice, but once to itself."""
    return 2 * values.numel() * values.element_size() * (num_ranks - 1) // num_ranks


def _as_bytes(rows: Tensor) -> Tensor:
    """(n, ...) of any type -> (n, bytes of a row)."""
    width = rows.shape[1:].numel()
    return rows.contiguous().view(len(rows), width).view(torch.uint8)


# --- which rank holds which rows ------------------------------------------------------------------
#
# Rows are held in contiguous ranges, as `torch.chunk` cuts them: the owner of a row is one
# division, sorted ids are grouped by owner, and a checkpoint's shard is a slice. Labels whose ids
# follow their frequency would all be asked of the first rank; docs/scaling.md says how much that
# matters.


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


# --- joining them ---------------------------------------------------------------------------------


def num_launched() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def num_restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def joined_ranks(
    device: torch.device, *, timeout: float
) -> Iterator[tuple[ProcessRanks | None, torch.device]]:
    """The ranks that torchrun started and the device of this one; None: there is but one process.

    Args:
        timeout: seconds that a rank waits for the others before it ends.
    """
    if num_launched() == 1:
        yield None, device
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    ranks = ProcessRanks()
    try:
        yield ranks, device  # after an error nobody is waited for: others may be gone
    except dist.DistError as error:  # NCCL's, of any operation on the GPU
        raise _lost(ranks.rank, error) from error
    wait_for_all(ranks)  # a group that a rank has left early takes the others down
    dist.destroy_process_group()
