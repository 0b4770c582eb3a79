"""Rademacher complexity: how well the best function of a class follows random signs.

Rad = E sup over h of (1/N) sum_i sigma_i h(z_i), with fair independent signs and no absolute value.
On a sample at hand it is the *empirical* complexity; its mean over samples is Rad_N, the *expected*
one. A class is given as a table (M, N), a row of values on the sample for each of its M functions.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import poch

from evenhand.theory.arguments import DoubleArray, check_at_least
from evenhand.theory.expected import Estimate

MOST_SIGNS = 20  # 2**20 sign vectors are the most that are enumerated
SIGNS_AT_ONCE = 2**13


def threshold_rademacher(*, loss_bound: float, num_examples: int) -> float:
    """Rad_N of the constants t in [0, B]: (B/2) E|mean sigma|, exactly; at most B/(2 sqrt N).

    Example:
        >>> round(threshold_rademacher(loss_bound=1.0, num_examples=2), 12)
        0.25
    """
    # E|sum of N signs| = N times the middle of the binomial law of N - 1 fair coins, which is that
    # of 2m coins for m = floor(N / 2): (2m choose m) / 4^m = Gamma(m + 1/2) / (sqrt(pi) m!).
    middle = float(poch(num_examples // 2 + 1, -0.5)) / math.sqrt(math.pi)
    return loss_bound / 2 * middle


def empirical_rademacher(values: ArrayLike) -> float:
    """E over signs of max over functions of (1/N) sum_i sigma_i h(z_i), exactly: (M, N) -> ().

    For vectors of scores, put the coordinates of an example side by side, (M, N K), and multiply
    the result by K: the mean is over examples.

    Args:
        values: (M, N), a row for each function of the class; N at most 20.

    Example:
        >>> empirical_rademacher([[0.0, 0.0], [1.0, 1.0]])
        0.25
    """
    table = _table(values)
    num_examples: int = table.shape[1]
    if num_examples > MOST_SIGNS:
        raise ValueError(
            f"values must have at most {MOST_SIGNS} columns (2**N sign vectors are enumerated; "
            f"sampled_rademacher draws them), got {num_examples}"
        )
    total, num_codes = 0.0, 1 << num_examples
    for start in range(0, num_codes, SIGNS_AT_ONCE):
        codes = np.arange(start, min(start + SIGNS_AT_ONCE, num_codes))
        signs = 2.0 * (codes[:, None] >> np.arange(num_examples) & 1) - 1  # (codes, N)
        total += float((signs @ table.T).max(axis=1).sum())  # (codes, M) -> (codes,) -> ()
    return total / (num_codes * num_examples)


def sampled_rademacher(
    values: ArrayLike, *, num_draws: int, generator: np.random.Generator
) -> Estimate:
    """The same by drawing sign vectors, with its standard error: (M, N) -> ().

    Example:
        >>> rng = np.random.default_rng(0)
        >>> sampled_rademacher([[1.0, 1.0]] * 2, num_draws=8, generator=rng).standard_error < 1
        True
    """
    table = _table(values)
    check_at_least("num_draws", num_draws, 2, " (for a standard error)")
    signs = generator.choice([-1.0, 1.0], size=(num_draws, table.shape[1]))
    maxima = (signs @ table.T).max(axis=1) / table.shape[1]  # (draws, M) -> (draws,)
    return Estimate(float(maxima.mean()), float(maxima.std(ddof=1) / math.sqrt(num_draws)))


def linear_rademacher_bound(
    queries: ArrayLike, *, norm_bound: float, num_outputs: int = 1
) -> float:
    """Rad of the linear scorers W x with Frobenius norm of W at most `norm_bound`, from above.

    norm_bound sqrt(num_outputs sum_i |x_i|^2) / N: Cauchy and Schwarz, then Jensen. It grows with
    the root of the number of labels: with many labels it says nothing until N is larger still.

    Args:
        queries: (N, D).

    Example:
        >>> linear_rademacher_bound([[3.0, 4.0]] * 4, norm_bound=1.0)
        2.5
    """
    table = _table(queries)
    length = math.sqrt(num_outputs * float((table**2).sum()))
    return norm_bound * length / len(table)


def _table(values: ArrayLike) -> DoubleArray:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"values must be a table with rows and columns, got shape {table.shape}")
    return table
