"""Targets that read text: Extreme Classification files and their lists, tables, names, n-grams."""

import functools
import io
import lzma
import zipfile
from bz2 import compress as bzip2
from gzip import compress as gzip

import numpy as np

from evenhand.data import Strings, extreme, memberships, table
from evenhand.data.text import NgramFeaturizer, normalize, script_of
from evenhand.data.text_files import read_blocks, read_lines
from evenhand.evaluation import group_columns

from . import twins
from .target import Target, agree, answer, in_memory, patched, require, written

FEATURIZER = NgramFeaturizer(num_buckets=1000)


def _read_extreme(data: bytes) -> Exception | None:
    path = in_memory("x.txt", data)
    block_bytes = 1 + len(data) % 61 if len(data) % 2 else 2**19  # rows must not depend on it
    blocks = functools.partial(read_blocks, block_bytes=block_bytes)
    with patched(extreme, read_blocks=blocks):
        read, refusal = answer(lambda: extreme.read_extreme(path))
    found = None
    if refusal is None:
        for rows in (read.features, read.positives):
            require(rows.offsets[0] == 0 and rows.offsets[-1] == len(rows.ids), "offsets")
        bounds = [list(zip(r.offsets, r.offsets[1:], strict=False)) for r in read[:2]]
        rows = [
            (
                read.positives.ids[i:j].tolist(),
                read.features.ids[k:m].tolist(),
                read.features.values[k:m].tolist(),
            )
            for (k, m), (i, j) in zip(*bounds, strict=True)
        ]
        found = [read.num_features, read.num_labels, rows]
    agree(found, twins.extreme(data), refusal)
    header, header_refusal = answer(lambda: extreme.read_header(path))
    if refusal is None:
        require(header_refusal is None and header[1:] == read[2:4], "another header")
    return refusal


EXTREME = Target(
    "extreme",
    _read_extreme,
    (
        b"2 10 4\n1,3 0:0.5 9:1.25\n 2:1e-3\n",
        b"\xef\xbb\xbf3 5 3\r\n0 0:1\r\n2,0 1:-2.5 1:.5\r\n \r\n",
        b"1 2147483647 2147483647\n2147483646 2147483646:3.4e38",
        b"4 40 7\n6,6,5 0:1 1:2 3:4 \n0\n  7:7e7 8:+8.5E-2  9:00.10\n3 39:123456789012345678\n",
    ),
    (
        b"0:1", b" 1:2.5", b",3", b"1,2", b":", b"1e-45", b"1e-46", b"1.17549435e-38", b"nan",
        b"e5",
        b"16777217.0000000001", b"0.1e1", b"9" * 25, b"-.5e+1", b"+", b" \n", b"1e280", b"1e-281",
        b"340282356779733661637539395458142568447", b"340282356779733661637539395458142568448",
        b",".join(b"%d" % (n % 5) for n in range(1100)),
    ),
)  # fmt: skip


def _read_split(data: bytes) -> Exception | None:
    train, _, test = data.partition(b"|")
    paths = in_memory("train.lst", train), in_memory("test.lst", test)
    read, refusal = answer(lambda: extreme._read_split(*paths, 7))
    found = None if refusal else [rows.tolist() for rows in read]
    agree(found, twins.split_rows(train, test, 7), refusal)
    return refusal


SPLIT_LISTS = Target(
    "split-lists",
    _read_split,
    (b"1\n2\n7\n|3\n4\n", b"0 5 5\n1 2\n|6\t1\n", b"\xef\xbb\xbf5\r\n6\r\n|1\r\n2"),
    (b"|", b"7", b"8", b"0", b" 1", b"\xd9\xa3"),
)


def _read_groups(data: bytes) -> Exception | None:
    read, refusal = answer(lambda: extreme._read_groups(in_memory("groups.tsv", data), 3))
    agree(read, twins.group_values(data, 3), refusal)
    return refusal


GROUP_FILES = Target(
    "group-files",
    _read_groups,
    (b"1\ta\n2\tb\n3\t\n", b"id\tcountry\tscript\n1\tDE\tLATIN\n2\t\tTHAI\n3\tAT\t\n"),
    (b"\t", b"id\t", b"ID\tid\t", b"\n\n", b"country"),
)


def _read_names(data: bytes) -> Exception | None:
    expected = twins.unicode_lines(data)
    num_labels = 3 if expected is None else len(expected)
    read, refusal = answer(
        lambda: extreme.read_label_names(in_memory("names.txt", data), num_labels)
    )
    agree(None if refusal else list(read), expected, refusal)
    return refusal


