"""The Extreme Classification format: what is read, how fast and careful agree, what is refused."""

import bz2
import gzip
import hashlib
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data import count_unseen_labels, load_extreme, read_extreme
from evenhand.data.csr import collect_rows
from evenhand.data.extreme import Documents, Header, parse_block, parse_line
from evenhand.data.text_io import read_blocks
from evenhand.errors import UserError
from fuzz.inputs import inputs_of
from fuzz.registry import TARGETS

SMALL = "3 5 4\n0,2 1:0.5 4:1\n 0:2\n3\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
HEADER = Header(num_rows=10**6, num_features=1000, num_labels=100)


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rows_as_lists(rows):
    return [rows.row(index).tolist() for index in range(len(rows))]


def as_lists(documents: Documents):
    return [array.tolist() for array in (*documents.positives[:2], *documents.features)]


def careful(text: bytes) -> Documents:
    """A block of lines, each by `parse_line`."""
    lines = enumerate(text[:-1].split(b"\n"), start=2)
    parsed = [parse_line(line, HEADER, where=f"a.txt, line {number}") for number, line in lines]
    return Documents(*map(collect_rows, zip(*parsed, strict=True)))


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_extreme(path)
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_file_is_read_plain_or_compressed(tmp_path, ending):
    path = written(tmp_path / f"a.txt{ending}", COMPRESS[ending](SMALL.encode()))
    header, (positives, features) = read_extreme(path)
    assert rows_as_lists(positives) == [[0, 2], [], [3]]
    assert rows_as_lists(features) == [[1, 4], [0], []]
    assert features.values.tolist() == [0.5, 1.0, 2.0]
    assert features.values.dtype == np.float32
    assert header == (3, 5, 4)


@pytest.mark.parametrize("block_bytes", [1, 7, 50, 10**6])
def test_blocks_of_any_size_are_read_as_one(tmp_path, monkeypatch, block_bytes):
    """The arrays grow many times; every row is where it belongs, and a wrong line has its number.

    Line ends, byte order marks and labels named twice: tests/fuzz/text_targets.py.
    """
    monkeypatch.setattr(read_blocks, "__kwdefaults__", {"block_bytes": block_bytes})
    generator = np.random.default_rng(0)
    lists = [generator.integers(0, 999, size).tolist() for size in generator.integers(0, 9, 400)]
    lines = [f"{row % 4} " + " ".join(f"{i}:{i}.5" for i in ids) for row, ids in enumerate(lists)]
    calls = []
    path = written(tmp_path / "a.txt", "\n".join(["400 999 4", *lines]))
    _, (positives, features) = read_extreme(path, progress_fn=lambda *call: calls.append(call))
    assert calls[-1] == ("reading a.txt", *[path.stat().st_size] * 2)
    assert rows_as_lists(features) == lists
    assert features.values.tolist() == [i + 0.5 for ids in lists for i in ids]
    assert rows_as_lists(positives) == [[row % 4] for row in range(400)]
    lines[15:17] = "0 1:1e-400", "0 1:x"
    assert_refused(written(path, "\n".join(["400 999 4", *lines])), "line 18:", "value 'x'")
    monkeypatch.setattr("evenhand.data.text_io.MAX_LINE_BYTES", 1000)
    assert_refused(written(path, "1 5 4\n" + "1" * 5000), "line 2", "longer than")


# --- the two parsers ----------------------------------------------------------------------------

odd_lines = [
    b"0000000000000000000007 1:0000000000000000000000000000000001", b"10000000000000007 1:1",
    b"1 ,2", b"1:1", b"1 2:.", b"1 2:1.2.3", b",1 2:1", b"1, 2:1", b"1 :1", b"1 -2:1", b"1 2:1_0",
    b"1 2:0x1", b"",
]  # fmt: skip


@given(inputs_of(TARGETS["extreme"]) | st.sampled_from(odd_lines).map(b"header\n".__add__))
def test_on_damaged_text_the_fast_parser_gives_up_or_agrees_with_the_careful_one(damaged):
    """What both must read is the twin's in tests/fuzz/text_targets.py."""
    text = damaged.partition(b"\n")[2].removesuffix(b"\n") + b"\n"
    block = parse_block(text, HEADER)
    try:
        expected = careful(text)
    except UserError as error:
        expected, message = None, str(error)
    if expected is None:
        assert block is None
        assert re.fullmatch("a.txt, line [0-9]+: [^\n]+", message)
    else:
        assert block is None or as_lists(block) == as_lists(expected)


