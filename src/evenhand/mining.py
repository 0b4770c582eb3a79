"""Which labels and which examples are hard. Selection only: nothing here has a gradient."""

import torch
from torch import Tensor

from evenhand.kernels.selection import largest


@torch.no_grad()
def hardest_labels(negative_scores: Tensor, num_hard_labels: int) -> Tensor:
    """Positions of the highest-scoring negatives of each example.

    Args:
        negative_scores: (B, M), -inf where a slot holds no label.
        num_hard_labels: k in the paper; 1 <= k <= M.

    Returns:
        (B, k) int64, in no particular order.

    Example:
        >>> hardest_labels(torch.tensor([[0.1, 0.9, 0.5]]), 1)
        tensor([[1]])
    """
    _check_count("num_hard_labels", num_hard_labels, negative_scores.shape[-1], "sampled labels")
    return largest(negative_scores, num_hard_labels).positions


@torch.no_grad()
def hardest_examples(losses: Tensor, num_hard_examples: int) -> Tensor:
    """Positions of the largest losses of the batch (k' in the paper): (B,) -> (k',).

    Example:
        >>> hardest_examples(torch.tensor([0.1, 0.9, 0.5]), 2).sort().values
        tensor([1, 2])
    """
    _check_count("num_hard_examples", num_hard_examples, losses.shape[0], "examples in the batch")
    return losses.topk(num_hard_examples, sorted=False).indices


def mask_positives(negative_scores: Tensor, sampled_ids: Tensor, positive_ids: Tensor) -> Tensor:
    """Scores without those of an example's own positives and of slots that hold no label.

    Args:
        negative_scores: (B, M).
        sampled_ids: (M,) label ids shared by the batch, or (B, M); -1 where a slot is empty.
        positive_ids: (B, P) label ids, padded with -1. The paper's mask is P = 1.

    Returns:
        (B, M) scores, -inf where the slot's id is -1 or is in positive_ids[b].

    Example:
        >>> scores = torch.tensor([[0.1, 0.9, 0.5]])
        >>> mask_positives(scores, torch.tensor([7, 3, -1]), torch.tensor([[3]]))
        tensor([[0.1000,   -inf,   -inf]])
    """
    is_masked = (sampled_ids < 0).expand_as(negative_scores)  # (M,) or (B, M) -> (B, M)
    for positives in positive_ids.unbind(dim=1):  # (B,), one by one: there is no (B, P, M)
        is_masked = is_masked | (sampled_ids == positives.unsqueeze(1))
    return negative_scores.masked_fill(is_masked, -torch.inf)


def _check_count(name: str, value: int, limit: int, of_what: str) -> None:
    if not 1 <= value <= limit:
        raise ValueError(
            f"{name} must be between 1 and {limit} (the number of {of_what}), got {value}"
        )
