"""The Extreme Classification text format: documents as sparse features, and their labels.

The first line is `num_rows num_features num_labels`; then comes a line a document,
`label,label feature:value feature:value ...`, where a line that starts with a space has no label.
Files may be compressed (.gz, .bz2, .xz) or members of an archive (data.zip/train.txt). A label
named twice in a line counts once; a feature named twice is kept twice, so its values add. A wrong
file is refused, by file and line.
"""

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenhand.data.checks import check_promise
from evenhand.data.dataset import Dataset, Part, Rows, Strings, taken_rows
from evenhand.data.extreme_lines import Header, parsed_blocks
from evenhand.data.files import line_blocks, lines_of, shown
from evenhand.data.parts import GroupValues, check_fractions, part_of, shared_groups
from evenhand.errors import UserError

IntArray = NDArray[np.integer[Any]]
ProgressFn = Callable[[Path, int, int], None]  # the file, rows read, rows it has

HEADER = re.compile(rb"([0-9]{1,18}) +([0-9]{1,18}) +([0-9]{1,18}) *")
COUNTED = "documents, features and labels"
MAX_IDS = 2**31 - 1  # ids are 32 bits wide on disk
HEADER_BYTES = 64  # more than it has
GROWTH_MARGIN = 1.05  # the later rows may be longer
LEAST_GROWTH, MOST_GROWTH = 1.25, 64.0  # a header may lie


