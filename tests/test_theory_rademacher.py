"""Rademacher complexity: exact, sampled, and the three steps of proposition 5 that use it."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import theory_oracles as oracles
from evenhand.theory.rademacher import (
    empirical_rademacher,
    linear_rademacher_bound,
    sampled_rademacher,
    threshold_rademacher,
)


@st.composite
def classes(draw, max_examples=6):
    num_examples = draw(st.integers(1, max_examples))
    row = st.lists(st.integers(0, 8), min_size=num_examples, max_size=num_examples)
    return [[v / 8 for v in values] for values in draw(st.lists(row, min_size=1, max_size=5))]


@given(classes())
def test_the_exact_value_is_the_mean_over_all_signs(functions):
    assert empirical_rademacher(functions) == pytest.approx(
        oracles.rademacher(functions), abs=1e-13
    )


def test_the_sampled_value_agrees_within_its_error():
    table = np.random.default_rng(0).random((7, 12))
    estimate = sampled_rademacher(table, num_draws=20_000, generator=np.random.default_rng(1))
    assert abs(estimate.mean - empirical_rademacher(table)) < 5 * estimate.standard_error
    assert estimate.standard_error < 0.01 * estimate.mean


@pytest.mark.parametrize("num_examples", range(1, 12))
def test_thresholds_cost_half_of_what_the_paper_allows(num_examples):
    ends = [[0.0] * num_examples, [3.0] * num_examples]  # a line is greatest at an end of [0, B]
    value = threshold_rademacher(loss_bound=3.0, num_examples=num_examples)
    assert value == pytest.approx(oracles.rademacher(ends), rel=1e-12)
    assert value <= 3 / (2 * math.sqrt(num_examples)) * (1 + 1e-12)


@pytest.mark.parametrize("num_examples", [99, 1000, 10_001])
def test_the_cost_of_thresholds_is_exact_for_more_examples_than_can_be_enumerated(num_examples):
    coins = num_examples - 1
    middle = Fraction(math.comb(coins, coins // 2), 2**coins)
    value = threshold_rademacher(loss_bound=2.0, num_examples=num_examples)
    assert value == pytest.approx(float(middle), rel=1e-11)


@given(classes())
def test_losses_minus_thresholds_split_exactly_and_the_positive_part_adds_nothing(functions):
    thresholds = [k / 8 for k in range(9)]  # both ends of [0, 1] are among them
    shifted = [[v - t for v in row] for row in functions for t in thresholds]
    clipped = [[max(v, 0.0) for v in row] for row in shifted]
    cost = threshold_rademacher(loss_bound=1.0, num_examples=len(functions[0]))
    assert oracles.rademacher(shifted) == pytest.approx(
        oracles.rademacher(functions) + cost, abs=1e-12
    )
    assert oracles.rademacher(clipped) <= oracles.rademacher(shifted) + 1e-12


@given(st.data())
def test_a_loss_of_vectors_costs_at_most_root_two(data):
    """Maurer's contraction, on random classes of (N, 2) scores and the loss |f - target|_2."""
    num_examples, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    whole = st.integers(-4, 4)
    shape = (1 + size, num_examples, 2)
    drawn = [data.draw(whole) for _ in range(math.prod(shape))]
    targets, *scores = np.array(drawn).reshape(shape)  # (N, 2) each
    scores = np.stack(scores)
    losses = np.linalg.norm(scores - targets, axis=2)  # (M, N, 2) -> (M, N)
    of_scores = 2 * empirical_rademacher(scores.reshape(size, -1))  # the mean is over examples
    assert empirical_rademacher(losses) <= math.sqrt(2) * of_scores + 1e-12


@pytest.mark.parametrize("num_examples", [1, 2, 3])
def test_root_two_is_reached(num_examples):
    """Every pattern of plus and minus (1, 1)/sqrt 2, and the loss along that direction."""
    signs = list(itertools.product([-1, 1], repeat=num_examples))
    half = 1 / math.sqrt(2)
    scores = [[sign * half for sign in row for _ in range(2)] for row in signs]
    losses = [[1 + sign for sign in row] for row in signs]  # 1 + <f, (1, 1)/sqrt 2>: 1-Lipschitz
    of_scores = 2 * empirical_rademacher(scores)
    assert empirical_rademacher(losses) == pytest.approx(math.sqrt(2) * of_scores, rel=1e-12)


def test_linear_scorers_are_below_their_bound_and_not_far():
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(40, 5))
    # The best weights for given signs are along sum_ij sigma_ij x_i: the supremum is a norm.
    for num_outputs in (1, 3):
        signs = rng.choice([-1.0, 1.0], size=(4000, num_outputs, 40))
        suprema = 2.0 * np.linalg.norm(signs @ queries, axis=(1, 2)) / 40
        bound = linear_rademacher_bound(queries, norm_bound=2.0, num_outputs=num_outputs)
        assert 0.9 * bound < suprema.mean() <= bound
