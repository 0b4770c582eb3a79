"""The collective operations that training uses, with a count of the bytes sent by each.

`ProcessRanks` uses torch.distributed; `experiments.simulated_ranks` runs the same code with the
ranks as threads of one process, for tests and to count what hundreds of ranks would send.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
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

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent: Counter[str] = Counter()
        self.process_group: Any = group or dist.group.WORLD  # as a checkpoint asks for it
        self.calls = 0  # begun; all ranks make the same ones
        self.waits_since: float | None = None  # for the others, by the monotonic clock

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        self.calls += 1
        shape = rows.shape[1:]
        own_bytes = _as_bytes(rows)  # (n, row in bytes): whatever the type, it travels
        others = own_bytes.new_empty(sum(received), own_bytes.shape[1])
        work = dist.all_to_all_single(
            others, own_bytes, list(received), list(sent), group=self.group, async_op=True
        )
        self.sent[what] += (sum(sent) - sent[self.rank]) * own_bytes.shape[1]

        def wait() -> Tensor:
            with self._waiting():
                work.wait()
            return others.view(rows.dtype).view(len(others), *shape)

        return wait

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        self.calls += 1
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        own_bytes = _as_bytes(padded)
        everyone = [torch.empty_like(own_bytes) for _ in range(self.num_ranks)]
        with self._waiting():
            dist.all_gather(everyone, own_bytes, group=self.group)
        self.sent[what] += own_bytes.numel() * (self.num_ranks - 1)
        parts = [part.view(rows.dtype).view(most, *rows.shape[1:]) for part in everyone]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        self.calls += 1
        with self._waiting():
            dist.all_reduce(values, group=self.group)
        self.sent[what] += reduction_bytes(values, self.num_ranks)
        return values

    def seconds_waiting(self) -> float:
        """How long this rank has been waiting for the others."""
        since = self.waits_since
        return 0.0 if since is None else time.monotonic() - since

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None


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