NAMES = Target(
    "label-names",
    _read_names,
    (b"a\nb\nc\n", "\ufeffWien\r\nウィーン\r\n".encode(), b"\n\n"),
    (b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\xc0\x80"),
)

CSV_COLUMNS = ["query", "label", "country"]


def _read_table(data: bytes) -> Exception | None:
    delimiter = "\t" if data[:1] == b"\t" else ","
    data = data.removeprefix(b"\t")
    path = in_memory("t.tsv" if delimiter == "\t" else "t.csv", data)
    records, refusal = answer(lambda: list(table.read_records(path, CSV_COLUMNS)))
    expected = _expected_records(twins.table(data, delimiter))
    agree(None if refusal else [list(r) for r in records], expected, refusal)
    if refusal is not None:
        return refusal
    read, refusal = answer(lambda: table.load_table(path, group_columns=["country"]))
    if refusal is None:
        _check_table(read, records)
    return refusal


def _expected_records(rows: list[list[str]] | None) -> list | None:
    if not rows:
        return None
    names = [name.strip() for name in rows[0]]
    if any(names.count(column) != 1 for column in CSV_COLUMNS):
        return None
    records = []
    for row in rows[1:]:
        if len(row) != len(names):
            return None
        cells = dict(zip(names, (" ".join(cell.split()) for cell in row), strict=True))
        if not normalize(cells["query"]) or not cells["label"]:
            return None
        records.append([normalize(cells["query"]), cells["label"], (cells["country"],)])
    return records


def _check_table(read, records) -> None:
    """Every pair is in exactly one part, and in every group that a line of it names."""
    part_pairs = {
        name: [
            (text, read.label_names[label])
            for row, text in enumerate(part.texts)
            for label in part.positives.row(row)
        ]
        for name, part in read.parts.items()
    }
    pairs = [pair for of_part in part_pairs.values() for pair in of_part]
    wanted = {(record.query, record.label) for record in records}
    require(len(pairs) == len(wanted) and set(pairs) == wanted, f"pairs {pairs}")
    found = []
    for name in read.parts:
        columns = {column.name: column for column in group_columns(read, name)}
        groups = columns["country"].groups
        found += [
            (part_pairs[name][pair], groups.names[group])
            for pair, group in zip(*memberships(groups), strict=True)
        ]
    named = {((r.query, r.label), r.groups[0]) for r in records if r.groups[0]}
    require(len(found) == len(named) and set(found) == named, f"groups {found}")


TABLE = Target(
    "table",
    _read_table,
    (
        b"query,label,country\nlaptop sleeve 13,Laptop bags,DE\nlaptop,Laptop bags,\nbag,b,AT\n",
        b"query,label,country\nbag,b,AT\nbag,b,DE\nbag,c,DE\nbag,b,AT\nsack,b,\n",
        b'query,label,country\n"a, b","c ""d""",x\n\ne,"f\ng",\n',
        b"\tlabel\tquery\tcountry\tmore\na\tb\t\tc\nd\te\tf\tg\nh\ti\t\t\n",
        "query,label,country\r\n名,ラベル,JP\r\nﬁ,É,FR\r\n".encode(),
    ),
    (b'"', b'""', b',"', b'",', b"query", b"label,", b"\xcc\x81", b"\xc2\xa0", b"\xe1\xba\x9e"),
)


def _featurize(data: bytes) -> Exception | None:
    texts = data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace").split("\n")
    rows = FEATURIZER.featurize(texts)
    require(len(rows) == len(texts) and rows.offsets[-1] == len(rows.ids), "offsets")
    for row, text in enumerate(texts):
        script_of(text)
        expected = twins.ngram_buckets(
            normalize(text), min_length=1, max_length=4, num_buckets=1000
        )
        require(rows.row(row).tolist() == expected, f"buckets of {text!r}")
    packed = Strings.pack([text.encode("utf-8", "replace").decode() for text in texts])
    require(len(packed) == len(texts) and packed.offsets.dtype == np.int64, "packed strings")
    return None


def _any_bytes(check_fn):
    """Bytes that are no text are refused before they come so far."""

    def check(data: bytes) -> Exception | None:
        try:
            return check_fn(data)
        except UnicodeDecodeError as error:
            return error

    return check


NGRAMS = Target(
    "ngrams",
    _any_bytes(_featurize),
    (b"Wien\nVienna\n", "ウィーン\nᾳ ŉ ﬃ\n".encode(), b"\x02\x03 \x01", b""),
    (b"\xcc\x81", b"\xcc\xb4", b"\xed\xa0\x80", b"\xef\xb7\xba", b"\xc4\xb0", b"\x02", b"\x03"),
)

# --- compressed -----------------------------------------------------------------------------------

TEXT = b"".join(b"%d %d:%d\n" % (n, n, n * n) for n in range(40))
ENDINGS = (".gz", ".bz2", ".xz", ".zip/a/b.txt")


def _zipped(data: bytes, kind: int, name: str = "a/b.txt") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr(zipfile.ZipInfo(name), data, kind)
        archive.writestr(zipfile.ZipInfo("other"), b"x")
    return file.getvalue()


COMPRESSED = (
    b"0" + gzip(TEXT, mtime=0),
    b"1" + bzip2(TEXT),
    b"2" + lzma.compress(TEXT),
    *(
        b"3" + _zipped(TEXT, kind)
        for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    ),
)


def _read_compressed(data: bytes) -> Exception | None:
    ending = ENDINGS[int(data[:1]) if data[:1] in (b"0", b"1", b"2", b"3") else 0]
    archive, _, member = ending.partition("/")
    path = written(f"c{archive}", data[1:])
    read, refusal = answer(lambda: list(read_lines(path / member if member else path)))
    if refusal is None:
        require(all(isinstance(line, str) for line in read), "lines")
        is_cut = any(data != seed and seed.startswith(data) for seed in COMPRESSED)
        require(not is_cut or len(data) < 2 or ending == ".gz", "an archive cut short was read")
    return refusal


COMPRESSED_TEXT = Target("compressed", _read_compressed, COMPRESSED, (b"PK\x05\x06", b"PK\x01\x02"))


TARGETS = (
    EXTREME, SPLIT_LISTS, GROUP_FILES, NAMES, TABLE, NGRAMS, COMPRESSED_TEXT,
)  # fmt: skip
