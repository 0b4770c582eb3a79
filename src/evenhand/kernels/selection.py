"""The largest entries of each row, and those that do not count.

`torch.topk` is the obvious form, and the one for other devices. Its twin is by hand because a row
is then read once, while it is in the cache. It is folded twice: `fold` entries that stand a fixed
distance apart share a maximum, and so do `fold` of these maxima. Entries that reach the count-th
largest of the last maxima hold the `count` largest of the row and few others, among which an exact
selection is cheap. They are found by going back: into the maxima that reach it, and only there.

Numbers are compared as integers of the same order, in which NaN is the largest, as it is for
`torch.topk`. Of equal entries, those further left are taken.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.kernels.jit import are_plain, in_parts, jit, num_threads_for
from evenhand.kernels.sparse import Floats, Ids, Places, empty_table, place_of

SCORES_AT_ONCE = 2**22  # of a block on a CPU: fewer slow the product down, more leave the cache
_INFINITY, _HIGHEST = np.int32(0x7F800000), np.int32(2**31 - 1)


class Largest(NamedTuple):
    positions: Tensor  # (B, count) int64, in no particular order
    values: Tensor  # (B, count)


def largest(scores: Tensor, count: int) -> Largest:
    """The `count` largest entries of each row of (..., M), without gradient; NaN is above all.

    Example:
        >>> largest(torch.tensor([[0.1, 0.9, 0.5]]), 1)
        Largest(positions=tensor([[1]]), values=tensor([[0.9000]]))
    """
    scores = scores.detach().contiguous()
    if scores.dim() != 2 or scores.dtype != torch.float32 or not are_plain(scores):
        found = scores.topk(count, dim=-1, sorted=False)
        return Largest(found.indices, found.values)
    batch_size, width = scores.shape
    if not 1 <= count <= width:
        raise ValueError(f"count must be between 1 and {width} (the length of a row), got {count}")
    positions = torch.empty(batch_size, count, dtype=torch.int64)
    values = torch.empty(batch_size, count)
    bits, chosen_bits = scores.view(torch.int32).numpy(), values.view(torch.int32).numpy()
    arguments = bits, fold_of(width, count), positions.numpy(), chosen_bits
    _select(num_threads_for(scores.numel()), batch_size, arguments)
    return Largest(positions, values)


def largest_of_blocks(
    scores_fn: Callable[[int, int], Tensor], shape: tuple[int, int], count: int, *, like: Tensor
) -> Largest:
    """`largest` of scores that are made a few rows at a time, and are never all there at once.

    Args:
        scores_fn: first row, row after the last -> (b, M) scores.
        shape: (B, M) of them all.
        like: of the type and on the device of the scores.
    """
    batch_size, width = shape
    rows_at_once = max(1, SCORES_AT_ONCE // width) if are_plain(like) else batch_size
    blocks = [
        largest(scores_fn(first, min(batch_size, first + rows_at_once)), count)
        for first in range(0, batch_size, rows_at_once)
    ]
    return Largest(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def mask_shared_(scores: Tensor, sampled_ids: Tensor, positive_ids: Tensor) -> Tensor:
    """-inf, in place, for what an example must not see of a shared sample: (B, M), (M,), (B, P).

    These are its positives and the empty slots. Looks every positive up in the sample, where
    comparing each with each slot, as `mining.mask_positives` does, takes B P M.

    Example:
        >>> mask_shared_(torch.zeros(2, 3), torch.tensor([7, -1, 5]), torch.tensor([[5], [7]]))
        tensor([[0., -inf, -inf],
                [-inf, -inf, 0.]])
    """
    positive_ids = positive_ids.contiguous()
    if are_plain(scores, sampled_ids, positive_ids):
        _mask_shared(scores.numpy(), sampled_ids.numpy(), positive_ids.numpy())
        return scores
    scores.index_fill_(1, (sampled_ids < 0).nonzero().squeeze(1), -torch.inf)
    sorted_ids, order = sampled_ids.sort()
    firsts = torch.searchsorted(sorted_ids, positive_ids)  # (B, P)
    counts = torch.searchsorted(sorted_ids, positive_ids, right=True) - firsts  # repeats of a label
    counts = counts.flatten()  # (B * P,)
    starts = firsts.flatten() - (counts.cumsum(0) - counts)
    places = torch.repeat_interleave(starts, counts)  # (n,), then one after another
    places += torch.arange(len(places), device=places.device)
    rows = torch.arange(len(scores), device=scores.device)
    rows = rows.repeat_interleave(positive_ids.shape[1]).repeat_interleave(counts)  # (n,)
    scores[rows, order[places]] = -torch.inf
    return scores


# --- compiled -------------------------------------------------------------------------------------


def fold_of(width: int, count: int) -> int:
    """As much as leaves, folded twice, four maxima for every entry that is sought; at most 4."""
    return max(fold for fold in (1, 2, 4) if fold == 1 or 4 * count * fold**2 <= width)


@jit
def _select(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_select_rows, num_rows, num_threads, arguments)


@jit
def _select_rows(
    first: int, last: int, scores: Places, fold: int, positions: Ids, values: Places
) -> None:
    """Fills positions and values (B, count) from scores (B, M), given as bits of float32."""
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
        threshold = _threshold(last_maxima, count, count + count // 8)

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

        threshold = _threshold(found_keys[:num_found], count, count)
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
def _fold(keys: Places, maxima: Places) -> None:
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
def _threshold(keys: Places, count: int, most: int) -> Any:
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


@jit
def _mask_shared(scores: Floats, sampled_ids: Ids, positive_ids: Ids) -> None:
    """-inf for slots (M,) that are empty, or that hold one of the positives (B, P) of the row."""
    table = empty_table(len(sampled_ids))
    following = np.full(len(sampled_ids), -1, np.int32)  # the next slot with the same id
    for slot in range(len(sampled_ids)):
        if sampled_ids[slot] < 0:
            scores[:, slot] = -np.inf
        else:
            place = place_of(sampled_ids[slot], table, sampled_ids)
            following[slot] = table[place]
            table[place] = slot
    for row in range(len(positive_ids)):
        for column in range(positive_ids.shape[1]):
            if positive_ids[row, column] >= 0:
                slot = table[place_of(positive_ids[row, column], table, sampled_ids)]
                while slot >= 0:
                    scores[row, slot] = -np.inf
                    slot = following[slot]
