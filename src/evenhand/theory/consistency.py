"""What a scorer learns that minimises the average top-k' softmax loss: proposition 2, exactly.

With g the scorer's probabilities, p the true ones and alpha = k'/N, the population risk is the
minimum over t >= 0 of

    V(g, t) = t + (1/alpha) E_x sum_y p_y [-log g_y - t]_+.

-log g - t is convex in (g, t) together, so V is, and so is its minimum over g as a function of t.
For a fixed t, with tau = e^t, that minimum is a capped copy of p (the paper's appendix):

    g_y = min(1/tau, c p_y),  c such that g sums to one.

The m most probable labels are *collapsed* to 1/tau; m <= tau because their mass is at most one.
The envelope theorem gives dV/dt = 1 - E_x[1/c] / alpha, so the joint minimum needs no search over
g: it is where E_x[1/c] = alpha. For one x that is c = 1/alpha, hence g = min(p, w)/alpha, where
the water level w leaves the mass alpha. What is true of retrieval, and why:

- where more than tau labels have positive probability, g is unique, its m <= floor(tau) collapsed
  labels lead, and the others keep their order. So every r >= m is right, and no r < m is where p
  has no ties: the exact limit is the number of collapsed labels, often less than e^t*;
- where at most tau labels have positive probability, any g with 1/tau on each of them is a
  minimiser, and what is left may go anywhere. At most floor(tau) labels can hold 1/tau, so
  the top floor(tau) holds them all; a smaller r can be wrong, even for an x without noise.

docs/theory.md says what this leaves of the proposition.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from evenhand.theory.arguments import DoubleArray, check_at_least, check_tail_fraction

ROUNDING = 1e-12  # relative; sums of probabilities are not exact


class TopMinimiser(NamedTuple):
    """A scorer that minimises the average top-k' softmax loss over the population."""

    predictions: DoubleArray  # (K,) or (Q, K), g: like label_probabilities
    threshold: float  # t*, the smallest where several are optimal
    level: int  # floor(e^t*): top-r retrieval is right for every r from here on
    num_collapsed: NDArray[np.int64]  # () or (Q,), labels that reach e^-t*: m
    value: float  # the least average top-k' loss


def top_minimiser(
    label_probabilities: ArrayLike,
    *,
    tail_fraction: float,
    query_probabilities: ArrayLike | None = None,
) -> TopMinimiser:
    """The joint minimiser over predictions and threshold (proposition 2), with its value.

    The threshold is shared by all queries. Where several are optimal (at tail_fraction = 1, or
    where some queries are not capped at all and the others cost nothing) it is the smallest.

    Args:
        label_probabilities: (K,) for one query, or (Q, K), a row for each. Rows sum to one.
        tail_fraction: alpha, above 0 and at most 1.
        query_probabilities: (Q,), how often each query comes; even where it is left out.

    Example:
        >>> best = top_minimiser([0.5, 0.3, 0.2], tail_fraction=0.9)  # 0.4 + 0.3 + 0.2 are left
        >>> best.predictions.round(3).tolist(), best.level, int(best.num_collapsed)
        ([0.444, 0.333, 0.222], 2, 1)
    """
    check_tail_fraction(tail_fraction)
    probabilities, weights = _checked(label_probabilities, query_probabilities)
    steps = _steps(probabilities)
    cap = _best_cap(steps, weights, tail_fraction)
    threshold = math.log(cap)
    predictions, num_collapsed = _capped(steps, cap)
    value = threshold + _excess(probabilities, predictions, cap) @ weights / tail_fraction
    shape = np.shape(label_probabilities)
    return TopMinimiser(
        predictions=predictions.reshape(shape),
        threshold=threshold,
        level=math.floor(cap * (1 + ROUNDING)),  # rounding up is safe: every larger r is right
        num_collapsed=num_collapsed.reshape(shape[:-1]),
        value=float(value),
    )


def capped_predictions(label_probabilities: ArrayLike, *, threshold: float) -> DoubleArray:
    """The minimiser for a fixed threshold: min(e^-t, c p), each row summing to one.

    Where at most e^t labels have positive probability the loss above the threshold can be zero and
    many predictions give it; this returns even shares over the labels of positive probability.

    Example:
        >>> import math
        >>> capped_predictions([0.7, 0.2, 0.1], threshold=math.log(2)).round(3).tolist()
        [0.5, 0.333, 0.167]
    """
    check_at_least("threshold", threshold, 0, " (losses are)")
    probabilities, _ = _checked(label_probabilities, None)
    predictions, _ = _capped(_steps(probabilities), math.exp(threshold))
    return predictions.reshape(np.shape(label_probabilities))


def threshold_value(
    label_probabilities: ArrayLike,
    *,
    threshold: float,
    tail_fraction: float,
    query_probabilities: ArrayLike | None = None,
) -> float:
    """The least of t + (1/alpha) E[loss - t]_+ over all predictions, for a fixed threshold t.

    Example:
        >>> threshold_value([0.5, 0.5], threshold=0.0, tail_fraction=1.0)  # the entropy
        0.6931471805599453
    """
    check_at_least("threshold", threshold, 0, " (losses are)")
    probabilities, weights = _checked(label_probabilities, query_probabilities)
    predictions, _ = _capped(_steps(probabilities), math.exp(threshold))
    excess = _excess(probabilities, predictions, math.exp(threshold))
    return float(threshold + excess @ weights / tail_fraction)


