"""Checkpoints of many ranks are those of one process; a kill leaves the old one or the new one."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from evenhand.errors import UserError
from evenhand.training import checkpoint_tables
from evenhand.training.checkpoint import (
    Checkpoint,
    Keeper,
    load_latest_checkpoint,
    save_checkpoint,
)
from evenhand.training.checkpoint_files import Table
from test_checkpoint import assert_holds, flipped, made, names_in, step_names

SERVER = multiprocessing.get_context("forkserver")  # imports once, then forks every rank
SERVER.set_forkserver_preload(["pytest", "hypothesis", "evenhand.training.checkpoint_tables"])
SECONDS = 50
SHAPES = {  # also fewer rows than ranks, and none at all
    "even": ((12, 3), torch.float32),
    "uneven": ((7, 2), torch.bfloat16),
    "exact": ((5,), torch.float64),
    "single": ((1, 4), torch.float32),
    "none": ((0, 2), torch.float32),
}


class Ranks(NamedTuple):
    rank: int
    num_ranks: int
    process_group: dist.ProcessGroup


def whole(seed):
    """The tables, not split."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def split(tables, group):
    """The tables of a rank, as copies: contiguous ranges, as torch.chunk has them."""
    found = {}
    for name, rows in tables.items():
        rows_a_rank = -(-len(rows) // group.num_ranks)
        first = min(len(rows), group.rank * rows_a_rank)
        found[name] = Table(rows[first : first + rows_a_rank].clone(), first, len(rows))
    return found


def checkpoint_of(group, seed):
    return Checkpoint({"common": torch.arange(3) + seed}, {"seed": seed}, split(whole(seed), group))


def assert_loads(group, folder, seed):
    """The rows of this rank are bit for bit those of the whole tables."""
    into = checkpoint_of(group, seed=99)
    said = []
    loaded = load_latest_checkpoint(folder, into, group=group, warn_fn=said.append)
    assert loaded.state == {"seed": seed}
    assert loaded.tensors["common"].equal(torch.arange(3) + seed)
    expected = split(whole(seed), group)
    for name, table in expected.items():
        assert loaded.tables[name].rows is into.tables[name].rows
        assert loaded.tables[name].rows.equal(table.rows), name
    return said


# --- ranks ----------------------------------------------------------------------------------------


def rank_main(rank, world_size, meeting_place, task, arguments):
    torch.set_num_threads(1)
    checkpoint_tables.FILE_BYTES = 40  # so that a rank writes many files
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=world_size
    )
    task(Ranks(rank, world_size, dist.group.WORLD), *arguments)
    dist.barrier()
    dist.destroy_process_group()


