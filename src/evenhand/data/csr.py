"""Rows of ids, and texts, of different length as CSR; and the pairs that rows stand for.

Arrays may be memory-mapped files larger than memory: whatever reads all of one does so in pieces.
"""

import dataclasses
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from evenhand.errors import UserError
from evenhand.files import NpyWriter, open_npy
from evenhand.kernels.jit import jit

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float32]

PIECE = 2**22  # entries: some ten megabytes
BLOCK_ROWS = 2**16
MAX_IDS = 2**31 - 1  # ids are 32 bits wide on disk
MOST_ENTRIES = 2**22  # of the index of pairs: 16 MB
INDEX_PIECE = 2**17  # of its entries that are found at once


class Rows(NamedTuple):
    """N rows of ids: row i holds ids[offsets[i] : offsets[i + 1]]."""

    offsets: IntArray  # (N + 1,) int64
    ids: IntArray  # (nnz,) int32
    values: NDArray[np.floating[Any]] | None = None  # (nnz,) float32; None: every value is 1

    def __len__(self) -> int:  # rows, not fields of the tuple
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        """The ids of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> IntArray:
        """How many ids each row has: (N,)."""
        return np.diff(self.offsets)

    def blocks(self) -> Iterator["Rows"]:
        """The rows, some after the others: what is made of a block fits memory."""
        for start in range(0, len(self), BLOCK_ROWS):
            offsets = self.offsets[start : start + BLOCK_ROWS + 1]
            span = slice(offsets[0], offsets[-1])
            values = None if self.values is None else self.values[span]
            yield Rows(offsets - offsets[0], self.ids[span], values)

    def with_values(self, values: FloatArray | None) -> "Rows":
        """The rows with other values; `_replace` of a tuple would count its fields by `len`."""
        return Rows(self.offsets, self.ids, values)

    def to_scipy(self, num_columns: int) -> csr_matrix:
        """The (N, num_columns) matrix of the values."""
        values = np.ones(len(self.ids)) if self.values is None else self.values
        return csr_matrix((values, self.ids, self.offsets), shape=(len(self), num_columns))

    def to_merged(self, num_columns: int) -> csr_matrix:
        """The same matrix with each id of a row once, in order, its values added.

        Example:
            >>> Rows(np.array([0, 3]), np.array([4, 1, 4])).to_merged(5).data
            array([1., 2.])
        """
        matrix = self.to_scipy(num_columns)
        if not matrix.has_canonical_format:
            matrix = matrix.copy()  # its arrays are those of the rows
            matrix.sum_duplicates()
        return matrix

    def to_torch(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Offsets and ids, as int64, and values, as tensors on a device."""
        offsets, ids = (
            torch.from_numpy(np.asarray(array, dtype=np.int64)).to(device)
            for array in (self.offsets, self.ids)
        )
        values = None if self.values is None else torch.from_numpy(self.values).to(device)
        return offsets, ids, values


@dataclasses.dataclass(frozen=True, eq=False)
class Strings:
    """Many strings in two arrays, so that millions of names open without being read."""

    offsets: IntArray  # (N + 1,) int64, into `utf8`
    utf8: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> str:
        position = range(len(self))[index]  # counts from the end below 0; IndexError beyond
        start, stop = self.offsets[position], self.offsets[position + 1]
        return self.utf8[start:stop].tobytes().decode("utf-8", "replace")  # of a damaged file

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    @classmethod
    def pack(cls, strings: Iterable[str]) -> "Strings":
        encoded = [string.encode("utf-8") for string in strings]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(offsets, np.frombuffer(b"".join(encoded), dtype=np.uint8))

    @classmethod
    def from_arrow(cls, texts: pa.LargeStringArray) -> "Strings":
        """Texts without nulls, of which nothing is copied."""
        if not len(texts):
            return cls.pack([])
        _, offsets, utf8 = texts.buffers()
        begins = np.frombuffer(offsets, dtype=np.int64)[texts.offset :][: len(texts) + 1]
        data = np.frombuffer(utf8 or b"", dtype=np.uint8)
        return cls(begins - begins[0], data[begins[0] : begins[-1]])


