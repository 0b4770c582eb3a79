"""Targets that read text: Extreme Classification files and their lists, tables, names.

What compiled code reads, a slow and obvious twin reads here too, written from the format.
"""

import functools
import io
import lzma
import zipfile
from bz2 import compress as bzip2
from gzip import compress as gzip
from unittest.mock import patch

import numpy as np

from evenhand.data import extreme, table
from evenhand.data.text import normalize
from evenhand.data.text_io import read_blocks, read_lines

from .target import answer, require, target, write

LARGEST = float(np.finfo(np.float32).max)

# --- the Extreme Classification format ------------------------------------------------------------


@target(
    "extreme",
    b"2 10 4\n1,3 0:0.5 9:1.25\n 2:1e-3\n",
    b"\xef\xbb\xbf3 5 3\r\n0 0:1\r\n2,0 1:-2.5 1:.5\r\n \r\n",
    b"1 2147483647 2147483647\n2147483646 2147483646:3.4e38",
    b"4 40 7\n6,6,5 0:1 1:2 3:4 \n0\n  7:7e7 8:+8.5E-2  9:00.10\n3 39:123456789012345678\n",
    b"1 2 997\n" + b",".join(b"%d" % (n * n % 997) for n in range(1100)) + b" 0:1\n",
    b"\xef\xbb\xbf1 5 3\r\n0,2,0 0:1\r",
)
def read_extreme(data: bytes) -> Exception | None:
    path = write("x.txt", data)
    block_bytes = 1 + len(data) % 61 if len(data) % 2 else 2**19  # rows must not depend on it
    blocks = functools.partial(read_blocks, block_bytes=block_bytes)
    with patch.object(extreme, "read_blocks", blocks):
        read, refusal = answer(lambda: extreme.read_extreme(path))
    expected = _extreme_twin(data)
    if refusal is not None:
        require(expected is None, f"refused ({refusal}), but the twin reads {str(expected)[:200]}")
        return refusal
    header, (positives, features) = read
    rows = [
        (labels.tolist(), ids.tolist(), values.tolist())
        for labels, ids, values in zip(
            np.split(positives.ids, positives.offsets[1:-1]),
            np.split(features.ids, features.offsets[1:-1]),
            np.split(features.values, features.offsets[1:-1]),
            strict=True,
        )
    ]
    found = [header.num_features, header.num_labels, rows]
    require(found == expected, f"read {str(found)[:200]}, the twin {str(expected)[:200]}")
    return None


def _extreme_twin(data: bytes) -> list | None:
    """[num_features, num_labels, [(labels, features, values) of each row]]; None: refused."""
    data = data.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r").replace(b"\r\n", b"\n")
    lines = data.removesuffix(b"\n").split(b"\n")
    first, *numbers = lines[0].rstrip(b" ").split(b" ")
    numbers = [first, *(number for number in numbers if number)]
    if len(numbers) != 3 or not all(_is_whole(number, 18) for number in numbers):
        return None
    num_rows, num_features, num_labels = counts = [int(number) for number in numbers]
    if not all(1 <= count < 2**31 for count in counts) or len(lines) - 1 != num_rows:
        return None
    rows = [_extreme_row(line, num_features, num_labels) for line in lines[1:]]
    return None if None in rows else [num_features, num_labels, rows]


def _extreme_row(line: bytes, num_features: int, num_labels: int) -> tuple | None:
    if line == b"":
        return None
    labels, features, values = [], [], []
    before, _, after = line.partition(b" ")
    for item in before.split(b",") if before else []:
        if not _is_whole(item, 4000) or int(item) >= num_labels:
            return None
        if int(item) not in labels:
            labels.append(int(item))
    for item in filter(None, after.split(b" ")):
        feature, _, value = item.partition(b":")
        if not _is_whole(feature, 4000) or int(feature) >= num_features:
            return None
        try:  # digits, with one dot at most and one exponent at most
            number = float(value) if set(value) <= set(b"0123456789.+-eE") else np.inf
        except ValueError:
            return None
        if abs(number) > LARGEST:
            return None
        features.append(int(feature))
        values.append(float(np.float32(number)))
    return labels, features, values


