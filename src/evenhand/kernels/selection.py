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
    places = torch.searchsorted(sorted_ids, positive_ids.contiguous())  # (B, P)
    rows, columns = [], []
    while True:  # one turn a repeat of a label within the sample
        last = places.clamp(max=len(sorted_ids) - 1)
        is_hit = (sorted_ids[last] == positive_ids) & (places < len(sorted_ids))
        is_hit &= positive_ids >= 0
        found = is_hit.nonzero()  # (n, 2)
        if not len(found):
            break
        rows.append(found[:, 0])
        columns.append(order[last[is_hit]])
        places = places + 1
    empty = torch.empty(0, dtype=torch.int64, device=sampled_ids.device)
    return Slots(torch.cat([empty, *rows]), torch.cat([empty, *columns]))
