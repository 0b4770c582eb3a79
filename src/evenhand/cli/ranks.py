"""Several processes that train or evaluate one model together, each of them this command."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from evenhand.errors import UserError

if TYPE_CHECKING:
    import torch

    from evenhand.distributed.ranks import ProcessRanks


@contextlib.contextmanager
def join_ranks(
    device: "torch.device", *, timeout: float
) -> Iterator[tuple["ProcessRanks | None", "torch.device"]]:
    """The ranks that torchrun started and the device of this one; None: there is but one process.

    Only the first rank speaks.
    """
    import torch

    from evenhand.cli.console import console
    from evenhand.distributed.processes import joined_ranks, launched_rank, num_launched

    check_timeout(timeout)
    if num_launched() == 1:
        yield None, device
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    console.quiet = console.quiet or launched_rank() > 0
    with joined_ranks(device, timeout=timeout) as ranks:
        yield ranks, device


def check_timeout(timeout: float) -> None:
    if not timeout > 0:  # nor is what is no number
        raise UserError(f"--rank-timeout must be above 0 seconds, got {timeout}")


def launch(ranks: int, *, max_restarts: int) -> NoReturn:
    """Becomes torchrun, which starts this command once for each rank, and again if one fails."""
    from evenhand.distributed.processes import num_launched

    if num_launched() > 1:
        raise UserError("--ranks is for a command that torchrun has not started already")
    words = without_flags(sys.argv[1:], ("--ranks", "--max-restarts"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // ranks)),
        # With one store for the launcher and the ranks, ranks that start again meet leftovers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **os.environ,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    sys.stdout.flush()
    # The two dashes: torchrun would take `--run` for the beginning of a flag of its own.
    command = [sys.executable, *launcher, "-m", "--", "evenhand", *words]
    os.execve(sys.executable, command, environment)


def without_flags(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """The words of a command without some flags and their values.

    Example:
        >>> without_flags(["train", "--ranks", "2", "--ranks=2", "--run", "a"], ("--ranks",))
        ['train', '--run', 'a']
    """
    kept: list[str] = []
    is_value = False
    for word in words:
        is_flag = word in flags or any(word.startswith(f"{flag}=") for flag in flags)
        if not is_value and not is_flag:
            kept.append(word)
        is_value = word in flags
    return kept
