"""The largest entries of each row, and the slots that a positive occupies."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.kernels.cpu import are_plain, in_parts
from evenhand.kernels.cpu_selection import fold_of, select_rows

SCORES_AT_ONCE = 2**22  # of a block on a CPU: fewer slow the product down, more leave the cache


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
    positions = torch.empty(batch_size, count, dtype=torch.int64)
    values = torch.empty(batch_size, count)
    bits, value_bits = scores.view(torch.int32), values.view(torch.int32)
    arguments = bits, fold_of(width, count), positions, value_bits
    in_parts(select_rows, batch_size, *arguments, work=4 * scores.numel())
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


class Slots(NamedTuple):
    rows: Tensor  # (n,) which example
    columns: Tensor  # (n,) which slot of the shared sample


def positive_slots(sampled_ids: Tensor, positive_ids: Tensor) -> Slots:
    """Where a shared sample holds an example's own positive: (M,), (B, P) -> n places.

    Looks each positive up in the sorted sample, (M + B P) log M in all, where comparing every
    positive with every slot takes B P M.
    """
    sorted_ids, order = sampled_ids.sort()
    wanted = positive_ids.contiguous()
    firsts = torch.searchsorted(sorted_ids, wanted)  # (B, P)
    counts = torch.searchsorted(sorted_ids, wanted, right=True) - firsts  # repeats of a label
    counts = counts.masked_fill(wanted < 0, 0).flatten()  # (B * P,)
    starts = firsts.flatten() - (counts.cumsum(0) - counts)
    places = torch.repeat_interleave(starts, counts)  # (n,), then one after another
    places += torch.arange(len(places), device=places.device)
    rows = torch.arange(len(wanted), device=wanted.device).repeat_interleave(wanted.shape[1])
    return Slots(torch.repeat_interleave(rows, counts), order[places])
