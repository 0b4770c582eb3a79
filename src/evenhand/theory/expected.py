"""Lemma 1: the expected S2M loss, and the order-weighted average the paper says it equals.

Both sides, for a data set of N examples given by their losses phi(f_y) and phi(-f_y'):

    left   E[average of the top k' of a batch of n], over the batch and the labels drawn
    right  owa({E[loss_i]}; theta), each E[loss_i] = phi(f_y) + owa({phi(-f_y')}; varphi)

Over the batch alone this is exact: the left side is E[owa({loss_i}; theta)], over the labels. The
paper then moves this expectation inside the average. But owa with falling weights is convex, so
that left >= right, and in general left > right: a draw that lifts one example above another counts
for more than the one that lowers it.

They are equal where theta is flat (k' = n), where labels are not random (all are drawn), and where
no draw changes the order of the examples.

Labels are drawn for each example, independently, from its `negative_losses` (N, K - 1); or, in the
functions named *shared*, once for the batch, from `label_losses` (N, K), where a row is -inf at the
example's own positive, which is never its negative. `positive_losses` are (N,).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.theory.arguments import DoubleArray, check_count
from evenhand.theory.order_weights import (
    batch_weights,
    label_weights,
    order_weighted_average,
    shared_label_weights,
)

IntArray = NDArray[np.int64]

MOST_SETS = 200_000  # sets of labels that are enumerated
THRESHOLDS_AT_ONCE = 4096  # (4096, N + 1) probabilities: 33 MB for a thousand examples


class LossDistribution(NamedTuple):
    values: DoubleArray  # (V,) rising
    probabilities: DoubleArray  # (V,)


class Estimate(NamedTuple):
    mean: float
    standard_error: float


# --- the right side -------------------------------------------------------------------------------


def expected_snm_loss(
    positive_losses: ArrayLike,
    negative_losses: ArrayLike,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
) -> DoubleArray:
    """Each example's loss, expected over labels drawn for it: (N,), (N, K - 1) -> (N,).

    Args:
        positive_losses: phi(f_y).
        negative_losses: phi(-f_y') of every other label, in any order.

    Example:
        >>> expected_snm_loss([0.5], [[1.0, 3.0]], num_sampled_labels=1, num_hard_labels=1).tolist()
        [2.5]
    """
    positive_losses, negative_losses = _checked(positive_losses, negative_losses)
    weights = label_weights(
        negative_losses.shape[1],
        num_sampled_labels=num_sampled_labels,
        num_hard_labels=num_hard_labels,
    )
    return positive_losses + order_weighted_average(negative_losses, weights)


def expected_shared_snm_loss(
    positive_losses: ArrayLike,
    label_losses: ArrayLike,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
) -> DoubleArray:
    """The same for labels drawn once for the batch: (N,), (N, K) -> (N,).

    Args:
        positive_losses: phi(f_y).
        label_losses: phi(-f_y') of every label, -inf at the positive.

    Example:
        >>> label_losses = [[-np.inf, 1.0, 3.0]]
        >>> expected_shared_snm_loss(
        ...     [0.5], label_losses, num_sampled_labels=1, num_hard_labels=1
        ... ).round(6).tolist()
        [1.833333]
    """
    positive_losses, label_losses = _checked_shared(positive_losses, label_losses)
    weights = shared_label_weights(
        label_losses.shape[1],
        num_sampled_labels=num_sampled_labels,
        num_hard_labels=num_hard_labels,
    )
    negative_losses = np.sort(label_losses, axis=1)[:, 1:]  # (N, K) -> (N, K - 1)
    return positive_losses + order_weighted_average(negative_losses, weights)


def lemma_1_right_side(
    expected_losses: ArrayLike, *, batch_size: int, num_hard_examples: int
) -> float:
    """owa(expected losses; theta): what the paper states, and a lower bound of the expected loss.

    Args:
        expected_losses: (N,), from `expected_snm_loss` or `expected_shared_snm_loss`.

    Example:
        >>> lemma_1_right_side([1.0, 2.0, 6.0], batch_size=3, num_hard_examples=2)
        4.0
    """
    expected_losses = np.asarray(expected_losses, dtype=np.float64)
    weights = batch_weights(
        len(expected_losses), batch_size=batch_size, num_hard_examples=num_hard_examples
    )
    return float(order_weighted_average(expected_losses, weights))


# --- the left side, exactly -----------------------------------------------------------------------


def expected_s2m_loss(
    positive_losses: ArrayLike,
    negative_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
) -> float:
    """The S2M loss expected over batches and over labels drawn for each example, exactly.

    The cost grows with the sets of labels an example can keep (see `snm_loss_distribution`), but
    only as N^3 with the number of examples.

    Example:
        >>> expected_s2m_loss(
        ...     [0.0, 0.0], [[0.0, 2.0], [0.0, 2.0]],
        ...     batch_size=2, num_hard_examples=1, num_sampled_labels=1, num_hard_labels=1,
        ... )
        1.5
    """
    positive_losses, negative_losses = _checked(positive_losses, negative_losses)
    distributions = [
        snm_loss_distribution(
            float(positive),
            negatives,
            num_sampled_labels=num_sampled_labels,
            num_hard_labels=num_hard_labels,
        )
        for positive, negatives in zip(positive_losses, negative_losses, strict=True)
    ]
    weights = batch_weights(
        len(positive_losses), batch_size=batch_size, num_hard_examples=num_hard_examples
    )
    return expected_order_weighted_average(distributions, weights)


def snm_loss_distribution(
    positive_loss: float,
    negative_losses: ArrayLike,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
) -> LossDistribution:
    """Every loss one example can have over the labels drawn for it, with its probability.

    Goes through the sets of k labels that can be kept, C(K - 1 - M + k, k) of them: those whose
    last rank i leaves M - k labels to be drawn behind it, in C(K - 1 - i, M - k) ways.

    Raises:
        ValueError: where there are more than 200,000 such sets.

    Example:
        >>> snm_loss_distribution(0.0, [1.0, 3.0], num_sampled_labels=1, num_hard_labels=1)
        LossDistribution(values=array([1., 3.]), probabilities=array([0.5, 0.5]))
    """
    negatives = np.sort(np.asarray(negative_losses, dtype=np.float64))[::-1]
    num_drawn, num_kept = num_sampled_labels, num_hard_labels
    check_count("num_sampled_labels", num_drawn, len(negatives), "negative labels")
    check_count("num_hard_labels", num_kept, num_drawn, "sampled labels")
    kept = _sets(len(negatives) - num_drawn + num_kept, num_kept)  # (sets, k)
    ways = [math.comb(len(negatives) - 1 - int(last), num_drawn - num_kept) for last in kept[:, -1]]
    draws = math.comb(len(negatives), num_drawn)
    values, places = np.unique(positive_loss + negatives[kept].mean(axis=1), return_inverse=True)
    probabilities = np.zeros(len(values))
    np.add.at(probabilities, places.ravel(), [number / draws for number in ways])
    return LossDistribution(values, probabilities)


def expected_order_weighted_average(
    distributions: Sequence[LossDistribution], weights: ArrayLike
) -> float:
    """E[owa(z; theta)] for independent discrete values z_1 ... z_N, exactly.

    The i-th largest is above a threshold where at least i values are. So the expectation is a sum
    over the gaps between thresholds of the gap times E[theta_1 + ... + theta_C], where C, the
    number of values above, is a sum of independent coins. T thresholds cost T N^2.

    Example:
        >>> coin = LossDistribution(np.array([0.0, 2.0]), np.array([0.5, 0.5]))
        >>> expected_order_weighted_average([coin, coin], [1.0, 0.0])
        1.5
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (len(distributions),):
        raise ValueError(
            f"weights must have the shape ({len(distributions)},) (one for each distribution), "
            f"got {weights.shape}"
        )
    for law in distributions:
        _check_law(law)
    thresholds = np.unique(np.concatenate([law.values for law in distributions]))  # (T,)
    sums = np.append(0.0, np.cumsum(weights))  # (N + 1,)
    total = thresholds[0] * sums[-1]
    for start in range(0, len(thresholds) - 1, THRESHOLDS_AT_ONCE):
        ends = thresholds[start : start + THRESHOLDS_AT_ONCE + 1]
        chances = np.stack([_chance_above(law, ends[:-1]) for law in distributions])  # (N, T)
        total += np.diff(ends) @ (_numbers_of_successes(chances) @ sums)
    return float(total)


def expected_shared_s2m_loss(
    positive_losses: ArrayLike,
    label_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
) -> float:
    """The S2M loss expected over batches and over labels drawn once for the batch, exactly.

    The examples depend on each other by the draw, so all C(K, M) draws are gone through.

    Raises:
        ValueError: where there are more than 200,000 draws.

    Example:
        >>> expected_shared_s2m_loss(
        ...     [0.0, 0.0], [[-np.inf, 0.0, 3.0], [0.0, -np.inf, 3.0]],
        ...     batch_size=2, num_hard_examples=1, num_sampled_labels=1, num_hard_labels=1,
        ... )
        1.0
    """
    positive_losses, label_losses = _checked_shared(positive_losses, label_losses)
    num_labels = label_losses.shape[1]
    check_count("num_sampled_labels", num_sampled_labels, num_labels, "labels")
    check_count("num_hard_labels", num_hard_labels, num_sampled_labels, "sampled labels")
    weights = batch_weights(
        len(label_losses), batch_size=batch_size, num_hard_examples=num_hard_examples
    )
    averages = [
        order_weighted_average(
            positive_losses + _mean_of_top(label_losses[:, drawn], num_hard_labels), weights
        )
        for drawn in _sets(num_labels, num_sampled_labels)
    ]
    return float(np.mean(averages))


# --- the left side, by drawing --------------------------------------------------------------------


def simulated_s2m_loss(
    positive_losses: ArrayLike,
    negative_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
    num_draws: int,
    generator: np.random.Generator,
) -> Estimate:
    """The mean of the S2M loss over so many batches, with labels drawn for each example.

    It draws as Algorithm 1 does and uses none of the weights: a check of all that is exact here,
    and the way for data too large for it.
    """
    positive_losses, negative_losses = _checked(positive_losses, negative_losses)
    num_negatives = negative_losses.shape[1]
    check_count("num_sampled_labels", num_sampled_labels, num_negatives, "negative labels")
    check_count("num_hard_labels", num_hard_labels, num_sampled_labels, "sampled labels")

    def losses_fn(batch: IntArray) -> DoubleArray:
        keys = generator.random((len(batch), num_negatives))
        drawn = np.argpartition(keys, num_sampled_labels - 1, axis=1)[:, :num_sampled_labels]
        sampled = negative_losses[batch[:, None], drawn]  # (n, M)
        return positive_losses[batch] + _mean_of_top(sampled, num_hard_labels)

    batches = _batches(len(positive_losses), batch_size, num_draws, generator)
    return _estimate([losses_fn(batch) for batch in batches], num_hard_examples)


def simulated_shared_s2m_loss(
    positive_losses: ArrayLike,
    label_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
    num_draws: int,
    generator: np.random.Generator,
) -> Estimate:
    """The same with labels drawn once for each batch."""
    positive_losses, label_losses = _checked_shared(positive_losses, label_losses)
    num_labels = label_losses.shape[1]
    check_count("num_sampled_labels", num_sampled_labels, num_labels, "labels")
    check_count("num_hard_labels", num_hard_labels, num_sampled_labels, "sampled labels")

    def losses_fn(batch: IntArray) -> DoubleArray:
        drawn = generator.choice(num_labels, num_sampled_labels, replace=False)
        sampled = label_losses[np.ix_(batch, drawn)]  # (n, M)
        return positive_losses[batch] + _mean_of_top(sampled, num_hard_labels)

    batches = _batches(len(positive_losses), batch_size, num_draws, generator)
    return _estimate([losses_fn(batch) for batch in batches], num_hard_examples)


def _batches(
    num_examples: int, batch_size: int, num_draws: int, generator: np.random.Generator
) -> Iterator[IntArray]:
    check_count("batch_size", batch_size, num_examples, "examples")
    for _ in range(num_draws):
        yield generator.choice(num_examples, batch_size, replace=False)


def _estimate(losses_of_batches: Sequence[DoubleArray], num_hard_examples: int) -> Estimate:
    if len(losses_of_batches) < 2:
        raise ValueError(
            f"num_draws must be at least 2 (for a standard error), got {len(losses_of_batches)}"
        )
    losses = np.stack(losses_of_batches)  # (draws, n)
    check_count("num_hard_examples", num_hard_examples, losses.shape[1], "examples of the batch")
    risks = np.sort(losses, axis=1)[:, -num_hard_examples:].mean(axis=1)  # (draws,)
    return Estimate(float(risks.mean()), float(risks.std(ddof=1)) / math.sqrt(len(risks)))


# --- parts ----------------------------------------------------------------------------------------


def _sets(num_items: int, size: int) -> IntArray:
    """Every set of so many of the numbers from 0, each rising: (sets, size)."""
    number = math.comb(num_items, size)
    if number > MOST_SETS:
        raise ValueError(
            f"there must be at most {MOST_SETS} sets of labels (all are enumerated), got "
            f"{number}: {size} of {num_items}; simulate instead"
        )
    sets = itertools.chain.from_iterable(itertools.combinations(range(num_items), size))
    return np.fromiter(sets, dtype=np.int64, count=number * size).reshape(number, size)


def _check_law(law: LossDistribution) -> None:
    if not (np.diff(law.values) > 0).all():
        raise ValueError(f"values of a distribution must rise, got {law.values}")
    if not (law.probabilities >= 0).all() or not math.isclose(law.probabilities.sum(), 1):
        raise ValueError(f"probabilities must be at least 0 and sum to 1, got {law.probabilities}")


def _chance_above(law: LossDistribution, thresholds: DoubleArray) -> DoubleArray:
    """P[value > threshold], for each threshold; the law's values rise."""
    chances = np.append(np.cumsum(law.probabilities[::-1])[::-1], 0.0).clip(max=1.0)
    return chances[np.searchsorted(law.values, thresholds, side="right")]


def _numbers_of_successes(chances: DoubleArray) -> DoubleArray:
    """The law of the number of successes of N coins (Poisson binomial): (N, T) -> (T, N + 1)."""
    law = np.zeros((chances.shape[1], len(chances) + 1))
    law[:, 0] = 1.0
    for count, chance in enumerate(chances, start=1):
        one_more = law[:, :count] * chance[:, None]
        law[:, :count] -= one_more
        law[:, 1 : count + 1] += one_more
    return law


def _mean_of_top(losses: DoubleArray, num_hard_labels: int) -> DoubleArray:
    """The average of the k largest that hold a label, 0 where none does: (N, M) -> (N,)."""
    top = np.sort(losses, axis=1)[:, -num_hard_labels:]  # (N, k)
    is_label = top > -np.inf
    return np.asarray(np.where(is_label, top, 0).sum(axis=1) / is_label.sum(axis=1).clip(min=1))


def _checked(
    positive_losses: ArrayLike, negative_losses: ArrayLike
) -> tuple[DoubleArray, DoubleArray]:
    positive_losses = np.asarray(positive_losses, dtype=np.float64)
    negative_losses = np.asarray(negative_losses, dtype=np.float64)
    if negative_losses.ndim != 2 or positive_losses.shape != negative_losses.shape[:1]:
        raise ValueError(
            f"positive_losses must be (N,) and the losses of the labels (N, K), got "
            f"{positive_losses.shape} and {negative_losses.shape}"
        )
    return positive_losses, negative_losses


def _checked_shared(
    positive_losses: ArrayLike, label_losses: ArrayLike
) -> tuple[DoubleArray, DoubleArray]:
    positive_losses, label_losses = _checked(positive_losses, label_losses)
    num_masked = (label_losses == -np.inf).sum(axis=1)  # (N, K) -> (N,)
    if (num_masked != 1).any():
        raise ValueError(
            f"label_losses must be -inf once in each row (at the example's positive), "
            f"got a row with {num_masked[num_masked != 1][0]}"
        )
    return positive_losses, label_losses