def _is_whole(text: bytes, most_digits: int) -> bool:
    return 0 < len(text) <= most_digits and set(text) <= set(b"0123456789")


@target("group-files", b"1\ta\n2\tb\n3\t\n", b"id\tcountry\tscript\n1\tDE\tA\n2\t\tB\n3\tAT\t\n")
def read_groups(data: bytes) -> Exception | None:
    read, refusal = answer(lambda: extreme._read_groups(write("groups.tsv", data), 3))
    require(refusal is not None or all(len(values) == 3 for values in read.values()), f"{read}")
    return refusal


@target("label-names", b"a\nb\nc\n", "\ufeffWien\r\nウィーン\r\nc".encode(), b"\n\n\n")
def read_names(data: bytes) -> Exception | None:
    read, refusal = answer(lambda: extreme.read_label_names(write("names.txt", data), 3))
    require(refusal is not None or len(list(read)) == 3, "names")
    return refusal


# --- tables ---------------------------------------------------------------------------------------


@target(
    "table",
    b"query,label,country\nlaptop sleeve 13,Laptop bags,DE\nlaptop,Laptop bags,\nbag,b,AT\n",
    b"query,label,country\nbag,b,AT\nbag,b,DE\nbag,c,DE\nbag,b,AT\nsack,b,\n",
    b'query,label,country\n"a, b","c ""d""",x\n\ne,"f\ng",\n',
    b"\tlabel\tquery\tcountry\tmore\na\tb\t\tc\nd\te\tf\tg\nh\ti\t\t\n",
    "query,label,country\r\n名,ラベル,JP\r\nﬁ,É,FR\r\n".encode(),
)
def read_table(data: bytes) -> Exception | None:
    """Every pair of the lines is in exactly one part, and nothing else is."""
    path = write("t.tsv" if data[:1] == b"\t" else "t.csv", data.removeprefix(b"\t"))
    notes = []
    options = {"groups": ["country"], "skip_missing": True, "note_fn": notes.append}
    read, refusal = answer(lambda: table.load_table(path, **options))
    if refusal is None:
        num_pairs = sum(len(part.positives.ids) for part in read.parts.values())
        require(any(f"different pairs: {num_pairs:,}," in note for note in notes), f"{notes}")
        texts = [text for part in read.parts.values() for text in part.texts]
        require(len(set(texts)) == len(texts), "a query in two parts")
        require(all(text and text == normalize(text) for text in texts), f"{texts}")
    return refusal


# --- compressed -----------------------------------------------------------------------------------

TEXT = b"".join(b"%d %d:%d\n" % (n, n, n * n) for n in range(40))
ENDINGS = (".gz", ".bz2", ".xz", ".zip/a/b.txt")
KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def _zip(kind: int, text: bytes, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), text, kind)
    return file.getvalue()


COMPRESSED = (
    b"0" + gzip(TEXT, mtime=0), b"1" + bzip2(TEXT), b"2" + lzma.compress(TEXT),
    *(b"3" + _zip(kind, TEXT, "a/b.txt", "other") for kind in KINDS),
)  # fmt: skip


@target("compressed", *COMPRESSED)
def read_compressed(data: bytes) -> Exception | None:
    ending = ENDINGS[int(data[:1]) if data[:1] in (b"0", b"1", b"2", b"3") else 0]
    archive, _, member = ending.partition("/")
    path = write(f"c{archive}", data[1:])
    read, refusal = answer(lambda: list(read_lines(path / member if member else path)))
    if refusal is None:
        require(all(isinstance(line, str) for line in read), "lines")
        is_cut = any(data != seed and seed.startswith(data) for seed in COMPRESSED)
        require(not is_cut or len(data) < 2 or ending == ".gz", "an archive cut short was read")
    return refusal
