"""A table with a right answer a row becomes a data set.

    query,label,country
    laptop sleeve 13,Laptop bags,DE

`TableOptions` says which columns are what and how the rows are split; `load_table` makes the data
set, and `prepare_table` keeps it in a folder, so that an unchanged table is not converted again.

Queries are normalised (see `text.normalize`); rows with the same query become one query with
several positives. Groups belong to rows: a query, or a (query, label) pair, that occurs with
several groups is in each of them, and trains once.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evenhand.data.csr import ArrayWriter, FloatArray, IntArray, Rows, Strings, collect_rows
from evenhand.data.dataset import Dataset, Part, open_dataset, release_memory, write_dataset
from evenhand.data.groups import group_pairs, make_groups
from evenhand.data.splits import (
    PARTS,
    PartIds,
    check_fractions,
    hold_out_last,
    split_by_hash,
    split_by_name,
    split_by_time,
)
from evenhand.data.table_cells import (
    Codes,
    as_labels,
    as_texts,
    as_times,
    as_vectors,
    check_finite,
    encode,
    group_name,
    is_filled,
    iterate_texts,
    join_codes,
    join_texts,
    squeeze,
)
from evenhand.data.table_reader import Source, is_path, read_batches
from evenhand.data.text import Featurizer, make_featurizer, normalize, words_recur
from evenhand.data.text_io import quote_value
from evenhand.errors import UserError
from evenhand.files import ProgressFn, atomic_folder, open_npy

NoteFn = Callable[[str], None]

KEPT_FORMAT = 2  # of what `prepare_table` keeps: a higher number converts all tables again
BLOCK_ROWS = 2**15  # of vectors, copied at once
NUM_LOOKED_AT = 2500  # texts, to choose their features
SEPARATORS, SHARE_JOINED = "|;,", 0.1  # of labels that look like several in one cell
MANY_PAIRS = 10  # a query: more than most texts have, and fewer than the users of a log


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Which columns of a table are what, and how its rows are split.

    At most one way to split is chosen: by the hash of the query (the default), by `split_time` (the
    latest rows are for the test), by `split_entity` (all rows of one on a side), by both (the last
    rows of each entity are held out), by `split_column`, or by `test` and `validation`.

    Args:
        query: a column, or several that are joined by a space; none: "query", but with `vectors`
            rows of equal vectors are one query.
        label: a column of one label a row, or of lists of labels.
        groups: columns of groups; an empty cell belongs to none.
        label_separator: between the labels of a cell, such as "|".
        labels: a table of the labels, by file or in memory: `id`, as in `label`, and if you like
            `name` and `text`; every other column groups the labels.
        vectors: a column of lists of numbers, or a .npy file with a row for each of the table's,
            instead of features made of the text.
        split_time: a column of numbers or dates.
        split_entity: a column of users, sessions, documents.
        split_column: a column that says train, validation or test.
        test, validation: separate files (or tables in memory) with the same columns.
        skip_missing: leaves out rows with an empty cell where there must be none.
        features: of the texts, "ngrams" of characters or "words" (see `text`); None: words where
            they recur (`words_recur`), as in sentences, else n-grams.
        num_buckets, min_length, max_length, max_words: of these features; None: their defaults.
    """

    query: tuple[str, ...] | str = ()
    label: str = "label"
    groups: tuple[str, ...] | str = ()
    label_separator: str | None = None
    labels: Source | None = None
    vectors: str | None = None
    split_time: str | None = None
    split_entity: str | None = None
    split_column: str | None = None
    test: Source | None = None
    validation: Source | None = None
    test_fraction: float = 0.2
    validation_fraction: float = 0.1
    skip_missing: bool = False
    features: str | None = None
    num_buckets: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        for name in ("query", "groups"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, value)
        check_fractions(
            test_fraction=self.test_fraction, validation_fraction=self.validation_fraction
        )
        if not self.query and self.vectors is None:
            object.__setattr__(self, "query", ("query",))
        if "" in (self.label, *self.query, *self.groups, *self._split_columns()):
            raise UserError("the name of a column must not be empty; leave the option out")
        if self.label in self.query:
            raise UserError(
                f"{self.label!r} is named as the query and as the label; name two columns"
            )
        self.featurizer()  # checks its settings
        if self.label_separator == "":
            raise UserError("label_separator must not be empty; leave it out, or give such as '|'")
        ways = {
            "split_time or split_entity": (self.split_time, self.split_entity),
            "split_column": (self.split_column,),
            "test or validation": (self.test, self.validation),
        }
        chosen = [name for name, given in ways.items() if any(one is not None for one in given)]
        if len(chosen) > 1:
            raise UserError(f"a table is split in one way, got {' and '.join(chosen)}; choose one")

    def featurizer(self, texts: pa.LargeStringArray | None = None) -> Featurizer:
        """What makes features of texts, by these options.

        Args:
            texts: all queries, which decide what is None: the kind of features, and `num_buckets`.
                Small tables get as many buckets as they can have features, and not the default:
                each bucket is a vector to be trained.
        """
        kind, num_buckets = self.features, self.num_buckets
        if kind is None:
            is_of_words, has_lengths = (
                self.max_words is not None,
                self.min_length or self.max_length,
            )
            if texts is not None and not (is_of_words or has_lengths):
                places = np.linspace(0, len(texts) - 1, min(len(texts), NUM_LOOKED_AT))
                is_of_words = words_recur(texts.take(places.astype(np.int64)).to_pylist())
            kind = "words" if is_of_words else "ngrams"
        if num_buckets is None and texts is not None:
            num_characters = pc.sum(pc.utf8_length(texts)).as_py() or 1
            wanted = (4 if kind == "ngrams" else 2) * num_characters
            num_buckets = min(max(2 ** math.ceil(math.log2(wanted)), 2**12), 2**18)
        return make_featurizer(
            kind,
            num_buckets=num_buckets,
            min_length=self.min_length,
            max_length=self.max_length,
            max_words=self.max_words,
        )

    def _split_columns(self) -> tuple[str | None, ...]:
        return self.split_time, self.split_entity, self.split_column

    def columns(self) -> list[str]:
        """All columns that are read, each once."""
        vectors = None if self.vectors and self.vectors.endswith(".npy") else self.vectors
        names = [*self.query, self.label, *self.groups, *self._split_columns(), vectors]
        return list(dict.fromkeys(name for name in names if name))