class ExtremeFile(NamedTuple):
    """One file: N rows of features and of positives."""

    features: Rows  # with float32 values
    positives: Rows
    num_features: int
    num_labels: int
    num_repeated_labels: int  # dropped: labels named before in the same line


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
        progress_fn: called after each block with the file, the rows read and the rows it has.
    """
    check_fractions(validation_fraction=validation_fraction, validation_block=validation_block)
    train = read_extreme(train_path, progress_fn=progress_fn)
    _check_promises(train_path, train)
    test = read_extreme(test_path, progress_fn=progress_fn)
    check_same_ids(train_path, train, test_path, test)
    label_names = read_label_names(label_names_path, train.num_labels)
    groups = shared_groups(
        {
            "train": _group_values(train_groups_path, len(train.positives)),
            "test": _group_values(test_groups_path, len(test.positives)),
        }
    )
    whole = Part(train.features, train.positives, groups["train"])
    return Dataset(
        name=name,
        num_features=train.num_features,
        num_labels=train.num_labels,
        parts={
            **_without_validation(whole, validation_fraction, validation_block),
            "test": Part(test.features, test.positives, groups["test"]),
        },
        label_names=label_names,
    )


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
    _check_promises(path, whole)
    train_ids, test_ids = _split_rows(train_rows_path, test_rows_path, len(whole.positives))
    parts = [
        Part(taken_rows(whole.features, row_ids), taken_rows(whole.positives, row_ids))
        for row_ids in (train_ids, test_ids)
    ]
    return Dataset(
        name=name,
        num_features=whole.num_features,
        num_labels=whole.num_labels,
        parts={
            **_without_validation(parts[0], validation_fraction, validation_block),
            "test": parts[1],
        },
    )


def read_header(path: Path) -> Header:
    """The numbers of documents, features and labels that a file promises."""
    for _, text in line_blocks(path, block_bytes=HEADER_BYTES):
        return _header(text.partition(b"\n")[0], path)
    raise UserError(f"{path} is empty; its first line must be the numbers of {COUNTED}")


def read_extreme(path: Path, *, progress_fn: ProgressFn | None = None) -> ExtremeFile:
    """Reads one file, a block of lines at a time, into arrays that grow."""
    header, num_rows, num_repeated = None, 0, 0
    grown = [_Grown(dtype) for dtype in (np.int64, np.int32, np.int64, np.int32, np.float32)]
    for line_number, text in line_blocks(path):
        if header is None:
            first_line, _, text = text.partition(b"\n")
            header, line_number = _header(first_line, path), 2
        for block in parsed_blocks(text, header, path=path, first_line=line_number):
            num_rows += len(block.label_counts)
            num_repeated += block.num_repeated_labels
            growth = GROWTH_MARGIN * header.num_rows / max(num_rows, 1)  # to the end of the file
            for array, more in zip(grown, block[:5], strict=True):
                array.append(more, growth)
        refuse_more_rows(path, header, num_rows)
        if progress_fn is not None and text:
            progress_fn(path, num_rows, header.num_rows)
    if header is None:
        raise UserError(f"{path} is empty; its first line must be the numbers of {COUNTED}")
    refuse_fewer_rows(path, header, num_rows)
    label_counts, label_ids, feature_counts, feature_ids, values = (
        array.filled() for array in grown
    )
    return ExtremeFile(
        Rows(_offsets(feature_counts), feature_ids, values),
        Rows(_offsets(label_counts), label_ids),
        header.num_features,
        header.num_labels,
        num_repeated,
    )


def _check_promises(path: Path, file: ExtremeFile) -> None:
    header = Header(len(file.positives), file.num_features, file.num_labels)
    check_promises(path, header, len(file.positives.ids), len(file.features.ids))


def check_promises(path: Path, header: Header, num_pairs: int, num_values: int) -> None:
    """Refuses the header of a training file that nearly no label or feature bears out."""
    for kind, count, num_entries in (
        ("labels", header.num_labels, num_pairs),
        ("features", header.num_features, num_values),
    ):
        try:
            check_promise(kind, count, num_entries)
        except ValueError as error:
            raise UserError(
                f"{path}, line 1: the header promises {count} {kind}, and all documents together "
                f"name at most {num_entries} different ones; mend the header (the order is "
                f"{COUNTED}), or number them anew"
            ) from error


def refuse_more_rows(path: Path, header: Header, num_rows: int) -> None:
    if num_rows > header.num_rows:
        raise UserError(
            f"{path}, line {header.num_rows + 2}: is one document more than the header's "
            f"{header.num_rows}; mend the first number of the header or remove the line"
        )


def refuse_fewer_rows(path: Path, header: Header, num_rows: int) -> None:
    """At the end of the file."""
    if num_rows < header.num_rows:
        raise UserError(
            f"{path}, line {num_rows + 1}: is the last, but the header promises {header.num_rows} "
            f"documents and there are {num_rows}; fetch the file again or mend the header"
        )


class _Grown:
    """An array with room at its end, which costs no memory before it is written to.

    A list of blocks joined at the end would all be held twice for a moment.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.array: NDArray[Any] = np.empty(0, dtype=dtype)
        self.length = 0

    def append(self, more: NDArray[Any], growth: float) -> None:
        """Appends, if need be after making room for `growth` times as many as there then are."""
        end = self.length + len(more)
        if end > len(self.array):
            factor = min(max(growth, LEAST_GROWTH), MOST_GROWTH)
            larger = np.empty(int(factor * end), dtype=self.array.dtype)
            larger[: self.length] = self.array[: self.length]
            self.array = larger
        self.array[self.length : end] = more
        self.length = end

    def filled(self) -> NDArray[Any]:
        return self.array[: self.length]


def _header(line: bytes, path: Path) -> Header:
    match = HEADER.fullmatch(line.removeprefix(codecs.BOM_UTF8))
    if match is None:
        raise UserError(
            f"{path}, line 1: {shown(line)} is not a header; write the numbers of {COUNTED}, as in "
            f"'4880 1836 159' (a compressed file must end in .gz, .bz2 or .xz)"
        )
    header = Header(*map(int, match.groups()))
    for count, kind in zip(header, COUNTED.replace(" and", ",").split(", "), strict=True):
        if not 1 <= count <= MAX_IDS:
            raise UserError(
                f"{path}, line 1: the number of {kind} must be between 1 and {MAX_IDS}, "
                f"got {count}; the order is {COUNTED}"
            )
    return header


