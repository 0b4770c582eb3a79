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

Labels are drawn for each example, independently, from its negatives: `label_losses` are (N, K - 1).
With `is_shared` they are drawn once for the batch, from all labels: (N, K), where a row is -inf at
the example's own positive, which is never its negative. `positive_losses` are (N,).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenhand.theory.arguments import (
    DoubleArray,
    check_at_least,
    check_count,
    check_label_counts,
)
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
    label_losses: ArrayLike,
    *,
    num_sampled_labels: int,
    num_hard_labels: int,
    is_shared: bool = False,
) -> DoubleArray:
    """Each example's loss, expected over the labels drawn: (N,) and (N, K - 1) or (N, K) -> (N,).

    Example:
        >>> counts = {"num_sampled_labels": 1, "num_hard_labels": 1}
        >>> expected_snm_loss([0.5], [[1.0, 3.0]], **counts).tolist()
        [2.5]
        >>> expected_snm_loss([0.5], [[-np.inf, 1.0, 3.0]], **counts, is_shared=True).round(6)
        array([1.833333])
    """
    positive_losses, label_losses = _checked(positive_losses, label_losses, is_shared=is_shared)
    counts = {"num_sampled_labels": num_sampled_labels, "num_hard_labels": num_hard_labels}
    weights_fn = shared_label_weights if is_shared else label_weights
    weights = weights_fn(label_losses.shape[1], **counts)
    if is_shared:  # without the positive, which is -inf
        label_losses = np.sort(label_losses, axis=1)[:, 1:]  # (N, K) -> (N, K - 1)
    return positive_losses + order_weighted_average(label_losses, weights)


