"""Reads the columns of a table as Arrow record batches, from files or from memory.

CSV (commas, semicolons or tabs), JSON lines, Parquet, Arrow and Feather, plain or compressed, a
folder of such files, or a table in memory: pandas, polars, pyarrow, or a dict of lists. Memory
holds a few batches, however long the table is.
"""

import csv
import difflib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from evenhand.data.text_io import (
    MAX_LINE_BYTES,
    OPENERS,
    open_input_stream,
    plain_suffix,
    quote_value,
    read_lines,
    readable,
)
from evenhand.errors import UserError
from evenhand.files import ProgressFn, open_input

# A path, or what holds a table: pandas, polars, pyarrow (anything that exports Arrow), or a dict.
Source = Any

SHOWN_COLUMNS = 20
BATCH_ROWS = 2**16
MAX_BLANK_LINES = 2**16  # before the first that is not: more is no table, but a bomb
BLOCK_BYTES = 2**23  # of text, parsed at once: no row may be longer
DELIMITERS = ",;\t"
PARQUET_MARK = b"PAR1"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
TOO_DEEP = re.compile(rb"(?:[\[{][^\[\]{}\n]{0,100}+){2000}")  # on this the parser of JSON crashes
JSON_KINDS = {
    str: "a text", bool: "true or false", int: "a number", float: "a number",
    list: "a list", dict: "an object",
}  # fmt: skip


def is_path(source: Source) -> bool:
    """Whether a source is a file or folder, and no table in memory."""
    return isinstance(source, str | os.PathLike)


def is_table_path(path: Path) -> bool:
    """Whether its ending, or that of a file in the folder, is one of those that are read."""
    return plain_suffix(path) in READERS or (path.is_dir() and bool(_table_files(path)))


def read_batches(
    source: Source, columns: Sequence[str] | None, *, progress_fn: ProgressFn | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a table in batches that have these columns, in this order; None: all it has."""
    progress_fn = progress_fn or (lambda name, done, total: None)
    if not is_path(source):
        yield from _read_frame(source, columns, progress_fn)
        return
    path = Path(source)
    if not path.is_dir():
        yield from _read_file(path, columns, progress_fn)
        return
    files = _table_files(path)
    if not files:
        raise UserError(f"{path} holds no table; its files must end in {', '.join(READERS)}")
    for file in files:
        # Spark writes country=DE/part-0.parquet: a column of which the folder tells the value.
        folders = file.relative_to(path).parts[:-1]
        keys = dict(folder.split("=", 1) for folder in folders if "=" in folder)
        of_file = columns if columns is None else [name for name in columns if name not in keys]
        for batch in _read_file(file, of_file, progress_fn):
            for name in [*keys] if columns is None else keys.keys() & columns:
                batch = batch.append_column(name, pa.array([keys[name]] * len(batch)))
            yield batch if columns is None else batch.select(columns)


def _table_files(folder: Path) -> list[Path]:
    """The tables in a folder and in those below it, without what is hidden or a remark."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if plain_suffix(path) in READERS
        and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    ]