def _offsets(counts: IntArray) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _without_validation(whole: Part, validation_fraction: float, block: int = 1) -> dict[str, Part]:
    """The training file as train and validation part; the latter only if it holds a row."""
    sides = [
        part_of(str(row // block), test_fraction=0.0, validation_fraction=validation_fraction)
        for row in range(len(whole) if validation_fraction else 0)
    ]
    if not {"train", "validation"} <= set(sides):  # nothing to take out, or nothing would be left
        return {"train": whole}
    return {
        side: _taken(whole, np.flatnonzero(np.array(sides) == side))
        for side in ("train", "validation")
    }


def _taken(part: Part, row_ids: IntArray) -> Part:
    assert isinstance(part.features, Rows)
    groups = {
        column: group._replace(ids=group.ids[row_ids]) for column, group in part.groups.items()
    }
    return Part(taken_rows(part.features, row_ids), taken_rows(part.positives, row_ids), groups)


def check_same_ids(
    train_path: Path, train: ExtremeFile | Header, test_path: Path, test: ExtremeFile | Header
) -> None:
    for kind in ("features", "labels"):
        counts = [getattr(file, f"num_{kind}") for file in (train, test)]
        if counts[0] != counts[1]:
            raise UserError(
                f"{test_path}, line 1: the header says {counts[1]} {kind}, that of {train_path} "
                f"says {counts[0]}; if their ids mean the same, write the larger number in both"
            )


def _split_rows(train_path: Path, test_path: Path, num_rows: int) -> tuple[IntArray, IntArray]:
    """The rows of the train and of the test part, from 0; no row may be in both or twice."""
    numbers = {path: _first_numbers(path) for path in (train_path, test_path)}
    first = min(min(listed) for listed in numbers.values())
    base = 0 if first == 0 else 1
    seen: dict[int, str] = {}
    for path, listed in numbers.items():
        for line_number, number in enumerate(listed, start=1):
            place = f"{path}, line {line_number}"
            if not base <= number < num_rows + base:
                raise UserError(
                    f"{place}: document {number} is not between {base} and {num_rows + base - 1}; "
                    f"is the list of another data set?"
                )
            if number in seen:
                raise UserError(f"{place}: document {number} was named before: {seen[number]}")
            seen[number] = place
    train_rows, test_rows = (np.array(listed) - base for listed in numbers.values())
    return train_rows, test_rows


def _first_numbers(path: Path) -> list[int]:
    """The first number of every line."""
    numbers = []
    for line_number, line in enumerate(lines_of(path), start=1):
        cells = line.split()
        if not cells or not re.fullmatch("[0-9]{1,18}", cells[0]):
            raise UserError(f"{path}, line {line_number}: {shown(line)} is not a document's number")
        numbers.append(int(cells[0]))
    if not numbers:
        raise UserError(f"{path} is empty; it must name a document a line")
    return numbers


def read_label_names(path: Path | None, num_labels: int) -> Strings | None:
    if path is None:
        return None
    names = list(lines_of(path))
    if len(names) != num_labels:
        raise UserError(
            f"{path} has {len(names)} lines for {num_labels} labels; give one name a line, "
            f"in the order of the label ids"
        )
    return Strings.pack(names)


def _group_values(path: Path | None, num_rows: int) -> GroupValues:
    """Group column -> the group of each document, from a file of tab-separated lines."""
    if path is None:
        return {}
    cells = [line.split("\t") for line in lines_of(path)]
    has_names = len(cells) == num_rows + 1 and cells[0][0].strip().lower() == "id"
    if len(cells) != num_rows + has_names:
        raise UserError(
            f"{path} has {len(cells)} lines for {num_rows} documents; give one line a document, "
            f"after an optional first line that starts with 'id'"
        )
    names = cells[0] if has_names else ["id", "group"]
    if len(set(names)) < len(names) or "" in names:
        raise UserError(
            f"{path}, line 1: the columns must have different names, got {shown(', '.join(names))}"
        )
    for line_number, line_cells in enumerate(cells, start=1):
        if len(line_cells) != len(names):
            raise UserError(
                f"{path}, line {line_number}: has {len(line_cells)} cells, expected {len(names)} "
                f"({shown(', '.join(names))}) with tabs between them; several group columns need a "
                f"first line with their names"
            )
    columns = zip(*cells[has_names:], strict=True)
    return {
        name: [cell or None for cell in column]
        for name, column in zip(names, columns, strict=True)
        if name != names[0]
    }