def test_values_beside_the_middle_of_two_32_bit_numbers_are_rounded_as_python_rounds_them():
    generator = np.random.default_rng(0)
    bits = generator.integers(0x00800000, 0x7F000000, 500, dtype=np.uint32)
    lower = bits.view(np.float32).astype(np.float64)
    middles = (lower + (bits + 1).view(np.float32)) / 2  # exact in 64 bits
    beside = [middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)]
    for form in ("%.17e", "%.16e", "%.15e", "%.25e"):
        texts = [form % value for values in beside for value in values]
        lines = "".join(f"1 2:{text}\n" for text in texts).encode()
        expected = np.array([float(text) for text in texts]).astype(np.float32)
        assert np.array_equal(parse_block(lines, HEADER).features.values, expected)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"0 1:1 2", ["'2'", "id:value"]),
        (b"0,x 1:1", ["label id 'x'", "0 to 3"]),
        (b"4 1:1", ["label id '4'", "0 to 3", "third number of the header"]),
        (b"-1 1:1", ["label id '-1'"]),
        (b"0, 1:1", ["label id ''"]),
        (b"0 5:1", ["feature id '5'", "0 to 4", "second number of the header"]),
        (b"0 -2:1", ["feature id '-2'"]),
        (b"0 99999999999999999999:1", ["feature id '99999999999999999999'"]),
        (b"0 1:", ["feature value ''", "is not a number"]),
        (b"0 1:nan", ["feature value 'nan'", "not a finite"]),
        (b"0 1:1e39", ["'1e39'", "not a finite"]),
        (b"", ["is empty", "one space"]),
        (b"0 1:1\xc3\xa9", ["is not a number"]),
        (b"\xff\xfe 1:1", ["label id", "is not a whole number"]),
    ],
)
def test_a_wrong_line_is_refused_by_file_line_value_and_remedy(tmp_path, line, words):
    text = b"3 5 4\n0 1:1\n" + line + b"\n0 1:1\n"
    assert_refused(written(tmp_path / "a.txt", text), "line 3", *words)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("3 5", ["line 1", "'3 5'", "documents, features and labels"]),
        ("3 5 -4", ["line 1", "'3 5 -4'"]),
        ("3 0 4", ["line 1", "number of features", "got 0"]),
        ("3 5 2147483648", ["line 1", "number of labels", "got 2147483648"]),
        ("0,2 1:0.5", ["line 1", "is not a header"]),
        ("2 5 4", ["line 4", "one document more than the header's 2"]),
        ("4 5 4", ["line 4", "promises 4", "there are 3"]),
    ],
)
def test_a_header_that_is_malformed_or_lies_is_refused(tmp_path, header, words):
    assert_refused(written(tmp_path / "a.txt", SMALL.replace("3 5 4", header, 1)), *words)


# --- data sets ----------------------------------------------------------------------------------


def numbered(tmp_path, num_rows=200) -> tuple[Path, Path]:
    """A training file whose row i has the one feature i, and a test file with an unseen label."""
    lines = "".join(f"{row % 3} {row}:1\n" for row in range(num_rows))
    train = written(tmp_path / "train.txt", f"{num_rows} {num_rows} 4\n{lines}")
    return train, written(tmp_path / "test.txt", f"2 {num_rows} 4\n0,3 1:1\n3 2:1\n")


@pytest.mark.parametrize("block", [1, 8])
def test_validation_is_taken_from_training_by_the_md5_of_the_number_of_its_block(tmp_path, block):
    paths, settings = numbered(tmp_path), {"name": "a", "validation_block": block}
    parts = load_extreme(*paths, validation_fraction=0.0, **settings).parts
    assert (list(parts), len(parts["train"])) == (["train", "test"], 200)
    dataset = load_extreme(*paths, validation_fraction=0.25, **settings)
    digests = [hashlib.md5(str(row // block).encode()).hexdigest() for row in range(200)]
    expected = [row for row in range(200) if int(digests[row], 16) < 2**128 // 4]
    assert 0 < len(expected) < 200
    assert dataset.parts["validation"].features.ids.tolist() == expected
    assert dataset.parts["train"].features.ids.tolist() == sorted(set(range(200)) - set(expected))
    assert dataset.parts["validation"].positives.ids.tolist() == [row % 3 for row in expected]
    assert list(dataset.parts) == ["train", "validation", "test"]
    assert count_unseen_labels(dataset, "test") == 2  # counted, not fatal


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("test_groups_path", "x\tnet\n", "has 1 lines for 2 documents"),
        ("test_groups_path", "x\tnet\ny\tweb\nz\tweb\n", "has 3 lines for 2 documents"),
        ("test_groups_path", "x\tnet\ny web\n", "line 2: has 1 cells, expected 2"),
        ("test_groups_path", "x\ta\tb\ny\tc\td\n", "line 1: has 3 cells.* need a first line"),
        ("label_names_path", "a\nb\n", "has 2 lines for 4 labels; give one name"),
        ("label_names_path", b"a\n\xe7\nc\nd\n", "line 2: .* is not UTF-8"),
        ("test_path", "1 200 5\n4 1:1\n", "line 1: the header says 5 labels.* says 4"),
        ("validation_block", 0, "must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_the_training_file_is_refused(tmp_path, kind, text, message):
    train, test = numbered(tmp_path)
    given = text if kind == "validation_block" else written(tmp_path / f"{kind}.txt", text)
    with pytest.raises(UserError, match=f"{kind}.*{message}"):
        load_extreme(train, **{"test_path": test, "name": "a", kind: given})
