"""Distinct numbers and entries in the order of their columns, without sorting: numba twins."""

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.compiled import compiled

Ids = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 over the golden ratio: Fibonacci hashing


@compiled
def find_distinct(ids: Ids, distinct: Ids, inverse: Ids) -> int:
    """Fills `distinct` with the ids as they first occur, and where each id stands there.

    A table of twice the size, at least, says which of the distinct ids has a hash; where that is
    another id, the next place is tried.
    """
    bits = 1
    while (1 << bits) < 2 * len(ids):
        bits += 1
    table = np.full(1 << bits, -1, np.int32)
    count = 0
    for entry in range(len(ids)):
        place = np.int64((np.uint64(ids[entry]) * _GOLDEN) >> np.uint64(64 - bits))
        while table[place] >= 0 and distinct[table[place]] != ids[entry]:
            place = (place + 1) & ((1 << bits) - 1)
        if table[place] < 0:
            table[place] = count
            distinct[count] = ids[entry]
            count += 1
        inverse[entry] = table[place]
    return count


@compiled
def order_by_column(
    rows: Ids,
    columns: Ids,
    values: NDArray[np.float32],
    starts: Ids,
    ordered_rows: Ids,
    ordered_values: NDArray[np.float32],
) -> None:
    """Counts the entries of each column, then puts every entry at its place.

    `starts` has a place for each column and two more, and is 0.
    """
    for entry in range(len(columns)):
        starts[columns[entry] + 2] += 1
    for column in range(2, len(starts)):
        starts[column] += starts[column - 1]
    for entry in range(len(columns)):
        place = starts[columns[entry] + 1]
        ordered_rows[place] = rows[entry]
        ordered_values[place] = values[entry]
        starts[columns[entry] + 1] = place + 1