def read_options(given: Mapping[str, Any], base: TableOptions | None = None) -> TableOptions:
    """Options by name, on top of others; a name that is none is told what was meant."""
    known = [field.name for field in dataclasses.fields(TableOptions)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"a table has no option {name!r}; {hint}")
    return TableOptions(**given) if base is None else dataclasses.replace(base, **given)


def load_table(
    source: Source,
    options: TableOptions | None = None,
    *,
    name: str | None = None,
    folder: Path | None = None,
    note_fn: NoteFn | None = None,
    progress_fn: ProgressFn | None = None,
    **columns: Any,
) -> Dataset:
    """A data set from a table: a path, a pandas, polars or pyarrow table, or a dict of lists.

    Example:
        >>> table = {"title": ["red shoe", "hat"], "category": ["Shoes", "Hats"]}
        >>> list(load_table(table, query="title", label="category", test_fraction=0).label_names)
        ['Hats', 'Shoes']

    Args:
        name: of the data set; the file's own unless given.
        folder: where to write it; features are then never all in memory. None: nowhere.
        note_fn: called with each sentence about what was read, left out and merged.
        progress_fn: called with what is being done, how much is done and, if known, of how much.
        columns: fields of `TableOptions`, which need no `options` then.
    """
    options = read_options(columns, options)
    name = name or table_name(source)
    note_fn = note_fn or (lambda note: None)
    progress_fn = progress_fn or (lambda title, done, total: None)
    if folder is None:
        return _make_dataset(source, options, name, None, note_fn, progress_fn)
    with atomic_folder(folder) as staging:
        write_dataset(_make_dataset(source, options, name, staging, note_fn, progress_fn), staging)
    dataset = open_dataset(folder)
    release_memory(dataset)  # training comes next
    return dataset


