"""Upper confidence bounds of means of bounded variables, by betting against a candidate mean.

If E[value] = ratio * E[weight] with 0 <= value <= weight <= 1, then for every bet between 0 and 1
each draw multiplies a stake by a fair factor, 1 + bet (ratio weight - value) / (1 - ratio): it is
never negative and 1 on average. A stake spread over several bets fixed beforehand therefore grows
beyond 1 / delta with probability at most delta (Markov's inequality; Waudby-Smith and Ramdas,
2024). Candidates that would make the stake grow so far are given up; the stake rises with the
candidate, so those that remain lie below one number: the bound. It holds for every law and every
number of draws, is narrow where the variance is small, and no order of the draws matters.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from evenhand.theory.arguments import DoubleArray, check_chance

LARGEST_BET = 1 - 2.0**-10  # a bet of 1 loses all of its stake on one draw
MARGIN = 1e-9  # to the safe side: of rounding, and of a bound that close to 1, which is made 1


def mean_bound(
    values: DoubleArray,
    *,
    delta: float,
    counts: NDArray[np.int64] | None = None,
    weights: DoubleArray | None = None,
) -> float:
    """Upper confidence bound of E[value] / E[weight], wrong with probability at most delta.

    Args:
        values: (V,) between 0 and the weight.
        counts: (V,) how often each (value, weight) was drawn; once if not given.
        weights: (V,) between 0 and 1; 1 if not given, and the bound is one of the mean.

    Example:
        >>> round(mean_bound(np.array([0.0, 1.0]), counts=np.array([900, 100]), delta=0.05), 3)
        0.13
    """
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    weights = np.ones(len(values)) if weights is None else weights
    check_chance("delta", delta)
    if not counts.sum() >= 1:
        raise ValueError("values must hold at least one draw, got none")
    if not (np.all(values >= 0) and np.all(values <= weights) and np.all(weights <= 1)):
        raise ValueError("values must be between 0 and their weight, and weights at most 1")
    # Halves of halves, down to the best bet at the largest variance, 1/4.
    smallest = min(0.5, math.sqrt(2 * math.log(1 / delta) / int(counts.sum())))
    halvings = np.arange(1 + math.ceil(-math.log2(smallest)))
    bets = (LARGEST_BET * 0.5**halvings)[:, None]  # (J, 1)
    # With odds = 1 / (1 - ratio), a factor is linear in the odds: kept + won * odds.
    kept, won = 1 - bets * weights, bets * (weights - values)  # (J, V)
    needed = math.log(len(bets) / delta)

    def growth(log_odds: float) -> float:
        log_stakes = np.log(kept + won * math.exp(log_odds)) @ counts  # (J, V), (V,) -> (J,)
        return float(np.logaddexp.reduce(log_stakes)) - needed

    # At the observed ratio no stake has grown (mean factor 1), so the bound lies above it.
    observed = float(counts @ values) / max(float(counts @ weights), MARGIN)
    low, most = -math.log(max(1 - observed, MARGIN)), -math.log(MARGIN)
    step = 1 / math.sqrt(counts.sum())
    while growth(min(low + step, most)) < 0:
        if low + step >= most:
            return 1.0
        step *= 2
    root = brentq(growth, low, min(low + step, most), xtol=MARGIN)
    return -math.expm1(-(root + 2 * MARGIN))
