"""Conversion in bounded memory: the rows of `load_extreme`, by random keys, or nothing."""

import gzip
import json
import lzma
import zipfile
from unittest.mock import Mock

import numpy as np
import pytest

import small
from evenhand.cli import main
from evenhand.data import load_extreme, open_dataset, stream, take_rows
from evenhand.data.splits import split_by_hash
from evenhand.data.stream import choose_shards, row_keys, stream_extreme
from evenhand.data.text_io import read_blocks
from evenhand.errors import UserError
from evenhand.files import locked_file
from small import bytes_of

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


def assert_rows_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks of text, and no least memory."""
    monkeypatch.setattr(stream, "LEAST_MEMORY", 1)
    monkeypatch.setattr(read_blocks, "__kwdefaults__", {"block_bytes": 700})


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
    shares = {"test_fraction": 0, "validation_fraction": fraction}
    row_ids = np.flatnonzero(split_by_hash([str(r // block) for r in range(400)], **shares) == 0)
    order = np.argsort(row_keys(row_ids, 5))
    part, whole = actual.parts["train"], expected.parts["train"]
    assert_rows_equal(part.features, take_rows(whole.features, order))
    assert_rows_equal(part.positives, take_rows(whole.positives, order))
    assert part.block_pairs > 0
    other = stream_extreme(train, tmp_path / "other", name="small", seed=6, **settings)
    assert not np.array_equal(other.parts["train"].features.ids, part.features.ids)
    assert np.array_equal(actual.label_counts(), expected.label_counts())
    assert actual.is_finite
    assert not list(tmp_path.glob(".out*"))


def test_the_bytes_do_not_depend_on_memory_compression_or_line_ends(paths, tmp_path, small_blocks):
    stream_extreme(paths[0], tmp_path / "large", name="small", test_path=paths[1])
    expected = bytes_of(tmp_path / "large")
    text = paths[0].read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("train.txt", text)
    forms = {"a.gz": gzip.compress(text), "a.xz": lzma.compress(text),
             "a.txt": text.replace(b"\n", b"\r\n")}  # fmt: skip
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
    for number, (name, memory) in enumerate(
        [("train.txt", 3_000), ("train.txt", 50_000), ("a.zip/train.txt", 2**20), ("a.gz", 9_000),
         ("a.xz", 2**20), ("a.txt", 2**20)]
    ):  # fmt: skip
        calls, folder = [], tmp_path / str(number)
        stream_extreme(
            tmp_path / name, folder, name="small", test_path=paths[1], memory_bytes=memory,
            progress_fn=lambda *call, calls=calls: calls.append(call),
        )  # fmt: skip
        assert bytes_of(folder) == expected
        assert all(total is None or done <= total for _, done, total in calls)


def test_keys_are_splitmix64_and_shards_ranges_of_them_of_equal_size():
    def one(number):  # as published, for the seed 0
        state = number * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    assert row_keys(np.arange(1000), 0).tolist() == [one(number) for number in range(1, 1001)]
    for seed in (1, 2, 2**63):
        assert len(np.unique(row_keys(np.arange(100_000), seed))) == 100_000
    keys = row_keys(np.arange(70_000), 3)
    shards = choose_shards(keys, 7)
    assert (np.diff(shards[np.argsort(keys)]) >= 0).all()
    counts = np.bincount(shards, minlength=7)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-square of 6, p = 0.001


def test_what_cannot_be_converted_is_refused_in_a_sentence_and_leaves_nothing(
    paths, tmp_path, monkeypatch
):
    def assert_refused(match, *arguments, **settings):
        with pytest.raises(UserError, match=match):
            stream_extreme(*arguments, name="small", **settings)
        assert not list(tmp_path.glob("*out*"))

    out, other = tmp_path / "out", tmp_path / "other.txt"
    assert_refused("does not exist", tmp_path / "none.txt", out)
    assert_refused("memory must be at least", paths[0], out, memory_bytes=1)
    assert_refused("validation_fraction", paths[0], out, validation_fraction=1.0)
    for text, match in (  # the parsers are tested by themselves
        ("", "is empty"),
        ("2 5 5\n1 0:1\n", "header promises 2"),
        ("1 5 5\n1 0:1\n2 0:1\n", "one document more"),
        ("1 5 5\n9 0:1\n", "label id '9'"),
        ("1 5 99999999\n9 0:1\n", "promises 99999999 labels"),
    ):
        other.write_text(text)
        assert_refused(match, other, out)
    other.write_text("1 5 5\n1 0:1\n")
    assert_refused("that of .* says", paths[0], out, test_path=other)
    # Block 0 is on the side of validation below 0.9.
    assert_refused("no row is left", other, out, validation_fraction=0.9)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", Mock(side_effect=OSError(28, "No space left on device")))
        assert_refused("No space left", paths[0], out)
    with locked_file(tmp_path / ".there.lock", tmp_path / "there"):
        assert_refused("is in use by process", paths[0], tmp_path / "there")
    (tmp_path / "there").mkdir()
    assert_refused("exists already", paths[0], tmp_path / "there")


def test_a_changed_byte_is_found_by_the_fingerprint(paths, tmp_path, capsys):
    out = tmp_path / "out"
    stream_extreme(paths[0], out, name="small")
    path = out / "train.features.values.npy"
    content = path.read_bytes()
    for changed, words in (
        (content, ""),
        (content[:-1] + bytes([content[-1] ^ 1]), "does not match the fingerprint"),
        (content[:-1], "train.features.values.npy is missing or damaged"),
        (None, "train.features.values.npy is missing or damaged"),
    ):
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        assert main(["data", "check", str(out)]) == (2 if words else 0)
        assert words in capsys.readouterr().err
    path.write_bytes(content)
    about = json.loads((out / "dataset.json").read_text())
    for found in ("7", 1.5, -1, True, None):
        about["streamed"]["block_pairs"]["train"] = found
        (out / "dataset.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match="block_pairs of train must be a whole number from 0"):
            open_dataset(out)


SETTINGS = [
    "--device", "cpu", "--steps", "10", "--hard-labels", "5", "--hard-examples", "4",
    "--set", "model.embedding_dim=8", "--set", "mining.batch_size=16",
    "--set", "mining.num_sampled_labels=10", "--set", "training.evaluate_every=5",
]  # fmt: skip


def test_a_streamed_data_set_is_trained_on_and_what_needs_all_rows_refused(paths, tmp_path, capsys):
    train, test = map(str, paths)
    out, run = str(tmp_path / "data"), str(tmp_path / "run")
    command = ["data", "stream", "--train", train, "--test", test, "--out", out, "--memory", "64"]
    assert main(command) == 0
    assert "train on it with" in capsys.readouterr().out
    for setting in (
        "search.num_neighbours=3", "ranker.num_mined_labels=3", "mining.whole_queries=true",
    ):  # fmt: skip
        assert main(["train", "--data", out, "--run", run, *SETTINGS, "--set", setting]) == 2
        assert "is read in blocks" in capsys.readouterr().err
    for weighting in ("as-is", "tf-idf"):
        runs = [tmp_path / f"{weighting}-{number}" for number in (1, 2)]
        for name in map(str, runs):
            words = [*SETTINGS, "--set", f'data.weighting="{weighting}"']
            assert main(["train", "--data", out, "--run", name, *words]) == 0
        weights = [small.weights_file(name).read_bytes() for name in runs]
        assert weights[0] == weights[1]
