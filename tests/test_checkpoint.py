"""A checkpoint is there as a whole, or the one before it is."""

import errno
import json
import os
import re
import shutil
import threading

import pytest
import safetensors.torch
import torch

from evenhand.errors import UserError
from evenhand.training import checkpoint as module
from evenhand.training import checkpoint_files, checkpoint_tables
from evenhand.training.checkpoint import (
    Checkpoint,
    Keeper,
    load_latest_checkpoint,
    save_checkpoint,
)
from evenhand.training.checkpoint_files import Table
from small import bytes_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


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


def saved(keeper, step):
    keeper.save(made(step), step=step)
    keeper.wait()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def step_names(*steps):
    return [f"step-{step:08d}" for step in steps]


def test_there_is_none_before_the_first(tmp_path):
    assert load_latest_checkpoint(tmp_path) is None
    assert load_latest_checkpoint(tmp_path / "nowhere") is None


def test_what_is_saved_is_loaded_and_only_the_newest_is_kept(tmp_path):
    for step in (9, 10, 100):
        save_checkpoint(tmp_path, made(step), step=step)
        assert_holds(load_latest_checkpoint(tmp_path), step)
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}"]


def test_a_tensor_that_is_not_contiguous_is_saved_by_value(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).T
    save_checkpoint(tmp_path, Checkpoint({"a": tensor}, {}), step=1)
    assert load_latest_checkpoint(tmp_path).tensors["a"].equal(tensor)


def test_a_step_saved_twice_is_the_second(tmp_path):
    save_checkpoint(tmp_path, made(1), step=5)
    save_checkpoint(tmp_path, made(2), step=5)
    assert_holds(load_latest_checkpoint(tmp_path), 2)


def test_where_the_one_replaced_is_still_there_the_new_one_is_loaded(tmp_path):
    """As a crash leaves it, after the new one took its place and before the old one went."""
    (name,) = step_names(5)
    save_checkpoint(tmp_path / "old", made(1), step=5)
    save_checkpoint(tmp_path / "new", made(2), step=5)
    shutil.copytree(tmp_path / "old" / name, tmp_path / "both" / f"{name}.replaced")
    shutil.copytree(tmp_path / "new" / name, tmp_path / "both" / name)
    assert_holds(load_latest_checkpoint(tmp_path / "both"), 2)


def test_an_earlier_step_saved_later_is_the_one_that_stays(tmp_path):
    save_checkpoint(tmp_path, made(9), step=9)
    save_checkpoint(tmp_path, made(3), step=3)
    assert_holds(load_latest_checkpoint(tmp_path), 3)


def test_the_newest_of_two_is_loaded(tmp_path):
    """As a crash leaves them that comes before the older one is removed."""
    save_checkpoint(tmp_path / "other", made(9), step=9)
    save_checkpoint(tmp_path, made(10), step=10)
    shutil.move(tmp_path / "other/step-00000009", tmp_path / "step-00000009")
    assert_holds(load_latest_checkpoint(tmp_path), 10)