class _Steps(NamedTuple):
    """Each row of p as a staircase: where, as tau grows, the next label collapses."""

    order: NDArray[np.intp]  # (Q, K), most probable label first
    sorted: DoubleArray  # (Q, K), probabilities in that order
    remaining: DoubleArray  # (Q, K), mass of this label and all after it: R_m at position m
    support: NDArray[np.int64]  # (Q,), labels of positive probability
    breaks: DoubleArray  # (Q, K), tau at which the label collapses; inf without probability

    def num_collapsed(self, cap: float) -> NDArray[np.int64]:
        """How many labels of each row reach the cap 1/tau: (Q,)."""
        return np.asarray((self.breaks <= cap).sum(axis=1))


def _steps(probabilities: DoubleArray) -> _Steps:
    """Label m + 1 reaches the cap, c p = 1/tau with c = (1 - m/tau)/R_m, at tau = m + R_m/p."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ordered = np.take_along_axis(probabilities, order, axis=1)
    remaining = np.cumsum(ordered[:, ::-1], axis=1)[:, ::-1]
    support = (ordered > 0).sum(axis=1)
    ratio = np.full_like(ordered, np.inf)
    np.divide(remaining, ordered, out=ratio, where=ordered > 0)
    breaks = np.arange(ordered.shape[1]) + ratio
    return _Steps(order, ordered, remaining, support, breaks)


def _slopes(steps: _Steps, num_collapsed: NDArray[np.int64], cap: float) -> DoubleArray:
    """1/c for each row, minus the derivative of its loss above t: tau R_m / (tau - m), (Q,)."""
    has_rest = num_collapsed < steps.support
    position = np.where(has_rest, num_collapsed, 0)
    remaining = np.take_along_axis(steps.remaining, position[:, None], axis=1)[:, 0]
    # At most 1 in exact arithmetic; a tiny rest can make tau - m round to 0.
    room = np.maximum(cap - position, np.finfo(np.float64).tiny)
    return np.where(has_rest, np.minimum(cap * (remaining / room), 1.0), 0.0)


def _best_cap(steps: _Steps, weights: DoubleArray, tail_fraction: float) -> float:
    """The smallest tau >= 1 at which the mean slope is at most alpha.

    The mean slope falls with tau and is smooth between breaks: bisection finds the interval, a
    bracketed root the place in it. It may jump at a break, which is then the answer.
    """

    def excess_slope(cap: float, below: float) -> float:  # with the labels collapsed at `below`
        slopes = _slopes(steps, steps.num_collapsed(below), cap)
        return float(slopes @ weights) - tail_fraction

    caps = np.unique(np.append(steps.breaks[np.isfinite(steps.breaks)], 1.0))
    slack = -tail_fraction * ROUNDING
    first = bisect_left(caps, slack, key=lambda cap: -excess_slope(cap, cap))
    if first == 0:
        return 1.0
    below, above = float(caps[first - 1]), float(caps[first])
    if excess_slope(above, below) >= 0:
        return above
    return float(brentq(excess_slope, below, above, args=(below,), xtol=1e-15))


def _capped(steps: _Steps, cap: float) -> tuple[DoubleArray, NDArray[np.int64]]:
    """Predictions (Q, K) in the labels' own order, and how many labels each row collapses (Q,)."""
    num_collapsed = steps.num_collapsed(cap)
    slopes = _slopes(steps, num_collapsed, cap)[:, None]
    scaled = np.divide(steps.sorted, slopes, out=np.zeros_like(steps.sorted), where=slopes > 0)
    is_collapsed = np.arange(steps.sorted.shape[1]) < num_collapsed[:, None]
    height = np.where(slopes > 0, 1 / cap, 1 / steps.support[:, None])
    ordered = np.where(is_collapsed, height, scaled)
    predictions = np.empty_like(ordered)
    np.put_along_axis(predictions, steps.order, ordered, axis=1)
    return predictions, num_collapsed


def _excess(probabilities: DoubleArray, predictions: DoubleArray, cap: float) -> DoubleArray:
    """sum_y p_y [-log(tau g_y)]_+ for each row; a label without probability adds nothing: (Q,)."""
    logs = np.log(predictions * cap, out=np.zeros_like(predictions), where=probabilities > 0)
    return np.asarray((probabilities * np.maximum(-logs, 0)).sum(axis=1))


def _checked(
    label_probabilities: ArrayLike, query_probabilities: ArrayLike | None
) -> tuple[DoubleArray, DoubleArray]:
    """A row of probabilities for each query (Q, K), and how often each comes (Q,)."""
    rows = np.atleast_2d(np.asarray(label_probabilities, dtype=np.float64))
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"label_probabilities must be one or more rows, got shape {rows.shape}")
    weights = np.full(len(rows), 1 / len(rows))
    if query_probabilities is not None:
        weights = np.asarray(query_probabilities, dtype=np.float64)
    if weights.shape != rows.shape[:1]:
        raise ValueError(
            f"query_probabilities must have shape {rows.shape[:1]} (a value for each row of "
            f"label_probabilities), got {weights.shape}"
        )
    for name, table in (("label_probabilities", rows), ("query_probabilities", weights[None])):
        if not (table >= 0).all() or not (np.abs(table.sum(axis=1) - 1) <= 1e-9).all():
            raise ValueError(f"{name} must be 0 or more and sum to 1, got {table}")
    return rows, weights
