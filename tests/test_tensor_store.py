"""Tensors on disk: written whole or not at all, by any number of ranks, read by any other."""

import contextlib
import errno
import json
import os
import shutil
import threading

import pytest
import safetensors.torch
import torch

from evenhand import tensor_store
from evenhand.distributed.ranks import Shards
from evenhand.errors import UserError
from evenhand.tensor_store import (
    MANIFEST,
    DamagedError,
    Table,
    all_finite,
    open_store,
    save_tensors,
    sign,
)  # fmt: skip
from ranks import run_ranks
from small import bytes_of

FILE = "rank-0-file-0.safetensors"


def whole(seed=0):
    """Tensors of every kind; `tables` below splits those with many rows."""
    drawn = torch.randn(13, 6, generator=torch.Generator().manual_seed(seed))
    drawn[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return {
        "table": drawn.bfloat16(), "wide": drawn.double(), "flat": drawn[:, 0].contiguous(),
        "deep": drawn.view(13, 2, 3), "one_row": drawn[:1], "no_rows": drawn[:0],
        "transposed": drawn.T, "scalar": torch.tensor(7 + seed),
        "bytes": torch.arange(3, dtype=torch.uint8), "truth": torch.tensor([True, False]),
    }  # fmt: skip


TABLES = ("table", "wide", "flat", "deep", "one_row", "no_rows")  # split over ranks


def save_whole(folder, seed=0, ranks=None, **options):
    tensors, tables = whole(seed), {}
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.num_ranks)
    for name in TABLES:
        rows = tensors.pop(name)
        own = Shards(len(rows), num_ranks).rows_of(rank)
        tables[name] = Table(rows[slice(*own)], own.first, len(rows))
    save_tensors(folder, tensors, tables, ranks=ranks, **options)


def save_by(num_ranks, folder, seed=0):
    """Saved by so many ranks; 0: by one process without ranks."""
    if num_ranks == 0:
        save_whole(folder, seed)
    else:
        run_ranks(num_ranks, lambda ranks: save_whole(folder, seed, ranks))


