"""Rows of different length as CSR, the one form of sparse data: in memory, on disk, in batches.

Arrays may be memory-mapped files larger than memory: whatever reads all of one does so in pieces.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from evenhand.errors import UserError
from evenhand.kernels.jit import jit

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.float32]

PIECE = 2**22  # entries: some ten megabytes


class Rows(NamedTuple):
    """N rows of ids: row i holds ids[offsets[i] : offsets[i + 1]]."""

    offsets: IntArray  # (N + 1,) int64
    ids: IntArray  # (nnz,) int32
    values: FloatArray | None = None  # (nnz,); None: every value is 1

    def __len__(self) -> int:  # rows, not fields of the tuple
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        """The ids of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> IntArray:
        """How many ids each row has: (N,)."""
        return np.diff(self.offsets)

    def with_values(self, values: FloatArray | None) -> "Rows":
        """The rows with other values; `_replace` of a tuple would count its fields by `len`."""
        return Rows(self.offsets, self.ids, values)

    def to_scipy(self, num_columns: int) -> csr_matrix:
        """The (N, num_columns) matrix of the values."""
        values = np.ones(len(self.ids)) if self.values is None else self.values
        return csr_matrix((values, self.ids, self.offsets), shape=(len(self), num_columns))

    def to_torch(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Offsets and ids, as int64, and values, as tensors on a device."""
        offsets, ids = (
            torch.from_numpy(np.asarray(array, dtype=np.int64)).to(device)
            for array in (self.offsets, self.ids)
        )
        values = None if self.values is None else torch.from_numpy(self.values).to(device)
        return offsets, ids, values


def rows_from_lists(lists: Sequence[Sequence[int]]) -> Rows:
    """Lists of ids as rows without values."""
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Rows(offsets, np.array([item for items in lists for item in items], dtype=np.int32))


def concatenate_rows(blocks: Sequence[Rows]) -> Rows:
    """The rows of all blocks, one block after the other; all have values, or none."""
    offsets = np.cumsum(np.concatenate([[0], *(block.lengths() for block in blocks)]))
    ids = np.concatenate([block.ids for block in blocks])
    values = [block.values for block in blocks if block.values is not None]
    return Rows(offsets, ids, np.concatenate(values) if values else None)


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
    """The array in pieces, each with the position of its first entry."""
    for start in range(0, len(array), length):
        yield start, array[start : start + length]


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
