"""Per-example losses: one positive label against its kept negatives.

Contract shared by every loss here:

    positive_scores (B,), negative_scores (B, k)  ->  losses (B,)

A negative score of -inf means "this slot holds no label": it adds no loss and no gradient, and
averages are over the slots that hold one. Nothing here reduces over the batch; see `risk`.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

MarginLoss = Callable[[Tensor], Tensor]  # phi: elementwise, decreasing, non-negative
LossFn = Callable[[Tensor, Tensor], Tensor]  # (B,), (B, k) -> (B,)

CONTRASTIVE_MARGIN, CONTRASTIVE_POWER = 0.3, 2.0


def hinge(margins: Tensor) -> Tensor:
    """phi(z) = max(0, 1 - z).

    Example:
        >>> hinge(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([2.0000, 0.5000, 0.0000])
    """
    return F.relu(1 - margins)


def squared_hinge(margins: Tensor) -> Tensor:
    """phi(z) = max(0, 1 - z) ** 2.

    Example:
        >>> squared_hinge(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([4.0000, 0.2500, 0.0000])
    """
    return F.relu(1 - margins).square()


def logistic(margins: Tensor) -> Tensor:
    """phi(z) = log(1 + exp(-z)).

    Example:
        >>> logistic(torch.tensor([0.0]))
        tensor([0.6931])
    """
    # Beyond its threshold softplus is a straight line: at 20, as it comes, that is off by 2e-9; at
    # 36 by less than float64 can tell.
    return F.softplus(-margins, threshold=36)


def exponential(margins: Tensor) -> Tensor:
    """phi(z) = exp(-z). It overflows where the number format does (z < -88 in float32).

    Example:
        >>> exponential(torch.tensor([0.0]))
        tensor([1.])
    """
    return torch.exp(-margins)


def bowl_loss(
    positive_scores: Tensor, negative_scores: Tensor, *, margin_loss: MarginLoss = hinge
) -> Tensor:
    """Binary ordered weighted loss over negatives already mined (equation 2).

    loss_b = phi(p_b) + mean_j phi(-n_bj)

    The labels with the largest phi(-n) are those with the highest scores only if phi is
    decreasing, and mining goes by scores; any other phi is refused.

    Example:
        >>> bowl_loss(torch.tensor([0.5]), torch.tensor([[0.0, -2.0]]))
        tensor([1.])
    """
    _require_decreasing(margin_loss)
    return margin_loss(positive_scores) + _mean_over_labels(
        lambda scores: margin_loss(-scores), negative_scores
    )


def crammer_singer_loss(
    positive_scores: Tensor, negative_scores: Tensor, *, margin_loss: MarginLoss = hinge
) -> Tensor:
    """BOWL at its sharp end, k = 1: phi(p_b) + max_j phi(-n_bj) (equation 3).

    Example:
        >>> crammer_singer_loss(torch.tensor([0.5]), torch.tensor([[0.0, -2.0]]))
        tensor([1.5000])
    """
    hardest = negative_scores.amax(dim=-1, keepdim=True)  # (B, k) -> (B, 1)
    return bowl_loss(positive_scores, hardest, margin_loss=margin_loss)


def averaged_loss(
    positive_scores: Tensor, negative_scores: Tensor, *, margin_loss: MarginLoss = hinge
) -> Tensor:
    """BOWL at its flat end: every label but the positive is kept, k = K - 1 (equation 4).

    Example:
        >>> averaged_loss(torch.tensor([0.5]), torch.tensor([[0.0, -2.0, -0.5]]))
        tensor([1.])
    """
    return bowl_loss(positive_scores, negative_scores, margin_loss=margin_loss)


def softmax_loss(positive_scores: Tensor, negative_scores: Tensor) -> Tensor:
    """Cross-entropy of the positive among itself and its negatives; exact when all are given.

    loss_b = log(exp p_b + sum_j exp n_bj) - p_b

    Example:
        >>> softmax_loss(torch.tensor([0.0]), torch.tensor([[0.0, -torch.inf]]))
        tensor([0.6931])
    """
    scores = torch.cat([positive_scores.unsqueeze(-1), negative_scores], dim=-1)  # (B, 1 + k)
    return scores.logsumexp(dim=-1) - positive_scores


def contrastive_loss(
    positive_scores: Tensor,
    negative_scores: Tensor,
    *,
    margin: float = CONTRASTIVE_MARGIN,
    power: float = CONTRASTIVE_POWER,
) -> Tensor:
    """Cosine contrastive loss (Hadsell et al., 2006), for scores that are cosines.

    loss_b = (1 - p_b) ** power + mean_j max(0, n_bj - margin) ** power

    Example:
        >>> contrastive_loss(torch.tensor([0.5]), torch.tensor([[0.8, 0.1]]), margin=0.3)
        tensor([0.3750])
    """
    if not -1 <= margin <= 1:
        raise ValueError(f"margin must be between -1 and 1 (it is a cosine), got {margin}")
    if not power >= 1:
        raise ValueError(f"power must be at least 1 (or the loss is not convex), got {power}")
    # Rounding can carry a cosine past 1, where a power of a negative number is no loss at all.
    return _power(1 - positive_scores, power) + _mean_over_labels(
        lambda scores: _power(scores - margin, power), negative_scores
    )


def _power(distances: Tensor, power: float) -> Tensor:
    return F.relu(distances) if power == 1 else F.relu(distances) ** power


def _mean_over_labels(cost_fn: Callable[[Tensor], Tensor], negative_scores: Tensor) -> Tensor:
    """Mean of the costs over the slots that hold a label, 0 where none does: (B, k) -> (B,)."""
    is_label = negative_scores != -torch.inf  # (B, k); NaN is no empty slot: it must show
    scores = negative_scores.masked_fill(~is_label, 0)  # keeps the gradient finite
    costs = cost_fn(scores).masked_fill(~is_label, 0)
    return costs.sum(dim=-1) / is_label.sum(dim=-1).clamp(min=1)  # (B, k) -> (B,)


@lru_cache(maxsize=64)
def _require_decreasing(margin_loss: MarginLoss) -> None:
    margins = torch.linspace(-8, 8, 161, dtype=torch.float64)
    values = margin_loss(margins)
    if not (values.diff() <= 0).all():
        name = getattr(margin_loss, "__name__", repr(margin_loss))
        raise ValueError(
            f"margin_loss must be decreasing, because the hardest labels are found by their "
            f"scores; {name} increases somewhere between -8 and 8"
        )
