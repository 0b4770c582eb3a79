"""The largest entries of each row, and the slots that a positive occupies."""

from typing import NamedTuple

import torch
from torch import Tensor

FOLD = 8  # columns that share one maximum in the first stage


def largest(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest entries of each row: (B, M) -> (B, count), unordered.

    On a CPU `torch.topk` over wide rows costs as much as the score product. Its exact shortcut:
    the largest entries lie in the columns whose maximum over FOLD interleaved columns is among
    the `count` largest maxima, so two small selections do the work of a wide one.
    """
    width = scores.shape[-1] // FOLD  # columns after folding
    if scores.is_cuda or scores.dim() != 2 or 2 * count > width:
        return scores.topk(count, dim=-1, sorted=False).indices
    folded = scores[:, : FOLD * width].view(len(scores), FOLD, width)
    columns = folded.amax(dim=1).topk(count, dim=-1, sorted=False).indices  # (B, count)
    steps = torch.arange(0, FOLD * width, width, device=scores.device)
    positions = (columns.unsqueeze(1) + steps.view(1, FOLD, 1)).flatten(1)  # (B, FOLD * count)
    if FOLD * width < scores.shape[1]:
        rest = torch.arange(FOLD * width, scores.shape[1], device=scores.device)
        positions = torch.cat([positions, rest.expand(len(scores), -1)], dim=1)
    chosen = scores.gather(1, positions).topk(count, dim=-1, sorted=False).indices
    return positions.gather(1, chosen)


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
