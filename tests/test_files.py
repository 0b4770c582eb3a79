"""A file is the old one or the new one, and one process at a time writes into a folder."""

import errno
import fcntl
import json
import os
import platform
import stat
from unittest.mock import Mock

import pytest

import small
from evenhand import files
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.files import atomic_folder, atomic_path, locked, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_at_the_place_before_all_is_written(tmp_path):
    path, before = tmp_path / "a/b/c.txt", os.umask(0o022)
    try:
        write_text(path, "Wien, ウィーン\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # as open to others as the user wishes
    assert path.read_text("utf-8") == "Wien, ウィーン\n"
    with atomic_path(path) as staging:
        staging.write_text("new")
        assert path.read_text("utf-8") == "Wien, ウィーン\n"
        assert staging.parent == path.parent  # the same disk, or it could not be renamed
    assert path.read_text() == "new"
    assert names(path.parent) == ["c.txt"]


@pytest.mark.parametrize(("place", "name"), [(os, "replace"), (os, "fsync"), (files, "sync")])
def test_an_error_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, place, name):
    path = tmp_path / "a.txt"
    path.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(place, name, Mock(side_effect=full))
    with pytest.raises(UserError, match=r"a\.txt could not be written \(No space left.*untouched"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_what_is_written_is_synced_before_it_takes_its_place(tmp_path, monkeypatch):
    events, real_sync, real_replace, real_rename = [], files.sync, os.replace, os.rename
    monkeypatch.setattr(files, "sync", lambda path: (events.append(path.name), real_sync(path)))
    monkeypatch.setattr(os, "replace", lambda *p: (events.append("replace"), real_replace(*p)))
    monkeypatch.setattr(os, "rename", lambda *p: (events.append("rename"), real_rename(*p)))
    write_text(tmp_path / "a.txt", "x")
    with atomic_folder(tmp_path / "a") as staging:
        (staging / "b").mkdir()
        (staging / "b/c").touch()
    staged = f".a.txt.{os.getpid()}.partial"
    assert events[:3] == [staged, "replace", tmp_path.name]
    assert events[3:] == ["c", "b", staging.name, "rename", tmp_path.name]


def test_a_folder_is_whole_or_not_there_and_made_by_one(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), atomic_folder(tmp_path / "a"):
        raise RuntimeError("a bug")
    assert not list(tmp_path.iterdir())
    with atomic_folder(tmp_path / "a") as staging:
        write_text(staging / "b/c.txt", "x")
        assert not (tmp_path / "a").exists()
        pid = rf"a is in use by process {os.getpid()}"
        with pytest.raises(UserError, match=pid), atomic_folder(tmp_path / "a"):
            pass
    assert small.bytes_of(tmp_path) == {"a/b/c.txt": b"x"}
    with pytest.raises(UserError, match="exists already"), atomic_folder(tmp_path / "a"):
        pass


def test_what_a_killed_maker_left_goes_and_what_a_running_one_has_stays(tmp_path):
    running = os.getppid()
    for pid in (2**31 - 1, running):
        (tmp_path / f".a.{pid}.partial").mkdir()
    (tmp_path / f".ab.{2**31 - 1}.partial").touch()
    (tmp_path / f".b.{os.getpid()}.partial").write_text("of an earlier process of this number")
    with atomic_folder(tmp_path / "a"):
        pass
    write_text(tmp_path / "b", "x")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a", "b", f".a.{running}.partial", f".ab.{2**31 - 1}.partial"}


def test_a_folder_that_is_held_is_refused_with_the_holder_and_a_stale_lock_has_no_meaning(tmp_path):
    """What the lock of another process does: the last test below."""
    path = tmp_path / "run/.lock"
    with locked(tmp_path / "run"):
        left = path.read_text("utf-8")
        assert json.loads(left)["pid"] == os.getpid()
        with pytest.raises(UserError) as caught, locked(tmp_path / "run"):
            pass
    sentence = str(caught.value)
    assert f"run is in use by process {os.getpid()} on {platform.node()} (since 20" in sentence
    assert "wait for it or stop it" in sentence
    path.write_text(left)  # as kill -9 leaves it
    with locked(tmp_path / "run"):
        assert path.exists()
    assert not path.exists()


def test_a_lock_that_was_removed_between_opening_and_locking_does_not_count(tmp_path, monkeypatch):
    """And it is free after the block, also after an error."""
    real, calls = fcntl.flock, []

    def flock(handle, how):
        calls.append(handle)
        real(handle, how)
        if len(calls) == 1:  # the last holder goes, and takes the file along
            (tmp_path / ".lock").unlink()

    def fail():
        with locked(tmp_path):
            assert len(calls) == 2
            assert (tmp_path / ".lock").exists()
            raise RuntimeError("a bug")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match="a bug"):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with locked(tmp_path), locked(tmp_path):
        pass
    assert capsys.readouterr().err.count("without locks") == 2
    assert not list(tmp_path.iterdir())


def test_a_holder_that_has_not_signed_yet_and_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / ".lock").write_text("")
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another process"), locked(tmp_path):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file could not be made"), locked(tmp_path / "file"):
        pass
    with pytest.raises(UserError, match=r"inside\.txt could not be written"):
        write_text(tmp_path / "file/inside.txt", "x")


def test_a_folder_in_use_is_refused_to_writers_and_open_to_readers(tmp_path):
    save_dataset(small.text_dataset(), tmp_path / "data")
    small.settings_file(tmp_path / "a.toml", "data", training__num_steps=20)
    table = "query,label\n" + "".join(f"q{n},l{n % 3}\n" for n in range(50))
    (tmp_path / "x.csv").write_text(table)
    for words in (["train", "--run", "run"], ["tune", "--run", "tune", "--trials", "2"]):
        assert small.run(tmp_path, words[0], "a.toml", *words[1:]).code == 0
    small.unfinish(tmp_path / "run")
    before = small.bytes_of(tmp_path)
    for folder, words in (
        ("run", ["train", "--resume", "--run", "run"]),
        ("tune", ["tune", "a.toml", "--run", "tune", "--trials", "3"]),
        ("kept", ["demo", "--run", "kept"]),
        ("made", ["data", "table", "x.csv", "--out", "made"]),
    ):
        with (atomic_folder if folder == "made" else locked)(tmp_path / folder):
            answer = small.run(tmp_path, *words)
        assert f"{folder} is in use by process {os.getpid()} on" in answer.sentence
    assert small.bytes_of(tmp_path) == before
    with locked(tmp_path / "run"):
        for words in (["search", "run", "wel"], ["report", "run"], ["evaluate", "run"]):
            answer = small.run(tmp_path, *words)
            assert answer.code == 0, answer.err
