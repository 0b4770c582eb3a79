"""Distinct ids, entries by column and the slots of an id, without sorting: numba twins of torch.

A hash table has at least twice as many places as ids. Where an id's place is taken by another id,
the next is tried.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.jit import jit
from evenhand.kernels.mix import GOLDEN64

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Places = NDArray[np.int32]


@jit
def find_distinct(ids: Ids, distinct: Ids, places: Ids) -> int:
    """Fills `distinct` with the ids as they first occur, and where each id stands there."""
    table = _empty_table(len(ids))
    count = 0
    for entry in range(len(ids)):
        place = _place_of(ids[entry], table, distinct)
        if table[place] < 0:
            table[place] = count
            distinct[count] = ids[entry]
            count += 1
        places[entry] = table[place]
    return count


@jit
def find_entries(
    ids: Ids, coefficients: Floats, starts: Ids, distinct: Ids, columns: Ids, values: Floats
) -> int:
    """Lists the coefficients (R, C) that are not 0, of ids that are not below 0, by distinct id."""
    table = _empty_table(ids.size)
    count, num_entries = 0, 0
    for row in range(len(ids)):
        for column in range(ids.shape[1]):
            value = coefficients[row, column]
            if value == 0 or ids[row, column] < 0:
                continue
            place = _place_of(ids[row, column], table, distinct)
            if table[place] < 0:
                table[place] = count
                distinct[count] = ids[row, column]
                count += 1
            columns[num_entries], values[num_entries] = table[place], value
            num_entries += 1
        starts[row + 1] = num_entries
    return count


@jit
def transpose(
    starts: Ids, columns: Ids, values: Floats, new_starts: Ids, new_columns: Ids, new_values: Floats
) -> None:
    """Counts the entries of each column, then puts every entry at its place.

    `new_starts` is 0, and has a place for each column and two more.
    """
    for entry in range(len(columns)):
        new_starts[columns[entry] + 2] += 1
    for column in range(2, len(new_starts)):
        new_starts[column] += new_starts[column - 1]
    for row in range(len(starts) - 1):
        for entry in range(starts[row], starts[row + 1]):
            place = new_starts[columns[entry] + 1]
            new_columns[place], new_values[place] = row, values[entry]
            new_starts[columns[entry] + 1] = place + 1


@jit
def entries_of(starts: Ids, rows: Ids, new_starts: Ids) -> Ids:
    """Where the entries of chosen rows stand, one row after another; fills where each starts."""
    for place in range(len(rows)):
        length = starts[rows[place] + 1] - starts[rows[place]]
        new_starts[place + 1] = new_starts[place] + length
    entries = np.empty(new_starts[-1], np.int64)
    for place in range(len(rows)):
        shift = starts[rows[place]] - new_starts[place]
        for entry in range(new_starts[place], new_starts[place + 1]):
            entries[entry] = entry + shift
    return entries


@jit
def mask_shared(scores: Floats, sampled_ids: Ids, positive_ids: Ids) -> None:
    """-inf for slots (M,) that are empty, or that hold one of the positives (B, P) of the row."""
    table = _empty_table(len(sampled_ids))
    following = np.full(len(sampled_ids), -1, np.int32)  # the next slot with the same id
    for slot in range(len(sampled_ids)):
        if sampled_ids[slot] < 0:
            scores[:, slot] = -np.inf
        else:
            place = _place_of(sampled_ids[slot], table, sampled_ids)
            following[slot] = table[place]
            table[place] = slot
    for row in range(len(positive_ids)):
        for column in range(positive_ids.shape[1]):
            if positive_ids[row, column] >= 0:
                slot = table[_place_of(positive_ids[row, column], table, sampled_ids)]
                while slot >= 0:
                    scores[row, slot] = -np.inf
                    slot = following[slot]


@jit
def _empty_table(num_ids: int) -> Places:
    size = 2
    while size < 2 * num_ids:
        size *= 2
    return np.full(size, -1, np.int32)


@jit
def _place_of(key: int, table: Places, ids: Ids) -> Any:
    """Where the table holds the index of this id among `ids`, or -1 and room for it."""
    place = np.int64((np.uint64(key) * GOLDEN64) >> np.uint64(32)) & (len(table) - 1)
    while table[place] >= 0 and ids[table[place]] != key:
        place = (place + 1) & (len(table) - 1)
    return place
