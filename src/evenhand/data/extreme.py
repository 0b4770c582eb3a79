"""The Extreme Classification text format: documents as sparse features, and their labels.

    3 5 4                   number of documents, of features and of labels
    0,2 1:0.5 4:1           labels 0 and 2, two features
     0:2                    starts with a space: no label

Files may be compressed (.gz, .bz2, .xz) or members of an archive (data.zip/train.txt). A label
named twice in a line counts once; a feature named twice is kept twice, so its values add. A wrong
file is refused, by file and line.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from evenhand.data.csr import (
    MAX_IDS,
    IntArray,
    Rows,
    RowsWriter,
    Strings,
    rows_from_lists,
    take_rows,
)
from evenhand.data.dataset import Dataset, Part, is_borne_out
from evenhand.data.groups import GroupValues, make_shared_groups
from evenhand.data.splits import check_fractions, choose_validation_rows
from evenhand.data.text_io import quote_value, read_blocks, read_lines
from evenhand.errors import UserError
from evenhand.files import ProgressFn

HEADER = re.compile(rb"([0-9]{1,18}) +([0-9]{1,18}) +([0-9]{1,18}) *")
HEADER_BYTES = 64  # more than a header has
COUNTED = "documents, features and labels"
WHOLE_NUMBER = re.compile(rb"[0-9]{1,4000}")
NUMBER = re.compile(
    rb"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE
)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Header(NamedTuple):
    """The first line of a file."""

    num_rows: int
    num_features: int
    num_labels: int


class Documents(NamedTuple):
    """Some documents of a file, or all of them."""

    positives: Rows  # ids are distinct in a row
    features: Rows  # with float32 values


# --- data sets ------------------------------------------------------------------------------------


def load_extreme(
    train_path: Path,
    test_path: Path,
    *,
    name: str,
    label_names_path: Path | None = None,
    train_groups_path: Path | None = None,
    test_groups_path: Path | None = None,
    validation_fraction: float = 0.1,
    validation_block: int = 1,
    progress_fn: ProgressFn | None = None,
) -> Dataset:
    """A data set from two files; the validation part is taken out of the training file.

    Args:
        label_names_path: one name a line, as many as there are labels.
        train_groups_path, test_groups_path: one line a document, tab between the cells: its id,
            then a group. A first line `id<TAB>name<TAB>name ...` names the group columns; without
            it there is one, called `group`. An empty cell belongs to no group.
        validation_fraction: about this share of the training rows, chosen by the md5 of the row
            number, so the same everywhere. 0: no validation part.
        validation_block: so many consecutive rows are on the same side, chosen by the md5 of the
            number of their block. For files that list related documents one after the other: with
            single rows most of the validation part would have a sibling in training.
        progress_fn: called with what is being done, the bytes done and, if known, those in all.
    """
    check_fractions(validation_fraction=validation_fraction, validation_block=validation_block)
    header, train = read_extreme(train_path, progress_fn=progress_fn)
    check_promises(train_path, header, len(train.positives.ids), len(train.features.ids))
    test_header, test = read_extreme(test_path, progress_fn=progress_fn)
    check_same_ids(train_path, header, test_path, test_header)
    groups = make_shared_groups(
        {
            "train": _read_groups(train_groups_path, len(train.positives)),
            "test": _read_groups(test_groups_path, len(test.positives)),
        }
    )
    parts = {"train": Part(train.features, train.positives, groups["train"])}
    is_validation = choose_validation_rows(
        np.arange(header.num_rows), fraction=validation_fraction, block=validation_block
    )
    if is_validation.any() and not is_validation.all():
        whole = parts["train"]
        parts["train"] = _take_part(whole, np.flatnonzero(~is_validation))
        parts["validation"] = _take_part(whole, np.flatnonzero(is_validation))
    parts["test"] = Part(test.features, test.positives, groups["test"])
    label_names = read_label_names(label_names_path, header.num_labels)
    return Dataset(name, header.num_features, header.num_labels, parts, label_names)


def _take_part(part: Part, row_ids: IntArray) -> Part:
    assert isinstance(part.features, Rows)
    groups = {name: group._replace(ids=group.ids[row_ids]) for name, group in part.groups.items()}
    return Part(take_rows(part.features, row_ids), take_rows(part.positives, row_ids), groups)


# --- files ----------------------------------------------------------------------------------------


def read_extreme(path: Path, *, progress_fn: ProgressFn | None = None) -> tuple[Header, Documents]:
    """Reads one file, a block of lines at a time."""
    header = read_header(path)
    writers = RowsWriter(), RowsWriter()
    for block in read_documents(path, header, progress_fn=progress_fn):
        for writer, rows in zip(writers, block, strict=True):
            writer.append(rows)
    return header, Documents(*(writer.finish() for writer in writers))


def read_header(path: Path) -> Header:
    """The numbers of documents, features and labels that a file promises."""
    first = next(read_blocks(path, block_bytes=HEADER_BYTES), None)
    if first is None:
        raise UserError(f"{path} is empty; its first line must be the numbers of {COUNTED}")
    line = first[1].partition(b"\n")[0]
    match = HEADER.fullmatch(line.removeprefix(codecs.BOM_UTF8))
    if match is None:
        raise UserError(
            f"{path}, line 1: {quote_value(line)} is not a header; write the numbers of {COUNTED}, "
            f"as in '4880 1836 159' (a compressed file must end in .gz, .bz2 or .xz)"
        )
    header = Header(*map(int, match.groups()))
    for count, kind in zip(header, ("documents", "features", "labels"), strict=True):
        if not 1 <= count <= MAX_IDS:
            raise UserError(
                f"{path}, line 1: the number of {kind} must be between 1 and {MAX_IDS}, "
                f"got {count}; the order is {COUNTED}"
            )
    return header


def check_promises(path: Path, header: Header, num_pairs: int, num_values: int) -> None:
    """Refuses a header with far more labels or features than the documents name."""
    for kind, num_entries in (("labels", num_pairs), ("features", num_values)):
        count = getattr(header, f"num_{kind}")
        if not is_borne_out(count, num_entries):
            raise UserError(
                f"{path}, line 1: the header promises {count} {kind}, and all documents together "
                f"name at most {num_entries} different ones; mend the header (the order is "
                f"{COUNTED}), or number them anew"
            )


def check_same_ids(train_path: Path, train: Header, test_path: Path, test: Header) -> None:
    """Refuses two files that do not have as many features and labels."""
    for kind in ("features", "labels"):
        counts = [getattr(header, f"num_{kind}") for header in (train, test)]
        if counts[0] != counts[1]:
            raise UserError(
                f"{test_path}, line 1: the header says {counts[1]} {kind}, that of {train_path} "
                f"says {counts[0]}; if their ids mean the same, write the larger number in both"
            )


def read_documents(
    path: Path, header: Header, *, progress_fn: ProgressFn | None = None
) -> Iterator[Documents]:
    """The documents of a file block by block, as many as the header promises."""
    num_rows = 0
    num_bytes = path.stat().st_size if path.is_file() else None  # None: a member of an archive
    for first_line, text, stored_end in read_blocks(path):
        if first_line == 1:
            first_line, text = 2, text.partition(b"\n")[2]
        if not text:
            continue
        block = parse_block(text, header)
        # Text in another form is read line by line, as is text that must be refused.
        lines = enumerate(text[:-1].split(b"\n"), start=first_line)
        for documents in (
            [block]
            if block is not None
            else (
                parse_line(line, header, where=f"{path}, line {number}") for number, line in lines
            )
        ):
            num_rows += len(documents.positives)
            if num_rows > header.num_rows:
                raise UserError(
                    f"{path}, line {header.num_rows + 2}: is one document more than the header's "
                    f"{header.num_rows}; mend the first number of the header or remove the line"
                )
            yield documents
        if progress_fn is not None:
            progress_fn(f"reading {path.name}", stored_end, num_bytes)
    if num_rows < header.num_rows:
        raise UserError(
            f"{path}, line {num_rows + 1}: is the last, but the header promises {header.num_rows} "
            f"documents and there are {num_rows}; fetch the file again or mend the header"
        )


# --- parsing --------------------------------------------------------------------------------------

USUAL = b"0123456789\n ,:.eE+-"  # all that `parse_block` reads
LINE, SPACE, COMMA, COLON = range(4)
DELIMITERS = np.full(256, 4, dtype=np.uint8)  # which one a byte is; 4: none
DELIMITERS[list(b"\n ,:")] = range(4)
OTHER, NOTHING, LABEL, FEATURE, VALUE = range(5)
# What a token is: (delimiter before it, delimiter after it, whether it has any bytes).
TOKENS = np.full((4, 4, 2), OTHER)
TOKENS[LINE, SPACE, 0] = TOKENS[SPACE, SPACE, 0] = TOKENS[SPACE, LINE, 0] = NOTHING
TOKENS[[[LINE], [COMMA]], [LINE, SPACE, COMMA], 1] = LABEL
TOKENS[SPACE, COLON, 1] = FEATURE
TOKENS[COLON, [LINE, SPACE], 1] = VALUE


def parse_block(text: bytes, header: Header) -> Documents | None:
    """The documents of whole lines as most programs write them; None: `parse_line` must look."""
    if text.translate(None, USUAL):
        return None
    delimiters = DELIMITERS[np.frombuffer(text, dtype=np.uint8)]
    ends = np.flatnonzero(delimiters < 4)  # of the tokens
    after = delimiters[ends]
    starts, before = np.roll(ends + 1, 1), np.roll(after, 1)  # the text ends with a newline
    starts[0] = 0
    kinds = TOKENS[before, after, (ends > starts).astype(np.int8)]
    if (kinds == OTHER).any():
        return None
    bounds = np.column_stack([starts, ends]).ravel().astype(np.int32)
    tokens = pa.StringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(text))

    def parse(kind: int, dtype: pa.DataType) -> Any:
        return tokens.take(2 * np.flatnonzero(kinds == kind)).cast(dtype).to_numpy()

    try:
        labels, features = parse(LABEL, pa.uint32()), parse(FEATURE, pa.uint32())
        numbers = parse(VALUE, pa.float64())
    except pa.ArrowInvalid:
        return None
    if not (
        labels.max(initial=0) < header.num_labels
        and features.max(initial=0) < header.num_features
        and np.abs(numbers).max(initial=0) <= LARGEST_FLOAT32
    ):
        return None
    is_end = after == LINE
    label_offsets, feature_offsets = (
        np.append(0, np.cumsum(kinds == kind)[is_end]) for kind in (LABEL, FEATURE)
    )
    rows = np.repeat(np.arange(len(label_offsets) - 1), np.diff(label_offsets))
    _, firsts = np.unique(rows * np.int64(header.num_labels) + labels, return_index=True)
    if len(firsts) < len(labels):  # a label named twice in a line
        firsts.sort()
        labels, rows = labels[firsts], rows[firsts]
        label_offsets = np.searchsorted(rows, np.arange(len(label_offsets)))
    return Documents(
        Rows(label_offsets, labels.astype(np.int32)),
        Rows(feature_offsets, features.astype(np.int32), numbers.astype(np.float32)),
    )


def parse_line(line: bytes, header: Header, *, where: str) -> Documents:
    """The document of one line: the definition of the format, and of its errors."""
    if not line:
        raise UserError(
            f"{where}: is empty; a document without labels and features is one space, "
            f"and nothing may follow the last document"
        )

    def parse_id(text: bytes, kind: str, limit: int, place: str) -> int:
        if not WHOLE_NUMBER.fullmatch(text) or int(text) >= limit:
            raise UserError(
                f"{where}: {kind} id {quote_value(text)} is not a whole number from 0 to "
                f"{limit - 1}; mend the line, or the {place} number of the header (number of "
                f"{kind}s)"
            )
        return int(text)

    label_text, _, feature_text = line.partition(b" ")
    labels = [
        parse_id(item, "label", header.num_labels, "third")
        for item in (label_text.split(b",") if label_text else [])
    ]
    features, values = [], []
    for item in filter(None, feature_text.split(b" ")):
        id_text, colon, value_text = item.partition(b":")
        if not colon:
            raise UserError(
                f"{where}: {quote_value(item)} is not a feature; write it as id:value, "
                f"and labels before the first space with commas between them"
            )
        features.append(parse_id(id_text, "feature", header.num_features, "second"))
        if not NUMBER.fullmatch(value_text):
            raise UserError(
                f"{where}: feature value {quote_value(value_text)} is not a number; write it as "
                f"0.25 or 2.5e-1"
            )
        values.append(float(value_text))
        if not abs(values[-1]) <= LARGEST_FLOAT32:  # also if it is not a number
            raise UserError(
                f"{where}: feature value {quote_value(value_text)} is not a finite 32-bit number; "
                f"leave the feature out or scale it"
            )
    rows = rows_from_lists([features]).with_values(np.array(values, dtype=np.float32))
    return Documents(rows_from_lists([list(dict.fromkeys(labels))]), rows)


# --- label names and groups -----------------------------------------------------------------------


def read_label_names(path: Path | None, num_labels: int) -> Strings | None:
    """One name a line, in the order of the label ids."""
    if path is None:
        return None
    names = list(read_lines(path))
    if len(names) != num_labels:
        raise UserError(
            f"{path} has {len(names)} lines for {num_labels} labels; give one name a line, "
            f"in the order of the label ids"
        )
    return Strings.pack(names)


def _read_groups(path: Path | None, num_rows: int) -> GroupValues:
    """Group column -> the group of each document, from a file of tab-separated lines."""
    if path is None:
        return {}
    cells = [line.split("\t") for line in read_lines(path)]
    has_names = len(cells) == num_rows + 1 and cells[0][0].strip().lower() == "id"
    if len(cells) != num_rows + has_names:
        raise UserError(
            f"{path} has {len(cells)} lines for {num_rows} documents; give one line a document, "
            f"after an optional first line that starts with 'id'"
        )
    names = cells[0] if has_names else ["id", "group"]
    named = quote_value(", ".join(names))
    if len(set(names)) < len(names) or "" in names:
        raise UserError(f"{path}, line 1: the columns must have different names, got {named}")
    for line_number, line_cells in enumerate(cells, start=1):
        if len(line_cells) != len(names):
            raise UserError(
                f"{path}, line {line_number}: has {len(line_cells)} cells, expected {len(names)} "
                f"({named}) with tabs between them; several group columns need a first line with "
                f"their names"
            )
    columns = zip(*cells[has_names:], strict=True)
    named_columns = list(zip(names, columns, strict=True))[1:]  # without the ids
    return {name: [cell or None for cell in column] for name, column in named_columns}
