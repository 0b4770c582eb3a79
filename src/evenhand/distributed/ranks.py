"""The collective operations that training uses, with a count of the bytes sent by each.

`ProcessRanks` uses torch.distributed; `experiments.simulated_ranks` runs the same code with the
ranks as threads of one process, for tests and to count what hundreds of ranks would send.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evenhand.errors import UserError


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

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        shape = rows.shape[1:]
        own_bytes = _as_bytes(rows)  # (n, row in bytes): whatever the type, it travels
        others = own_bytes.new_empty(sum(received), own_bytes.shape[1])
        work = dist.all_to_all_single(
            others, own_bytes, list(received), list(sent), group=self.group, async_op=True
        )
        self.sent[what] += (sum(sent) - sent[self.rank]) * own_bytes.shape[1]

        def wait() -> Tensor:
            work.wait()
            return others.view(rows.dtype).view(len(others), *shape)

        return wait

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        own_bytes = _as_bytes(padded)
        everyone = [torch.empty_like(own_bytes) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, own_bytes, group=self.group)
        self.sent[what] += own_bytes.numel() * (self.num_ranks - 1)
        parts = [part.view(rows.dtype).view(most, *rows.shape[1:]) for part in everyone]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        dist.all_reduce(values, group=self.group)
        self.sent[what] += reduction_bytes(values, self.num_ranks)
        return values


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


# --- joining them ---------------------------------------------------------------------------------

# What the libraries say when another process is gone, or has not answered in time.
_LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|NCCL|gloo", re.I)


def num_launched() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def launched_rank() -> int:
    """Which of them this process is."""
    return int(os.environ.get("RANK", "0")) if num_launched() > 1 else 0


def num_restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def joined_ranks(device: torch.device, *, timeout: float) -> Iterator[ProcessRanks]:
    """The process group of the ranks that torchrun started, left together at the end.

    Args:
        timeout: seconds that a rank waits for the others before it ends.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    ranks = ProcessRanks()
    try:
        yield ranks
    except RuntimeError as error:  # after an error nobody is waited for: others may be gone
        if not _LOST.search(str(error)):
            raise
        raise UserError(
            f"rank {ranks.rank} lost the others ({str(error).splitlines()[0]}); the run goes on "
            f"from its last checkpoint when torchrun starts it again, or with --resume"
        ) from error
    dist.barrier()  # a group that a rank has left early takes the others down
    dist.destroy_process_group()
