"""Order-weighted averages, and the weight that a random draw gives to each rank.

Draw n of N values without replacement and average the k' largest of the n. In expectation this is
an order-weighted average of all N values, with weights that depend on the counts alone:

    owa(z; theta) = sum_i theta_i z_[i]      z_[i]: the i-th largest value
    theta_i = n / (N k') P[H <= k' - 1]      H: how many of the i - 1 larger values are drawn too

H is hypergeometric: n - 1 drawn of N - 1, of which i - 1 are marked. Ranks count from 1, the
largest value. Where `ranks` are given, the cost does not depend on N. The relative error is about
1e-12 down to the smallest numbers of float64: a weight below 2e-308 loses digits, one below 5e-324
is 0.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from evenhand.theory.arguments import DoubleArray, check_count, check_label_counts

MOST_RATIOS = 2**20  # of a product, in memory at once


def order_weighted_average(values: ArrayLike, weights: ArrayLike) -> DoubleArray:
    """owa(z; theta): the i-th largest value times the i-th weight, summed: (..., N), (N,) -> (...).

    Example:
        >>> float(order_weighted_average([1.0, 3.0, 2.0], [0.5, 0.5, 0.0]))
        2.5
    """
    values, weights = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    if weights.shape != values.shape[-1:]:
        raise ValueError(
            f"weights must have the shape {values.shape[-1:]} (one for each value), "
            f"got {weights.shape}"
        )
    return np.asarray(np.sort(values, axis=-1)[..., ::-1] @ weights)


def batch_weights(
    num_examples: int, *, batch_size: int, num_hard_examples: int, ranks: ArrayLike | None = None
) -> DoubleArray:
    """theta: the expected weight of each rank in the top-k' average of a random batch (Lemma 1).

    Args:
        num_examples: N, from which a batch of n is drawn without replacement.
        batch_size: n.
        num_hard_examples: k', how many of the batch are averaged.
        ranks: (R,) ranks to answer for, 1 being the largest loss; all N where it is None.

    Returns:
        (R,) or (N,) weights; those of all ranks sum to 1.

    Example:
        >>> batch_weights(3, batch_size=2, num_hard_examples=1).round(6).tolist()
        [0.666667, 0.333333, 0.0]
    """
    check_count("batch_size", batch_size, num_examples, "examples")
    check_count("num_hard_examples", num_hard_examples, batch_size, "examples of the batch")
    return _draw_weights(num_examples, batch_size, num_hard_examples, ranks)


def label_weights(
    num_negatives: int,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
    ranks: ArrayLike | None = None,
) -> DoubleArray:
    """varphi: the same for M labels drawn for each example from its K - 1 negatives (Lemma 1).

    Example:
        >>> label_weights(3, num_sampled_labels=3, num_hard_labels=2).tolist()
        [0.5, 0.5, 0.0]
    """
    check_label_counts(num_sampled_labels, num_hard_labels, num_negatives, "negative labels")
    return _draw_weights(num_negatives, num_sampled_labels, num_hard_labels, ranks)


def shared_label_weights(
    num_labels: int,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
    ranks: ArrayLike | None = None,
) -> DoubleArray:
    """The weights of an example's K - 1 negatives when M of all K labels are drawn for the batch.

    The positive is masked where it was drawn. So the example sees M labels with probability
    1 - M / K, and M - 1 with probability M / K; the average is over k of them, or over all it sees
    where they are fewer. An example that sees none (M = 1) has an average of 0: only then do the
    weights sum to less than 1, namely to 1 - 1 / K.

    Example:
        >>> shared_label_weights(3, num_sampled_labels=2, num_hard_labels=2).round(6).tolist()
        [0.5, 0.5]
    """
    check_label_counts(num_sampled_labels, num_hard_labels, num_labels, "labels")
    drawn = num_sampled_labels / num_labels  # the chance that the positive is
    weights = np.zeros(num_labels - 1 if ranks is None else np.shape(ranks))
    for num_seen, chance in ((num_sampled_labels, 1 - drawn), (num_sampled_labels - 1, drawn)):
        if 1 <= num_seen < num_labels:
            num_kept = min(num_hard_labels, num_seen)
            weights += chance * _draw_weights(num_labels - 1, num_seen, num_kept, ranks)
    return weights


def inclusion_probabilities(
    population_size: int, *, num_drawn: int, num_kept: int, ranks: ArrayLike | None = None
) -> DoubleArray:
    """P[H <= k' - 1]: that the value of each rank, if drawn, is among the largest k' drawn.

    These are the weights before they are scaled to sum to 1: theta = n / (N k') times them.

    Example:
        >>> inclusion_probabilities(3, num_drawn=2, num_kept=1).tolist()
        [1.0, 0.5, 0.0]
    """
    check_count("num_drawn", num_drawn, population_size, "values")
    check_count("num_kept", num_kept, num_drawn, "values drawn")
    ranks = np.arange(1, population_size + 1) if ranks is None else np.asarray(ranks)
    if ranks.size and not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"ranks must be whole numbers, got {ranks.dtype}")
    if ranks.size and not (ranks.min() >= 1 and ranks.max() <= population_size):
        raise ValueError(
            f"ranks must be between 1 and {population_size} (the number of values), "
            f"got {ranks.min()} to {ranks.max()}"
        )
    num_larger = ranks.astype(np.float64) - 1
    return _cumulative(num_kept - 1, population_size - 1, num_larger, num_drawn - 1)


def _draw_weights(
    population_size: int, num_drawn: int, num_kept: int, ranks: ArrayLike | None
) -> DoubleArray:
    probabilities = inclusion_probabilities(
        population_size, num_drawn=num_drawn, num_kept=num_kept, ranks=ranks
    )
    return probabilities * (num_drawn / (population_size * num_kept))


# --- the hypergeometric law -----------------------------------------------------------------------
#
# Differences of log-gamma are of no use here: log-gamma of 1e9 is 2e10, whose last digit is 4e-6.
# The mass of one point is a product of ratios instead, one for each value drawn.


def _cumulative(limit: int, population: int, marked: DoubleArray, drawn: int) -> DoubleArray:
    """P[H <= limit] for each number of marked values, by the tail that is short."""
    is_below_mean = limit * population < marked * drawn
    probabilities = np.empty_like(marked)
    probabilities[is_below_mean] = _lower_tail(limit, population, marked[is_below_mean], drawn)
    # What is drawn and not marked is hypergeometric too, and H > limit is a lower tail of it.
    unmarked = population - marked[~is_below_mean]
    beyond = _lower_tail(drawn - limit - 1, population, unmarked, drawn)
    probabilities[~is_below_mean] = 1.0 - beyond
    return probabilities


def _lower_tail(limit: int, population: int, marked: DoubleArray, drawn: int) -> DoubleArray:
    """P[H <= limit] for a limit not above the mean: from its last term down, by ratios."""
    terms, total = np.ones_like(marked), np.zeros_like(marked)  # relative to P[H = limit]
    for count in range(limit, -1, -1):
        total += terms
        # The ratios only fall, so what is left is less than `count` terms like this one.
        if not (count * terms > 2.0**-60 * total).any():
            break
        num_left = (population - drawn - marked + count).clip(min=0)  # not drawn, not marked
        terms *= (count / (drawn - count + 1)) * (num_left / (marked - count + 1))
    if not 0 <= limit <= drawn:
        return np.zeros_like(marked)
    # P[H = limit]: ways to place the marked ones among those drawn, times the chance of one way.
    log_mass = _log_of_draws(marked, population, limit) + math.log(math.comb(drawn, limit))
    log_mass += _log_of_draws(population - marked, population - limit, drawn - limit)
    return np.asarray(np.exp(log_mass) * total)


def _log_of_draws(wanted: DoubleArray, population: int, num_drawn: int) -> DoubleArray:
    """log of the chance that all values drawn are among those wanted; -inf where they cannot be."""
    total = np.zeros_like(wanted)
    at_once = max(1, MOST_RATIOS // max(1, len(wanted)))
    for start in range(0, num_drawn, at_once):
        before = np.arange(start, min(start + at_once, num_drawn))  # drawn already
        ratios = (wanted[:, None] - before).clip(min=0) / (population - before)
        with np.errstate(divide="ignore"):
            total += np.log(ratios).sum(axis=1)
    return total