def rows_from_lists(lists: Sequence[Sequence[int]]) -> Rows:
    """Lists of ids as rows without values."""
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Rows(offsets, np.array([item for items in lists for item in items], dtype=np.int32))


def take_rows(rows: Rows, row_ids: IntArray) -> Rows:
    """The chosen rows, in that order, as rows of their own."""
    starts, lengths = _spans(rows, row_ids)
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.empty(offsets[-1], dtype=rows.ids.dtype)
    _copy_rows(_read_only(rows.ids), starts, lengths, ids, offsets)
    if rows.values is None:
        return Rows(offsets, ids)
    values = np.empty(offsets[-1], dtype=rows.values.dtype)
    _copy_rows(_read_only(rows.values), starts, lengths, values, offsets)
    return Rows(offsets, ids, values)


def pad_rows(rows: Rows, row_ids: IntArray, *, width: int | None = None) -> NDArray[np.int64]:
    """The ids of chosen rows side by side, padded with -1: (B,) -> (B, P).

    P is the length of the longest row, or `width`: longer rows are cut there.
    """
    starts, lengths = _spans(rows, row_ids)
    width = max(1, int(lengths.max(initial=1)) if width is None else width)
    padded = np.full((len(starts), width), -1, dtype=np.int64)
    places = width * np.arange(len(starts))
    _copy_rows(_read_only(rows.ids), starts, np.minimum(lengths, width), padded.ravel(), places)
    return padded


