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

# log(x! / (x / e)^x) of small numbers, for which Stirling's series has too few digits.
SMALL_STIRLING = np.array([math.lgamma(x + 1) - x * math.log(x or 1) + x for x in range(16)])


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
    others, others_drawn = population_size - 1, num_drawn - 1
    if ranks is None:
        return _inclusion_of_all(others, others_drawn, num_kept - 1)
    ranks = np.asarray(ranks)
    if ranks.size and not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"ranks must be whole numbers, got {ranks.dtype}")
    if ranks.size and not (ranks.min() >= 1 and ranks.max() <= population_size):
        raise ValueError(
            f"ranks must be between 1 and {population_size} (the number of values), "
            f"got {ranks.min()} to {ranks.max()}"
        )
    return _cumulative(num_kept - 1, others, ranks.astype(np.float64) - 1, others_drawn)


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
# The mass of one point is written instead as a 2 x 2 table (drawn or not, marked or not) against
# what the margins predict (Loader, 2000, for the binomial): nothing large is subtracted.


def _inclusion_of_all(population: int, drawn: int, limit: int) -> DoubleArray:
    """P[H <= limit] for every number of marked values from 0 to the population, in O(N).

    One more marked value lowers P by the chance that it is drawn and `limit` others are too. All
    these steps are positive, so that their sum from the far end keeps its digits.
    """
    if limit >= drawn:
        return np.ones(population + 1)
    marked = np.arange(population, dtype=np.float64)
    steps = np.exp(_log_mass(limit, population - 1, marked, drawn - 1)) * (drawn / population)
    probabilities = np.append(np.cumsum(steps[::-1])[::-1], 0.0)
    probabilities[: limit + 1] = 1.0
    return probabilities.clip(max=1.0)


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
    return np.asarray(np.exp(_log_mass(limit, population, marked, drawn)) * total)


def _log_mass(count: int, population: int, marked: DoubleArray, drawn: int) -> DoubleArray:
    """log P[H = count]; -inf for a count that cannot be."""
    fewest = np.maximum(0, drawn - (population - marked))
    most = np.minimum(drawn, marked)
    log_mass = np.where((fewest <= count) & (count <= most), 0.0, -np.inf)
    is_open = (log_mass == 0) & (fewest < most)
    if not is_open.any():
        return log_mass
    marked = marked[is_open]
    unmarked, left = population - marked, population - drawn
    expected = marked * (drawn / population)
    excess = count - expected  # every cell is off by as much, up to sign
    cells = [  # number, what the margins predict, their difference
        (np.full_like(marked, count), expected, excess),
        (marked - count, marked * (left / population), -excess),
        (np.full_like(marked, drawn - count), unmarked * (drawn / population), -excess),
        (left - marked + count, unmarked * (left / population), excess),
    ]
    given = _stirling(np.array([drawn, left, population], dtype=np.float64))
    margins = _stirling(marked) + _stirling(unmarked) + (given[0] + given[1] - given[2])
    log_mass[is_open] = margins - sum(_stirling(cell[0]) + _deviance(*cell) for cell in cells)
    return log_mass


def _deviance(counts: DoubleArray, expected: DoubleArray, excess: DoubleArray) -> DoubleArray:
    """x log(x / e) + e - x for numbers x and their expectations e, given the excess x - e."""
    far = counts * np.log(np.where(counts > 0, counts, 1) / expected) - excess
    # Near e the terms cancel: with v = (x - e) / (x + e), log(x / e) is 2 (v + v^3 / 3 + ...).
    ratio = excess / (counts + expected)
    series = np.zeros_like(ratio)
    for power in range(21, 1, -2):
        series = (series + 1 / power) * ratio**2
    near = excess * ratio + 2 * counts * ratio * series
    return np.where(np.abs(ratio) < 0.1, near, far)


def _stirling(counts: DoubleArray) -> DoubleArray:
    """log(x! / (x / e)^x), about log(2 pi x) / 2: what is left of log x! without its bulk."""
    smallest = len(SMALL_STIRLING)
    x = counts.clip(min=smallest)
    series = 1 / 1680 - 1 / (1188 * x**2)
    for coefficient in (1260, 360, 12):
        series = 1 / coefficient - series / x**2
    large = 0.5 * np.log(2 * np.pi * x) + series / x
    small = SMALL_STIRLING[counts.clip(max=smallest - 1).astype(np.int64)]
    return np.asarray(np.where(counts < smallest, small, large))
