"""The largest entries of each row while it is in the cache: the numba twin of `torch.topk`.

A row is folded twice: `fold` entries that stand a fixed distance apart share a maximum, and so do
`fold` of these maxima. Entries that reach the count-th largest of the last maxima hold the `count`
largest of the row and few others, among which an exact selection is cheap. They are found by going
back: into the maxima that reach it, and only there.

Numbers are compared as integers of the same order, in which NaN is the largest, as it is for
`torch.topk`. Of equal entries, those further left are taken.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.jit import jit
from evenhand.kernels.threads import in_parts

_INFINITY, _HIGHEST, _LOWEST = np.int32(0x7F800000), np.int32(2**31 - 1), np.int32(-(2**31))


def fold_of(width: int, count: int) -> int:
    """As much as leaves, folded twice, four maxima for every entry that is sought; at most 4."""
    return max(fold for fold in (1, 2, 4) if fold == 1 or 4 * count * fold**2 <= width)


@jit
def select_rows(
    num_threads: int,
    scores: NDArray[np.int32],
    fold: int,
    positions: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    """Fills positions and values (B, count) from scores (B, M), given as bits of float32."""
    in_parts(_select_rows, len(scores), num_threads, (scores, fold, positions, values))


@jit
def _select_rows(
    first: int,
    last: int,
    scores: NDArray[np.int32],
    fold: int,
    positions: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    count, width = positions.shape[1], scores.shape[1]
    num_last = width // fold**2
    num_first, num_folded = fold * num_last, fold**2 * num_last
    keys = np.empty(width, np.int32)
    first_maxima, last_maxima = np.empty(num_first, np.int32), np.empty(num_last, np.int32)
    found, found_keys = np.empty(width + 1, np.int32), np.empty(width + 1, np.int32)
    starts = np.empty(num_first + 1, np.int32)
    for row in range(first, last):
        line = scores[row]
        for column in range(width):
            keys[column] = _key(line[column])
        _fold(keys[:num_folded], first_maxima)
        _fold(first_maxima, last_maxima)
        threshold = _reached(last_maxima, count, count + count // 8)

        num_found = 0
        for column in range(num_last):  # without a branch, which would be mispredicted
            found[num_found] = column
            num_found += last_maxima[column] >= threshold
        num_starts = 0
        for column in found[:num_found]:
            for start in range(column, num_first, num_last):
                starts[num_starts] = start
                num_starts += first_maxima[start] >= threshold
        num_found = 0
        for start in starts[:num_starts]:
            for position in range(start, num_folded, num_first):
                found[num_found], found_keys[num_found] = position, keys[position]
                num_found += keys[position] >= threshold
        for position in range(num_folded, width):
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


@jit
def _fold(keys: NDArray[np.int32], maxima: NDArray[np.int32]) -> None:
    """maxima[i] of keys[i], keys[i + n], keys[i + 2 n], ..., n the number of maxima."""
    for column in range(len(maxima)):
        maxima[column] = keys[column]
    for start in range(len(maxima), len(keys), len(maxima)):
        part = keys[start : start + len(maxima)]
        for column in range(len(maxima)):
            maxima[column] = max(maxima[column], part[column])


@jit
def _key(bits: np.int32) -> np.int32:
    key = np.int32(bits ^ ((bits >> np.int32(31)) & _HIGHEST))
    return _HIGHEST if np.int32(bits & _HIGHEST) > _INFINITY else key


@jit
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