def table_name(source: Source) -> str:
    """The file's name without its endings; `table` for one in memory."""
    return os.path.basename(os.path.realpath(source)).split(".")[0] if is_path(source) else "table"


# --- a folder that is kept ------------------------------------------------------------------------


def prepare_table(
    source: Source,
    options: TableOptions,
    *,
    root: Path = Path("datasets"),
    note_fn: NoteFn | None = None,
    progress_fn: ProgressFn | None = None,
) -> Path:
    """The folder of the data set made of a table; an unchanged table is not converted again.

    Folders are called after the table, its size and date (its content, if it is in memory) and the
    options: `datasets/pairs-3f2a91c0`.
    """
    tables = {"source": source, "test": options.test, "validation": options.validation}
    about = {
        **vars(options),
        "format": KEPT_FORMAT,
        **{name: _identity(table, options.columns()) for name, table in tables.items()},
        "labels": _identity(options.labels, None),
    }
    if options.vectors is not None and options.vectors.endswith(".npy"):
        about["vectors"] = _identity(options.vectors, None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    folder = root / f"{table_name(source)}-{digest[:8]}"
    if not folder.exists():
        try:
            load_table(source, options, folder=folder, note_fn=note_fn, progress_fn=progress_fn)
        except UserError:
            if not folder.exists():  # else another process has just made it
                raise
    return folder


def _identity(source: Source | None, columns: Sequence[str] | None) -> Any:
    """What changes when a table does: path, size and date of its files, or else its content."""
    if source is None:
        return None
    if is_path(source):
        path = Path(os.path.realpath(source))
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in files if file.is_file()]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256()
    for batch in read_batches(source, columns):
        digest.update(batch.serialize())
    return digest.hexdigest()


# --- from batches to a data set -------------------------------------------------------------------


def _make_dataset(
    source: Source,
    options: TableOptions,
    name: str,
    folder: Path | None,
    note_fn: NoteFn,
    progress_fn: ProgressFn,
) -> Dataset:
    where = str(source) if is_path(source) else "the table"
    lines = _read_lines(source, options, where, folder, note_fn, progress_fn)
    for note in _merge_notes(lines):
        note_fn(note)
    for hint in (_separator_hint(lines, options), _log_hint(lines, options)):
        if hint:
            note_fn(f"note: {hint}")
    queries, labels, vectors = lines.queries, lines.labels, lines.vectors
    if len(labels.names) == 1:
        raise UserError(
            f"{where}: every row has the label {labels.names[0].as_py()!r}; two or more are needed"
        )
    featurizer = options.featurizer(queries.names if vectors is None else None)
    if vectors is None:
        note_fn(f"features: {featurizer.describe()}, in {featurizer.num_buckets:,} buckets")
    part_ids = _split(lines, options)
    if not (part_ids == 0).any():
        remedy = (
            f"add rows, or lower test_fraction ({options.test_fraction}) and validation_fraction "
            f"({options.validation_fraction})"
            if options.split_column is None
            else f"column {options.split_column!r} must say train in some rows"
        )
        raise UserError(
            f"{where}: none of its {len(queries.names)} queries fell into the training part; "
            f"{remedy}"
        )
    first_lines = np.zeros(len(queries.names), dtype=np.int64)
    first_lines[queries.ids[::-1]] = np.arange(len(queries.ids))[::-1]

    def features_fn(part: str, query_ids: IntArray) -> Rows | FloatArray:
        if vectors is None:
            texts = queries.names.take(query_ids)
            return featurize(texts, featurizer, part=part, folder=folder, progress_fn=progress_fn)
        return _take_vectors(vectors, lines.row_ids[first_lines[query_ids]], part, folder)

    return Dataset(
        name=name,
        num_features=featurizer.num_buckets if vectors is None else vectors.shape[1],
        num_labels=len(labels.names),
        parts=make_parts(
            queries.names if options.query else None,
            queries.ids,
            labels.ids,
            part_ids,
            groups=lines.groups,
            features_fn=features_fn,
        ),
        **_describe_labels(labels.names, options.labels, note_fn),
        query_columns=tuple(options.query),
        featurizer=featurizer.settings() if vectors is None else None,
    )