def _read_file(
    path: Path, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    read_fn = READERS.get(plain_suffix(path))
    if path.suffix == ".zip" and path.is_file():
        raise UserError(f"{path} is an archive; name a table in it, such as {path}/data.csv")
    if read_fn is None:
        raise UserError(
            f"{path}: a table must end in {', '.join(READERS)}, optionally followed by "
            f"{', '.join(OPENERS)}; rename or convert the file"
        )
    with readable(path):
        for batch in read_fn(path, columns, progress_fn):
            batch.validate(full=True)  # a file may lie about its texts and lengths
            yield batch


def _places(names: Sequence[str], columns: Sequence[str] | None, where: str) -> list[int]:
    """Where the columns stand among the names."""
    if columns is None:
        columns = names
    return [find_column(column, names, where) for column in columns]


def find_column(column: str, names: Sequence[str], where: str) -> int:
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


# --- memory ---------------------------------------------------------------------------------------


def _read_frame(
    frame: Any, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    where = "the table"
    try:
        if hasattr(frame, "iloc") and hasattr(
            frame, "columns"
        ):  # pandas: of a frame of any objects only what is asked for
            places = _places([str(name) for name in frame.columns], columns, where)
            frame = pa.Table.from_pandas(frame.iloc[:, places], preserve_index=False)
        elif isinstance(frame, Mapping):
            frame = pa.table(dict(frame))
        if not hasattr(frame, "__arrow_c_stream__"):
            raise UserError(
                f"a table must be a path, a pandas, polars or pyarrow table, or a dict of lists, "
                f"got {type(frame).__name__}"
            )
        total = len(frame) if hasattr(frame, "__len__") else None
        reader, done = pa.RecordBatchReader.from_stream(frame), 0
        places = _places(_flat_names(reader.schema), columns, where)
        for batch in reader:
            for piece in _pieces(_select(batch, places, columns)):
                piece.validate(full=True)
                yield piece
                done += len(piece)
                progress_fn("reading", done, total)
    except (pa.ArrowException, TypeError) as error:
        raise UserError(
            f"{where} cannot be read ({error}); make each column of one type, such as text"
        ) from error


def _select(
    batch: pa.RecordBatch, places: Sequence[int], columns: Sequence[str] | None
) -> pa.RecordBatch:
    batch = _flatten(batch)
    names = batch.schema.names if columns is None else list(columns)
    return pa.RecordBatch.from_arrays([batch.column(place) for place in places], names)


def _flatten(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Makes the fields of objects columns of their own: `doc.title`."""
    while any(map(pa.types.is_struct, batch.schema.types)):
        flat = pa.Table.from_batches([batch]).flatten()
        arrays = [column.combine_chunks() for column in flat.columns]
        batch = pa.RecordBatch.from_arrays(arrays, flat.schema.names)
    return batch


def _flat_names(fields: Iterable[pa.Field]) -> list[str]:
    """The columns that `_flatten` makes of those of a schema."""
    names: list[str] = []
    for field in fields:
        is_object = pa.types.is_struct(field.type)
        names += _flat_names(field.flatten()) if is_object else [field.name]
    return names


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(batch), BATCH_ROWS):
        yield batch.slice(start, BATCH_ROWS)


# --- Parquet and Arrow ----------------------------------------------------------------------------


def _read_parquet(
    path: Path, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    with _open_seekable(path) as file, pa.parquet.ParquetFile(file) as table:
        names = _flat_names(table.schema_arrow)
        wanted = [names[place] for place in _places(names, columns, str(path))]
        done = 0
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
            yield _flatten(batch).select(wanted)
            done += len(batch)
            progress_fn(f"reading {path.name}", done, table.metadata.num_rows)


def _read_arrow(
    path: Path, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    """The file format, which Feather is too, or the stream format."""
    with _open_seekable(path) as file:
        try:
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
            total = reader.num_record_batches
        except pa.ArrowInvalid:
            file.seek(0)
            batches = reader = pa.ipc.open_stream(file)
            total = None
        places = _places(_flat_names(reader.schema), columns, str(path))
        for done, batch in enumerate(batches, start=1):
            yield from _pieces(_select(batch, places, columns))
            progress_fn(f"reading {path.name}", done, total)


def _open_seekable(path: Path) -> IO[bytes]:
    """A file whose end can be read first; what is compressed or archived as a copy."""
    with open_input_stream(path) as (file, stored):
        if file is stored and path.exists():
            return open_input(path)
        start = file.read(len(PARQUET_MARK))
        if plain_suffix(path) == ".parquet" and start != PARQUET_MARK:
            raise ValueError("what is compressed is no Parquet")  # and may be without end
        copy: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        copy.write(start)
        shutil.copyfileobj(file, copy, BLOCK_BYTES)
        copy.seek(0)
        return copy


# --- text -----------------------------------------------------------------------------------------


class _Text(io.RawIOBase):
    """What follows the first line of a text; counts its quotes and lines."""

    def __init__(self, start: bytes, file: IO[bytes]) -> None:
        self.start, self.file, self.num_quotes, self.num_lines = start, file, 0, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as a file gives them; quotes are counted on the way."""
        block = self.file.read(size)
        if self.start:
            block, self.start = self.start + block, b""
            if 0 <= size < len(block):
                block, self.start = block[:size], block[size:]
        self.num_quotes += block.count(b'"')
        self.num_lines += block.count(b"\n")
        return block


class _Json(_Text):
    """A text of JSON that the parser survives."""

    def read(self, size: int = -1) -> bytes:
        block = super().read(size)
        if TOO_DEEP.search(block):
            raise ValueError("lists or objects are nested thousands of levels deep")
        return block


def _first_line(file: IO[bytes], path: Path) -> tuple[bytes, bytes]:
    """The first line that is not blank, and what was read beyond it."""
    line, rest = b"", b""
    for _ in range(MAX_BLANK_LINES):
        if line.strip():
            break
        line, rest = rest, b""
        if not line:
            line = file.readline(MAX_LINE_BYTES)
        if not line:
            return b"", b""
        if line.startswith(UTF16_MARKS):
            raise UserError(f"{path} is UTF-16 text; save it as UTF-8")
        if b"\0" in line:
            raise UserError(f"{path} holds NUL characters, so it is no UTF-8 text; save it as such")
        first, mark, beyond = line.partition(b"\r")
        if mark and beyond not in (b"", b"\n"):  # lines end with CR alone
            line, rest = first, beyond
    else:
        return b"", b""
    return line.removeprefix(b"\xef\xbb\xbf"), rest


def _read_csv(
    path: Path, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    with open_input_stream(path) as (file, stored):
        line, rest = _first_line(file, path)
        if not line:
            raise UserError(f"{path} is empty; its first line must name the columns")
        try:
            head = line.decode("utf-8").strip("\r\n")
        except UnicodeDecodeError:
            _explain_csv(path, ",")
            raise
        default = "\t" if plain_suffix(path) == ".tsv" else ","
        cells = {delimiter: _split_cells(head, delimiter) for delimiter in default + DELIMITERS}
        delimiter = max(cells, key=lambda delimiter: len(cells[delimiter]))
        names = [name.strip() for name in cells[delimiter]]
        if not names:
            raise UserError(
                f"{path}: its first line does not name the columns; write the names on one line, "
                f"and close each quote"
            )
        wanted = list(map(str, _places(names, columns, f"{path}, its first line")))
        text, num_rows = _Text(rest, file), 0
        try:
            reader = pa.csv.open_csv(
                text,
                read_options=pa.csv.ReadOptions(
                    column_names=list(map(str, range(len(names)))), block_size=BLOCK_BYTES
                ),
                parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                convert_options=pa.csv.ConvertOptions(
                    include_columns=wanted,
                    column_types=dict.fromkeys(wanted, pa.string()),
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
            for batch in reader:
                num_rows += len(batch)
                yield batch.rename_columns(names if columns is None else list(columns))
                progress_fn(f"reading {path.name}", stored.tell(), _stored_size(path))
        except pa.ArrowInvalid as error:
            if not str(error).startswith("Empty CSV"):
                _explain_csv(path, delimiter)
                raise UserError(
                    f"{path}: a row has more than {BLOCK_BYTES} bytes; is a quote missing?"
                    if "straddl" in str(error)
                    else f"{path}: {error}"
                ) from error
        if text.num_quotes % 2:  # the last one may have opened a cell that took the rest
            _explain_csv(path, delimiter, only_open_quote=True)
        elif text.num_quotes and num_rows < text.num_lines:
            _explain_csv(path, delimiter)  # a cell of many lines may end at the quote of another


def _split_cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line; none, if their quotes are wrong."""
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error:
        return []


def _explain_csv(path: Path, delimiter: str, *, only_open_quote: bool = False) -> None:
    """Says by line what is wrong with a file, for errors; returns if that is not seen here."""
    lines = (f"{line}\n" for text in read_lines(path) for line in text.split("\r"))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    limit = csv.field_size_limit(sys.maxsize)
    start, width = 1, 0
    try:
        for cells in reader:
            width = width or len(cells)
            if cells and len(cells) != width and not only_open_quote:
                raise UserError(
                    f"{path}, line {reader.line_num}: has {len(cells)} cells, the first line has "
                    f"{width}; a cell that holds the separator must be quoted"
                )
            start = reader.line_num + 1
    except csv.Error as error:
        if "unexpected end" in str(error):
            raise UserError(
                f"{path}, line {start}: a quote opens in this row and never closes; close it, or "
                f"double it if it is part of the text"
            ) from error
        if not only_open_quote:
            raise UserError(
                f"{path}, line {reader.line_num}: {error}; quote the cell and double each quote "
                f"in it"
            ) from error
    finally:
        csv.field_size_limit(limit)


def _read_json(
    path: Path, columns: Sequence[str] | None, progress_fn: ProgressFn
) -> Iterator[pa.RecordBatch]:
    with open_input_stream(path) as (file, stored):
        line, rest = _first_line(file, path)
        if not line:
            return
        try:
            first = json.loads(line)
            texts = _text_fields(first) if isinstance(first, dict) else {}
        except (ValueError, RecursionError):
            first = None
        if not isinstance(first, dict):
            raise UserError(
                f"{path}, line 1: {quote_value(line.strip())} is no JSON object; write one object "
                f"a line"
            )
        # Other columns, which may be of any kind, are skipped if those that are read are texts.
        is_enough = columns is not None and texts.keys() >= set(columns)
        if is_enough:
            texts = {name: texts[name] for name in columns or ()}
        try:
            reader = pa.json.open_json(
                _Json(line + rest, file),
                read_options=pa.json.ReadOptions(block_size=BLOCK_BYTES),
                parse_options=pa.json.ParseOptions(
                    explicit_schema=pa.schema(texts),
                    unexpected_field_behavior="ignore" if is_enough else "infer",
                ),
            )
            places = _places(_flat_names(reader.schema), columns, str(path))
            for batch in reader:
                yield _select(batch, places, columns)
                progress_fn(f"reading {path.name}", stored.tell(), _stored_size(path))
        except pa.ArrowInvalid as error:
            _explain_json(path, columns if is_enough else None)
            if "straddl" in str(error):
                raise UserError(f"{path}: a line has more than {BLOCK_BYTES} bytes") from error
            problem = re.sub(r" in row \d+$", "", str(error))  # counted from anywhere
            raise UserError(
                f"{path}: {problem}; write a column in one type, such as text"
            ) from error


def _text_fields(row: dict[str, Any]) -> dict[str, pa.DataType]:
    """The texts of an object and of those in it: else what looks like a date would become one."""
    kinds = {key: pa.string() for key, value in row.items() if isinstance(value, str)}
    for key, value in row.items():
        if isinstance(value, dict) and value:
            kinds[key] = pa.struct(_text_fields(value))
    return kinds


def _explain_json(path: Path, columns: Sequence[str] | None) -> None:
    """Says by line what is wrong with a file, for errors; returns if that is not seen here."""
    kinds: dict[str, str] = {}
    for number, text in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(text or "{}")
        except (ValueError, RecursionError) as damage:
            raise UserError(
                f"{path}, line {number}: {quote_value(text)} is not JSON ({damage})"
            ) from damage
        for name in row if columns is None else columns:
            kind = JSON_KINDS.get(type(row.get(name)))
            if kind and kinds.setdefault(name, kind) != kind:
                raise UserError(
                    f"{path}, line {number}: {name!r} is {kind}, and {kinds[name]} before; write a "
                    f"column in one type, such as text"
                )


def _stored_size(path: Path) -> int | None:
    """The bytes of a file; None: it is a member of an archive."""
    return path.stat().st_size if path.is_file() else None


READERS = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
