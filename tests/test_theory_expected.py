"""Lemma 1: both sides against every batch and every draw, the inequality, the equalities."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import theory_oracles as oracles
from evenhand.theory.expected import (
    LossDistribution,
    expected_order_weighted_average,
    expected_s2m_loss,
    expected_snm_loss,
    lemma_1_right_side,
    simulated_s2m_loss,
    snm_loss_distribution,
)

NAMES = ("batch_size", "num_hard_examples", "num_sampled_labels", "num_hard_labels")
whole_numbers = st.integers(0, 9)  # as fractions in the oracles, so that these are exact


@st.composite
def problems(draw, num_examples=3, num_negatives=3):
    """Positive losses, negative losses, and the four counts."""
    size, width = draw(st.integers(1, num_examples)), draw(st.integers(1, num_negatives))
    positives = [Fraction(draw(whole_numbers)) for _ in range(size)]
    negatives = [[Fraction(draw(whole_numbers)) for _ in range(width)] for _ in range(size)]
    batch_size, num_sampled = draw(st.integers(1, size)), draw(st.integers(1, width))
    counts = (
        batch_size,
        draw(st.integers(1, batch_size)),
        num_sampled,
        draw(st.integers(1, num_sampled)),
    )
    return positives, negatives, counts


@st.composite
def shared_problems(draw):
    """The same with a loss for every label, and each example's positive among them."""
    positives, label_losses, counts = draw(problems(num_negatives=5))
    num_labels = len(label_losses[0])
    labels = [draw(st.integers(0, num_labels - 1)) for _ in positives]
    return positives, label_losses, labels, counts


def floats(rows):
    return np.array(rows, dtype=np.float64)


def masked(label_losses, labels):
    losses = floats(label_losses)
    losses[np.arange(len(labels)), labels] = -np.inf
    return losses


def by_name(counts):
    return dict(zip(NAMES, counts, strict=True))


def of_labels(counts):
    return {name: count for name, count in by_name(counts).items() if "labels" in name}


def of_examples(counts):
    return {name: count for name, count in by_name(counts).items() if "labels" not in name}


def both_sides(positives, negatives, **counts):
    counts = [counts[name] for name in NAMES]
    left = expected_s2m_loss(positives, negatives, **by_name(counts))
    expected = expected_snm_loss(positives, negatives, **of_labels(counts))
    return left, lemma_1_right_side(expected, **of_examples(counts))


# One example.


@given(problems(num_negatives=5))
def test_the_expected_loss_of_an_example_is_the_mean_over_all_its_draws(problem):
    positives, negatives, counts = problem
    actual = expected_snm_loss(floats(positives), floats(negatives), **of_labels(counts))
    for value, positive, row in zip(actual, positives, negatives, strict=True):
        losses = oracles.snm_losses_of_example(positive, row, *counts[2:])
        assert value == pytest.approx(float(sum(losses) / len(losses)), rel=1e-12)


@given(shared_problems())
def test_with_shared_labels_too(problem):
    positives, label_losses, labels, counts = problem
    losses = floats(positives), masked(label_losses, labels)
    actual = expected_snm_loss(*losses, **of_labels(counts), is_shared=True)
    draws = list(itertools.combinations(range(len(label_losses[0])), counts[2]))
    rows = [
        oracles.shared_losses(positives, label_losses, labels, drawn, counts[3]) for drawn in draws
    ]
    expected = [float(sum(column) / len(rows)) for column in zip(*rows, strict=True)]
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(problems(num_negatives=6))
def test_the_distribution_of_a_loss_is_that_of_all_its_draws(problem):
    positives, negatives, counts = problem
    law = snm_loss_distribution(float(positives[0]), floats(negatives[0]), **of_labels(counts))
    losses = oracles.snm_losses_of_example(positives[0], negatives[0], *counts[2:])
    # Averages of thirds differ in the last digit, so compare moments and the distribution function.
    assert law.probabilities.sum() == pytest.approx(1, rel=1e-13)
    for threshold in sorted(set(losses)):
        share = sum(loss <= threshold for loss in losses) / len(losses)
        near = law.values <= float(threshold) + 1e-9
        assert law.probabilities[near].sum() == pytest.approx(share, rel=1e-12)


# E[owa].


