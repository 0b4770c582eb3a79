"""A checkpoint is there as a whole, or the one before it is."""

import errno
import os
import shutil

import pytest
import safetensors.torch
import torch

from evenhand.errors import UserError
from evenhand.training import checkpoint as module
from evenhand.training.checkpoint import Checkpoint, load_latest_checkpoint, save_checkpoint
from small import bytes_of


def made(value):
    tensors = {"a": torch.full((2, 3), float(value)), "scalar": torch.tensor(value)}
    return Checkpoint(tensors, {"step": value, "best_value": None})


def assert_holds(checkpoint, value):
    assert checkpoint.state == {"step": value, "best_value": None}
    assert checkpoint.tensors["a"].equal(torch.full((2, 3), float(value)))
    assert checkpoint.tensors["scalar"].equal(torch.tensor(value))


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


@pytest.mark.parametrize(
    ("place", "name"),
    [(os, "replace"), (module, "sync"), (safetensors.torch, "save_file"), (os, "fsync")],
)
def test_a_write_that_fails_leaves_the_one_before(tmp_path, monkeypatch, place, name):
    save_checkpoint(tmp_path, made(1), step=1)
    before = bytes_of(tmp_path)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, name, full)
    with pytest.raises(UserError, match=r"step-00000002 could not be written .*No space left"):
        save_checkpoint(tmp_path, made(2), step=2)
    assert bytes_of(tmp_path) == before
    assert_holds(load_latest_checkpoint(tmp_path), 1)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "rubbish"])
def test_a_damaged_one_is_refused_by_name(tmp_path, name, damage):
    save_checkpoint(tmp_path, made(1), step=1)
    path = tmp_path / "step-00000001" / name
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\xff" * 50)
    with pytest.raises(UserError, match=r"step-00000001 is damaged .* begin anew"):
        load_latest_checkpoint(tmp_path)
