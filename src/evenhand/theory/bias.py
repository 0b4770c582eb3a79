"""How far the average of a sample's largest losses is below that of the population: lemma 4.

For a law with P[U > x] = q(x), bounded below by its least value u,

    CVaR_alpha              = u + (1/alpha) integral from u of min(alpha, q(x)) dx
    CVaR_alpha of N draws   = u + (1/(alpha N)) integral from u of min(alpha N, #{U_i > x}) dx,

and #{U_i > x} is binomial(N, q(x)). min(alpha N, .) is concave, so the empirical value is *below*
the true one on average, never above. For a discrete law the integrals are finite sums, so the
expectation is exact. alpha N need not be whole: the next largest value then counts in part.

How fast the bias falls depends on the law at the quantile, q(x) = alpha:

- a density f > 0 there: -(1 - alpha) / (2 f N) + smaller, of order 1/N;
- a gap there (q is flat at exactly alpha, as for losses 0 and B with P[B] = alpha):
  -width * sqrt((1 - alpha) / (2 pi alpha N)) + smaller, of order N^(-1/2);
- an atom there (q jumps across alpha): exponentially small in N.

So the paper's order N^(-1/2) is right for every bounded law and reached. `cvar_bias_bound` needs
nothing but the bound: binomial(N, q) has a deviation of at most sqrt(N)/2, and E[min(c, X)] is at
most half a deviation below min(c, E[X]).
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincc

from evenhand.theory.arguments import DoubleArray, check_at_least, check_tail_fraction, checked_law


def expected_empirical_cvar(
    values: ArrayLike, probabilities: ArrayLike, *, num_examples: int, tail_fraction: float
) -> float:
    """E[CVaR_alpha of N draws], exactly, for a law on finitely many values.

    Args:
        values: (V,) losses, in any order, repeats allowed.
        probabilities: (V,), summing to one.
        num_examples: N, the draws.
        tail_fraction: alpha; the average is over the alpha N largest.

    Example:
        >>> expected_empirical_cvar([0, 1], [0.5, 0.5], num_examples=2, tail_fraction=0.5)
        0.75
    """
    least, gaps, _, missing = _gaps(values, probabilities, num_examples, tail_fraction)
    return float(least + gaps @ (1 - missing / (tail_fraction * num_examples)))


def empirical_cvar_bias(
    values: ArrayLike, probabilities: ArrayLike, *, num_examples: int, tail_fraction: float
) -> float:
    """E[CVaR_alpha of N draws] - CVaR_alpha of the law: exact, and never above zero (lemma 4).

    The arguments are those of `expected_empirical_cvar`.

    Example:
        >>> empirical_cvar_bias([0, 1], [0.5, 0.5], num_examples=2, tail_fraction=0.5)
        -0.25
    """
    _, gaps, survival, missing = _gaps(values, probabilities, num_examples, tail_fraction)
    kept = tail_fraction * num_examples
    # Jensen's gap of a concave function; the least and greatest value cancel out of it.
    jensen = np.maximum(missing - np.maximum(kept - num_examples * survival, 0), 0)
    return float(-(gaps @ jensen) / kept)


def cvar_bias_bound(*, loss_bound: float, num_examples: int, tail_fraction: float) -> float:
    """No law on [0, B] has a bias below minus B / (4 alpha sqrt N) (lemma 4, with its constant).

    Example:
        >>> cvar_bias_bound(loss_bound=1.0, num_examples=100, tail_fraction=0.5)
        0.05
    """
    check_at_least("num_examples", num_examples, 1)
    check_tail_fraction(tail_fraction)
    return loss_bound / (4 * tail_fraction * math.sqrt(num_examples))


def _gaps(
    values: ArrayLike, probabilities: ArrayLike, num_examples: int, tail_fraction: float
) -> tuple[float, DoubleArray, DoubleArray, DoubleArray]:
    """The least value; and for each gap from a value to the next, three times (V - 1,):

    its width, q = P[U > the lower end], and E[(c - X)_+] for c = alpha N and X ~ binomial(N, q),
    which is c P[X <= c] - N q P[binomial(N - 1, q) <= c - 1].
    """
    points, masses = checked_law(values, probabilities)
    check_at_least("num_examples", num_examples, 1)
    check_tail_fraction(tail_fraction)
    order = np.argsort(points[masses > 0])
    points, masses = points[masses > 0][order], masses[masses > 0][order]
    survival = np.minimum(np.cumsum(masses[::-1])[::-1][1:], 1)  # P[U >= the upper end]
    level = tail_fraction * num_examples
    below = _at_most(math.floor(level), num_examples, survival)
    below_without_one = _at_most(math.floor(level) - 1, num_examples - 1, survival)
    missing = np.maximum(level * below - num_examples * survival * below_without_one, 0)
    return float(points[0]), np.diff(points), survival, missing


def _at_most(count: int, num_draws: int, success: DoubleArray) -> DoubleArray:
    """P[binomial(N, q) <= c]; to import scipy.stats for it takes longer than all else of scipy."""
    if not 0 <= count < num_draws:
        return np.full_like(success, float(count >= num_draws))
    return np.asarray(betaincc(count + 1, num_draws - count, success))
