"""Reads a CSV or TSV with one (query, label) pair per line, and optional group columns.

    query,label,country
    laptop sleeve 13,Laptop bags,DE

Queries are normalised (see `text.normalize`); lines with the same query become one query with
several positives. Groups belong to lines: a query, or a (query, label) pair, that occurs with
several groups is in each of them, and trains once. The split is by the md5 of the query, so no
query is on two sides and a query keeps its side when the table grows.
"""

import csv
import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from evenhand.data.csr import Strings, rows_from_lists
from evenhand.data.dataset import Dataset, Part
from evenhand.data.groups import Groups, group_pairs
from evenhand.data.splits import PARTS, check_fractions, choose_part
from evenhand.data.text import NgramFeaturizer, normalize
from evenhand.data.text_io import OPENERS, plain_suffix, quote_value, read_lines
from evenhand.errors import UserError

SHOWN_COLUMNS = 20
DELIMITERS = {".csv": ",", ".tsv": "\t"}


class Record(NamedTuple):
    """A line of the table."""

    query: str  # normalised
    label: str
    groups: tuple[str, ...]  # one a column, empty: belongs to none


def load_table(
    path: Path,
    *,
    query_column: str = "query",
    label_column: str = "label",
    group_columns: Sequence[str] = (),
    test_fraction: float = 0.2,
    validation_fraction: float = 0.1,
    name: str | None = None,
    note_fn: Callable[[str], None] | None = None,
) -> Dataset:
    """A data set from a .csv or .tsv file, plain or compressed, whose first line names columns.

    A query or label may not be empty; an empty group cell belongs to no group. A part no query
    falls into is left out.

    Args:
        name: the file's own unless given.
        note_fn: called with each sentence about what was read and what was merged.
    """
    check_fractions(test_fraction=test_fraction, validation_fraction=validation_fraction)
    num_of = Counter(read_records(path, [query_column, label_column, *group_columns]))
    if not num_of:
        raise UserError(f"{path} has no line below its column names; add (query, label) lines")
    if note_fn is not None:
        for note in _describe(num_of, group_columns):
            note_fn(note)
    label_names = sorted({record.label for record in num_of})
    label_ids = {label: label_id for label_id, label in enumerate(label_names)}
    labels_of: dict[str, set[int]] = {}
    groups: dict[str, dict[tuple[str, int], set[str]]] = {column: {} for column in group_columns}
    for query, label, names in num_of:
        labels_of.setdefault(query, set()).add(label_ids[label])
        for column, group in zip(group_columns, names, strict=True):
            if group:
                groups[column].setdefault((query, label_ids[label]), set()).add(group)
    featurizer = NgramFeaturizer()
    parts = make_parts(
        labels_of,
        part_fn=lambda query: choose_part(
            query, test_fraction=test_fraction, validation_fraction=validation_fraction
        ),
        group_fns={column: groups_of.get for column, groups_of in groups.items()},
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


def make_parts(
    labels_of: Mapping[str, set[int]],
    *,
    part_fn: Callable[[str], str],
    group_fns: Mapping[str, Callable[[tuple[str, int]], Collection[str] | None]],
    featurizer: NgramFeaturizer,
) -> dict[str, Part]:
    """The parts that hold a query, of texts whose positives are known.

    Args:
        labels_of: query -> the labels that are right for it.
        part_fn: query -> train, validation or test.
        group_fns: group column -> the function from a (query, label) pair to its groups, if any.
    """
    queries: dict[str, list[str]] = {part: [] for part in PARTS}
    for query in sorted(labels_of):
        queries[part_fn(query)].append(query)
    queries = {part: texts for part, texts in queries.items() if texts}
    positives = {
        part: rows_from_lists([sorted(labels_of[text]) for text in texts])
        for part, texts in queries.items()
    }
    pairs = {
        part: [(text, label) for text in texts for label in sorted(labels_of[text])]
        for part, texts in queries.items()
    }
    groups: dict[str, dict[str, Groups]] = {part: {} for part in queries}
    for column, group_fn in group_fns.items():
        members = {part: [group_fn(pair) or () for pair in pairs[part]] for part in queries}
        names = set().union(*(names for rows in members.values() for names in rows))  # of all parts
        for part, rows in members.items():
            groups[part][column] = group_pairs(rows, positives[part], names)
    return {
        part: Part(featurizer.featurize(texts), positives[part], groups[part], Strings.pack(texts))
        for part, texts in queries.items()
    }


def _describe(num_of: Counter[Record], group_columns: Sequence[str]) -> Iterator[str]:
    """What became of the lines, of which `num_of` counts those that are the same."""
    on_lines, pairs_on_lines = Counter[str](), Counter[tuple[str, str]]()
    for record, count in num_of.items():
        on_lines[record.query] += count
        pairs_on_lines[record.query, record.label] += count
    several, pairs_several = (
        sum(count > 1 for count in counts.values()) for counts in (on_lines, pairs_on_lines)
    )
    yield (
        f"lines read: {num_of.total():,}; merged, since another has the same query, label and "
        f"groups: {num_of.total() - len(num_of):,}"
    )
    yield (
        f"queries: {len(on_lines):,}, on several lines: {several:,}; "
        f"(query, label) pairs: {len(pairs_on_lines):,}, on several lines: {pairs_several:,}"
    )
    for place, column in enumerate(group_columns):
        num_empty = sum(count for record, count in num_of.items() if not record.groups[place])
        yield f"empty cells of {column}, in no group: {num_empty:,}"


# --- reading --------------------------------------------------------------------------------------


def read_records(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The lines of a table: `columns` names those of the query, the label and the groups."""
    delimiter = DELIMITERS.get(plain_suffix(path))
    if delimiter is None:
        raise UserError(
            f"{path}: the ending must be {' or '.join(DELIMITERS)}, optionally followed by "
            f"{', '.join(OPENERS)}; rename or convert the file"
        )
    lines = (line + "\n" for line in read_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    places: list[int] = []
    try:
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [name.strip() for name in cells]
                places = [_find_column(column, header, where) for column in columns]
                continue
            if len(cells) != len(header):
                raise UserError(
                    f"{where}: has {len(cells)} cells, the first line has {len(header)}; "
                    f"a cell that holds the separator must be quoted"
                )
            query, label, *groups = (" ".join(cells[place].split()) for place in places)
            query = normalize(query)
            for column, text in zip(columns, (query, label), strict=False):
                if not text:
                    raise UserError(
                        f"{where}: column {column!r} is empty; fill it or remove the line"
                    )
            yield Record(query, label, tuple(groups))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num}: {error}; quote the cell and double each quote in it"
        ) from error
    if not header:
        raise UserError(f"{path} is empty; its first line must name the columns")


def _find_column(column: str, names: list[str], where: str) -> int:
    """Where a column stands in the header."""
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise UserError(f"{where}: two columns are called {column!r}; rename one")
    close = difflib.get_close_matches(column, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    more = ", ..." if len(names) > SHOWN_COLUMNS else ""
    raise UserError(
        f"{where}: there is no column {column!r}; {hint}the columns are "
        f"{', '.join(map(quote_value, names[:SHOWN_COLUMNS]))}{more}"
    )
