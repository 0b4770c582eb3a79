"""The largest entries of each row, and those that do not count."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.kernels.cpu import are_plain
from evenhand.kernels.cpu_selection import fold_of, select_rows
from evenhand.kernels.cpu_sparse import mask_shared
from evenhand.kernels.threads import num_threads_for

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
    if not 1 <= count <= width:
        raise ValueError(f"count must be between 1 and {width} (the length of a row), got {count}")
    positions = torch.empty(batch_size, count, dtype=torch.int64)
    values = torch.empty(batch_size, count)
    select_rows(
        num_threads_for(scores.numel()),
        scores.view(torch.int32).numpy(),
        fold_of(width, count),
        positions.numpy(),
        values.view(torch.int32).numpy(),
    )
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
        mask_shared(scores.numpy(), sampled_ids.numpy(), positive_ids.numpy())
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
