"""Conversion in bounded memory: the rows of `load_extreme`, by random keys, whatever happens."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import small
from evenhand.cli import main
from evenhand.data import load_extreme, open_dataset, taken_rows
from evenhand.data import streaming as streaming_module
from evenhand.data.manifest import check_manifest
from evenhand.data.parts import part_of
from evenhand.data.spool import Pending, keys_of, shards_of
from evenhand.data.streaming import stream_extreme
from evenhand.errors import UserError
from evenhand.locking import locked

NUM_FEATURES, NUM_LABELS = 50, 20


def text_of(num_rows, *, seed=0, line_end="\n"):
    generator = np.random.default_rng(seed)
    lines = [f"{num_rows} {NUM_FEATURES} {NUM_LABELS}"]
    for _ in range(num_rows):
        labels = generator.integers(NUM_LABELS, size=generator.integers(0, 4))
        features = generator.integers(NUM_FEATURES, size=generator.integers(0, 9))
        values = generator.normal(size=len(features))
        row = [f"{f}:{v:.4g}" for f, v in zip(features, values, strict=True)]
        lines.append(" ".join([",".join(map(str, labels)), *row]) if row else " ")
    return line_end.join(lines) + line_end


@pytest.fixture
def paths(tmp_path):
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"
    train.write_text(text_of(400))
    test.write_text(text_of(60, seed=1))
    return train, test


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_rows_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


@pytest.fixture
def small_pieces(monkeypatch):
    """Many entries in the journal, and many blocks of text."""
    blocks = streaming_module.placed_blocks
    monkeypatch.setattr(streaming_module, "JOURNAL_BYTES", 2000)
    monkeypatch.setattr(
        streaming_module,
        "placed_blocks",
        lambda path, *, block_bytes=700, **place: blocks(path, block_bytes=700, **place),
    )


def small_memory(monkeypatch, num_bytes=20_000):
    monkeypatch.setattr(streaming_module, "LEAST_MEMORY", 1)
    return num_bytes


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("block", [1, 7])
def test_the_rows_are_those_of_load_extreme_and_training_rows_by_their_keys(
    paths, tmp_path, fraction, block
):
    settings = {"validation_fraction": fraction, "validation_block": block}
    expected = load_extreme(*paths, name="small", **settings)
    train, test = paths
    out = tmp_path / "out"
    actual = stream_extreme(train, out, name="small", test_path=test, seed=5, **settings)
    assert list(actual.parts) == list(expected.parts)
    for part in set(expected.parts) - {"train"}:
        assert_rows_equal(actual.parts[part].features, expected.parts[part].features)
        assert_rows_equal(actual.parts[part].positives, expected.parts[part].positives)
        assert actual.parts[part].block_pairs == 0
    row_ids = np.array(
        [
            row
            for row in range(400)
            if part_of(str(row // block), test_fraction=0, validation_fraction=fraction) == "train"
        ]
    )
    order = np.argsort(keys_of(row_ids.astype(np.uint64), 5))
    part, whole = actual.parts["train"], expected.parts["train"]
    assert_rows_equal(part.features, taken_rows(whole.features, order))
    assert_rows_equal(part.positives, taken_rows(whole.positives, order))
    assert part.block_pairs > 0
    assert np.array_equal(actual.label_counts(), expected.label_counts())
    assert actual.is_finite
    assert not list(tmp_path.glob(".out*"))


def test_the_bytes_do_not_depend_on_the_memory(paths, tmp_path, monkeypatch, small_pieces):
    expected = stream_extreme(paths[0], tmp_path / "large", name="small", test_path=paths[1])
    for num_bytes in (3_000, 20_000):
        folder = tmp_path / str(num_bytes)
        stream_extreme(
            paths[0], folder, name="small", test_path=paths[1],
            memory_bytes=small_memory(monkeypatch, num_bytes),
        )  # fmt: skip
        assert bytes_of(folder) == bytes_of(tmp_path / "large")
    assert expected.fingerprint == open_dataset(folder).fingerprint


def test_another_seed_is_another_order_of_the_same_rows(paths, tmp_path):
    one, other = (
        stream_extreme(paths[0], tmp_path / str(seed), name="small", seed=seed).parts["train"]
        for seed in (0, 1)
    )
    assert not np.array_equal(one.features.ids, other.features.ids)
    assert np.array_equal(np.sort(one.features.values), np.sort(other.features.values))


def packed(path, kind):
    text = path.read_bytes()
    if kind == ".zip":
        with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
            archive.writestr("train.txt", text)
        return path.with_suffix(".zip") / "train.txt"
    packed_path = path.with_name(path.name + kind)
    packed_path.write_bytes({".gz": gzip, ".xz": lzma}[kind].compress(text))
    return packed_path


@pytest.mark.parametrize("kind", [".gz", ".xz", ".zip"])
def test_compressed_texts_give_the_same(paths, tmp_path, small_pieces, kind):
    stream_extreme(paths[0], tmp_path / "plain", name="small")
    calls = []
    stream_extreme(
        packed(paths[0], kind), tmp_path / "out", name="small",
        progress_fn=lambda *call: calls.append(call),
    )  # fmt: skip
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "plain")
    assert all(total is None or done <= total for _, done, total in calls)


def test_line_ends_of_windows_give_the_same(paths, tmp_path, small_pieces):
    other = tmp_path / "windows.txt"
    other.write_text(text_of(400, line_end="\r\n"), newline="")
    stream_extreme(paths[0], tmp_path / "one", name="small")
    stream_extreme(other, tmp_path / "other", name="small")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "other")


def test_long_lines_need_no_more_than_themselves(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    features = " ".join(f"{i % 50}:1" for i in range(5000))
    path.write_text(f"3 50 20\n1 {features}\n2 0:1\n3 {features}\n")
    dataset = stream_extreme(
        path, tmp_path / "out", name="long", validation_fraction=0,
        memory_bytes=small_memory(monkeypatch, 4_000),
    )  # fmt: skip
    assert sorted(dataset.parts["train"].features.lengths()) == [1, 5000, 5000]


# --- keys ---------------------------------------------------------------------------------------


def test_keys_are_splitmix64_and_all_different():
    def one(number):  # as published, for the seed 0
        state = number * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    keys = keys_of(np.arange(1000, dtype=np.uint64), 0)
    assert keys.tolist() == [one(number) for number in range(1, 1001)]
    for seed in (1, 2, 2**63):
        assert len(np.unique(keys_of(np.arange(100_000, dtype=np.uint64), seed))) == 100_000


def test_shards_are_ranges_of_keys_of_equal_size():
    keys = keys_of(np.arange(70_000, dtype=np.uint64), 3)
    shards = shards_of(keys, 7)
    assert (np.diff(shards[np.argsort(keys)]) >= 0).all()
    counts = np.bincount(shards, minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-square of 6, p = 0.001


def test_every_order_of_four_rows_is_as_frequent_as_any_other():
    orders = [
        tuple(np.argsort(keys_of(np.arange(4, dtype=np.uint64), seed))) for seed in range(24_000)
    ]
    counts = np.array(list({order: orders.count(order) for order in set(orders)}.values()))
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7  # chi-square of 23, p = 0.001


# --- killed -------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def test_killed_anywhere_it_goes_on_and_ends_with_the_same_bytes(
    paths, tmp_path, monkeypatch, small_pieces
):
    """Before and after every write that it makes, one after the other."""
    memory = small_memory(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process needs none

    def convert(folder):
        stream_extreme(paths[0], folder, name="small", test_path=paths[1], memory_bytes=memory)

    convert(tmp_path / "whole")
    expected = bytes_of(tmp_path / "whole")
    left = [10**9]

    def mortal(function):
        def called(*arguments, **settings):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            result = function(*arguments, **settings)
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return result

        return called

    monkeypatch.setattr(Pending, "write", mortal(Pending.write))
    array_file = streaming_module._ArrayFile
    monkeypatch.setattr(array_file, "write", mortal(array_file.write))
    for name in ("write_journal", "write_manifest", "sync", "open_shard"):
        monkeypatch.setattr(streaming_module, name, mortal(getattr(streaming_module, name)))
    for module, name in ((os, "rename"), (streaming_module.shutil, "rmtree")):
        monkeypatch.setattr(module, name, mortal(getattr(module, name)))
    count, num_killed, folder = 1, 0, tmp_path / "out"
    while True:
        left[0] = count
        try:
            convert(folder)
            break
        except Killed:
            num_killed += 1
        left[0] = count + 11  # and once more, a little later
        try:
            convert(folder)
        except Killed:
            left[0] = 10**9
            convert(folder)
        assert bytes_of(folder) == expected
        assert not list(tmp_path.glob(".out*"))
        left[0] = 10**9
        streaming_module.shutil.rmtree(folder)
        count += 1 + count // 6
    assert num_killed > 20


def test_a_process_that_is_killed_goes_on(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(text_of(8_000))
    code = (
        "import sys, pathlib; from evenhand.data import streaming\n"
        "streaming.JOURNAL_BYTES = 2**16\n"
        "streaming.stream_extreme(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]),\n"
        "    name='small', memory_bytes=2**20)"
    )
    command = [sys.executable, "-c", code, str(path)]
    stream_extreme(path, tmp_path / "whole", name="small")
    process = subprocess.Popen([*command, str(tmp_path / "out")])
    journal = tmp_path / ".out.streaming" / "journal.json"
    deadline = time.monotonic() + 60
    while not journal.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    subprocess.run([*command, str(tmp_path / "out")], check=True, timeout=120)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_conversion_and_feed_hold_far_less_than_the_data(tmp_path):
    code = """
