"""The collective operations that training uses, with a count of the bytes sent by each.

`ProcessRanks` uses torch.distributed; `experiments.simulated_ranks` runs the same code with the
ranks as threads of one process, for tests and to count what hundreds of ranks would send.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

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


# --- joining them, and naming one that is late ----------------------------------------------------
# All ranks make the same calls in the same order, so the rank that has begun the fewest is the one
# the others wait for. Every second each writes how many it has begun into the store by which they
# met; a rank that has waited too long names the late one and ends, and torchrun starts all of them
# again. That store may be in the process that hangs (rank 0's, or the launcher's), so one thread
# talks to it and another looks at the clock.

# What the libraries say when another process is gone.
_LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|NCCL|gloo", re.I)
GOES_ON = "goes on from its last checkpoint when torchrun starts it again"
EXIT_LATE = 75  # of a rank that has waited too long; "try again" among the exit codes of a shell


def num_launched() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def launched_rank() -> int:
    """Which of them this process is."""
    return int(os.environ.get("RANK", "0")) if num_launched() > 1 else 0


def num_restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Pulse(NamedTuple):
    """What a rank writes about itself."""

    beats: int  # grows every second, as long as the process runs
    calls: int  # begun
    where: str  # host and process


class Watch:
    """Publishes the pulse of this rank, and ends the process when it has waited too long."""

    def __init__(
        self, ranks: ProcessRanks, store: Store, *, timeout: float, end_fn: Callable[[str], Any]
    ) -> None:
        self.ranks, self.store, self.timeout, self.end_fn = ranks, store, timeout, end_fn
        self.pause = min(1.0, timeout / 5)  # seconds between beats
        self.seen: dict[int, tuple[Pulse, float]] = {}  # each with the time it last changed
        self.answered_at = time.monotonic()  # the store
        self.is_over = threading.Event()
        targets = (self._beat, self._watch)
        self.threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def start(self) -> None:
        self._exchange(0)  # every rank has a pulse from here on
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()

    def _beat(self) -> None:
        beats = 0
        while not self.is_over.wait(self.pause):
            beats += 1
            try:
                self._exchange(beats)
            except (RuntimeError, ValueError):  # the store is gone, and `_watch` will say so
                return

    def _exchange(self, beats: int) -> None:
        """Writes the pulse of this rank and reads those of all."""
        where = f"{socket.gethostname()}, process {os.getpid()}"
        pulse = Pulse(beats, self.ranks.calls, where)
        self.store.set(f"pulse/{self.ranks.rank}", json.dumps(pulse))
        names = [f"pulse/{rank}" for rank in range(self.ranks.num_ranks)]
        for rank, text in enumerate(self.store.multi_get(names)):
            found = Pulse(*json.loads(text))
            if rank not in self.seen or self.seen[rank][0] != found:
                self.seen[rank] = found, time.monotonic()
        self.answered_at = time.monotonic()

    def _watch(self) -> None:
        while not self.is_over.wait(self.pause):
            waited = self.ranks.seconds_waiting()
            if waited > self.timeout:
                has_store = time.monotonic() - self.answered_at < waited / 2
                self.end_fn(late_message(self.ranks, self.seen, waited=waited, has_store=has_store))
                return


def late_message(
    ranks: ProcessRanks, seen: dict[int, tuple[Pulse, float]], *, waited: float, has_store: bool
) -> str:
    """One sentence that names the ranks which the others wait for.

    If the store no longer answers (`has_store`), nothing newer is known of any rank.
    """
    waits = f"rank {ranks.rank} has waited {waited:.0f} s for"
    if not has_store and ranks.rank != 0:
        return f"{waits} rank 0 ({seen[0][0].where}), whose store does not answer any more"
    others = {rank: found for rank, found in seen.items() if rank != ranks.rank}
    fewest = min((pulse.calls for pulse, _ in others.values()), default=ranks.calls)
    late = [rank for rank, (pulse, _) in others.items() if pulse.calls == fewest < ranks.calls]
    silent = [rank for rank, (_, at) in others.items() if time.monotonic() - at > waited / 2]
    if not (late or silent):
        return f"{waits} the others, and all of them wait"
    state = "says nothing any more" if silent else "still runs, but is behind"
    names = [f"rank {rank} ({others[rank][0].where}), which {state}" for rank in silent or late]
    return f"{waits} {' and '.join(names)}"


def _end(message: str) -> None:
    remedy = f"the run {GOES_ON} (--max-restarts), or with --resume"
    print(f"evenhand: {message}; this rank ends, and {remedy}", file=sys.stderr, flush=True)
    os._exit(EXIT_LATE)  # the main thread waits inside the library, where no exception reaches it


@contextlib.contextmanager
def joined_ranks(device: torch.device, *, timeout: float) -> Iterator[ProcessRanks]:
    """The process group of the ranks that torchrun started, left together at the end.

    Args:
        timeout: seconds that a rank waits for the others before it names the late one and ends.
    """
    # The library's own limits come later than ours, which knows the name of the late rank.
    limit = timedelta(seconds=2 * timeout + 30)
    store, rank, num_ranks = next(rendezvous("env://", timeout=limit))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    place = {"store": PrefixStore("evenhand", store), "rank": rank, "world_size": num_ranks}
    dist.init_process_group(backend, timeout=limit, **place)
    ranks = ProcessRanks()
    watch = Watch(ranks, PrefixStore("watch", store), timeout=timeout, end_fn=_end)
    watch.start()
    try:
        yield ranks
    except BaseException as error:
        watch.is_over.set()  # others may be gone: nobody is waited for
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            problem = f"rank {rank} lost the others ({str(error).splitlines()[0]})"
            raise UserError(f"{problem}; the run {GOES_ON}, or with --resume") from error
        raise
    dist.barrier()  # a group that a rank has left early takes the others down
    watch.stop()
    dist.destroy_process_group()