@given(st.data())
def test_the_expected_average_of_independent_values_is_that_of_all_combinations(data):
    laws = []
    for _ in range(data.draw(st.integers(1, 4))):
        values = sorted(data.draw(st.sets(whole_numbers, min_size=1, max_size=3)))
        shares = [data.draw(st.integers(0, 4)) for _ in values]
        shares[0] += 1
        laws.append([(v, Fraction(s, sum(shares))) for v, s in zip(values, shares, strict=True)])
    weights = [data.draw(st.integers(-3, 3)) for _ in laws]  # exact for any weights, falling or not
    actual = expected_order_weighted_average(
        [LossDistribution(*floats(law).T) for law in laws], weights
    )
    expected = oracles.expected_order_weighted_average(laws, weights)
    assert actual == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


# The left side.


@settings(max_examples=100)
@given(problems())
def test_the_expected_s2m_loss_is_that_of_every_batch_and_every_draw(problem):
    positives, negatives, counts = problem
    actual = expected_s2m_loss(floats(positives), floats(negatives), **by_name(counts))
    expected = oracles.expected_s2m_loss(positives, negatives, counts)
    assert actual == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


@settings(max_examples=100)
@given(shared_problems())
def test_with_shared_labels_it_is_that_of_every_batch_and_every_draw(problem):
    positives, label_losses, labels, counts = problem
    losses = floats(positives), masked(label_losses, labels)
    actual = expected_s2m_loss(*losses, **by_name(counts), is_shared=True)
    expected = oracles.expected_shared_s2m_loss(positives, label_losses, labels, counts)
    assert actual == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
    of_each = expected_snm_loss(*losses, **of_labels(counts), is_shared=True)
    assert actual >= lemma_1_right_side(of_each, **of_examples(counts)) - 1e-12


# Lemma 1 is an inequality.


@settings(max_examples=100)
@given(problems(num_examples=4, num_negatives=4))
def test_the_expected_loss_is_never_below_the_right_side_of_lemma_1(problem):
    positives, negatives, counts = problem
    left, right = both_sides(floats(positives), floats(negatives), **by_name(counts))
    assert left >= right - 1e-12


def test_lemma_1_is_strict_for_two_examples_and_two_labels():
    # Each example draws one of two negatives, of loss 0 or 2, and the batch keeps the larger loss:
    # 2 in three cases of four. But each expects 1, and the larger of 1 and 1 is 1.
    left, right = both_sides(
        [0, 0], [[0, 2], [0, 2]],
        batch_size=2, num_hard_examples=1, num_sampled_labels=1, num_hard_labels=1,
    )  # fmt: skip
    assert left == pytest.approx(2 * 3 / 4)
    assert right == pytest.approx(1)


# Where it is an equality.


@given(problems(num_examples=4, num_negatives=4))
def test_the_sides_are_equal_where_all_count_or_all_are_drawn_or_no_draw_changes_the_order(problem):
    positives, negatives, (batch_size, num_hard, num_sampled, num_kept) = problem
    positives, negatives = floats(positives), floats(negatives)
    in_order = 100.0 * np.arange(len(negatives))  # negatives are at most 9
    for own, counts in (
        (positives, (batch_size, batch_size, num_sampled, num_kept)),
        (positives, (batch_size, num_hard, negatives.shape[1], num_kept)),
        (in_order, (batch_size, num_hard, num_sampled, num_kept)),
    ):
        left, right = both_sides(own, negatives, **by_name(counts))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


# By drawing.


def problem_of_size(num_examples, num_labels):
    generator = np.random.default_rng(1)
    return generator.random(num_examples), generator.exponential(size=(num_examples, num_labels))


@pytest.mark.parametrize("is_shared", [False, True])
def test_drawing_as_the_algorithm_does_agrees_with_the_exact_loss(is_shared):
    positives, losses = problem_of_size(12, 9)
    if is_shared:
        losses[np.arange(12), np.arange(12) % 9] = -np.inf
    counts = by_name((6, 2, 4, 2))
    left = expected_s2m_loss(positives, losses, **counts, is_shared=is_shared)
    how = {"num_draws": 4000, "generator": np.random.default_rng(2), "is_shared": is_shared}
    estimate = simulated_s2m_loss(positives, losses, **counts, **how)
    assert estimate.mean == pytest.approx(left, abs=5 * estimate.standard_error)
    if not is_shared:  # the draws tell the two sides apart
        _, right = both_sides(positives, losses, **counts)
        assert right < estimate.mean - 10 * estimate.standard_error
