"""A file is the old one or the new one, whatever happens between."""

import errno
import os
import stat

import pytest

from evenhand import files
from evenhand.errors import UserError
from evenhand.files import atomic_path, read_json, write_json, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_at_the_place_before_all_is_written(tmp_path):
    path = tmp_path / "a/b/c.txt"
    write_text(path, "Wien, ウィーン\n")
    assert path.read_text("utf-8") == "Wien, ウィーン\n"
    with atomic_path(path) as staging:
        staging.write_text("new")
        assert path.read_text("utf-8") == "Wien, ウィーン\n"
        assert staging.parent == path.parent  # the same disk, or it could not be renamed
    assert path.read_text() == "new"
    assert names(path.parent) == ["c.txt"]


def test_an_error_in_between_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with atomic_path(path) as staging:
            staging.write_text("half")
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(("place", "name"), [(os, "replace"), (os, "fsync"), (files, "sync")])
def test_a_disk_error_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, place, name):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, name, full)
    with pytest.raises(UserError, match=r"a\.txt could not be written \(No space left.*untouched"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"inside\.txt could not be written"):
        write_text(tmp_path / "file/inside.txt", "x")


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_path(path) as staging:
        staging_name = staging.name
        staging.write_text("x")
    (tmp_path / staging_name).write_text("half of a longer text")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_a_file_is_as_open_to_others_as_the_user_wishes(tmp_path):
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644


def test_what_is_written_is_synced_before_it_takes_its_place(tmp_path, monkeypatch):
    events = []
    real_sync, real_replace = files.sync, os.replace
    monkeypatch.setattr(files, "sync", lambda path: (events.append(path.name), real_sync(path)))
    monkeypatch.setattr(os, "replace", lambda *p: (events.append("replace"), real_replace(*p)))
    write_text(tmp_path / "a.txt", "x")
    assert events == [f".a.txt.{os.getpid()}.partial", "replace", tmp_path.name]


def test_json_goes_and_comes_back_and_nan_is_null(tmp_path):
    value = {"a": [1, 2.5, "ウ"], "b": (float("nan"), None), "c": {"d": float("nan")}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == {
        "a": [1, 2.5, "ウ"],
        "b": [None, None],
        "c": {"d": None},
    }
    assert "NaN" not in (tmp_path / "a.json").read_text("utf-8")


def test_json_that_is_absent_or_damaged_is_named(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json does not exist"):
        read_json(path)
    for data in (b"{", b"", b"\xff\xff"):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.json is damaged"):
            read_json(path)
