"""The largest entries of each row while it is in the cache: the numba twin of `torch.topk`.

A row is folded: one maximum for every `fold` entries that stand a fixed distance apart. Entries
that reach the count-th largest maximum hold the `count` largest of the row and few others, among
which an exact selection is cheap. Numbers are compared as integers of the same order, in which NaN
is the largest, as it is for `torch.topk`; of equal entries, those further left are taken.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.compiled import compiled

LARGEST_FOLD = 16
_INFINITY, _HIGHEST, _LOWEST = np.int32(0x7F800000), np.int32(2**31 - 1), np.int32(-(2**31))


def fold_of(width: int, count: int) -> int:
    """Entries to a maximum: as many as leave four maxima for every entry that is sought."""
    return max(1, min(LARGEST_FOLD, width // (4 * count)))


@compiled
def select_rows(
    first: int,
    last: int,
    scores: NDArray[np.int32],
    fold: int,
    positions: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    """Fills positions and values (B, count) from scores (B, M), given as bits of float32."""
    count, width = positions.shape[1], scores.shape[1]
    distance = width // fold
    keys, maxima = np.empty(width, np.int32), np.empty(distance, np.int32)
    columns = np.empty(distance + 1, np.int32)
    found, found_keys = np.empty(width + 1, np.int32), np.empty(width + 1, np.int32)
    for row in range(first, last):
        line = scores[row]
        for column in range(distance):
            maxima[column] = _LOWEST
        for start in range(0, fold * distance, distance):
            part, part_keys = line[start : start + distance], keys[start : start + distance]
            for column in range(distance):
                part_keys[column] = _key(part[column])
                maxima[column] = max(maxima[column], part_keys[column])
        for column in range(fold * distance, width):
            keys[column] = _key(line[column])
        threshold = _reached(maxima, count, count + count // 8)

        num_columns, num_found = 0, 0
        for column in range(distance):  # without a branch, which would be mispredicted
            columns[num_columns] = column
            num_columns += maxima[column] >= threshold
        for column in columns[:num_columns]:
            for position in range(column, fold * distance, distance):
                found[num_found], found_keys[num_found] = position, keys[position]
                num_found += keys[position] >= threshold
        for position in range(fold * distance, width):
            found[num_found], found_keys[num_found] = position, keys[position]
            num_found += keys[position] >= threshold

        threshold = _reached(found_keys[:num_found], count, count)
        num_kept = 0
        for place in range(num_found):
            found[num_kept] = found[place]
            num_kept += found_keys[place] > threshold
        for position in range(width):
            if num_kept == count:
                break
            found[num_kept] = position
            num_kept += keys[position] == threshold
        for place in range(count):
            positions[row, place] = found[place]
            values[row, place] = line[found[place]]


@compiled
def _key(bits: np.int32) -> np.int32:
    key = np.int32(bits ^ ((bits >> np.int32(31)) & _HIGHEST))
    return _HIGHEST if np.int32(bits & _HIGHEST) > _INFINITY else key


@compiled
def _reached(keys: NDArray[np.int32], count: int, most: int) -> Any:
    """A key that `count` to `most` of the keys reach; or more, where ties leave no such key."""
    low, high = keys[0], keys[0]
    for place in range(len(keys)):  # to iterate over the keys themselves is far slower
        low, high = min(low, keys[place]), max(high, keys[place])
    while low < high:  # `count` keys reach low, fewer reach high + 1
        middle = np.int32((np.int64(low) + np.int64(high) + 1) >> 1)
        num_reach = np.int32(0)
        for place in range(len(keys)):
            num_reach = np.int32(num_reach + np.int32(keys[place] >= middle))
        if num_reach < count:
            high = np.int32(middle - 1)
        else:
            low = middle
            if num_reach <= most:
                break
    return low
