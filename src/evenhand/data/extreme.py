"""The Extreme Classification text format: documents as sparse features, and their labels.

The first line is `num_rows num_features num_labels`; then comes a line a document,
`label,label feature:value feature:value ...`, where a line that starts with a space has no label.
Files may be compressed (.gz, .bz2, .xz) or members of an archive (data.zip/train.txt). A label
named twice in a line counts once; a feature named twice is kept twice, so its values add. A wrong
file is refused, by file and line.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenhand.data.array_files import RowsWriter
from evenhand.data.csr import MAX_IDS, IntArray, Rows, Strings, take_rows
from evenhand.data.dataset import Dataset, Part, is_borne_out
from evenhand.data.extreme_parser import Block, Header, parse_lines
from evenhand.data.groups import GroupValues, make_shared_groups
from evenhand.data.splits import check_fractions, choose_validation_rows
from evenhand.data.text_io import quote_value, read_blocks, read_lines
from evenhand.errors import UserError
from evenhand.files import ProgressFn

HEADER = re.compile(rb"([0-9]{1,18}) +([0-9]{1,18}) +([0-9]{1,18}) *")
COUNTED = "documents, features and labels"
HEADER_BYTES = 64  # more than it has


class ExtremeFile(NamedTuple):
    """One file: N rows of features and of positives."""

    features: Rows  # with float32 values
    positives: Rows
    num_features: int
    num_labels: int


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
    train = read_extreme(train_path, progress_fn=progress_fn)
    check_promises(train_path, train, len(train.positives.ids), len(train.features.ids))
    test = read_extreme(test_path, progress_fn=progress_fn)
    check_same_ids(train_path, train, test_path, test)
    label_names = read_label_names(label_names_path, train.num_labels)
    groups = make_shared_groups(
        {
            "train": _read_groups(train_groups_path, len(train.positives)),
            "test": _read_groups(test_groups_path, len(test.positives)),
        }
    )
    whole = Part(train.features, train.positives, groups["train"])
    parts = _split_off_validation(whole, validation_fraction, validation_block)
    parts["test"] = Part(test.features, test.positives, groups["test"])
    return Dataset(name, train.num_features, train.num_labels, parts, label_names)


def load_extreme_split(
    path: Path,
    train_rows_path: Path,
    test_rows_path: Path,
    *,
    name: str,
    validation_fraction: float = 0.1,
    validation_block: int = 1,
    progress_fn: ProgressFn | None = None,
) -> Dataset:
    """A data set from one file of all documents and two lists of which are of which part.

    A list has a line a document: its number, from 1 (or from 0, if a 0 occurs), or several such
    numbers, of which the first counts: every column of the published lists is another split.
    Blocks are of consecutive lines of the list.
    """
    check_fractions(validation_fraction=validation_fraction, validation_block=validation_block)
    whole = read_extreme(path, progress_fn=progress_fn)
    check_promises(path, whole, len(whole.positives.ids), len(whole.features.ids))
    part = Part(whole.features, whole.positives)
    train_ids, test_ids = _read_split(train_rows_path, test_rows_path, len(part))
    train = _take_part(part, train_ids)
    parts = _split_off_validation(train, validation_fraction, validation_block)
    parts["test"] = _take_part(part, test_ids)
    return Dataset(name, whole.num_features, whole.num_labels, parts)


def _split_off_validation(whole: Part, fraction: float, block: int) -> dict[str, Part]:
    """The training file as train and validation part; the latter only if it holds a row."""
    is_validation = choose_validation_rows(np.arange(len(whole)), fraction=fraction, block=block)
    if is_validation.all() or not is_validation.any():  # nothing would be left, or taken out
        return {"train": whole}
    return {
        "train": _take_part(whole, np.flatnonzero(~is_validation)),
        "validation": _take_part(whole, np.flatnonzero(is_validation)),
    }


def _take_part(part: Part, row_ids: IntArray) -> Part:
    assert isinstance(part.features, Rows)
    groups = {name: group._replace(ids=group.ids[row_ids]) for name, group in part.groups.items()}
    return Part(take_rows(part.features, row_ids), take_rows(part.positives, row_ids), groups)


# --- documents ------------------------------------------------------------------------------------


def read_extreme(path: Path, *, progress_fn: ProgressFn | None = None) -> ExtremeFile:
    """Reads one file, a block of lines at a time."""
    header = read_header(path)
    positives, features = RowsWriter(), RowsWriter()
    for block in read_documents(path, header, progress_fn=progress_fn):
        positives.append(block.positives)
        features.append(block.features)
    return ExtremeFile(
        features.finish(), positives.finish(), header.num_features, header.num_labels
    )


def read_documents(
    path: Path, header: Header, *, progress_fn: ProgressFn | None = None
) -> Iterator[Block]:
    """The documents of a file block by block.

    There are as many as the header promises, or a `UserError` says where they are not.
    """
    num_rows = 0
    num_bytes = path.stat().st_size if path.is_file() else None  # None: a member of an archive
    for first_line, text, stored_end in read_blocks(path):
        if first_line == 1:
            first_line, text = 2, text.partition(b"\n")[2]
        for block in parse_lines(text, header, path=path, first_line=first_line):
            num_rows += len(block.positives)
            if num_rows > header.num_rows:
                raise UserError(
                    f"{path}, line {header.num_rows + 2}: is one document more than the header's "
                    f"{header.num_rows}; mend the first number of the header or remove the line"
                )
            yield block
        if progress_fn is not None:
            progress_fn(f"reading {path.name}", stored_end, num_bytes)
    if num_rows < header.num_rows:
        raise UserError(
            f"{path}, line {num_rows + 1}: is the last, but the header promises {header.num_rows} "
            f"documents and there are {num_rows}; fetch the file again or mend the header"
        )


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


def check_promises(path: Path, file: ExtremeFile | Header, num_pairs: int, num_values: int) -> None:
    """Refuses the header of a training file that nearly no label or feature bears out."""
    for kind, num_entries in (("labels", num_pairs), ("features", num_values)):
        count = getattr(file, f"num_{kind}")
        if not is_borne_out(count, num_entries):
            raise UserError(
                f"{path}, line 1: the header promises {count} {kind}, and all documents together "
                f"name at most {num_entries} different ones; mend the header (the order is "
                f"{COUNTED}), or number them anew"
            )


def check_same_ids(
    train_path: Path, train: ExtremeFile | Header, test_path: Path, test: ExtremeFile | Header
) -> None:
    """Refuses two files that do not have as many features and labels."""
    for kind in ("features", "labels"):
        counts = [getattr(file, f"num_{kind}") for file in (train, test)]
        if counts[0] != counts[1]:
            raise UserError(
                f"{test_path}, line 1: the header says {counts[1]} {kind}, that of {train_path} "
                f"says {counts[0]}; if their ids mean the same, write the larger number in both"
            )


# --- what comes beside the documents --------------------------------------------------------------


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


def _read_split(train_path: Path, test_path: Path, num_rows: int) -> tuple[IntArray, IntArray]:
    """The rows of the train and of the test part, from 0; no row may be in both or twice."""
    seen: dict[int, str] = {}  # the first number of every line, and where it stands
    ends = [0]
    for path in (train_path, test_path):
        for line_number, line in enumerate(read_lines(path), start=1):
            where, match = f"{path}, line {line_number}", re.match(r"\s*([0-9]{1,18})(\s|$)", line)
            if match is None:
                raise UserError(f"{where}: {quote_value(line)} is not a document's number")
            if before := seen.get(number := int(match[1])):
                raise UserError(f"{where}: document {number} was named before: {before}")
            seen[number] = where
        if len(seen) == ends[-1]:
            raise UserError(f"{path} is empty; it must name a document a line")
        ends.append(len(seen))
    base = 0 if 0 in seen else 1
    for number, where in seen.items():
        if number >= num_rows + base:
            raise UserError(
                f"{where}: document {number} is not between {base} and {num_rows + base - 1}; "
                f"is the list of another data set?"
            )
    rows = np.array(list(seen)) - base
    return rows[: ends[1]], rows[ends[1] :]


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
