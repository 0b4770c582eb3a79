"""Ranks without torchrun: threads of one process, or processes joined by gloo."""

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from evenhand.distributed.ranks import ProcessRanks, Ranks, reduction_bytes

T = TypeVar("T")

# --- threads: bytes are counted and not sent ------------------------------------------------------


class Room:
    """Where the threads meet: each lays something down, and all see all of it."""

    def __init__(self, num_ranks: int, *, timeout: float) -> None:
        self.laid: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=timeout)

    def exchange(self, rank: int, thing: T, read_fn: Callable[[list[T]], Any]) -> Any:
        self.laid[rank] = thing
        self.barrier.wait()
        read = read_fn(list(self.laid))
        self.barrier.wait()  # nobody lays down the next thing before all have read
        return read


class ThreadRanks:
    """One of the ranks in a room."""

    def __init__(self, rank: int, num_ranks: int, room: Room) -> None:
        self.rank, self.num_ranks, self.room = rank, num_ranks, room
        self.sent: Counter[str] = Counter()

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        parts = torch.split(rows, list(sent))
        others = self.room.exchange(
            self.rank, parts, lambda laid: torch.cat([parts[self.rank] for parts in laid])
        )
        assert len(others) == sum(received)
        size = rows.shape[1:].numel() * rows.element_size()
        self.sent[what] += (sum(sent) - sent[self.rank]) * size
        return lambda: others

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        size = rows.shape[1:].numel() * rows.element_size()
        self.sent[what] += max(counts) * size * (self.num_ranks - 1)
        everyone: Tensor = self.room.exchange(self.rank, rows, torch.cat)
        return everyone

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        self.sent[what] += reduction_bytes(values, self.num_ranks)
        total = self.room.exchange(self.rank, values, lambda laid: torch.stack(laid).sum(dim=0))
        return values.copy_(total)


def run_ranks(num_ranks: int, rank_fn: Callable[[Ranks], T], *, timeout: float = 60.0) -> list[T]:
    """Runs `rank_fn` once for each rank, all at the same time; what each returned, by rank.

    Example:
        >>> def total(ranks):
        ...     return ranks.sum_(torch.tensor([float(ranks.rank)]), what="sum").item()
        >>> run_ranks(3, total)
        [3.0, 3.0, 3.0]
    """
    room = Room(num_ranks, timeout=timeout)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = rank_fn(ThreadRanks(rank, num_ranks, room))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            room.barrier.abort()  # the others would wait for this one

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if room.barrier.broken:
        raise TimeoutError(f"the {num_ranks} ranks did not meet within {timeout} s")
    return results


# --- processes ------------------------------------------------------------------------------------

SERVER = multiprocessing.get_context("forkserver")  # imports once, then forks every rank
SERVER.set_forkserver_preload(["pytest", "hypothesis", "evenhand.training.checkpoint"])
SECONDS = 50


def exit_codes(num_ranks, tmp_path, rank_fn, *arguments):
    """The exit codes of so many ranks that run `rank_fn(ranks, *arguments)`: 0 without an error."""
    meeting_place = tmp_path / f"meeting-{time.monotonic_ns()}"
    processes = [
        SERVER.Process(
            target=_run_rank, args=(rank, num_ranks, meeting_place, rank_fn, arguments), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _run_rank(rank, num_ranks, meeting_place, rank_fn, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=num_ranks
    )
    rank_fn(ProcessRanks(), *arguments)
    dist.barrier()
    dist.destroy_process_group()
