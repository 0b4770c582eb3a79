"""The losses of `evenhand.losses` and their slopes, inside a kernel.

An average over the kept labels needs their number, a softmax the logarithm of its sum: the *row
value*. Given it, the slope of the loss by each kept score follows from that score alone, so that
no kernel hands a matrix of coefficients to the next.
"""

from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl

from evenhand import losses
from evenhand.losses import LossFn

HINGE = tl.constexpr(0)
SQUARED_HINGE = tl.constexpr(1)
LOGISTIC = tl.constexpr(2)
EXPONENTIAL = tl.constexpr(3)
CONTRASTIVE = tl.constexpr(4)
SOFTMAX = tl.constexpr(5)

_MARGIN_LOSSES = {
    losses.hinge: HINGE.value,
    losses.squared_hinge: SQUARED_HINGE.value,
    losses.logistic: LOGISTIC.value,
    losses.exponential: EXPONENTIAL.value,
}


class KernelLoss(NamedTuple):
    """A loss by its number, and the two constants of the contrastive one."""

    kind: int
    margin: float = 0.0
    power: float = 1.0


def kernel_loss(loss_fn: LossFn) -> KernelLoss | None:
    """The kernels' form of a loss function, or None for one that they do not know.

    Example:
        >>> kernel_loss(partial(losses.contrastive_loss, margin=0.3, power=2.0))
        KernelLoss(kind=4, margin=0.3, power=2.0)
    """
    given = loss_fn if isinstance(loss_fn, partial) else partial(loss_fn)
    if given.args:
        return None
    settings = (getattr(given.func, "__kwdefaults__", None) or {}) | given.keywords
    if given.func is losses.softmax_loss:
        return KernelLoss(SOFTMAX.value)
    if given.func is losses.contrastive_loss:
        return KernelLoss(CONTRASTIVE.value, settings["margin"], settings["power"])
    if given.func is losses.bowl_loss:
        kind = _MARGIN_LOSSES.get(settings["margin_loss"])
        return None if kind is None else KernelLoss(kind)
    return None


@triton.jit
def row_loss(
    positive_score, scores, highest, num_kept, KIND: tl.constexpr, MARGIN: tl.constexpr,
    POWER: tl.constexpr,
):  # fmt: skip
    """A row's loss, its row value, and the slope of the loss by the positive score.

    Args:
        scores: of the kept labels, -inf for all others: which costs nothing, whatever the loss.
        highest: no less than the largest of them.
    """
    if KIND == SOFTMAX:
        largest = tl.maximum(highest, positive_score)
        total = tl.sum(tl.exp(scores - largest)) + tl.exp(positive_score - largest)
        row_value = tl.log(total) + largest
        loss = row_value - positive_score
        positive_slope = tl.exp(positive_score - row_value) - 1.0
    else:
        row_value = 1.0 / tl.maximum(num_kept, 1).to(tl.float32)
        mean_cost = tl.sum(_cost(scores, MARGIN, KIND, POWER)) * row_value
        if KIND == CONTRASTIVE:
            loss = _power(1.0 - positive_score, POWER) + mean_cost
            positive_slope = -_power_slope(1.0 - positive_score, POWER)
        else:
            loss = _cost(-positive_score, MARGIN, KIND, POWER) + mean_cost
            positive_slope = -_slope(-positive_score, MARGIN, KIND, POWER)
    return loss, row_value, positive_slope


@triton.jit
def coefficient(score, row_value, KIND: tl.constexpr, MARGIN: tl.constexpr, POWER: tl.constexpr):
    """The slope of the loss by the score of a kept label."""
    if KIND == SOFTMAX:
        return tl.exp(score - row_value)
    return _slope(score, MARGIN, KIND, POWER) * row_value


@triton.jit
def _cost(score, MARGIN: tl.constexpr, KIND: tl.constexpr, POWER: tl.constexpr):
    """What a negative costs: phi(-score), or the power of what is above the margin."""
    if KIND == HINGE:
        return tl.maximum(1.0 + score, 0.0)
    if KIND == SQUARED_HINGE:
        above = tl.maximum(1.0 + score, 0.0)
        return above * above
    if KIND == LOGISTIC:
        return tl.maximum(score, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(score)))
    if KIND == EXPONENTIAL:
        return tl.exp(score)
    return _power(score - MARGIN, POWER)


@triton.jit
def _slope(score, MARGIN: tl.constexpr, KIND: tl.constexpr, POWER: tl.constexpr):
    if KIND == HINGE:
        return tl.where(1.0 + score > 0.0, 1.0, 0.0)
    if KIND == SQUARED_HINGE:
        return 2.0 * tl.maximum(1.0 + score, 0.0)
    if KIND == LOGISTIC:
        return 1.0 / (1.0 + tl.exp(-score))
    if KIND == EXPONENTIAL:
        return tl.exp(score)
    return _power_slope(score - MARGIN, POWER)


@triton.jit
def _power(distance, POWER: tl.constexpr):
    above = tl.maximum(distance, 0.0)
    if POWER == 1.0:
        return above
    if POWER == 2.0:
        return above * above
    safe = tl.where(above > 0.0, above, 1.0)
    return tl.where(above > 0.0, tl.exp(POWER * tl.log(safe)), 0.0)


@triton.jit
def _power_slope(distance, POWER: tl.constexpr):
    above = tl.maximum(distance, 0.0)
    if POWER == 1.0:
        return tl.where(above > 0.0, 1.0, 0.0)
    if POWER == 2.0:
        return 2.0 * above
    safe = tl.where(above > 0.0, above, 1.0)
    return tl.where(above > 0.0, POWER * tl.exp((POWER - 1.0) * tl.log(safe)), 0.0)
