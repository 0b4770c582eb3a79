"""A table of one's own: a line a pair, with a query text, a label text and group columns.

    query,label,country
    laptop sleeve 13,Laptop bags,DE

Queries are normalised (see `text.normalized`); lines with the same query become one query with
several positives, in the groups of its first line that names one. The split is by the md5 of the
query, so no query is on two sides and a query keeps its side when the table grows.
"""

import csv
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evenhand.data.dataset import Dataset, Strings
from evenhand.data.files import OPENERS, lines_of, plain_suffix, shown
from evenhand.data.parts import check_fractions, part_of, parts_of_queries
from evenhand.data.text import NgramFeaturizer, normalized
from evenhand.errors import UserError

SHOWN_COLUMNS = 20
DELIMITERS = {".csv": ",", ".tsv": "\t"}


class Record(NamedTuple):
    query: str  # normalised
    label: str
    groups: list[str]  # empty: belongs to none


def load_table(
    path: Path,
    *,
    query_column: str = "query",
    label_column: str = "label",
    group_columns: Sequence[str] = (),
    test_fraction: float = 0.2,
    validation_fraction: float = 0.1,
    name: str | None = None,
) -> Dataset:
    """A data set from a .csv or .tsv file, plain or compressed, whose first line names columns.

    A query or label may not be empty; an empty group cell belongs to no group. A part no query
    falls into is left out. `name` is the file's own unless given.
    """
    check_fractions(test_fraction=test_fraction, validation_fraction=validation_fraction)
    labels_of: dict[str, set[str]] = {}
    groups: dict[str, dict[str, str]] = {column: {} for column in group_columns}
    for record in _records(path, [query_column, label_column, *group_columns]):
        labels_of.setdefault(record.query, set()).add(record.label)
        for column, group in zip(group_columns, record.groups, strict=True):
            if group:
                groups[column].setdefault(record.query, group)
    if not labels_of:
        raise UserError(f"{path} has no line below its column names; add (query, label) lines")
    label_names = sorted(set().union(*labels_of.values()))
    label_ids = {label: label_id for label_id, label in enumerate(label_names)}
    featurizer = NgramFeaturizer()
    parts = parts_of_queries(
        {query: {label_ids[label] for label in labels} for query, labels in labels_of.items()},
        part_fn=lambda query: part_of(
            query, test_fraction=test_fraction, validation_fraction=validation_fraction
        ),
        group_fns={column: group_of.get for column, group_of in groups.items()},
        featurizer=featurizer,
    )
    if "train" not in parts:
        raise UserError(
            f"{path}: none of its {len(labels_of)} queries fell into the training part; add lines "
            f"or lower test_fraction ({test_fraction}) and validation_fraction "
            f"({validation_fraction})"
        )
    return Dataset(
        name=path.name.split(".")[0] if name is None else name,
        num_features=featurizer.num_buckets,
        num_labels=len(label_names),
        parts=parts,
        label_names=Strings.pack(label_names),
        featurizer=featurizer.settings(),
    )


def _records(path: Path, columns: list[str]) -> Iterator[Record]:
    """The lines of the table, with the query, the label and the groups found by column name."""
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} is empty; its first line must name the columns")
    line_number, header = first
    places = [_place(column, header, f"{path}, line {line_number}") for column in columns]
    for line_number, cells in rows:
        where = f"{path}, line {line_number}"
        if len(cells) != len(header):
            raise UserError(
                f"{where}: has {len(cells)} cells, the first line has {len(header)}; "
                f"a cell that holds the separator must be quoted"
            )
        query, label, *groups = (" ".join(cells[place].split()) for place in places)
        for column, text in ((columns[0], normalized(query)), (columns[1], label)):
            if not text:
                raise UserError(f"{where}: column {column!r} is empty; fill it or remove the line")
        yield Record(normalized(query), label, groups)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the number of its last line."""
    delimiter = DELIMITERS.get(plain_suffix(path))
    if delimiter is None:
        raise UserError(
            f"{path}: the ending must be {' or '.join(DELIMITERS)}, optionally followed by "
            f"{', '.join(OPENERS)}; rename or convert the file"
        )
    reader = csv.reader((line + "\n" for line in lines_of(path)), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: {error}; quote the cell and double each quote in it"
        ) from error


def _place(column: str, header: list[str], where: str) -> int:
    """Where a column stands in the header."""
    names = [name.strip() for name in header]
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise UserError(f"{where}: two columns are called {column!r}; rename one")
    close = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(
        f"{where}: there is no column {column!r}; {hint}the columns are "
        f"{', '.join(map(shown, names[:SHOWN_COLUMNS]))}{', ...' * (len(names) > SHOWN_COLUMNS)}"
    )
