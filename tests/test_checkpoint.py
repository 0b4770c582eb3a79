"""Which checkpoints are kept and loaded; ranks that are processes."""

import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist

from evenhand import tensor_store
from evenhand.errors import UserError
from evenhand.tensor_store import Table
from evenhand.training.checkpoint import Checkpoint, CheckpointManager, load_latest_checkpoint
from ranks import exit_codes
from small import bytes_of


def made(value):
    tensors = {"a": torch.full((2, 3), float(value)), "scalar": torch.tensor(value)}
    tables = {"rows": Table(torch.full((5, 2), float(value))), "sums": Table(torch.ones(5) * value)}
    return Checkpoint(tensors, {"step": value, "best_value": None}, tables)


def assert_holds(checkpoint, value):
    assert checkpoint.state == {"step": value, "best_value": None}
    expected = made(value).everything()
    assert checkpoint.everything().keys() == expected.keys()
    for name, tensor in checkpoint.everything().items():
        assert tensor.equal(expected[name]), name


def save_all(folder, *steps, **options):
    manager = CheckpointManager(folder, **options)
    for step in steps:
        manager.save(made(step), step=step)


def steps_in(folder):
    """The steps of complete checkpoints; there must be nothing else."""
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.iterdir())]


def damage(folder, step):
    path = folder / f"step-{step:08d}/rank-0-file-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


# --- which are kept -------------------------------------------------------------------------------


