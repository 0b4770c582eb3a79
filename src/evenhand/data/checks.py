"""What must be true of arrays before anything, compiled code too, reads by them: else `ValueError`.

Lengths are compared when a data set is opened, which reads two numbers of an array. Ids and offsets
are read when a model is built, all of them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, iterate_pieces

MAX_IDS = 2**31 - 1  # ids are 32 bits wide on disk
MOST_UNSEEN = 2**24  # labels or features that may be promised whatever the rows name
LABELS_PER_ENTRY = 16  # of more labels than this for every pair, nearly none could be learnt


def check_length(name: str, length: int, expected: int) -> None:
    """Refuses rows that are not as many as those they belong to."""
    if length != expected:
        raise ValueError(f"{name} has {length} rows, expected {expected}")


def check_spans(name: str, offsets: IntArray, *entries: NDArray[Any]) -> None:
    """Refuses offsets that do not go from 0 to the end of every array of entries."""
    length = len(entries[0]) if entries[0].ndim else 0
    if offsets.ndim != 1 or not len(offsets) or any(e.shape != (length,) for e in entries):
        raise ValueError(f"the arrays of {name} do not belong together")
    if offsets[0] != 0 or offsets[-1] != length:
        raise ValueError(
            f"{name}.offsets must go from 0 to {length}, and goes from {offsets[0]} to "
            f"{offsets[-1]}"
        )


def check_rows(name: str, rows: Rows) -> None:
    """Refuses rows whose offsets, ids and values are not of one length."""
    check_spans(name, rows.offsets, rows.ids, rows.ids if rows.values is None else rows.values)


def check_offsets(name: str, offsets: IntArray) -> None:
    """Refuses offsets that decrease."""
    for start, piece in iterate_pieces(offsets[1:]):
        is_lower = piece < offsets[start : start + len(piece)]
        if is_lower.any():
            raise ValueError(f"{name}.offsets decrease after row {start + int(is_lower.argmax())}")


def check_ids(name: str, ids: IntArray, limit: int, *, first: int = 0) -> None:
    """Refuses ids that are not from `first` to `limit` - 1."""
    if len(ids) and not first <= ids.min() <= ids.max() < limit:
        raise ValueError(
            f"{name} must be from {first} to {limit - 1}, got {ids.min()} to {ids.max()}"
        )


def check_promise(name: str, count: int, num_entries: int) -> None:
    """Refuses a number of labels or features that no rows bear out.

    Tables of so many rows are made of it, and it may be a slip of the pen, or malice.
    """
    if count > max(MOST_UNSEEN, LABELS_PER_ENTRY * num_entries):
        raise ValueError(
            f"{name} is {count}, and all rows together name at most {num_entries} different ones"
        )


def first_not_finite(values: NDArray[np.floating[Any]]) -> int | None:
    """The first entry, or row, that holds a NaN or an infinity."""
    width = max(1, int(np.prod(values.shape[1:])))
    for start, piece in iterate_pieces(values, max(1, 2**22 // width)):
        is_finite = np.isfinite(piece)
        if not is_finite.all():
            return start + int(np.argwhere(~is_finite)[0][0])
    return None
