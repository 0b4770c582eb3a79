"""A certificate: with confidence 1 - delta, no subpopulation fares worse than this, for every size.

U is the loss in [0, 1] of a random query, of a model that is fixed. Among all subpopulations that
hold at least a share alpha of the queries, the worst has expected loss CVaR_alpha(U).

A *band* holds the law of U: P[U > k-th largest loss] <= mass_k for many k at once. The masses are
quantiles of Beta laws, all at one level, and that level is chosen so that the whole band fails with
probability delta exactly (for a continuous law; less often for another). The worst law inside it
puts all that the band allows above a loss on the next larger one. Its CVaR bounds every
subpopulation of every size at once.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, gammaln

from evenhand.theory.arguments import DoubleArray, check_chance
from evenhand.theory.cvar import cvar_curve

IntArray = NDArray[np.int64]

NUM_DENSE = 40  # the band holds each of the largest losses, then ever fewer
CHANCE_ROUNDING = 1e-14  # for each draw: log-gamma of n loses digits, and so the chance of a band


class Certificate(NamedTuple):
    """The losses of a sample, and the worst law that its band allows."""

    losses: DoubleArray  # (N,)
    worst_losses: DoubleArray  # (V,)
    worst_probabilities: DoubleArray  # (V,)

    def bounds(self, tail_fractions: ArrayLike) -> DoubleArray:
        """The most that a subpopulation of at least each share loses on average: (A,) -> (A,).

        They hold for all shares at once, with probability 1 - delta.
        """
        probabilities = self.worst_probabilities
        return cvar_curve(self.worst_losses, tail_fractions, probabilities=probabilities)

    def estimates(self, tail_fractions: ArrayLike) -> DoubleArray:
        """The worst share of the sample itself; not a bound: (A,) -> (A,)."""
        return cvar_curve(self.losses, tail_fractions)


def certificate(losses: ArrayLike, *, delta: float = 0.05) -> Certificate:
    """Bounds the expected loss of every subpopulation of every size, all at once.

    Args:
        losses: (N,) between 0 and 1, independent, on data used for no choice.
        delta: how likely any of the bounds may fail.

    Example:
        >>> found = certificate(np.repeat([0.0, 0.5, 1.0], [900, 80, 20]))
        >>> found.estimates([1.0, 0.1]), found.bounds([1.0, 0.1]).round(3)
        (array([0.06, 0.6 ]), array([0.086, 0.682]))
    """
    values = np.asarray(losses, dtype=np.float64)
    check_chance("delta", delta)
    if values.ndim != 1 or not len(values) or not (np.all(values >= 0) and np.all(values <= 1)):
        raise ValueError(f"losses must be one or more numbers between 0 and 1, got {values}")
    ranks, masses = tail_masses(len(values), delta)
    return Certificate(values, *worst_law(-np.sort(-values)[ranks - 1], masses))


def worst_law(largest: DoubleArray, masses: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
    """Losses and probabilities of the law with the largest losses of those with values up to 1.

    Args:
        largest: (B,) falling; P[U > largest[j]] <= masses[j], which rise.
    """
    return np.append(1.0, largest), np.diff(masses, prepend=0.0, append=1.0)


@functools.lru_cache(maxsize=64)
def tail_masses(num_draws: int, delta: float) -> tuple[IntArray, DoubleArray]:
    """P[U > k-th largest of the draws] <= mass_k for all listed k at once, but with probability
    delta: the ranks k and their masses.

    A uniform variable's k-th smallest of n follows Beta(k, n - k + 1). Every mass is the quantile
    of its law at one level (Berk and Jones, 1979), found by bisection on the exact probability that
    all hold. The arrays are kept for the next call, and read-only.
    """
    # 1, 2, ..., 40, then steps of half a standard deviation of a count of that size.
    listed = [1]
    while listed[-1] < num_draws:
        step = 1 if listed[-1] < NUM_DENSE else max(1, round(0.5 * math.sqrt(listed[-1])))
        listed.append(listed[-1] + step)
    ranks = np.array([rank for rank in listed if rank <= num_draws], dtype=np.int64)

    def masses_at(log_level: float) -> DoubleArray:
        chance = min(1.0, -math.expm1(log_level) + 2.0**-52)  # rounded up: a wider band holds too
        return np.asarray(betaincinv(ranks, num_draws - ranks + 1.0, chance))

    def gap(log_level: float) -> float:
        failing = 1 - all_hold_probability(ranks, masses_at(log_level), num_draws)
        return math.log(max(failing, 0.0) + CHANCE_ROUNDING * (num_draws + 10)) - math.log(delta)

    level = math.log(delta)
    lowest = level - math.log(len(ranks) + 1)  # the union bound, which holds in any case
    if gap(lowest) >= 0:  # delta is so small that it is lost in rounding
        level = lowest
    elif gap(level) > 0:
        level = float(brentq(gap, lowest, level, xtol=1e-3))
    while level > lowest and gap(level) > -1e-6:  # the root is known to a thousandth: be safe
        level -= 1e-3
    masses = masses_at(level)
    ranks.flags.writeable = masses.flags.writeable = False
    return ranks, masses


def all_hold_probability(ranks: IntArray, masses: DoubleArray, num_draws: int) -> float:
    """P[for all j, at least ranks[j] of n uniform draws lie below masses[j]].

    The counts below 0 < m_1 < m_2 < ... are those of a Poisson process of rate n, given that it
    counts n at 1: independent steps, so their law is a chain of convolutions, cut off below the
    ranks. What is cut off above is lost: but for rounding, the answer errs to the safe side.
    """
    log_factorials = gammaln(np.arange(num_draws + 2) + 1.0)
    chances, lowest, reached = np.ones(1), 0, 0.0  # of the counts lowest, lowest + 1, ...
    for rank, mass in zip(ranks.tolist(), masses.tolist(), strict=True):
        if mass >= 1:
            break
        mean = num_draws * (mass - reached)
        width = 9 * math.sqrt(mean) + 20  # other counts have no measurable probability
        first = max(0, int(mean - width))
        counts = np.arange(first, min(int(mean + width), num_draws + 1))
        steps = np.exp(_log_poisson(counts, mean, log_factorials))
        chances, lowest, reached = _convolve(chances, steps), lowest + first, mass
        cut = max(rank - lowest, 0)
        chances, lowest = chances[cut : num_draws - lowest + 1], lowest + cut
        kept = np.flatnonzero(chances > 1e-16)
        if not len(kept):
            return 0.0
        chances = np.maximum(chances[: kept[-1] + 1], 0)  # the Fourier transform errs below 0
    missing = num_draws - lowest - np.arange(len(chances))
    ends = _log_poisson(missing, num_draws * (1 - reached), log_factorials)
    whole = _log_poisson(np.array([num_draws]), num_draws, log_factorials)
    return float(chances @ np.exp(ends - whole))


def _log_poisson(counts: IntArray, mean: float, log_factorials: DoubleArray) -> DoubleArray:
    if mean <= 0:
        return np.where(counts == 0, 0.0, -np.inf)
    return counts * math.log(mean) - mean - log_factorials[counts]


def _convolve(left: DoubleArray, right: DoubleArray) -> DoubleArray:
    """As numpy does it, or by Fourier transform where that is faster."""
    if len(left) * len(right) < 20_000:
        return np.convolve(left, right)
    size = len(left) + len(right) - 1
    fast = 1 << (size - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(left, fast) * np.fft.rfft(right, fast), fast)[:size]