def test_half_a_checkpoint_is_not_one_and_is_cleared_away_by_the_next(tmp_path):
    save_checkpoint(tmp_path, made(1), step=1)
    for name in (".step-00000002", ".step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.safetensors").write_bytes(b"half")
    assert_holds(load_latest_checkpoint(tmp_path), 1)
    save_checkpoint(tmp_path, made(2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


# --- what is in it --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file_bytes", [1, 40, 1 << 20])
def test_tables_are_loaded_bit_for_bit_and_in_place(tmp_path, monkeypatch, dtype, file_bytes):
    """Also from many files, those of a row each among them."""
    monkeypatch.setattr(checkpoint_tables, "FILE_BYTES", file_bytes)
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (17, 3), "flat": (17,), "one": (1, 2), "none": (0, 4), "deep": (3, 2, 2)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    drawn["wide"][0, :] = torch.tensor([float("nan"), -0.0, float("inf")])
    saved = {name: Table(rows.to(dtype)) for name, rows in drawn.items()}
    save_checkpoint(tmp_path, Checkpoint({}, {}, saved), step=1)
    into = {name: Table(torch.zeros_like(table.rows)) for name, table in saved.items()}
    loaded = load_latest_checkpoint(tmp_path, Checkpoint({}, {}, into))
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for name, table in saved.items():
        assert loaded.tables[name].rows is into[name].rows
        assert into[name].rows.view(bits).equal(table.rows.view(bits)), name
    whole = load_latest_checkpoint(tmp_path).tables
    assert whole.keys() == saved.keys() - {"none"}
    assert whole["deep"].rows.equal(saved["deep"].rows)


def test_two_saves_of_the_same_are_the_same_bytes(tmp_path):
    for name in "ab":
        save_checkpoint(tmp_path / name, made(1), step=1)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_the_files_are_safetensors_that_anyone_can_read(tmp_path):
    save_checkpoint(tmp_path, made(3), step=3)
    (path,) = (tmp_path / "step-00000003/tables").iterdir()
    assert safetensors.torch.load_file(path)["rows"].equal(torch.full((5, 2), 3.0))
    manifest = json.loads((tmp_path / "step-00000003/manifest.json").read_text())
    assert sorted(manifest["files"]) == ["state.json", f"tables/{path.name}", "tensors.safetensors"]


MISFITS = {
    "another shape": ({"rows": torch.zeros(5, 3)}, r"rows is \(5, 2\).*\(5, 3\)"),
    "another type": ({"rows": torch.zeros(5, 2).double()}, "float32.*float64"),
    "more rows": ({"rows": torch.zeros(6, 2)}, r"\(5, 2\).*\(6, 2\)"),
    "another table": ({"rows": torch.zeros(5, 2), "x": torch.zeros(1)}, "no table x"),
    "a table less": ({"rows": torch.zeros(5, 2)}, "it has a table sums"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_tables_of_another_run_are_refused(tmp_path, misfit):
    rows, words = MISFITS[misfit]
    save_checkpoint(tmp_path, made(1), step=1)
    into = Checkpoint({}, {}, {name: Table(tensor) for name, tensor in rows.items()})
    with pytest.raises(UserError, match=f"step-00000001 does not fit this run.*{words}"):
        load_latest_checkpoint(tmp_path, into)


def test_a_state_that_does_not_fit_is_refused_before_a_table_is_touched(tmp_path):
    save_checkpoint(tmp_path, made(1), step=1)

    def refuse(state):
        raise UserError(f"not step {state['step']}")

    into = made(7)
    with pytest.raises(UserError, match="not step 1"):
        load_latest_checkpoint(tmp_path, into, check_fn=refuse)
    assert into.tables["rows"].rows.eq(7).all()


# --- which are kept -------------------------------------------------------------------------------


def test_the_last_few_are_kept(tmp_path):
    keeper = Keeper(tmp_path, keep_last=3)
    for step in (1, 2, 3, 4, 5):
        keeper.save(made(step), step=step)
    assert names_in(tmp_path) == step_names(3, 4, 5)


def test_the_best_is_kept_until_there_is_a_better_one(tmp_path):
    keeper = Keeper(tmp_path, keep_last=2, keep_best=True)
    for step, best_step in [(1, 0), (2, 2), (3, 2), (4, 2), (5, 2)]:
        keeper.save(made(step), step=step, best_step=best_step)
    assert names_in(tmp_path) == step_names(2, 4, 5)
    Keeper(tmp_path, keep_last=1, keep_best=True).save(made(6), step=6, best_step=5)
    assert names_in(tmp_path) == step_names(5, 6)
    Keeper(tmp_path, keep_last=1).save(made(7), step=7, best_step=5)
    assert names_in(tmp_path) == step_names(7)


def test_later_steps_of_a_course_given_up_go(tmp_path):
    keeper = Keeper(tmp_path, keep_last=3)
    for step in (1, 2, 3, 2):
        keeper.save(made(step), step=step)
    assert names_in(tmp_path) == step_names(1, 2)


def test_what_a_crash_left_is_cleared_without_a_save(tmp_path):
    keeper = Keeper(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        Keeper(tmp_path, keep_last=9).save(made(step), step=step)
    (tmp_path / ".step-00000005").mkdir()
    keeper.clear(step=3, keeps_later=True)  # the fourth may be damaged: the next save removes it
    assert names_in(tmp_path) == step_names(2, 3, 4)
    keeper.clear(step=3)
    assert names_in(tmp_path) == step_names(2, 3)


def test_nothing_to_keep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        Keeper(tmp_path, keep_last=0)


# --- in the background ----------------------------------------------------------------------------


@pytest.fixture
def held_back(monkeypatch):
    """Saving does not go on until the event is set."""
    event = threading.Event()
    write = checkpoint_tables.write_tables

    def slow(*arguments, **options):
        assert event.wait(20)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_tables, "write_tables", slow)
    return event


def test_what_changes_after_a_save_began_is_not_in_it(tmp_path, held_back):
    live = made(1)
    keeper = Keeper(tmp_path, is_async=True)
    keeper.save(live, step=1)
    for tensor in live.everything().values():
        tensor.zero_()
    live.state["step"] = 0
    assert load_latest_checkpoint(tmp_path) is None
    held_back.set()
    keeper.wait()
    assert_holds(load_latest_checkpoint(tmp_path), 1)


def test_memory_is_used_again_and_sizes_may_change(tmp_path):
    keeper = Keeper(tmp_path, is_async=True, keep_last=3)
    keeper.save(made(1), step=1)
    first = dict(keeper.buffers)
    keeper.save(made(2), step=2)
    assert all(keeper.buffers[name] is buffer for name, buffer in first.items())
    longer = made(3)._replace(tensors={**made(3).tensors, "a": torch.zeros(9, 2)})
    keeper.save(longer, step=3)
    keeper.wait()
    assert load_latest_checkpoint(tmp_path).tensors["a"].shape == (9, 2)
    shutil.rmtree(tmp_path / "step-00000003")
    assert_holds(load_latest_checkpoint(tmp_path), 2)


def test_a_copy_that_finds_no_memory_names_the_setting(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    keeper = Keeper(tmp_path, is_async=True)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UserError, match=r"no memory .*training\.async_checkpoints = false"):
        keeper.save(made(1), step=1)


def test_without_a_background_nothing_is_copied(tmp_path):
    keeper = Keeper(tmp_path)
    keeper.save(made(1), step=1)
    assert not keeper.buffers


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("surfaces_at", ["save", "wait", "end"])
def test_an_error_of_the_background_is_raised_by_the_next_call_once(
    tmp_path, monkeypatch, surfaces_at
):
    keeper = Keeper(tmp_path, is_async=True)
    keeper.save(made(1), step=1)
    keeper.wait()
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync", full)
        keeper.save(made(2), step=2)
        keeper.thread.join()
    calls = {
        "save": lambda: keeper.save(made(3), step=3),
        "wait": keeper.wait,
        "end": lambda: keeper.__exit__(None, None, None),
    }
    with pytest.raises(UserError, match=r"step-00000002 could not be written .*No space left"):
        calls[surfaces_at]()
    keeper.wait()
    assert_holds(load_latest_checkpoint(tmp_path), 1)
    keeper.save(made(4), step=4)
    keeper.wait()
    assert names_in(tmp_path) == step_names(4)


def test_an_error_of_training_is_the_one_that_is_told_and_the_save_is_finished(tmp_path, held_back):
    threading.Timer(0.1, held_back.set).start()

    def train():
        with Keeper(tmp_path, is_async=True) as keeper:
            keeper.save(made(1), step=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert_holds(load_latest_checkpoint(tmp_path), 1)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (os, "replace"),
        (module, "sync"),
        (checkpoint_files, "sync"),
        (safetensors.torch, "save_file"),
        (os, "fsync"),
        (checkpoint_tables._HashedFile, "write"),
    ],
)
def test_a_write_that_fails_leaves_the_one_before(tmp_path, monkeypatch, place, name, is_async):
    keeper = Keeper(tmp_path, is_async=is_async)
    save_checkpoint(tmp_path, made(1), step=1)
    before = bytes_of(tmp_path)
    monkeypatch.setattr(place, name, full)
    with pytest.raises(UserError, match=r"step-00000002 could not be written .*No space left"):
        saved(keeper, 2)
    assert bytes_of(tmp_path) == before
    assert_holds(load_latest_checkpoint(tmp_path), 1)


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def rubbish(path):
    path.write_bytes(b"\xff" * 50)


def gone(path):
    path.unlink()


TABLE_FILE = "tables/shard-00001-model-00001-of-00001.safetensors"
DAMAGES = {  # file, what is done to it, what is said of it
    "a bit of a table": (TABLE_FILE, flipped, f"{TABLE_FILE} has another content"),
    "half a table": (TABLE_FILE, cut, f"{TABLE_FILE} has .* bytes instead of"),
    "no table": (TABLE_FILE, gone, f"{TABLE_FILE} is missing"),
    "a bit of the tensors": ("tensors.safetensors", flipped, "tensors.safetensors has another"),
    "half of the tensors": ("tensors.safetensors", cut, "tensors.safetensors has .* bytes"),
    "no tensors": ("tensors.safetensors", gone, "tensors.safetensors is missing"),
    "a bit of the state": ("state.json", flipped, "state.json has another content"),
    "no state": ("state.json", gone, "state.json is missing"),
    "no manifest": ("manifest.json", gone, "manifest.json is missing"),
    "no JSON": ("manifest.json", lambda path: path.write_text("{"), "manifest.json cannot be read"),
    "no text": ("manifest.json", rubbish, "manifest.json cannot be read"),
    "a list": ("manifest.json", lambda path: path.write_text("[]"), "does not list any files"),
    "no list of files": (
        "manifest.json", lambda path: path.write_text('{"format": 1, "files": {}}'),
        "manifest.json does not list state.json",
    ),
    "another format": (
        "manifest.json", lambda path: path.write_text('{"format": 9, "files": {}}'), "format 9",
    ),
    "a file too many": (
        "tables/more.safetensors", lambda path: path.write_bytes(b"x"),
        "tables/more.safetensors is not listed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, damage):
    name, harm, words = DAMAGES[damage]
    keeper = Keeper(tmp_path, keep_last=2)
    for step in (1, 2):
        keeper.save(made(step), step=step)
    harm(tmp_path / "step-00000002" / name)
    said = []
    assert_holds(load_latest_checkpoint(tmp_path, made(0), warn_fn=said.append), 1)
    (sentence,) = said
    pattern = rf"step-00000002 is damaged \(.*{words}.*\); step-00000001 before it is used instead"
    assert re.search(pattern, sentence), sentence
    keeper.save(made(2), step=2)  # in place of the damaged one
    said.clear()
    assert_holds(load_latest_checkpoint(tmp_path, warn_fn=said.append), 2)
    assert not said
    assert names_in(tmp_path) == step_names(1, 2)


def test_where_all_are_damaged_all_are_named(tmp_path):
    keeper = Keeper(tmp_path, keep_last=2)
    for step in (1, 2):
        keeper.save(made(step), step=step)
        gone(tmp_path / f"step-0000000{step}" / "state.json")
    with pytest.raises(
        UserError, match=r"step-00000002 is damaged .*step-00000001 is damaged .*new"
    ):
        load_latest_checkpoint(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
    old = tmp_path / "step-00000005"
    old.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, old / "tensors.safetensors")
    (old / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000005 .*earlier version.* begin anew"):
        load_latest_checkpoint(tmp_path)