def _describe_labels(
    ids: pa.LargeStringArray, table: Source | None, note_fn: NoteFn
) -> dict[str, Any]:
    """What a data set says of its labels; without a table of them, their names are their ids."""
    if table is None:
        return {"label_names": Strings.from_arrow(ids)}
    where, columns, row_of = _read_labels(table)
    label_ids: list[str] = ids.to_pylist()
    row_ids = [row_of.get(label) for label in label_ids]
    num_known = len(label_ids) - row_ids.count(None)
    note_fn(
        f"{where}: describes {num_known:,} of the {len(label_ids):,} labels, and "
        f"{len(row_of) - num_known:,} that no row has, which are left out"
    )

    def of_labels(column: str) -> list[str | None]:
        values = columns[column]
        return [None if row is None else values[row] for row in row_ids]

    given = of_labels("name") if "name" in columns else [None] * len(label_ids)
    names = [name or label for name, label in zip(given, label_ids, strict=True)]
    num_of = Counter(names)
    texts = [text or "" for text in of_labels("text")] if "text" in columns else None
    return {
        "label_names": Strings.pack(
            name if num_of[name] == 1 else f"{name} ({label})"
            for name, label in zip(names, label_ids, strict=True)
        ),
        "label_texts": None if texts is None else Strings.pack(texts),
        "label_groups": {
            column: make_groups(of_labels(column))
            for column in columns
            if column not in ("id", "name", "text")
        },
    }


def _read_labels(table: Source) -> tuple[str, dict[str, list[str | None]], dict[str, int]]:
    """What to call a table of labels, the cells of its columns, and the row of each id."""
    where = str(table) if is_path(table) else "the table of labels"
    batches = list(read_batches(table, None))
    if not batches:
        raise UserError(f"{where} has no row below its column names")
    rows = pa.Table.from_batches(batches)
    if "id" not in rows.schema.names:
        raise UserError(f"{where}: there is no column 'id', which must hold the labels")

    def cells(column: str) -> list[str | None]:
        texts = as_texts(rows[column].combine_chunks(), column, where).to_pylist()
        return [group_name(text or "") or None for text in texts]

    row_of: dict[str, int] = {}
    for row, text in enumerate(as_texts(rows["id"].combine_chunks(), "id", where).to_pylist()):
        label = squeeze(text or "")
        if label and row_of.setdefault(label, row) != row:
            raise UserError(f"{where}: the id {label!r} is on several rows; keep one")
    return where, {column: cells(column) for column in dict.fromkeys(rows.schema.names)}, row_of


def load_labels(table: Source) -> tuple[list[str], list[str]]:
    """The names of the labels of a table, or else their ids, and what it says of each."""
    _, columns, row_of = _read_labels(table)
    names = columns.get("name") or [None] * (1 + max(row_of.values(), default=0))
    texts = columns.get("text") or [None] * len(names)
    return [names[row] or label for label, row in row_of.items()], [
        texts[row] or "" for row in row_of.values()
    ]


