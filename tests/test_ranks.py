"""Ranks that are real processes, joined by gloo, against one process."""

import datetime

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing

from evenhand.distributed.ranks import ProcessRanks
from small import config, text_dataset
from split import joined, split_training, tables_of, trained
from test_split_step import CASES, MAIN, NUM_STEPS, trained_alone

TYPES = {"float32": torch.float32, "float64": torch.float64}


def rank_process(rank, num_ranks, folder):
    """Trains every case, and leaves its part of the tables as a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    ranks = ProcessRanks()
    for type_name, dtype in TYPES.items():
        for case in MAIN:
            settings = config("none", **CASES[case])
            training, step = split_training(settings, text_dataset(), ranks, dtype=dtype)
            held = {"figures": trained(training, step, NUM_STEPS), **tables_of(training)}
            name = f"{folder}/{case}-{type_name}-{rank}.safetensors"
            safetensors.torch.save_file({key: t.contiguous() for key, t in held.items()}, name)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_losses_and_weights_after_50_steps_are_those_of_one_process(num_ranks, tmp_path):
    torch.multiprocessing.spawn(rank_process, args=(num_ranks, str(tmp_path)), nprocs=num_ranks)
    for type_name, dtype in TYPES.items():
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        for case in MAIN:
            settings = config("none", **CASES[case])
            figures, tables = trained_alone(
                settings, text_dataset(), num_steps=NUM_STEPS, dtype=dtype
            )
            parts = [
                safetensors.torch.load_file(tmp_path / f"{case}-{type_name}-{rank}.safetensors")
                for rank in range(num_ranks)
            ]
            for part in parts:
                split_figures = part.pop("figures")
                assert (split_figures - figures).abs().max() <= tolerance, (case, type_name)
            for name, tensor in joined(parts, tables).items():
                distance = (tensor - tables[name]).abs().max()
                assert distance <= tolerance, (case, type_name, name)
