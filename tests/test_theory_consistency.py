"""Proposition 2: the minimiser of the average top-k' softmax loss, and what it retrieves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.theory.consistency import capped_predictions, threshold_value, top_minimiser


def objective(predictions, threshold, probabilities, weights, tail_fraction):
    """t + (1/alpha) sum_x w_x sum_y p_xy [-log g_xy - t]_+, as a loop."""
    total = 0.0
    for weight, row, guess in zip(weights, probabilities, predictions, strict=True):
        for p, g in zip(row, guess, strict=True):
            if p > 0:
                total += weight * p * max(0.0, -math.log(g) - threshold)
    return threshold + total / tail_fraction


def least_mass_of_top(predictions, probabilities, r):
    """Mass of the top r by prediction when an enemy breaks the ties."""
    order = sorted(range(len(predictions)), key=lambda y: (-predictions[y], probabilities[y]))
    return sum(probabilities[y] for y in order[:r])


def most_mass(probabilities, r):
    return sum(sorted(probabilities, reverse=True)[:r])


def entropy(row):
    return -sum(p * math.log(p) for p in row if p > 0)


@st.composite
def problems(draw, max_queries=3, max_labels=6, sparse=True):
    """(Q, K) probabilities with ties and zeros, (Q,) weights, alpha."""
    queries, labels = draw(st.integers(1, max_queries)), draw(st.integers(1, max_labels))
    row = st.lists(st.integers(0 if sparse else 1, 9), min_size=labels, max_size=labels)
    counts = [draw(row) for _ in range(queries)]
    counts = [row if sum(row) else [1] * labels for row in counts]
    shares = draw(st.lists(st.integers(1, 5), min_size=queries, max_size=queries))
    probabilities = np.array([[count / sum(row) for count in row] for row in counts])
    weights = np.array(shares) / sum(shares)
    return probabilities, weights, draw(st.integers(1, 20)) / 20


@given(problems())
def test_the_value_is_the_objective_at_the_minimiser_and_no_grid_point_is_lower(problem):
    probabilities, weights, alpha = problem
    best = top_minimiser(probabilities, tail_fraction=alpha, query_probabilities=weights)
    at_best = objective(best.predictions, best.threshold, probabilities, weights, alpha)
    assert best.value == pytest.approx(at_best, abs=1e-11)
    np.testing.assert_allclose(best.predictions.sum(axis=1), 1, rtol=1e-12)
    for threshold in np.linspace(0, math.log(probabilities.shape[1]) + 0.5, 30):
        predictions = capped_predictions(probabilities, threshold=threshold)
        value = objective(predictions, threshold, probabilities, weights, alpha)
        kwargs = {"tail_fraction": alpha, "query_probabilities": weights}
        found = threshold_value(probabilities, threshold=threshold, **kwargs)
        assert found == pytest.approx(value, abs=1e-11)
        assert value >= best.value - 1e-11


@given(problems())
def test_a_dual_certificate_proves_that_the_minimum_is_global(problem):
    """For any law q of (x, y) with q <= w p / alpha, the entropy of y given x is at most V.

    Equality is reached, so neither side can be improved. q is read off the predictions: where
    labels are left below the cap it is g times the row's share 1/c / alpha.
    """
    probabilities, weights, alpha = problem
    best = top_minimiser(probabilities, tail_fraction=alpha, query_probabilities=weights)
    shares = []
    for p, g in zip(probabilities, best.predictions, strict=True):
        below = (p > 0) & (g < math.exp(-best.threshold) * (1 - 1e-9))
        shares.append((p[below] / g[below]).mean() if below.any() else None)
    shares = [None if s is None else s * w / alpha for s, w in zip(shares, weights, strict=True)]
    left = 1 - sum(s for s in shares if s is not None)
    # Rows whose labels are all at the cap, and no more than tau of them, take what is left.
    tau = math.exp(best.threshold)
    limits = [
        weight * p[p > 0].min() * (p > 0).sum() / alpha
        if share is None and (p > 0).sum() >= tau * (1 - 1e-9)
        else 0.0
        for share, p, weight in zip(shares, probabilities, weights, strict=True)
    ]
    value = 0.0
    for share, limit, p, g, weight in zip(
        shares, limits, probabilities, best.predictions, weights, strict=True
    ):
        mass = share if share is not None else min(max(left, 0), limit)
        left -= mass if share is None else 0
        assert (mass * g <= weight * p / alpha + 1e-9).all()
        value += mass * entropy(g)
    if best.threshold > 0:
        assert left == pytest.approx(0, abs=1e-9)
        assert best.value == pytest.approx(value, abs=1e-9)


@given(problems(max_queries=1, max_labels=8))
def test_one_query_keeps_the_mass_alpha_under_a_water_level(problem):
    (probabilities,), _, alpha = problem
    best = top_minimiser(probabilities, tail_fraction=alpha)
    level = alpha * math.exp(-best.threshold)
    if best.threshold > 0:
        expected = np.minimum(probabilities, level) / alpha
        np.testing.assert_allclose(best.predictions, expected, atol=1e-11)
    assert best.value == pytest.approx(entropy(best.predictions), abs=1e-11)


@given(problems())
def test_the_value_is_convex_in_the_threshold(problem):
    probabilities, weights, alpha = problem
    how = {"tail_fraction": alpha, "query_probabilities": weights}
    values = [threshold_value(probabilities, threshold=t, **how) for t in np.linspace(0, 2.2, 23)]
    assert (np.diff(values, 2) >= -1e-11).all()


@given(problems())
def test_top_r_is_right_from_the_level_on_whatever_breaks_ties(problem):
    probabilities, weights, alpha = problem
    best = top_minimiser(probabilities, tail_fraction=alpha, query_probabilities=weights)
    assert best.level >= 1
    assert (best.num_collapsed <= best.level).all()
    for p, g in zip(probabilities, best.predictions, strict=True):
        for r in range(best.level, len(p) + 1):
            assert least_mass_of_top(g, p, r) == pytest.approx(most_mass(p, r), abs=1e-12)


@given(st.permutations([1, 2, 4, 7, 11, 16]), st.integers(1, 19))
def test_the_exact_limit_is_the_number_of_collapsed_labels(counts, twentieths):
    p = np.array(counts) / sum(counts)
    best = top_minimiser(p, tail_fraction=twentieths / 20)
    for r in range(1, len(p)):
        is_right = math.isclose(least_mass_of_top(best.predictions, p, r), most_mass(p, r))
        assert is_right == (r >= best.num_collapsed)


def test_a_query_without_noise_can_be_wrong_below_the_level():
    """The threshold is shared: noise in one query frees the predictions of another.

    Query 0 has one label, query 1 four even ones. alpha = 1/4 gives tau = 4 < K = 6, so any g with
    1/4 on query 0's label is a minimiser, and the paper's claim that none exceeds 1/tau is not so.
    """
    p = np.array([[0, 0, 0, 0, 1, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0, 0]])
    best = top_minimiser(p, tail_fraction=1 / 4)
    assert best.level == 4
    rival = np.array([[0, 0, 0, 0, 1 / 4, 3 / 4], [1 / 4] * 4 + [0, 0]])
    weights = [1 / 2, 1 / 2]
    assert objective(rival, best.threshold, p, weights, 1 / 4) == pytest.approx(best.value)
    assert best.value == pytest.approx(math.log(4))
    assert least_mass_of_top(rival[0], p[0], 1) == 0  # a sure label is missed at top 1 ...
    even = np.array([1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0])
    value = objective([even, rival[1]], best.threshold, p, weights, 1 / 4)
    assert value == pytest.approx(best.value)
    assert least_mass_of_top(even, p[0], 3) == 0  # ... and at top 3, by a tie,
    assert least_mass_of_top(even, p[0], 4) == 1  # but never at the level


def test_where_several_thresholds_are_optimal_the_smallest_is_returned():
    p = np.array([[1, 0, 0, 0], [1 / 4] * 4])
    best = top_minimiser(p, tail_fraction=1 / 2)
    assert (best.threshold, best.level) == (0.0, 1)
    for threshold in (0.3, 0.9, math.log(4)):
        value = threshold_value(p, threshold=threshold, tail_fraction=1 / 2)
        assert value == pytest.approx(best.value)
    assert threshold_value(p, threshold=math.log(4) + 0.1, tail_fraction=1 / 2) > best.value


@given(problems())
def test_the_threshold_is_at_most_the_bayes_risk_over_alpha(problem):
    probabilities, weights, alpha = problem
    best = top_minimiser(probabilities, tail_fraction=alpha, query_probabilities=weights)
    bayes_risk = sum(w * entropy(p) for w, p in zip(weights, probabilities, strict=True))
    assert best.threshold <= bayes_risk / alpha + 1e-12
    assert best.threshold <= best.value + 1e-12 <= bayes_risk / alpha + 2e-12
