"""Which checkpoints are kept and loaded; ranks that are processes."""

import pytest
import torch

from evenhand.errors import UserError
from evenhand.tensor_store import Table
from evenhand.training.checkpoint import Checkpoint, CheckpointManager, load_latest_checkpoint


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