def exit_codes(world_size, tmp_path, task, *arguments):
    """Runs a task on so many ranks; 0 for each that met no error."""
    meeting_place = tmp_path / f"meeting-{time.monotonic_ns()}"
    processes = [
        SERVER.Process(
            target=rank_main, args=(rank, world_size, meeting_place, task, arguments), daemon=True
        )
        for rank in range(world_size)
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


def saving(group, folder, is_async):
    """Saves twice and changes everything at once; training's ranks talk in the meantime."""
    keeper = Keeper(folder, keep_last=2, is_async=is_async, group=group)
    for seed in (1, 2):
        live = checkpoint_of(group, seed)
        keeper.save(live, step=seed)
        for tensor in live.everything().values():
            tensor.zero_()
        for _ in range(20):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == group.num_ranks
    keeper.wait()
    dist.barrier()
    assert names_in(folder) == step_names(1, 2)


def loading(group, folder, seed, num_said):
    said = assert_loads(group, folder, seed)
    assert len(said) == (num_said if group.rank == 0 else 0)


@pytest.fixture(scope="module")
def saved_on_2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    assert exit_codes(2, folder, saving, folder / "checkpoints", True) == [0, 0]
    return folder / "checkpoints"


@pytest.mark.timeout(240)
def test_saved_on_2_ranks_it_is_loaded_by_one_process(saved_on_2):
    whole_tables = {name: Table(torch.zeros_like(rows)) for name, rows in whole(2).items()}
    loaded = load_latest_checkpoint(saved_on_2, Checkpoint({}, {}, whole_tables))
    for name, rows in whole(2).items():
        assert loaded.tables[name].rows.equal(rows)
    names = {path.name[:11] for path in (saved_on_2 / "step-00000002/tables").iterdir()}
    assert names == {"shard-00001", "shard-00002"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_saved_on_2_ranks_it_is_loaded_by_any_number(tmp_path, saved_on_2, world_size):
    assert exit_codes(world_size, tmp_path, loading, saved_on_2, 2, 0) == [0] * world_size


@pytest.mark.timeout(240)
def test_saved_on_3_ranks_in_the_foreground_it_is_loaded_by_2(tmp_path):
    folder = tmp_path / "checkpoints"
    assert exit_codes(3, tmp_path, saving, folder, False) == [0] * 3
    assert exit_codes(2, tmp_path, loading, folder, 2, 0) == [0] * 2


@pytest.mark.timeout(240)
def test_all_ranks_agree_on_the_one_before_a_damaged_one(tmp_path, saved_on_2):
    shutil.copytree(saved_on_2, tmp_path / "checkpoints")
    flipped(min((tmp_path / "checkpoints/step-00000002/tables").iterdir()))
    assert exit_codes(3, tmp_path, loading, tmp_path / "checkpoints", 1, 1) == [0] * 3


def failing(group, folder):
    """The disk of rank 1 is full: every rank says so."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if group.rank == 1:
        checkpoint_tables._HashedFile.write = full
    keeper = Keeper(folder, is_async=True, group=group)
    keeper.save(checkpoint_of(group, 3), step=3)
    with pytest.raises(UserError, match=r"step-00000003 could not .*rank 1: .*No space left"):
        keeper.wait()


@pytest.mark.timeout(240)
def test_a_rank_that_cannot_write_is_named_by_all(tmp_path, saved_on_2):
    shutil.copytree(saved_on_2, tmp_path / "checkpoints")
    assert exit_codes(2, tmp_path, failing, tmp_path / "checkpoints") == [0, 0]
    assert names_in(tmp_path / "checkpoints") == step_names(1, 2)


def dying(group, folder, victim):
    """A rank is killed while it writes; the others are told, and the checkpoint is not there."""

    def kill(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == victim:
        checkpoint_tables._HashedFile.write = kill
    keeper = Keeper(folder, is_async=True, group=group)
    keeper.save(checkpoint_of(group, 3), step=3)
    with pytest.raises(UserError, match=r"step-00000003 could not .*a rank was lost"):
        keeper.wait()
    os._exit(7)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_a_save_leaves_the_one_before(tmp_path, saved_on_2, victim):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved_on_2, folder)
    codes = exit_codes(2, tmp_path, dying, folder, victim)
    assert codes == [-signal.SIGKILL, 7][:: 1 if victim == 0 else -1]
    assert exit_codes(3, tmp_path, loading, folder, 2, 0) == [0] * 3


# --- kill -9 of one process -----------------------------------------------------------------------

POINTS = [
    (os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
    (shutil, "rmtree"), (safetensors.torch, "save_file"), (checkpoint_tables._HashedFile, "write"),
]  # fmt: skip


def save_and_die(folder, step, is_async, call):
    """Saves, and is killed before the n-th call of any of the functions that change the disk."""
    calls = [0]

    def deadly(function):
        def counted(*arguments, **options):
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # a kill does not lose what the kernel has; this saves minutes
    for place, name in POINTS:
        setattr(place, name, deadly(getattr(place, name)))
    keeper = Keeper(folder, keep_last=1, is_async=is_async)
    keeper.save(made(9), step=step)
    keeper.wait()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", [9, 5, 3], ids=["a new one", "the same step", "an earlier step"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, step):
    save_checkpoint(tmp_path / "base", made(5), step=5)
    code, call, found = 1, 0, []
    while code:
        call += 1
        folder = tmp_path / str(call)
        shutil.copytree(tmp_path / "base", folder)
        process = SERVER.Process(target=save_and_die, args=(folder, step, call % 2 == 0, call))
        process.start()
        process.join(30)
        code = process.exitcode
        assert code in (-signal.SIGKILL, 0)
        said = []
        newest = load_latest_checkpoint(folder, warn_fn=said.append)
        assert not said
        found.append(newest.state["step"])
        assert_holds(newest, found[-1])
        Keeper(folder).save(made(1), step=10)  # and what it left is cleared away
        assert names_in(folder) == step_names(10)
    assert call > 15
    assert found[0] == 5
    assert found[-1] == 9