def test_the_last_few_are_kept_and_the_newest_is_loaded(tmp_path):
    assert load_latest_checkpoint(tmp_path) is load_latest_checkpoint(tmp_path / "none") is None
    for number, (keep_last, steps, left) in enumerate((
        (1, [9, 10, 100], [100]),
        (3, [1, 2, 3, 4, 5], [3, 4, 5]),
        (3, [1, 2, 3, 2], [1, 2]),  # later steps of a course given up go
        (1, [9, 3], [3]),
        (1, [5, 5], [5]),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        save_all(folder, *steps, keep_last=keep_last)
        assert steps_in(folder) == left
        assert_holds(load_latest_checkpoint(folder), steps[-1])


def test_the_best_is_kept_until_there_is_a_better_one(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=True)
    for step, best_step in [(1, 0), (2, 2), (3, 2), (4, 2), (5, 2)]:
        manager.save(made(step), step=step, best_step=best_step)
    assert steps_in(tmp_path) == [2, 4, 5]
    CheckpointManager(tmp_path, keep_last=1, keep_best=True).save(made(6), step=6, best_step=5)
    assert steps_in(tmp_path) == [5, 6]
    CheckpointManager(tmp_path, keep_last=1).save(made(7), step=7, best_step=5)
    assert steps_in(tmp_path) == [7]
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        CheckpointManager(tmp_path, keep_last=0)


def test_what_a_crash_left_is_cleared_without_a_save_and_a_replaced_one_still_there(tmp_path):
    save_all(tmp_path, 1, 2, 3, 4, keep_last=9)
    (tmp_path / ".step-00000005").mkdir()
    (tmp_path / ".step-00000003").mkdir()
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003.replaced")
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.replaced")
    assert_holds(load_latest_checkpoint(tmp_path), 4)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000004")  # the new one
    assert_holds(load_latest_checkpoint(tmp_path), 2)
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.clear(step=3, keeps_later=True)  # the fourth may be damaged: the next save removes it
    assert steps_in(tmp_path) == [2, 3, 4]
    manager.clear(step=3)
    assert steps_in(tmp_path) == [2, 3]


# --- loading --------------------------------------------------------------------------------------


def test_tables_are_filled_in_place_and_what_does_not_fit_is_refused_before(tmp_path):
    save_all(tmp_path, 1)
    for changes, words in (
        ({"rows": torch.zeros(5, 3)}, r"rows is \(5, 2\).*\(5, 3\)"),
        ({"rows": torch.zeros(5, 2).double()}, "float32.*float64"),
        ({"rows": torch.zeros(6, 2)}, r"\(5, 2\).*\(6, 2\)"),
        ({"x": torch.zeros(1)}, "the tables .'rows', 'sums'.*not .*'x'"),
    ):
        tables = made(0).tables | {name: Table(rows) for name, rows in changes.items()}
        with pytest.raises(UserError, match=f"step-00000001 does not fit this run.*{words}"):
            load_latest_checkpoint(tmp_path, Checkpoint({}, {}, tables))

    def refuse(state):
        raise UserError(f"not step {state['step']}")

    into = made(7)
    with pytest.raises(UserError, match="not step 1"):
        load_latest_checkpoint(tmp_path, into, check_fn=refuse)
    assert into.tables["rows"].rows.eq(7).all()
    loaded = load_latest_checkpoint(tmp_path, into)
    assert_holds(loaded, 1)
    assert all(loaded.tables[name].rows is table.rows for name, table in into.tables.items())


def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path):
    save_all(tmp_path, 1, 2, keep_last=2)
    damage(tmp_path, 2)
    said = []
    assert_holds(load_latest_checkpoint(tmp_path, made(0), warn_fn=said.append), 1)
    (sentence,) = said
    assert sentence.startswith(f"{tmp_path}/step-00000002 is damaged (rank-0-file-0.safetensors ")
    assert sentence.endswith("; step-00000001 before it is used instead")
    save_all(tmp_path, 2, keep_last=2)  # in place of the damaged one
    assert_holds(load_latest_checkpoint(tmp_path, warn_fn=said.append), 2)
    assert len(said) == 1
    assert steps_in(tmp_path) == [1, 2]
    for step in (1, 2):
        damage(tmp_path, step)
    both = "step-00000002 is damaged .*step-00000001 is damaged .*new"
    with pytest.raises(UserError, match=both):
        load_latest_checkpoint(tmp_path)


# --- ranks that are processes ---------------------------------------------------------------------


def checkpoint_of(ranks, seed):
    """What a rank holds: a copy of its rows, in contiguous ranges; for some tables it has none."""
    generator, tables = torch.Generator().manual_seed(seed), {}
    for name, shape, dtype in (
        ("even", (12, 3), torch.float32), ("uneven", (7, 2), torch.bfloat16),
        ("exact", (5,), torch.float64), ("single", (1, 4), torch.float32),
        ("none", (0, 2), torch.float32),
    ):  # fmt: skip
        rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        rows_a_rank = -(-len(rows) // ranks.num_ranks)
        first = min(len(rows), ranks.rank * rows_a_rank)
        tables[name] = Table(rows[first : first + rows_a_rank].clone(), first, len(rows))
    return Checkpoint({"common": torch.arange(3) + seed}, {"seed": seed}, tables)


def save_twice(ranks, folder):
    """Changes everything at once after a save."""
    tensor_store.FILE_BYTES = 40  # so that a rank writes many files
    manager = CheckpointManager(folder, keep_last=2, ranks=ranks)
    for seed in (1, 2):
        live = checkpoint_of(ranks, seed)
        manager.save(live, step=seed)
        for tensor in live.everything().values():
            tensor.zero_()
    dist.barrier()
    assert steps_in(folder) == [1, 2]


def load(ranks, folder, seed, num_warnings):
    said = []
    into = checkpoint_of(ranks, seed=99)
    loaded = load_latest_checkpoint(folder, into, ranks=ranks, warn_fn=said.append)
    assert len(said) == (num_warnings if ranks.rank == 0 else 0)
    assert loaded.state == {"seed": seed}
    for name, tensor in checkpoint_of(ranks, seed).everything().items():
        assert loaded.everything()[name].equal(tensor), name


def die(ranks, folder, victim):
    """A rank is killed while it writes; the others are told."""
    if ranks.rank == victim:
        tensor_store.write_file = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    manager = CheckpointManager(folder, ranks=ranks)
    with pytest.raises(UserError, match=rf"rank {1 - victim} lost the others"):
        manager.save(checkpoint_of(ranks, 3), step=3)
    os._exit(7)


@pytest.mark.timeout(240)
def test_what_2_ranks_saved_is_loaded_by_3_and_a_rank_that_fails_costs_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    assert exit_codes(2, tmp_path, save_twice, folder) == [0, 0]
    assert exit_codes(3, tmp_path, load, folder, 2, 0) == [0] * 3
    before = bytes_of(folder)
    assert exit_codes(2, tmp_path, die, folder, 1) == [7, -signal.SIGKILL]
    assert bytes_of(folder) == before
    damage(folder, 2)
    assert exit_codes(3, tmp_path, load, folder, 1, 1) == [0] * 3