def make_parts(
    texts: pa.LargeStringArray | None,
    query_ids: IntArray,
    label_ids: IntArray,
    part_ids: PartIds,
    *,
    groups: Mapping[str, Codes],
    features_fn: Callable[[str, IntArray], Rows | FloatArray],
) -> dict[str, Part]:
    """The parts that hold a query, from lines that each say that a label is right for a query.

    Args:
        texts: of all queries; None: they have none.
        query_ids, label_ids, part_ids: (N,) of the lines, in any order, the same ones repeatedly.
        groups: group column -> the group of each line.
        features_fn: part, ids of its queries -> their features.
    """
    parts = {}
    num_labels = np.int64(label_ids.max()) + 1
    for place, part in enumerate(PARTS):
        lines = np.flatnonzero(part_ids == place)
        if not len(lines):
            continue
        queries, rows = np.unique(query_ids[lines], return_inverse=True)
        pairs, pair_ids = np.unique(rows * num_labels + label_ids[lines], return_inverse=True)
        offsets = np.searchsorted(pairs // num_labels, np.arange(len(queries) + 1))
        positives = Rows(offsets, (pairs % num_labels).astype(np.int32))
        parts[part] = Part(
            features_fn(part, queries),
            positives,
            {
                column: group_pairs(pair_ids, ids[lines], positives, tuple(names.to_pylist()))
                for column, (ids, names) in groups.items()
            },
            None if texts is None else Strings.from_arrow(texts.take(queries)),
        )
    return parts


def _split(lines: "Lines", options: TableOptions) -> PartIds:
    """The part of each line, in the one way that the options choose."""
    shares = {
        "test_fraction": options.test_fraction,
        "validation_fraction": options.validation_fraction,
    }
    if lines.said_parts is not None:
        names = split_by_name(
            lines.said_parts.names.to_pylist(), f"column {options.split_column!r}"
        )
        return names[lines.said_parts.ids]
    if lines.entities is not None and lines.times is not None:
        has_validation = options.validation_fraction > 0
        return hold_out_last(lines.entities.ids, lines.times, has_validation=has_validation)
    if lines.times is not None:
        return split_by_time(lines.times, **shares)
    keys = lines.queries if lines.entities is None else lines.entities
    if options.test is not None:  # which is all of the test part
        shares["test_fraction"] = 0.0
    if options.validation is not None:
        shares["validation_fraction"] = 0.0
    part_ids = split_by_hash(iterate_texts(keys.names), **shares)[keys.ids]
    return np.where(lines.file_ids > 0, lines.file_ids, part_ids)


def _merge_notes(lines: "Lines") -> Iterator[str]:
    """What became of the lines: which were merged, and which are in no group."""
    queries, labels = lines.queries, lines.labels
    num_lines = len(queries.ids)
    pairs = queries.ids * np.int64(len(labels.names)) + labels.ids
    _, kinds, on_lines = np.unique(pairs, return_inverse=True, return_counts=True)
    for ids, names in lines.groups.values():
        kinds = np.unique(kinds * np.int64(len(names) + 1) + ids + 1, return_inverse=True)[1]
    yield (
        f"rows: {len(np.unique(lines.row_ids)):,}, (query, label) pairs in them: {num_lines:,}; "
        f"merged, since another has the same query, label and groups: "
        f"{num_lines - int(kinds.max()) - 1:,}"
    )
    yield (
        f"different queries: {len(queries.names):,}, with several pairs: "
        f"{int((np.bincount(queries.ids) > 1).sum()):,}; different pairs: {len(on_lines):,}, "
        f"repeated: {int((on_lines > 1).sum()):,}"
    )
    for column, (ids, _) in lines.groups.items():
        yield f"empty cells of {column}, in no group: {int((ids < 0).sum()):,}"


def _separator_hint(lines: "Lines", options: TableOptions) -> str:
    """For cells that seem to hold several labels: split, many fewer of them would differ."""
    names, ids = lines.labels.names, lines.labels.ids
    is_list = pc.starts_with(names, "[").to_numpy(zero_copy_only=False)
    if is_list[ids].mean() > SHARE_JOINED:
        return (
            f"labels such as {quote_value(names[int(is_list.argmax())].as_py())} look like lists "
            f"written as text, and count as one each; keep lists in Parquet or JSON lines, or "
            f"write them as a|b"
        )
    for separator in SEPARATORS if options.label_separator is None else "":
        is_joined = pc.match_substring(names, separator).to_numpy(zero_copy_only=False)
        share = is_joined[ids].mean()
        if share > SHARE_JOINED:
            pieces = pc.utf8_trim_whitespace(pc.split_pattern(names, separator).flatten())
            if len(pieces.unique()) <= len(names) / 2:
                example = quote_value(names[int(is_joined.argmax())].as_py())
                return (
                    f"{share:.0%} of the labels look like several, such as {example}, and count as "
                    f"one each; --label-separator '{separator}' (label_separator) splits them"
                )
    return ""


def _log_hint(lines: "Lines", options: TableOptions) -> str:
    """For queries that seem to be users: the usual split tests none that has been seen."""
    is_split = lines.times is not None or lines.entities is not None or lines.said_parts is not None
    num_pairs = len(lines.queries.ids) / len(lines.queries.names)
    if is_split or options.test is not None or num_pairs < MANY_PAIRS or not options.query:
        return ""
    is_phrase = pc.match_substring(lines.queries.names, " ").to_numpy(zero_copy_only=False)
    if is_phrase.mean() > SHARE_JOINED:
        return ""
    return (
        f"{num_pairs:.0f} pairs a query, and queries of one word: if they are the users of a log, "
        f"all test users are new; --split-time asks what known users do next (see the docs, "
        f"Recommend from a log)"
    )


# --- from rows to lines ---------------------------------------------------------------------------


class Lines(NamedTuple):
    """Every (query, label) that a table says: N lines, one for each label of a row."""

    queries: Codes
    labels: Codes
    groups: dict[str, Codes]
    entities: Codes | None
    said_parts: Codes | None
    times: NDArray[np.float64] | None  # (N,)
    row_ids: NDArray[np.int64]  # (N,) counted through all files
    file_ids: NDArray[np.int8]  # (N,) places in PARTS
    vectors: FloatArray | None  # (rows, F)


def _read_lines(
    source: Source,
    options: TableOptions,
    where: str,
    folder: Path | None,
    note_fn: NoteFn,
    progress_fn: ProgressFn,
) -> Lines:
    """The lines of a table, and of its own files for validation and test."""
    columns = options.columns()
    has_own_vectors = options.vectors in columns
    vectors = _open_vectors(options) if options.vectors and not has_own_vectors else None
    store: ArrayWriter | None = None
    chunks: dict[str, list[Any]] = {}
    num_missing, first_missing, num_rows, num_skipped = Counter[str](), dict[str, str](), 0, 0
    files = {0: source, 1: options.validation, 2: options.test}  # by places in PARTS
    for file_id, file in files.items():
        if file is None and file_id:
            continue
        place, of_file = str(file) if is_path(file) else where, num_rows
        for batch in read_batches(file, columns, progress_fn=progress_fn):
            row_ids = np.arange(num_rows, num_rows + len(batch))
            num_rows += len(batch)
            numbers = None if vectors is None else vectors[row_ids[0] : num_rows]
            if options.vectors is not None and has_own_vectors:
                width = None if store is None else store.row_shape[0]
                numbers = as_vectors(batch.column(options.vectors), options.vectors, place, width)
                if store is None and numbers.shape[1]:
                    store = ArrayWriter(folder, "vectors", "<f4", numbers.shape[1:])
                    store.append(np.zeros((row_ids[0], numbers.shape[1])))  # all empty until here
                if store is not None:
                    store.append(numbers)
            if numbers is not None:
                check_finite(numbers, place, first_row=row_ids[0] - of_file + 1)
            cells, is_there = _row_cells(batch, numbers, options, place)
            labels, parents = as_labels(
                batch.column(options.label), options.label, place, separator=options.label_separator
            )
            is_there[options.label] = np.isin(np.arange(len(batch)), parents)
            for name, has_cell in is_there.items():
                if not has_cell.all():
                    num_missing[name] += int((~has_cell).sum())
                    row = row_ids[has_cell.argmin()] - of_file + 1
                    first_missing.setdefault(name, f"row {row:,}" + f" of {place}" * (file_id > 0))
            is_whole = np.logical_and.reduce(list(is_there.values()))
            num_skipped += int((~is_whole).sum())
            is_kept = is_whole[parents]
            cells |= {"row": row_ids, "file": np.full(len(batch), file_id, dtype=np.int8)}
            chunks.setdefault("label", []).append(labels.filter(pa.array(is_kept)))
            for name, column in cells.items():
                chunks.setdefault(name, []).append(column.take(parents[is_kept]))
        if num_rows == of_file:
            raise UserError(f"{place} has no row below its column names; add (query, label) rows")
    notes = [
        f"empty cells of {column}: {count:,}, the first in {first_missing[column]}"
        for column, count in num_missing.items()
    ]
    if notes and not options.skip_missing:
        raise UserError(
            f"{where}: {'; '.join(notes)}; fill them, or leave such rows out with --skip-missing "
            f"(skip_missing=True)"
        )
    for note in notes:
        note_fn(note)
    if num_skipped:
        note_fn(f"rows left out: {num_skipped:,} of {num_rows:,}")
    if num_rows == num_skipped:
        raise UserError(f"{where}: each of its {num_rows:,} rows has an empty cell; fill them")
    if vectors is not None and len(vectors) != num_rows:
        raise UserError(
            f"{options.vectors} has {len(vectors):,} rows, and {where} {num_rows:,}; a table needs "
            f"a vector for each row"
        )

    def codes(name: str | None) -> Codes | None:
        return None if name is None else join_codes(chunks[name])

    times = chunks.get("time")
    return Lines(
        queries=join_codes(chunks["query"]),
        labels=join_codes(chunks["label"]),
        groups={name: join_codes(chunks[f"group {name}"]) for name in options.groups},
        entities=codes(options.split_entity and "entity"),
        said_parts=codes(options.split_column and "part"),
        times=np.concatenate(times) if times else None,
        row_ids=np.concatenate(chunks["row"]),
        file_ids=np.concatenate(chunks["file"]),
        vectors=store.finish() if store is not None else vectors,
    )


def _row_cells(
    batch: pa.RecordBatch, numbers: FloatArray | None, options: TableOptions, where: str
) -> tuple[dict[str, Any], dict[str, NDArray[np.bool_]]]:
    """The cells of each row but its labels, and which of those that must be filled are."""

    def texts(name: str) -> pa.LargeStringArray:
        return as_texts(batch.column(name), name, where)

    if options.query:
        query = join_texts([texts(column) for column in options.query])
        cells = {"query": encode(query, normalize)}
    else:
        assert numbers is not None
        keys = [hashlib.md5(row.tobytes()).hexdigest() for row in numbers]
        cells = {"query": encode(pa.array(keys, pa.large_string()), str)}
    for name, column in (("entity", options.split_entity), ("part", options.split_column)):
        if column is not None:
            cells[name] = encode(texts(column), squeeze)
    columns = {
        "query": " + ".join(options.query),
        "entity": options.split_entity,
        "part": options.split_column,
    }
    is_there = {column: is_filled(cells[name]) for name, column in columns.items() if column}
    if options.split_time is not None:
        cells["time"] = as_times(batch.column(options.split_time), options.split_time, where)
        is_there[options.split_time] = ~np.isnan(cells["time"])
    if options.vectors is not None and options.vectors in batch.schema.names:
        is_there[options.vectors] = is_filled(batch.column(options.vectors))
    for column in options.groups:
        cells[f"group {column}"] = encode(texts(column), group_name)
    return cells, is_there


# --- features -------------------------------------------------------------------------------------


def featurize(
    texts: pa.LargeStringArray,
    featurizer: Featurizer,
    *,
    part: str,
    folder: Path | None = None,
    progress_fn: ProgressFn = lambda title, done, total: None,
) -> Rows:
    """The features of texts, made block by block; given a folder, never all in memory."""
    num_done = 0

    def blocks() -> Iterator[Rows]:
        nonlocal num_done
        for block in featurizer.blocks(iterate_texts(texts)):
            num_done += len(block)
            progress_fn(f"features of {part}", num_done, len(texts))
            yield block

    return collect_rows(blocks(), folder, f"{part}.features")


def _open_vectors(options: TableOptions) -> NDArray[Any]:
    path = Path(str(options.vectors))
    if options.test is not None or options.validation is not None:
        raise UserError(f"{path} has a row for each of one table; give vectors as a column instead")
    try:
        vectors = open_npy(path, is_empty=False)
        if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
            raise ValueError(f"it holds {vectors.dtype} of shape {vectors.shape}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no .npy file of vectors, a row each ({error})") from error
    return vectors


def _take_vectors(
    vectors: NDArray[Any], row_ids: NDArray[np.int64], part: str, folder: Path | None
) -> FloatArray:
    """The vectors of chosen rows; given a folder, never all in memory."""
    taken = ArrayWriter(folder, f"{part}.features.dense", "<f4", vectors.shape[1:])
    for start in range(0, len(row_ids), BLOCK_ROWS):
        taken.append(vectors[row_ids[start : start + BLOCK_ROWS]])
    return taken.finish()
