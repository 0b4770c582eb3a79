"""The retrieval loss, and the losses that bound it from above.

A *miss* is an example whose label is not among the r of highest score. Then at least r other labels
score as high, f_y' >= f_y. A loss phi(f_y) + owa({phi(-f_y')}; w), with phi decreasing and not
negative, puts the share s = w_1 + ... + w_r of its weight on the r highest of them, so that

    loss >= phi(f_y) + s phi(-f_y) >= c = inf over z of phi(z) + s phi(-z)

and loss / c is at least the retrieval loss. With BOWL, the average of the top k, s is 1 where
k <= r, so that k = r is the largest k without loss; where k > r it is r / k, and the bound is as
much weaker. With labels drawn at random the *expected* loss has the weights of Lemma 1, and their
share of the first r. The loss of one sample bounds nothing but the retrieval among that sample.

Scores are (N, K), labels (N,), results (N,).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from evenhand.losses import MarginLoss, hinge
from evenhand.theory.arguments import DoubleArray, check_at_least, check_count
from evenhand.theory.order_weights import label_weights, order_weighted_average

FARTHEST = 32.0  # margins from -32 to 32 are searched,
SMALLEST_SHARE = 1e-12  # where the least loss lies for shares down to this one: log(1e12) = 27.6


def retrieval_loss(scores: ArrayLike, labels: ArrayLike, *, num_results: int) -> DoubleArray:
    """1 where the label is not among the r of highest score, 0 where it is (retrieval risk).

    Ties count against the label: another label of the same score is placed before it. So does a
    score that is NaN.

    Example:
        >>> retrieval_loss([[0.9, 0.1, 0.5], [0.5, 0.5, 0.5]], [2, 2], num_results=2).tolist()
        [0.0, 1.0]
    """
    own, others = _split(scores, labels)
    check_count("num_results", num_results, others.shape[1] + 1, "labels")
    num_before = (~(others < own[:, None])).sum(axis=1)  # (N, K - 1) -> (N,)
    return np.asarray(num_before >= num_results, dtype=np.float64)


def order_weighted_losses(
    scores: ArrayLike, labels: ArrayLike, *, weights: ArrayLike, margin_loss: MarginLoss = hinge
) -> DoubleArray:
    """phi(f_y) + owa({phi(-f_y')}; weights): BOWL, or with the weights of Lemma 1 expected SNM.

    Args:
        weights: (K - 1,), that of the highest other score first.

    Example:
        >>> order_weighted_losses([[0.5, 0.0, -2.0]], [0], weights=[1.0, 0.0]).tolist()
        [1.5]
    """
    own, others = _split(scores, labels)
    rivals = order_weighted_average(_values(margin_loss, -others), weights)
    return _values(margin_loss, own) + rivals


def least_loss_of_a_miss(margin_loss: MarginLoss, *, share: float = 1.0) -> float:
    """c = inf over z of phi(z) + s phi(-z): below it no example can be a miss.

    At s = 1 it is 2 phi(0): 2 for hinge, squared hinge and exponential, 2 log 2 for logistic. For
    s < 1 the hinge has 2 s, the squared hinge 4 s / (1 + s), the exponential 2 sqrt(s), the
    logistic log(1 + s) + s log(1 + 1 / s).

    Args:
        margin_loss: phi; it must be convex, or the minimum could lie anywhere.
        share: s, from 1e-12 to 1.

    Example:
        >>> least_loss_of_a_miss(hinge), least_loss_of_a_miss(hinge, share=0.5)
        (2.0, 1.0)
    """
    if not SMALLEST_SHARE <= share <= 1 + 1e-9:
        raise ValueError(
            f"share must be between {SMALLEST_SHARE} and 1 (it is of the weights), got {share}"
        )
    margins = np.linspace(-FARTHEST, FARTHEST, 1025)  # a step of 1/16: 0 and 1 are among them
    values = _values(margin_loss, margins)
    steps = np.diff(values)
    if (np.diff(steps) < -1e-12 * np.abs(values[1:-1])).any() or (steps > 0).any():
        name = getattr(margin_loss, "__name__", repr(margin_loss))
        raise ValueError(
            f"margin_loss must be convex and decreasing, because the least loss of a miss is found "
            f"by going down; {name} is not, between {-FARTHEST:g} and {FARTHEST:g}"
        )
    costs = values + share * values[::-1]
    best, step = margins[costs.argmin()], margins[1] - margins[0]
    found: Any = minimize_scalar(
        lambda z: _values(margin_loss, np.array([z, -z])) @ [1, share],
        bounds=(best - step, best + step),
        options={"xatol": 1e-9},
    )
    return float(min(costs.min(), found.fun))


def least_contrastive_loss_of_a_miss(*, margin: float, power: float) -> float:
    """The same for the cosine contrastive loss: 2 ((1 - margin) / 2) ** power.

    It is the loss of a positive and negatives halfway between the margin and 1. At margin = 1 it is
    0: negatives then cost nothing, and the loss bounds nothing.

    Example:
        >>> round(least_contrastive_loss_of_a_miss(margin=0.3, power=2.0), 6)
        0.245
    """
    if not -1 <= margin <= 1:
        raise ValueError(f"margin must be between -1 and 1 (it is a cosine), got {margin}")
    check_at_least("power", power, 1, " (or the loss is not convex)")
    return float(2 * ((1 - margin) / 2) ** power)


def order_weighted_bound(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    num_results: int,
    weights: ArrayLike,
    margin_loss: MarginLoss = hinge,
) -> DoubleArray:
    """An upper bound of `retrieval_loss`: the order-weighted loss over the least of a miss.

    With `label_weights` or `shared_label_weights` it bounds retrieval among *all* labels by the
    expected loss over random samples of them.

    Args:
        num_results: r; at r = K nothing is missed and the weights need not reach it.
        weights: (K - 1,), as in `order_weighted_losses`; they sum to at most 1.

    Example:
        >>> order_weighted_bound([[0.0, 0.0, -2.0]], [0], num_results=1, weights=[1, 0]).tolist()
        [1.0]
    """
    losses = order_weighted_losses(scores, labels, weights=weights, margin_loss=margin_loss)
    weights = np.asarray(weights, dtype=np.float64)
    check_count("num_results", num_results, len(weights) + 1, "labels")
    least = least_loss_of_a_miss(margin_loss, share=float(weights[:num_results].sum()))
    if least <= 0:
        raise ValueError("margin_loss must not let a miss go free: phi(z) + phi(-z) reaches 0")
    return losses / least


def bowl_bound(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    num_results: int,
    num_hard_labels: int,
    margin_loss: MarginLoss = hinge,
) -> DoubleArray:
    """The bound by BOWL (equation 2): at its best where k = r.

    A smaller k gives a larger loss, so a looser bound. A larger k dilutes the r labels that matter:
    the loss is divided by less to remain a bound.

    Example:
        >>> scores, k = [[0.0, 0.0, -2.0]], 2
        >>> bowl_bound(scores, [0], num_results=2, num_hard_labels=k).tolist()  # nothing is missed
        [0.75]
        >>> bowl_bound(scores, [0], num_results=1, num_hard_labels=k).tolist()
        [1.5]
    """
    num_negatives = np.shape(scores)[1] - 1
    check_count("num_hard_labels", num_hard_labels, num_negatives, "negative labels")
    weights = label_weights(
        num_negatives, num_sampled_labels=num_negatives, num_hard_labels=num_hard_labels
    )
    return order_weighted_bound(
        scores, labels, num_results=num_results, weights=weights, margin_loss=margin_loss
    )


def _split(scores: ArrayLike, labels: ArrayLike) -> tuple[DoubleArray, DoubleArray]:
    """The score of the label (N,), and those of the others (N, K - 1)."""
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise ValueError(
            f"scores must be (N, K) and labels (N,), got {scores.shape} and {labels.shape}"
        )
    num_labels = scores.shape[1]
    if labels.size and not (labels.min() >= 0 and labels.max() < num_labels):
        raise ValueError(
            f"labels must be between 0 and {num_labels - 1} (the columns of scores), "
            f"got {labels.min()} to {labels.max()}"
        )
    is_own = np.arange(num_labels) == labels[:, None]  # (N, K)
    return scores[is_own], scores[~is_own].reshape(len(scores), num_labels - 1)


def _values(margin_loss: MarginLoss, margins: DoubleArray) -> DoubleArray:
    """phi of float64 numbers, by the package's own losses."""
    return np.asarray(margin_loss(torch.from_numpy(margins)).numpy())
