"""Ranks that are real processes, joined by gloo, against one process."""

import datetime
import itertools

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing

from evenhand.distributed.ranks import ProcessRanks
from small import config, text_dataset
from split import joined, tables_of, take_steps, whole_training
from test_split_step import CASES, trained_alone

SIZES = (1, 3)
NUM_STEPS = 8
MAIN = ("s2m", "s2m, the paper's mask", "cvar")
TYPES = {"float32": torch.float32, "float64": torch.float64}


def rank_process(rank, folder):
    """Trains every case in groups of 1 and of all, and leaves its part of the tables as a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", max(SIZES)),
        rank=rank,
        world_size=max(SIZES),
        timeout=datetime.timedelta(seconds=120),
    )
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    for size, group in groups.items():
        if rank < size:
            ranks = ProcessRanks(group)
            for case, (type_name, dtype) in itertools.product(MAIN, TYPES.items()):
                settings = config("none", **CASES[case])
                built = whole_training(settings, text_dataset(), dtype=dtype, ranks=ranks)
                figures = take_steps(built, NUM_STEPS)
                held = {"figures": figures, **tables_of(built.training)}
                name = f"{folder}/{case}-{type_name}-{size}-{rank}.safetensors"
                safetensors.torch.save_file({key: t.contiguous() for key, t in held.items()}, name)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that the ranks trained."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_process, args=(str(folder),), nprocs=max(SIZES))
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", MAIN)
@pytest.mark.parametrize("type_name", TYPES)
def test_losses_and_weights_are_those_of_one_process(folder, case, type_name):
    dtype = TYPES[type_name]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    figures, tables = trained_alone(
        config("none", **CASES[case]), text_dataset(), num_steps=NUM_STEPS, dtype=dtype
    )
    for size in SIZES:
        parts = [
            safetensors.torch.load_file(folder / f"{case}-{type_name}-{size}-{rank}.safetensors")
            for rank in range(size)
        ]
        for part in parts:
            assert (part.pop("figures") - figures).abs().max() <= tolerance, size
        for name, tensor in joined(parts, tables).items():
            assert (tensor - tables[name]).abs().max() <= tolerance, (size, name)
