"""Passes over arrays that may be larger than memory: a piece at a time, nothing of their size."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.errors import UserError

IntArray = NDArray[np.integer[Any]]

PIECE = 2**22  # entries: some ten megabytes


def pieces(array: NDArray[Any], length: int = PIECE) -> Iterator[tuple[int, NDArray[Any]]]:
    """The array in pieces, each with the place of its first entry."""
    for start in range(0, len(array), length):
        yield start, array[start : start + length]


def counted(ids: IntArray, size: int) -> NDArray[np.int64]:
    """How often each of 0 .. size - 1 occurs: (n,) -> (size,).

    Example:
        >>> counted(np.array([0, 2, 2]), 4)
        array([1, 0, 2, 0])
    """
    counts = np.zeros(size, dtype=np.int64)
    for _, piece in pieces(ids, max(PIECE, size)):
        more = np.bincount(piece, minlength=size)
        if len(more) > size:
            raise UserError(
                f"an id is {len(more) - 1} where there are {size}: the data set is damaged; "
                f"make it again"
            )
        counts += more
    return counts


def first_not_finite(values: NDArray[np.floating[Any]]) -> int | None:
    """The first entry, or row, that holds a NaN or an infinity."""
    width = max(1, int(np.prod(values.shape[1:])))
    for start, piece in pieces(values, max(1, PIECE // width)):
        is_finite = np.isfinite(piece)
        if not is_finite.all():
            return start + int(np.argwhere(~is_finite)[0][0])
    return None
