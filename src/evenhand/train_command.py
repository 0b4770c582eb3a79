"""`evenhand train`: by one process, or by the ranks that torchrun started, each in this command."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console

from evenhand.config import Config
from evenhand.data import Dataset
from evenhand.distributed.processes import (
    joined_ranks,
    launched_rank,
    num_launched,
    num_restarts,
)
from evenhand.distributed.ranks import ProcessRanks, wait_for_all
from evenhand.errors import UserError
from evenhand.faults import explain_out_of_memory
from evenhand.locking import locked
from evenhand.progress import stop_requested
from evenhand.runs import (
    begin_run,
    evaluate_run,
    is_trained,
    open_data,
    open_run_data,
    resumable_config,
    train_run,
)
from evenhand.tables import results_table, unseen_notes

ConfigFn = Callable[[Path | None], Config]  # the settings of the command, over those of a file


def train(
    options: argparse.Namespace, config_fn: ConfigFn, *, device: torch.device, console: Console
) -> int:
    if options.ranks is not None:
        _launch(options)
    with ranks_of(options, device, console) as (ranks, own_device):
        return _train(options, config_fn, device=own_device, console=console, ranks=ranks)


@contextlib.contextmanager
def ranks_of(
    options: argparse.Namespace, device: torch.device, console: Console
) -> Iterator[tuple[ProcessRanks | None, torch.device]]:
    """The ranks that torchrun started and the device of this one; None: there is but one process.

    Only the first rank speaks.
    """
    _check_timeout(options)
    if num_launched() == 1:
        yield None, device
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    console.quiet = console.quiet or launched_rank() > 0
    with joined_ranks(device, timeout=options.rank_timeout) as ranks:
        yield ranks, device


def _train(
    options: argparse.Namespace,
    config_fn: ConfigFn,
    *,
    device: torch.device,
    console: Console,
    ranks: ProcessRanks | None,
) -> int:
    is_first = ranks is None or ranks.rank == 0
    if not is_first:
        wait_for_all(ranks)  # the first one makes the data set and the run folder
    folder, config, dataset = _begun(
        options, config_fn, device=device, console=console, is_first=is_first
    )
    if is_first:
        wait_for_all(ranks)
    for note in unseen_notes(dataset):
        console.print(note)
    lock = locked(folder) if is_first else contextlib.nullcontext()
    with lock, explain_out_of_memory(config, dataset), stop_requested() as should_stop_fn:
        is_complete = train_run(
            folder,
            config,
            dataset,
            device=device,
            console=console,
            title=f"training {config.mining.method}",
            should_stop_fn=should_stop_fn,
            ranks=ranks,
        )
    if not is_complete:
        again = f"continue with: evenhand train --resume --run {shlex.quote(str(folder))}"
        if not config.training.checkpoint_every and not is_trained(folder):
            again = "there is no checkpoint (training.checkpoint_every = 0)"
        console.print(f"stopped; {again}")
        return 130
    part_name = "test" if "test" in dataset.parts else "validation"
    if part_name in dataset.parts:
        scores = evaluate_run(
            folder, dataset, part_name, device=device, console=console, ranks=ranks
        )
        console.print(results_table([(config.mining.method, scores)], part_name=part_name))
    console.print(f"run folder: {folder}")
    return 0


def _begun(
    options: argparse.Namespace,
    config_fn: ConfigFn,
    *,
    device: torch.device,
    console: Console,
    is_first: bool,
) -> tuple[Path, Config, Dataset]:
    """The run to train, new or to be continued; only the first rank makes anything."""
    if options.resume and options.run is None:
        raise UserError("--resume needs the folder of the run: evenhand train --resume --run …")
    if options.resume:
        resumable_config(Path(options.run), None)  # there is something to resume
        data, options.data = options.data, None  # where the data lie now; the setting stays
        config = config_fn(Path(options.run) / "config.toml")
        dataset = open_run_data(Path(options.run), console, data=data)
    else:
        config = config_fn(None)
        dataset = open_data(config.data, console)
    name = f"{dataset.name}-{config.mining.method}-seed{config.training.seed}"
    folder = Path(options.run) if options.run else Path("runs") / name
    # Started again by torchrun, the same command finds the folder that it made itself.
    is_continued = options.resume or not is_first or (num_restarts() > 0 and folder.is_dir())
    if is_continued:
        config = resumable_config(folder, config, dataset)
    else:
        begin_run(folder, config, dataset, device=device)
    return folder, config, dataset


def _check_timeout(options: argparse.Namespace) -> None:
    if not options.rank_timeout > 0:  # nor is what is no number
        raise UserError(f"--rank-timeout must be above 0 seconds, got {options.rank_timeout}")


def _launch(options: argparse.Namespace) -> NoReturn:
    """Becomes torchrun, which starts this command once for each rank, and again if one fails."""
    _check_timeout(options)
    for flag, value, least in (
        ("ranks", options.ranks, 1),
        ("max-restarts", options.max_restarts, 0),
    ):
        if value < least:
            raise UserError(f"--{flag} must be at least {least}, got {value}")
    if num_launched() > 1:
        raise UserError("--ranks is for a command that torchrun has not started already")
    words = _without(sys.argv[1:], ("--ranks", "--max-restarts"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // options.ranks)),
        # With one store for the launcher and the ranks, ranks that start again meet leftovers.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **os.environ,
    }
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(options.ranks)]
    launcher += ["--max-restarts", str(options.max_restarts)]
    sys.stdout.flush()
    # The two dashes: torchrun would take `--run` for the beginning of a flag of its own.
    command = [sys.executable, *launcher, "-m", "--", "evenhand", *words]
    os.execve(sys.executable, command, environment)


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """The words of a command without some flags and their values.

    Example:
        >>> _without(["train", "--ranks", "2", "--ranks=2", "--run", "a"], ("--ranks",))
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