def _spans(rows: Rows, row_ids: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the chosen rows start, and their lengths: (B,) and (B,)."""
    starts, ends = rows.offsets[row_ids], rows.offsets[row_ids + 1]
    num_entries = min(len(rows.ids), len(rows.ids if rows.values is None else rows.values))
    is_inside = (starts >= 0) & (starts <= ends) & (ends <= num_entries)
    if not is_inside.all():  # compiled code would read whatever lies there
        row = int(row_ids[~is_inside][0])
        raise UserError(
            f"row {row} is said to go from {rows.offsets[row]} to {rows.offsets[row + 1]} of "
            f"{num_entries} entries: the data set is damaged; make it again"
        )
    return np.asarray(starts, dtype=np.int64), np.asarray(ends - starts, dtype=np.int64)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view, so that arrays in memory and on disk are of one type, compiled once."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


@jit
def _copy_rows(
    source: NDArray[Any],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    target: NDArray[Any],
    places: NDArray[np.int64],
) -> None:
    """Copies the row that starts at starts[i] to places[i], for each i."""
    for row in range(len(starts)):
        # Unsigned: with no code for places counted from the end, this is a copy of whole words.
        start, place = np.uint64(starts[row]), np.uint64(places[row])
        for column in range(np.uint64(lengths[row])):
            target[place + column] = source[start + column]


def iterate_pieces(array: NDArray[Any], length: int = PIECE) -> Iterator[tuple[int, NDArray[Any]]]:
    """The array in pieces, each with the position of its first entry.

    Of a memory-mapped one, what was read does not stay in the memory of this process.
    """
    for start in range(0, len(array), length):
        yield start, array[start : start + length]
        release_pages(array)


def release_pages(array: Any) -> None:
    """Gives back what was read of a memory-mapped array; the file has it still."""
    while isinstance(array, np.ndarray):
        array = array.base
    if isinstance(array, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        array.madvise(mmap.MADV_DONTNEED)


def count_ids(ids: IntArray, size: int) -> NDArray[np.int64]:
    """How often each of 0 .. size - 1 occurs: (n,) -> (size,).

    Example:
        >>> count_ids(np.array([0, 2, 2]), 4)
        array([1, 0, 2, 0])
    """
    counts = np.zeros(size, dtype=np.int64)
    for _, piece in iterate_pieces(ids, max(PIECE, size)):
        if len(piece) and not 0 <= piece.min() <= piece.max() < size:
            raise UserError(
                f"ids go from {piece.min()} to {piece.max()} where there are {size}: the data set "
                f"is damaged; make it again"
            )
        counts += np.bincount(piece, minlength=size)
    return counts


# --- arrays and rows that grow block by block, in memory or in the files of a data set ------------


def array_path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe=' ')}.npy"  # a group column may be called a/b


class ArrayWriter:
    """An array that rows are appended to: in memory or, given a folder, in a .npy file of it.

    In memory it grows in place: blocks joined at the end would all be held twice for a moment.
    """

    def __init__(
        self, folder: Path | None, name: str, dtype: str, row_shape: tuple[int, ...] = ()
    ) -> None:
        self.dtype, self.row_shape = dtype, row_shape
        self.buffer, self.file = bytearray(), None
        if folder is not None:
            self.file = NpyWriter(array_path(folder, name), dtype, row_shape)

    def append(self, rows: NDArray[Any]) -> None:
        """Appends (n, *row_shape) rows."""
        if self.file is not None:
            self.file.append(rows)
        elif rows.size:
            self.buffer += np.ascontiguousarray(rows, dtype=self.dtype).data

    def finish(self) -> NDArray[Any]:
        """The whole array; that of a file is memory-mapped."""
        if self.file is not None:
            self.file.close()
            return open_npy(self.file.path, is_empty=self.file.num_rows == 0)
        return np.frombuffer(self.buffer, dtype=self.dtype).reshape(-1, *self.row_shape)


class RowsWriter:
    """Rows that grow block by block, as `ArrayWriter`: all blocks have values, or none."""

    def __init__(self, folder: Path | None = None, name: str = "") -> None:
        self.folder, self.name, self.num_ids = folder, name, 0
        self.arrays: dict[str, ArrayWriter] = {}  # none, and no file, before the first block

    def append(self, rows: Rows) -> None:
        if not self.arrays:
            kinds = {"offsets": "<i8", "ids": "<i4", "values": "<f4"}
            self.arrays = {
                kind: ArrayWriter(self.folder, f"{self.name}.{kind}", dtype)
                for kind, dtype in kinds.items()
                if kind != "values" or rows.values is not None
            }
            self.arrays["offsets"].append(np.zeros(1))
        self.arrays["offsets"].append(rows.offsets[1:] + self.num_ids)
        self.arrays["ids"].append(rows.ids)
        if rows.values is not None:
            self.arrays["values"].append(rows.values)
        self.num_ids += len(rows.ids)

    def finish(self) -> Rows:
        """All rows, of one block at least; those of files are memory-mapped."""
        return Rows(*(array.finish() for array in self.arrays.values()))


def collect_rows(blocks: Iterable[Rows], folder: Path | None = None, name: str = "") -> Rows:
    """The rows of all blocks, one block after the other; given a folder, never all in memory."""
    writer = RowsWriter(folder, name)
    for block in blocks:
        writer.append(block)
    return writer.finish()


# --- checks, before compiled code reads by the arrays ---------------------------------------------


def check_rows(
    rows: Rows, limit: int, name: str, *, needs_values: bool = False, num_rows: int | None = None
) -> None:
    """Refuses, by a `ValueError`, rows with which compiled code would read beyond an array.

    Args:
        limit: ids must be below it.
        num_rows: how many there must be.
    """
    if needs_values and rows.values is None:
        raise ValueError(f"{name} must have values")
    check_row_spans(name, rows, rows.offsets.size - 1 if num_rows is None else num_rows)
    check_offsets(name, rows.offsets)
    check_ids(f"ids of {name}", rows.ids, limit)


def check_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuses an array of another shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {array.shape}")


def check_row_spans(name: str, rows: Rows, num_rows: int) -> None:
    """Refuses rows whose arrays do not belong together, or that are not so many."""
    check_spans(name, num_rows, rows.offsets, *(array for array in rows[1:] if array is not None))


def check_spans(name: str, num_rows: int, offsets: IntArray, *entries: NDArray[Any]) -> None:
    """Refuses offsets that are not of all rows, or do not go from 0 to the end of the entries."""
    length = len(entries[0]) if entries[0].ndim else 0
    if offsets.ndim != 1 or not len(offsets) or any(e.shape != (length,) for e in entries):
        raise ValueError(f"the arrays of {name} do not belong together")
    if offsets[0] != 0 or offsets[-1] != length:
        raise ValueError(
            f"{name}.offsets must go from 0 to {length}, and goes from {offsets[0]} to "
            f"{offsets[-1]}"
        )
    if len(offsets) - 1 != num_rows:
        raise ValueError(f"{name} has {len(offsets) - 1} rows, expected {num_rows}")


def check_offsets(name: str, offsets: IntArray) -> None:
    """Refuses offsets that decrease."""
    for start, piece in iterate_pieces(offsets[1:]):
        is_lower = piece < offsets[start : start + len(piece)]
        if is_lower.any():
            raise ValueError(f"{name}.offsets decrease after row {start + int(is_lower.argmax())}")


def check_ids(name: str, ids: IntArray, limit: int, *, first: int = 0) -> None:
    """Refuses ids that are not from `first` to `limit` - 1."""
    for _, piece in iterate_pieces(ids):
        low, high = piece.min(), piece.max()
        if not first <= low <= high < limit:
            raise ValueError(f"{name} must be from {first} to {limit - 1}, got {low} to {high}")


# --- pairs: multilabel data as multiclass, one training example for each (query, positive) --------


class Pairs(NamedTuple):
    """Examples: a query and one of its positives each."""

    query_ids: IntArray  # (N_pairs,) int64
    label_ids: IntArray  # (N_pairs,) int64


def pairs_of(positives: Rows) -> Pairs:
    """Every (query, positive) pair, in the order of the queries."""
    query_ids = np.repeat(np.arange(len(positives)), positives.lengths())
    return Pairs(query_ids, positives.ids.astype(np.int64))


class PairIndex:
    """Finds pairs by their number in `pairs_of`, without a number in memory for every pair.

    The pairs of query q are offsets[q] .. offsets[q + 1] - 1, so the query of a pair is found by
    a search in the offsets, which may stay on disk. An index of bounded size holds the query of
    every pair if there are few of them, else of every 2nd, 4th, ...: a search is between two of
    its entries.
    """

    def __init__(self, positives: Rows, *, most_entries: int = MOST_ENTRIES) -> None:
        self.positives = positives
        self.num_pairs = len(positives.ids)
        self.offsets: NDArray[np.int64] = np.asarray(positives.offsets, dtype=np.int64)
        self.shift = 0  # an entry every 2 ** shift pairs
        while self.num_pairs >> self.shift > most_entries:
            self.shift += 1
        num_entries = -(-self.num_pairs // (1 << self.shift))
        dtype = np.int32 if len(positives) < 2**31 else np.int64
        self.first_rows: NDArray[Any] = np.empty(num_entries + 1, dtype=dtype)
        for start, piece in iterate_pieces(self.first_rows[:-1], INDEX_PIECE):
            marks = np.arange(start, start + len(piece)) << self.shift
            piece[:] = np.searchsorted(self.offsets, marks, side="right") - 1
        self.first_rows[-1] = max(0, len(positives) - 1)

    def __len__(self) -> int:
        return self.num_pairs

    def pairs_at(self, pair_ids: NDArray[np.int64]) -> Pairs:
        """The chosen pairs, as they are in `pairs_of`: (B,) -> (B,) and (B,)."""
        label_ids = np.asarray(self.positives.ids)[pair_ids].astype(np.int64)
        if self.shift == 0:
            return Pairs(self.first_rows[pair_ids].astype(np.int64), label_ids)
        query_ids = np.empty(len(pair_ids), dtype=np.int64)
        _find_rows(self.offsets, self.first_rows, self.shift, pair_ids, query_ids)
        return Pairs(query_ids, label_ids)


@jit
def _find_rows(
    offsets: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    shift: int,
    pair_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """The last row that begins at or before a pair: between those of two entries of the index."""
    for place in range(len(pair_ids)):
        pair = pair_ids[place]
        low, high = first_rows[pair >> shift], first_rows[(pair >> shift) + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if offsets[middle] <= pair:
                low = middle
            else:
                high = middle - 1
        rows[place] = low