import sys, threading, pathlib, numpy as np, torch
from evenhand.data.streaming import stream_extreme
from evenhand.training.feed import PairFeed

def anonymous():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def use(path, folder):
    data = stream_extreme(path, folder, name="x", memory_bytes=2**22, validation_fraction=0)
    assert data.label_counts().sum() > 0
    feed = PairFeed(data.parts["train"], batch_size=256, masks_all_positives=True,
                    generator=torch.Generator(), device=torch.device("cpu"))
    for _ in range(200):
        feed.next_batch()
    feed.close()
    return data

small, large, out = map(pathlib.Path, sys.argv[1:])
use(small, out / "small")  # what is compiled and loaded on the way
before, peak, is_over = anonymous(), [0], threading.Event()
def look():
    while not is_over.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=look)
thread.start()
data = use(large, out / "large")
is_over.set()
thread.join()
print(peak[0] - before, sum(path.stat().st_size for path in (out / "large").iterdir()))
"""
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_text(text_of(2000))
    body = text_of(5_000, seed=3).split("\n", 1)[1]
    with open(large, "w") as file:
        file.write(f"{5_000 * 240} {NUM_FEATURES} {NUM_LABELS}\n")
        for _ in range(240):
            file.write(body)
    command = [sys.executable, "-c", code, str(small), str(large), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    growth, size = map(int, answer.stdout.split())
    assert size > 60e6
    assert growth < size / 2, f"{growth / 1e6:.0f} MB held of {size / 1e6:.0f} MB"


# --- bad input ----------------------------------------------------------------------------------


def refused(match, *arguments, **settings):
    with pytest.raises(UserError, match=match):
        stream_extreme(*arguments, name="small", **settings)


def test_what_cannot_be_converted_is_refused_in_a_sentence(paths, tmp_path):
    out = tmp_path / "out"
    refused("does not exist", tmp_path / "none.txt", out)
    refused("memory must be at least", paths[0], out, memory_bytes=1)
    refused("validation_fraction", paths[0], out, validation_fraction=1.0)
    other = tmp_path / "other.txt"
    for text, match in (
        ("", "is empty"),
        ("2 5 5\n1 0:1\n", "header promises 2"),
        ("1 5 5\n1 0:1\n2 0:1\n", "one document more"),
        ("1 5 5\n1 0:nan\n", "not a finite"),
        ("1 5 5\n9 0:1\n", "label id '9'"),
        ("no header\n", "is not a header"),
    ):
        other.write_text(text)
        refused(match, other, out / match.split()[0])
    other.write_text("1 5 5\n1 0:1\n")
    refused("that of .* says", paths[0], tmp_path / "out2", test_path=other)
    tmp_path.joinpath("there").mkdir()
    refused("exists already", paths[0], tmp_path / "there")


def test_all_rows_for_validation_leave_nothing_to_train_on(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("1 5 5\n1 0:1\n")  # block 0 is on the side of validation below 0.9
    refused("no row is left", path, tmp_path / "out", validation_fraction=0.9)


def test_a_changed_file_and_other_settings_are_refused(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming_module, "write_manifest", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream_extreme(paths[0], tmp_path / "out", name="small")
    monkeypatch.undo()
    refused("was begun with seed = 0, and now it is 1", paths[0], tmp_path / "out", seed=1)
    journal = tmp_path / ".out.streaming" / "journal.json"
    saved = json.loads(journal.read_text())
    saved["sources"]["train"]["is_read"] = False
    journal.write_text(json.dumps(saved))
    paths[0].write_text(text_of(401))
    refused("has changed", paths[0], tmp_path / "out")
    journal.write_text('{"settings": {}}')
    refused("is damaged", paths[0], tmp_path / "out")


def test_two_processes_do_not_write_one_data_set(paths, tmp_path):
    with locked(tmp_path / ".out.streaming"):
        refused("is in use by process", paths[0], tmp_path / "out")


@pytest.mark.parametrize("found", ["7", 1.5, -1, True, None])
def test_an_odd_number_of_pairs_in_a_block_is_refused(paths, tmp_path, found):
    out = tmp_path / "out"
    stream_extreme(paths[0], out, name="small")
    path = out / "dataset.json"
    about = json.loads(path.read_text())
    about["streamed"]["block_pairs"]["train"] = found
    path.write_text(json.dumps(about))
    with pytest.raises(UserError, match="block_pairs of train must be a whole number from 0"):
        open_dataset(out)


def test_a_changed_byte_is_found_by_its_checksum(paths, tmp_path, capsys):
    out = tmp_path / "out"
    stream_extreme(paths[0], out, name="small")
    assert check_manifest(out) == 11
    assert main(["data", "check", str(out)]) == 0
    path = out / "train.features.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train\.features\.values\.npy is damaged"):
        check_manifest(out)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match="bytes and had"):
        check_manifest(out)
    path.unlink()
    assert main(["data", "check", str(out)]) == 2
    assert "is missing" in capsys.readouterr().err


# --- the whole way ------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["as-is", "tf-idf"])
def test_a_streamed_data_set_is_trained_on_and_resumed(paths, tmp_path, capsys, weighting):
    train, test = map(str, paths)
    out = str(tmp_path / "data")
    command = ["data", "stream", "--train", train, "--test", test, "--out", out, "--memory", "64"]
    assert main(command) == 0
    assert "train on it with" in capsys.readouterr().out
    settings = ["--set", "model.embedding_dim=8", "--set", "mining.batch_size=16", "--set",
                "mining.num_sampled_labels=10", "--hard-labels", "5", "--hard-examples", "4",
                "--set", "training.evaluate_every=5", "--device", "cpu",
                "--set", f'data.weighting="{weighting}"']  # fmt: skip
    run = str(tmp_path / "run")
    assert main(["train", "--data", out, "--run", run, "--steps", "10", *settings]) == 0
    assert main(["train", "--data", out, "--run", run + "2", "--steps", "10", *settings]) == 0
    weights = [small.weights_file(Path(r)) for r in (run, run + "2")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_what_needs_all_rows_is_refused_for_data_in_blocks(paths, tmp_path, capsys):
    out = str(tmp_path / "data")
    stream_extreme(paths[0], Path(out), name="small")
    for setting in (
        "search.num_neighbours=3",
        "ranker.num_mined_labels=3",
        "mining.whole_queries=true",
    ):
        run = str(tmp_path / "run")
        sizes = ["--set", "mining.batch_size=16", "--set", "mining.num_sampled_labels=10"]
        sizes += ["--hard-labels", "5", "--hard-examples", "4"]
        assert main(["train", "--data", out, "--run", run, "--set", setting, *sizes]) == 2
        assert "is read in blocks" in capsys.readouterr().err
