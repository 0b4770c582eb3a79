"""The conditional value at risk (CVaR) of losses, in the three ways the paper writes it.

CVaR at level alpha (`tail_fraction`, in (0, 1]) is the mean of the worst share alpha of the losses.
Three functions compute it by three formulas, and are equal to rounding:

    cvar_by_definition     min over t of t + E[(U - t)+] / alpha      (definition of CVaR)
    cvar_by_top            the average of the largest                 (empirical CVaR)
    cvar_by_worst_density  sup over densities of at most 1 / alpha    (subpopulation form)

Losses (N,) count 1/N each, or with `probabilities` (N,) that sum to 1: then they are the values of
a discrete law. `cvar_curve` is the fast way, for many levels at once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from evenhand.theory.arguments import DoubleArray, check_count, check_tail_fraction, checked_law


class WorstDensity(NamedTuple):
    value: float
    weights: DoubleArray  # (N,), in the order of the losses: sum to 1, at most 1/(alpha N) each


class AgnosticTop(NamedTuple):
    value: float
    mixture: DoubleArray  # (G,) nu: how much of the k' hardest each group has


def cvar_by_definition(
    losses: ArrayLike, tail_fraction: float, *, probabilities: ArrayLike | None = None
) -> float:
    """min over all t of t + E[(U - t)+] / alpha: Rockafellar and Uryasev's definition.

    Example:
        >>> cvar_by_definition([4.0, 1.0, 3.0, 2.0], 0.5)
        3.5
    """
    check_tail_fraction(tail_fraction)
    thresholds, costs = _costs_of_thresholds(losses, probabilities)
    return float((thresholds + costs / tail_fraction).min())


def cvar_of_nonnegative_thresholds(
    losses: ArrayLike, tail_fraction: float, *, probabilities: ArrayLike | None = None
) -> float:
    """min over t >= 0 alone, as the paper writes it.

    It is the CVaR where the best threshold, the (1 - alpha) quantile, is not negative: so for all
    losses that are not negative, as the paper's are. Elsewhere it is larger, namely E[U+] / alpha.

    Example:
        >>> cvar_of_nonnegative_thresholds([-1.0, -3.0], 1.0), cvar_by_definition([-1.0, -3.0], 1.0)
        (0.0, -2.0)
    """
    check_tail_fraction(tail_fraction)
    thresholds, costs = _costs_of_thresholds(losses, probabilities)
    risks = np.where(thresholds >= 0, thresholds + costs / tail_fraction, np.inf)
    losses, probabilities = checked_law(losses, probabilities)
    at_zero = (probabilities * losses.clip(min=0)).sum() / tail_fraction
    return float(min(risks.min(), at_zero))


def cvar_by_top(
    losses: ArrayLike, tail_fraction: float, *, probabilities: ArrayLike | None = None
) -> float:
    """The average of the largest losses, as many as fill the share alpha.

    Where alpha N = k' is whole this is the average of the top k'. Where it is not, the loss next in
    line counts for the fraction that is missing; the average of whole losses alone is then no CVaR.

    Example:
        >>> cvar_by_top([4.0, 1.0, 3.0, 2.0], 0.5), cvar_by_top([4.0, 1.0, 3.0, 2.0], 0.375)
        (3.5, 3.6666666666666665)
    """
    return cvar_by_worst_density(losses, tail_fraction, probabilities=probabilities).value


def cvar_by_worst_density(
    losses: ArrayLike, tail_fraction: float, *, probabilities: ArrayLike | None = None
) -> WorstDensity:
    """The largest mean under a law Q with P = alpha Q + (1 - alpha) R, and that law's weights.

    Such a Q is a subpopulation of share alpha. It gives no loss more than its probability / alpha.

    Example:
        >>> cvar_by_worst_density([4.0, 1.0, 3.0, 2.0], 0.5).weights.tolist()
        [0.5, 0.0, 0.5, 0.0]
    """
    check_tail_fraction(tail_fraction)
    losses, probabilities = checked_law(losses, probabilities)
    order = np.argsort(-losses, kind="stable")
    weights = np.empty_like(losses)
    taken = np.minimum(np.cumsum(probabilities[order]), tail_fraction)  # from the top
    taken[-1] = tail_fraction
    weights[order] = np.diff(taken, prepend=0.0) / tail_fraction
    return WorstDensity(float(weights @ losses), weights)


def cvar_curve(
    losses: ArrayLike, tail_fractions: ArrayLike, *, probabilities: ArrayLike | None = None
) -> DoubleArray:
    """CVaR at many levels at once, by one sort: (N,), (A,) -> (A,).

    alpha CVaR_alpha is a concave curve, straight between the shares of the losses in order.

    Example:
        >>> cvar_curve([4.0, 1.0, 3.0, 2.0], [0.25, 0.5, 1.0]).tolist()
        [4.0, 3.5, 2.5]
    """
    fractions = np.asarray(tail_fractions, dtype=np.float64)
    for tail_fraction in fractions.ravel():
        check_tail_fraction(tail_fraction)
    losses, probabilities = checked_law(losses, probabilities)
    order = np.argsort(-losses, kind="stable")
    shares = np.append(0.0, np.cumsum(probabilities[order]).clip(max=1.0))
    shares[-1] = 1.0  # the sum of many 1/N is not quite
    sums = np.append(0.0, np.cumsum(probabilities[order] * losses[order]))
    return np.asarray(np.interp(fractions, shares, sums) / fractions)


def agnostic_top(losses: ArrayLike, group_ids: ArrayLike, *, num_hard_examples: int) -> AgnosticTop:
    """The worst mixture of the groups' own top losses (Lemma 3's right side), and that mixture.

    max over nu of sum_p nu_p avgTop_{k' nu_p}(S_p), where k' nu_p are whole, sum to k', and are at
    most N_p. The maximum takes from each group what it has among the k' largest of all.

    Args:
        losses: (N,).
        group_ids: (N,) from 0.
        num_hard_examples: k'.

    Example:
        >>> agnostic_top([5.0, 1.0, 4.0, 3.0], [0, 0, 1, 1], num_hard_examples=3)
        AgnosticTop(value=4.0, mixture=array([0.33333333, 0.66666667]))
    """
    losses, _ = checked_law(losses, None)
    group_ids = np.asarray(group_ids)
    is_whole = np.issubdtype(group_ids.dtype, np.integer)
    if group_ids.shape != losses.shape or not is_whole or group_ids.min() < 0:
        raise ValueError(
            f"group_ids must be {len(losses)} whole numbers from 0 (one for each loss), "
            f"got {group_ids}"
        )
    check_count("num_hard_examples", num_hard_examples, len(losses), "losses")
    hardest = np.argsort(-losses, kind="stable")[:num_hard_examples]  # (k',)
    counts = np.bincount(group_ids[hardest], minlength=int(group_ids.max()) + 1)  # (G,)
    return AgnosticTop(float(losses[hardest].mean()), counts / num_hard_examples)


def _costs_of_thresholds(
    losses: ArrayLike, probabilities: ArrayLike | None
) -> tuple[DoubleArray, DoubleArray]:
    """Each loss t, rising, with E[(U - t)+]: a sum over the gaps above t of gap times P[U > gap].

    t + E[(U - t)+] / alpha is straight between two losses, so its minimum is at one of them.
    """
    losses, probabilities = checked_law(losses, probabilities)
    order = np.argsort(losses, kind="stable")
    thresholds = losses[order]
    share_above = np.cumsum(probabilities[order][::-1])[::-1][1:]  # (N - 1,)
    areas = np.diff(thresholds) * share_above
    return thresholds, np.append(np.cumsum(areas[::-1])[::-1], 0.0)
