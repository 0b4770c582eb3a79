"""Even-handed mining (`risk.EvenMining`): what the gap estimates, what the mixture bounds.

An example's key is its training loss plus the generalisation gap of its bin. The objective is
lambda * CVaR_alpha + (1 - lambda) * mean of the keys, with alpha = k' / B and lambda `mined_share`;
it is realised by equal weights for the k' hardest examples and an evenly spread share of the rest.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from evenhand.risk import GOLDEN, PRIOR_COUNT
from evenhand.theory.arguments import DoubleArray, check_count, checked_law
from evenhand.theory.bounds import known_membership_bound
from evenhand.theory.cvar import WorstDensity, cvar_by_top, cvar_by_worst_density


class ExpectedWeights(NamedTuple):
    hard: float  # of each of the k' hardest
    easy: float  # of each of the others; 0 where there are none


def gap_variance(
    test_losses: ArrayLike, trained_losses: ArrayLike, *, num_held_out: int, num_trained: int
) -> float:
    """Variance of a bin's measured gap: the mean of n held-out losses less that of m trained ones.

    var(test) / n + var(trained) / m * (N - m) / (N - 1). The held-out losses are drawn from the
    law in which the test losses are equally likely; m of N trained ones are in the batches.

    Example:
        >>> gap_variance([0.0, 2.0], [1.0, 3.0], num_held_out=4, num_trained=1)
        1.25
    """
    (test, _), (trained, _) = checked_law(test_losses, None), checked_law(trained_losses, None)
    check_count("num_trained", num_trained, len(trained), "trained losses")
    left_out = (len(trained) - num_trained) / max(1, len(trained) - 1)
    return float(test.var() / num_held_out + trained.var() / num_trained * left_out)


def shrinkage_matrix(
    num_held_out: ArrayLike, shape: ArrayLike, *, prior_count: float = PRIOR_COUNT
) -> DoubleArray:
    """A, such that `EvenMining.gaps` are A times the measured gaps: (G,), (G,) -> (G, G).

    A bin's own gap weighs n / (n + prior) if n are held out; the rest is the curve c * shape that
    fits best by least squares weighted with n. Gaps with covariance V get the bias (A - 1) gap,
    which is 0 where they are on the curve, and the covariance A V A'.

    Example:
        >>> shrinkage_matrix([32, 32], [1.0, 1.0]).tolist()
        [[0.75, 0.25], [0.25, 0.75]]
    """
    counts, curve = np.asarray(num_held_out, np.float64), np.asarray(shape, np.float64)
    own = counts / (counts + prior_count)  # (G,)
    fit = np.outer(curve, counts * curve) / (counts @ curve**2)  # (G, G)
    return np.asarray(np.diag(own) + (1 - own)[:, None] * fit)


def put_back_bias(
    test_losses: ArrayLike, is_put_back: ArrayLike, *, probabilities: ArrayLike | None = None
) -> float:
    """What a bin's held-out mean is off by on average, because labels put back have no part in it.

    Args:
        test_losses: (L,) expected, of the labels of the bin.
        is_put_back: (L,) labels all of whose pairs were drawn to be held out, and got them back.
        probabilities: (L,) at test time, within the bin.

    Example:
        >>> put_back_bias([1.0, 1.0, 4.0], [False, False, True])
        -1.0
    """
    losses, shares = checked_law(test_losses, probabilities)
    measured = shares * ~np.asarray(is_put_back, dtype=bool)
    return float(losses @ measured / measured.sum() - losses @ shares)


def even_bound(
    losses: ArrayLike,
    bin_ids: ArrayLike,
    held_out_losses: ArrayLike,
    held_out_bin_ids: ArrayLike,
    *,
    tail_fraction: float,
    loss_bound: float,
    failure_probability: float,
) -> float:
    """CVaR_alpha of the training loss plus the gap of its bin as measured, plus its deviation.

    With probability 1 - delta, no subpopulation with at least a share alpha of the examples (N,)
    has a larger test loss, if its gap within each bin is that of the bin (docs/theory.md). Losses
    lie in [0, B]; of every bin, some are held out (H,).

    Example:
        >>> settings = dict(tail_fraction=0.5, loss_bound=1.0, failure_probability=0.1)
        >>> round(even_bound([0.1, 0.2], [0, 0], [0.3] * 400, [0] * 400, **settings), 3)
        0.404
    """
    (trained, _), (held_out, _) = checked_law(losses, None), checked_law(held_out_losses, None)
    bins, held_out_bins = np.asarray(bin_ids), np.asarray(held_out_bin_ids)
    counts = np.bincount(held_out_bins, minlength=int(bins.max()) + 1)  # (G,)
    deviations = known_membership_bound(
        0.0 * counts, counts, loss_bound=loss_bound, failure_probability=failure_probability
    )
    gaps = np.bincount(held_out_bins, held_out) / counts  # of which the training loss is taken off
    gaps -= np.bincount(bins, trained) / np.bincount(bins)
    return cvar_by_top(trained + (gaps + deviations)[bins], tail_fraction)


def num_counting(batch_size: int, *, num_hard_examples: int, mined_share: float) -> float:
    """n with 1/n = lambda/k' + (1 - lambda)/B: how many examples a step differentiates.

    Example:
        >>> num_counting(1000, num_hard_examples=250, mined_share=0.5)
        400.0
    """
    check_count("num_hard_examples", num_hard_examples, batch_size, "examples of the batch")
    return 1 / (mined_share / num_hard_examples + (1 - mined_share) / batch_size)


def expected_even_weights(
    batch_size: int, *, num_hard_examples: int, mined_share: float
) -> ExpectedWeights:
    """Exact: what `even_weights` gives on average over all orders of a batch, nothing held out.

    Some of the B places count. How many of the easy examples lie there is hypergeometric.

    Example:
        >>> expected_even_weights(8, num_hard_examples=2, mined_share=0.5)
        ExpectedWeights(hard=0.375, easy=0.041666666666666664)
    """
    count = num_counting(batch_size, num_hard_examples=num_hard_examples, mined_share=mined_share)
    num_easy = batch_size - num_hard_examples
    places = np.arange(1, batch_size + 1) * GOLDEN % 2**32
    num_places = int((places < (1 - mined_share) * count / batch_size * 2**32).sum())
    hard, num_orders = 0.0, math.comb(batch_size, num_easy)
    for both in range(min(num_places, num_easy) + 1):  # easy examples at places that count
        ways = math.comb(num_places, both) * math.comb(batch_size - num_places, num_easy - both)
        hard += ways / num_orders / (num_hard_examples + both)
    easy = (1 - num_hard_examples * hard) / num_easy if num_easy else 0.0
    return ExpectedWeights(hard, easy)


def mixed_risk(
    losses: ArrayLike,
    *,
    tail_fraction: float,
    mined_share: float,
    probabilities: ArrayLike | None = None,
) -> WorstDensity:
    """lambda CVaR_alpha + (1 - lambda) mean, and the weights of each loss: (N,).

    It is the largest mean under densities between 1 - lambda and 1 - lambda + lambda / alpha.

    Example:
        >>> mixed_risk([4.0, 0.0], tail_fraction=0.5, mined_share=0.5)
        WorstDensity(value=3.0, weights=array([0.75, 0.25]))
    """
    tail = cvar_by_worst_density(losses, tail_fraction, probabilities=probabilities)
    values, shares = checked_law(losses, probabilities)
    weights = mined_share * tail.weights + (1 - mined_share) * shares
    return WorstDensity(float(weights @ values), weights)


def effective_count(weights: ArrayLike) -> float:
    """(sum w)^2 / sum w^2: so many draws, weighed equally, have a mean of the same variance.

    Example:
        >>> effective_count([0.5, 0.25, 0.25])
        2.6666666666666665
    """
    values = np.asarray(weights, dtype=np.float64)
    return float(values.sum() ** 2 / (values**2).sum())
