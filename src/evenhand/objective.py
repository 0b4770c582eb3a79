"""The S2M objective of a minibatch, twice.

`s2m_loss` is the obvious form, for a loop of one's own and as the oracle. `score_gradients` is
what the fast step uses: the same derivative, but with respect to the survivors' scores alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.losses import LossFn, softmax_loss
from evenhand.mining import hardest_labels
from evenhand.risk import RiskFn, top_weights

FEW_SCORES = 2**20  # of a batch; what autograd keeps of them is a few times as much


def s2m_loss(
    positive_scores: Tensor,
    negative_scores: Tensor,
    *,
    num_hard_labels: int,
    num_hard_examples: int,
    loss_fn: LossFn = softmax_loss,
) -> Tensor:
    """The S2M minibatch objective (algorithm 1): (B,), (B, M) -> ().

    The corners are familiar: num_hard_examples == B is stochastic negative mining; all labels
    sampled and kept is average top-k' SGD; both together are plain SGD.

    Example:
        >>> positives, negatives = torch.tensor([2.0, 0.0]), torch.tensor([[0.0, 1.0], [3.0, 0.0]])
        >>> s2m_loss(positives, negatives, num_hard_labels=1, num_hard_examples=1)
        tensor(3.0486)
    """
    kept = hardest_labels(negative_scores, num_hard_labels)  # (B, k)
    losses = loss_fn(positive_scores, negative_scores.gather(1, kept))  # (B,)
    return (top_weights(losses, num_hard_examples=num_hard_examples) * losses).sum()


class ScoreGradients(NamedTuple):
    losses: Tensor  # (B,) of every example
    survivors: Tensor  # (k',) positions of the examples with a weight
    weights: Tensor  # (k',) of the survivors
    positive: Tensor  # (k',) d objective / d positive score
    negative: Tensor  # (k', k) d objective / d kept score; 0 where a slot holds no label


def score_gradients(
    positive_scores: Tensor, negative_scores: Tensor, *, loss_fn: LossFn, risk_fn: RiskFn
) -> ScoreGradients:
    """Derivative of sum_b w_b * loss_b by the survivors' scores: (B,), (B, k).

    Autograd runs over these few numbers only, so any loss works and none needs a formula. Where
    they are many, it runs over the survivors alone, whose losses are computed once more.

    Example:
        >>> gradients = score_gradients(
        ...     torch.zeros(1), torch.zeros(1, 1), loss_fn=softmax_loss, risk_fn=torch.ones_like
        ... )
        >>> gradients.positive, gradients.negative
        (tensor([-0.5000]), tensor([[0.5000]]))
    """
    is_few = negative_scores.numel() <= FEW_SCORES
    scores = [positive_scores.detach(), negative_scores.detach()]
    with torch.set_grad_enabled(is_few):
        losses = loss_fn(*(own.requires_grad_(is_few) for own in scores))
    weights = risk_fn(losses.detach())
    survivors = weights.nonzero().squeeze(1)  # (k',)
    found = losses.detach(), survivors, weights[survivors]
    if is_few:
        gradients = torch.autograd.grad(losses, scores, weights)  # (B,), (B, k)
        return ScoreGradients(*found, *(own.index_select(0, survivors) for own in gradients))
    scores = [own[survivors].requires_grad_() for own in scores]
    with torch.enable_grad():
        losses = loss_fn(*scores)  # (k',)
    return ScoreGradients(*found, *torch.autograd.grad(losses, scores, weights[survivors]))


def collapsed_loss(loss_fn: LossFn, num_negatives: int, *, score: float) -> float:
    """The loss of an example where all scores are equal: a model that tells no labels apart.

    Example:
        >>> round(collapsed_loss(softmax_loss, 16, score=20.0), 3)  # log 17
        2.833
    """
    scores = torch.full((1, 1 + num_negatives), score, dtype=torch.float64)
    return float(loss_fn(scores[:, 0], scores[:, 1:]))