def assert_holds(folder, seed=0):
    saved, expected = open_store(folder), whole(seed)
    assert saved.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        found = saved.load(name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
        bits = [each.contiguous().view(-1).view(torch.uint8) for each in (found, tensor)]
        assert bits[0].equal(bits[1]), name


# --- what is saved is loaded ----------------------------------------------------------------------


@pytest.mark.parametrize("file_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("block_bytes", [24, 2**20])
@pytest.mark.parametrize("saved_by", [0, 2, 3, 7])
def test_tensors_come_back_bit_for_bit(tmp_path, monkeypatch, saved_by, file_bytes, block_bytes):
    monkeypatch.setattr(tensor_store, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(tensor_store, "BLOCK_BYTES", block_bytes)
    for name in "ab":  # the same tensors are the same bytes
        save_by(saved_by, tmp_path / name)
    assert_holds(tmp_path / "a")
    files = bytes_of(tmp_path / "a")
    assert bytes_of(tmp_path) == {f"{name}/{file}": files[file] for name in "ab" for file in files}
    if file_bytes == 2**20:
        ranks = {f"rank-{rank}-file-0.safetensors" for rank in range(saved_by or 1)}
        assert set(files) == {MANIFEST, *ranks}
    if (file_bytes, saved_by) == (2**20, 0):  # and anyone can read them
        found = safetensors.torch.load_file(tmp_path / "a" / FILE)
        assert found.keys() == whole().keys() - {"no_rows"}
        assert found["transposed"].nan_to_num(9).equal(whole()["transposed"].nan_to_num(9))


def test_any_rows_are_read_into_any_type_and_only_files_with_them_are_looked_at(tmp_path):
    save_by(3, tmp_path / "a")
    (tmp_path / "a/rank-1-file-0.safetensors").write_bytes(b"damaged")
    saved, table = open_store(tmp_path / "a"), whole()["table"]
    for first, last in [(0, 5), (1, 3), (10, 13), (4, 4), (13, 13)]:
        for dtype in (torch.bfloat16, torch.float64):
            target = torch.full((last - first, 6), 5, dtype=dtype)
            saved.read("table", target, first_row=first)
            assert target.nan_to_num(9).equal(table[first:last].to(dtype).nan_to_num(9))
    with pytest.raises(DamagedError, match=r"rank-1-file-0\.safetensors has 7 bytes instead of"):
        saved.read("table", torch.zeros(2, 6), first_row=4)
    for wrong in ({"target": torch.zeros(2, 5)}, {"target": torch.zeros(2, 6), "first_row": 12}):
        with pytest.raises(ValueError, match=r"table is \(13, 6\) there, without rows"):
            saved.read("table", **wrong)


@pytest.mark.parametrize("block_bytes", [2**26, 24])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(monkeypatch, block_bytes, bad):
    monkeypatch.setattr(tensor_store, "BLOCK_BYTES", block_bytes)
    table = torch.zeros(50, 3, dtype=torch.bfloat16)
    assert all_finite(table)
    assert all_finite(torch.zeros(0, 3))
    table[49, 2] = bad
    assert not all_finite(table)
    assert not all_finite(torch.tensor(bad))


# --- kills and full disks -------------------------------------------------------------------------


class KilledError(BaseException):
    pass


def cut_power(patch, *, last):
    """After so many things done to the disk, nothing more is done to it; a list of all tries."""
    tries, lock = [], threading.Lock()

    def counted(function):
        def call(*arguments, **others):
            with lock:
                tries.append(function.__name__)
                if len(tries) == last + 1 and function.__name__ == "write_file":
                    arguments[0].write_bytes(b"half of it")
                if len(tries) > last:
                    raise KilledError
            return function(*arguments, **others)

        return call

    patch.setattr(tensor_store, "write_file", counted(tensor_store.write_file))
    for name in ("replace", "unlink", "rmdir", "mkdir", "fsync"):
        patch.setattr(os, name, counted(getattr(os, name)))
    return tries


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (3, 2), (2, 0), (None, 2)])
def test_a_kill_at_any_moment_leaves_the_old_store_or_the_new_one(tmp_path, before, after):
    folder, seen = tmp_path / "home/a", []
    (tmp_path / "kept").mkdir()
    if before is not None:
        save_by(before, tmp_path / "kept/a", seed=0)
    for last in range(200):
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "home")
        with pytest.MonkeyPatch.context() as patch:
            tries = cut_power(patch, last=last)
            with contextlib.suppress(KilledError):
                save_by(after, folder, seed=1)
        if len(tries) <= last:  # not killed
            break
        if before is None and not tensor_store.has_store(folder):
            seen.append("none")
        else:
            seen.append("new" if open_store(folder).load("scalar") == 8 else "old")
            assert_holds(folder, seed=1 if seen[-1] == "new" else 0)
        save_by(after, folder, seed=2)  # and the next save goes well, and clears up
        assert_holds(folder, seed=2)
        assert [path.name for path in folder.parent.iterdir()] == ["a"]
    assert last < 199
    assert (seen[0], seen[-1]) == ("none" if before is None else "old", "new")


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_cannot_write_is_named_by_all(tmp_path, monkeypatch, victim):
    save_by(2, tmp_path / "a", seed=0)
    write_file = tensor_store.write_file

    def write_or_fail(path, tensors):
        return full() if f"rank-{victim}" in path.name else write_file(path, tensors)

    monkeypatch.setattr(tensor_store, "write_file", write_or_fail)

    def rank_fn(ranks):
        with pytest.raises(UserError, match=rf"a could not be .*\(rank {victim}: No space left"):
            save_whole(tmp_path / "a", 1, ranks)

    run_ranks(3, rank_fn)
    assert_holds(tmp_path / "a", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- damage ---------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def to_pipe(path):
    path.unlink()
    os.mkfifo(path)


def writing(data):
    return lambda path: path.write_bytes(data)


DAMAGES = [  # file, what is done to it, what is said of it
    (FILE, flip, f"{FILE} does not match its SHA-256"),
    (FILE, lambda path: path.write_bytes(path.read_bytes()[:-1]), f"{FILE} has .* bytes in"),
    (FILE, os.unlink, f"{FILE} cannot be read: .*No such file"),
    (FILE, to_pipe, f"{FILE} .* a pipe, not a file"),
    (MANIFEST, os.unlink, f"{MANIFEST} is missing, or .* earlier version"),
    (MANIFEST, to_pipe, "a pipe, not a file"),
    (MANIFEST, writing(b"{"), f"{MANIFEST}: "),
    (MANIFEST, writing(b"\xff" * 50), f"{MANIFEST}: "),
    (MANIFEST, writing(b"[]"), f"{MANIFEST} is not one of ours"),
    (MANIFEST, writing(b'{"format": 1}'), "format 1, and .* reads 2"),
    (MANIFEST, lambda path: path.write_text(path.read_text().replace('"step": 3', '"step": 2')),
     f"{MANIFEST}: it does not match its SHA-256"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage_fn", "words"), DAMAGES)
def test_what_is_damaged_is_named(tmp_path, name, damage_fn, words):
    save_whole(tmp_path / "a", state={"step": 3, "best": 0.1})
    assert open_store(tmp_path / "a").state == {"step": 3, "best": 0.1}
    damage_fn(tmp_path / "a" / name)
    with pytest.raises(DamagedError, match=rf"^[^\n]*/a is damaged \([^\n]*{words}[^\n]*\)$"):
        open_store(tmp_path / "a").verify()


def forge(path, *keys, to):
    """Changes the manifest at a path of keys, and signs it."""
    manifest = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    path.write_text(json.dumps(sign(manifest)))


FORGERIES = [
    ("files ../x.safetensors", {"size": 1, "sha256": ""}, "not a file of ours"),
    (f"files {FILE}", [], "not a file of ours"),
    (f"files {FILE} size", -1, "not a number of rows or bytes"),
    (f"files {FILE} size", True, "not a number of rows or bytes"),
    ("files", [], "not one of ours"),
    ("tensors table shape", [13, 2**40], "larger than the files"),
    ("tensors no_rows shape", [0, 2**60], "not a number of rows or bytes"),
    ("tensors table shape", [14, 6], "13 of .*14"),
    ("tensors table shape", 3, "not one of ours"),
    ("tensors table dtype", "F4", "not one of ours"),
    ("tensors table pieces", [[FILE, 0, 6], [FILE, 7, 13]], "missing or doubled"),
    ("tensors table pieces", [[FILE, 0, 7], [FILE, 6, 13]], "missing or doubled"),
    ("tensors table pieces", [["/etc/passwd", 0, 13]], "missing or doubled"),
    ("tensors table pieces", [[FILE, 0, "13"]], "not one of ours"),
    ("state", 3, "not one of ours"),
]


def test_a_forged_manifest_is_refused(tmp_path):
    save_whole(tmp_path / "a")
    path = tmp_path / "a" / MANIFEST
    genuine = path.read_bytes()
    for keys, value, words in FORGERIES:
        path.write_bytes(genuine)
        forge(path, *keys.split(), to=value)
        with pytest.raises(DamagedError, match=words):
            open_store(tmp_path / "a")
    path.write_bytes(genuine)  # what the files do not hold shows when it is read
    forge(path, "tensors", "flat", "shape", to=[13, 2])
    forge(path, "tensors", "more", to=json.loads(path.read_text())["tensors"]["flat"])
    saved = open_store(tmp_path / "a")
    for name in ("flat", "more"):
        with pytest.raises(DamagedError, match=FILE):
            saved.load(name)
