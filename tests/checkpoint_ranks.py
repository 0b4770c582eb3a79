"""Runs a function on ranks that are processes joined by gloo."""

import multiprocessing
import time

import torch
import torch.distributed as dist

from evenhand.distributed.ranks import ProcessRanks

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