def lemma_1_right_side(
    expected_losses: ArrayLike, *, batch_size: int, num_hard_examples: int
) -> float:
    """owa(expected losses; theta): what the paper states, and a lower bound of the expected loss.

    The (N,) losses are from `expected_snm_loss`.

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
    label_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
    is_shared: bool = False,
) -> float:
    """The S2M loss expected over batches and over the labels drawn, exactly.

    Where labels are drawn for each example, the cost grows with the sets of labels that one can
    keep (see `snm_loss_distribution`), but only as N^3 with the number of examples. Shared labels
    make the examples depend on each other, so all C(K, M) draws are gone through.

    Raises:
        ValueError: where there are more than 200,000 such sets, or draws.

    Example:
        >>> counts = {"batch_size": 2, "num_hard_examples": 1}
        >>> counts |= {"num_sampled_labels": 1, "num_hard_labels": 1}
        >>> expected_s2m_loss([0.0, 0.0], [[0.0, 2.0], [0.0, 2.0]], **counts)
        1.5
        >>> label_losses = [[-np.inf, 0.0, 3.0], [0.0, -np.inf, 3.0]]
        >>> expected_s2m_loss([0.0, 0.0], label_losses, **counts, is_shared=True)
        1.0
    """
    positive_losses, label_losses = _checked(positive_losses, label_losses, is_shared=is_shared)
    weights = batch_weights(
        len(positive_losses), batch_size=batch_size, num_hard_examples=num_hard_examples
    )
    if not is_shared:
        counts = {"num_sampled_labels": num_sampled_labels, "num_hard_labels": num_hard_labels}
        distributions = [
            snm_loss_distribution(float(positive), negatives, **counts)
            for positive, negatives in zip(positive_losses, label_losses, strict=True)
        ]
        return expected_order_weighted_average(distributions, weights)
    check_label_counts(num_sampled_labels, num_hard_labels, label_losses.shape[1], "labels")
    averages = [
        order_weighted_average(
            positive_losses + _mean_of_top(label_losses[:, drawn], num_hard_labels), weights
        )
        for drawn in _sets(label_losses.shape[1], num_sampled_labels)
    ]
    return float(np.mean(averages))


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
    check_label_counts(num_drawn, num_kept, len(negatives), "negative labels")
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
    for values, chances in distributions:
        if not (np.diff(values) > 0).all():
            raise ValueError(f"values of a distribution must rise, got {values}")
        if not (chances >= 0).all() or not math.isclose(chances.sum(), 1):
            raise ValueError(f"probabilities must be at least 0 and sum to 1, got {chances}")
    thresholds = np.unique(np.concatenate([law.values for law in distributions]))  # (T,)
    sums = np.append(0.0, np.cumsum(weights))  # (N + 1,)
    total = thresholds[0] * sums[-1]
    for start in range(0, len(thresholds) - 1, THRESHOLDS_AT_ONCE):
        ends = thresholds[start : start + THRESHOLDS_AT_ONCE + 1]
        # The law of the number of values above each threshold: Poisson binomial, (T, N + 1).
        numbers = np.zeros((len(ends) - 1, len(distributions) + 1))
        numbers[:, 0] = 1.0
        for count, (values, chances) in enumerate(distributions, start=1):
            above = np.append(np.cumsum(chances[::-1])[::-1], 0.0).clip(max=1.0)
            chance = above[np.searchsorted(values, ends[:-1], side="right")]  # (T,)
            one_more = numbers[:, :count] * chance[:, None]
            numbers[:, :count] -= one_more
            numbers[:, 1 : count + 1] += one_more
        total += np.diff(ends) @ (numbers @ sums)
    return float(total)


# --- the left side, by drawing --------------------------------------------------------------------


def simulated_s2m_loss(
    positive_losses: ArrayLike,
    label_losses: ArrayLike,
    *,
    batch_size: int,
    num_hard_examples: int,
    num_sampled_labels: int,
    num_hard_labels: int,
    num_draws: int,
    generator: np.random.Generator,
    is_shared: bool = False,
) -> Estimate:
    """The mean of the S2M loss over `num_draws` batches.

    It draws as Algorithm 1 does and uses none of the weights: a check of all that is exact here,
    and the way for data too large for it.
    """
    positive_losses, label_losses = _checked(positive_losses, label_losses, is_shared=is_shared)
    num_examples, num_labels = label_losses.shape
    of_what = "labels" if is_shared else "negative labels"
    check_label_counts(num_sampled_labels, num_hard_labels, num_labels, of_what)
    check_count("batch_size", batch_size, num_examples, "examples")
    check_count("num_hard_examples", num_hard_examples, batch_size, "examples of the batch")
    check_at_least("num_draws", num_draws, 2, " (for a standard error)")
    risks = []
    for _ in range(num_draws):
        batch = generator.choice(num_examples, batch_size, replace=False)  # (n,)
        keys = generator.random((1 if is_shared else batch_size, num_labels))
        drawn = np.argpartition(keys, num_sampled_labels - 1, axis=1)[:, :num_sampled_labels]
        sampled = label_losses[batch[:, None], drawn]  # (1 or n, M) ids -> (n, M)
        losses = positive_losses[batch] + _mean_of_top(sampled, num_hard_labels)
        risks.append(np.sort(losses)[-num_hard_examples:].mean())
    return Estimate(float(np.mean(risks)), float(np.std(risks, ddof=1)) / math.sqrt(num_draws))


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


def _mean_of_top(losses: DoubleArray, num_hard_labels: int) -> DoubleArray:
    """The average of the k largest that hold a label, 0 where none does: (N, M) -> (N,)."""
    top = np.sort(losses, axis=1)[:, -num_hard_labels:]  # (N, k)
    is_label = top > -np.inf
    return np.asarray(np.where(is_label, top, 0).sum(axis=1) / is_label.sum(axis=1).clip(min=1))


def _checked(
    positive_losses: ArrayLike, label_losses: ArrayLike, *, is_shared: bool = False
) -> tuple[DoubleArray, DoubleArray]:
    """Both as arrays; where labels are shared, each row must be -inf at its positive."""
    positive_losses = np.asarray(positive_losses, dtype=np.float64)
    label_losses = np.asarray(label_losses, dtype=np.float64)
    if label_losses.ndim != 2 or positive_losses.shape != label_losses.shape[:1]:
        raise ValueError(
            f"positive_losses must be (N,) and the losses of the labels (N, K), got "
            f"{positive_losses.shape} and {label_losses.shape}"
        )
    num_masked = (label_losses == -np.inf).sum(axis=1)  # (N, K) -> (N,)
    if is_shared and (num_masked != 1).any():
        raise ValueError(
            f"label_losses must be -inf once in each row (at the example's positive), "
            f"got a row with {num_masked[num_masked != 1][0]}"
        )
    return positive_losses, label_losses
