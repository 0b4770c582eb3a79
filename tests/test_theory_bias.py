"""Lemma 4: the empirical CVaR is too small on average, by how much, and how fast that falls."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import theory_oracles as oracles
from evenhand.theory.bias import cvar_bias_bound, empirical_cvar_bias, expected_empirical_cvar


def mean_over_all_samples(values, probabilities, num_examples, tail_fraction):
    total = 0.0
    for picks in itertools.product(range(len(values)), repeat=num_examples):
        mass = math.prod(probabilities[i] for i in picks)
        total += mass * oracles.cvar_of_sample([values[i] for i in picks], tail_fraction)
    return total


@st.composite
def laws(draw):
    size = draw(st.integers(1, 4))
    values = draw(st.lists(st.integers(-4, 12), min_size=size, max_size=size))
    counts = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    return [v / 4 for v in values], [c / sum(counts) for c in counts]


@given(laws(), st.integers(1, 5), st.integers(1, 12))
def test_the_expectation_is_the_sum_over_all_samples(law, num_examples, twelfths):
    values, probabilities = law
    alpha = twelfths / 12  # mostly alpha N is not whole
    kwargs = {"num_examples": num_examples, "tail_fraction": alpha}
    expected = mean_over_all_samples(values, probabilities, num_examples, alpha)
    actual = expected_empirical_cvar(values, probabilities, **kwargs)
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-13)
    bias = empirical_cvar_bias(values, probabilities, **kwargs)
    true = oracles.cvar_by_quantiles(values, probabilities, alpha)
    assert bias == pytest.approx(expected - true, rel=1e-9, abs=1e-13)


@given(laws(), st.integers(1, 300), st.integers(1, 40))
def test_the_bias_is_never_positive_and_within_its_bound(law, num_examples, fortieths):
    values, probabilities = law
    kwargs = {"num_examples": num_examples, "tail_fraction": fortieths / 40}
    bias = empirical_cvar_bias(values, probabilities, **kwargs)
    width = max(values) - min(values)
    assert bias <= 0
    assert -bias <= cvar_bias_bound(loss_bound=width, **kwargs) * (1 + 1e-12)


def test_the_bound_is_four_fifths_used_by_the_worst_law():
    kwargs = {"num_examples": 400, "tail_fraction": 0.5}
    bound = cvar_bias_bound(loss_bound=3.0, **kwargs)
    assert bound == pytest.approx(3 / (4 * 0.5 * 20))
    bias = empirical_cvar_bias([0, 3], [0.5, 0.5], **kwargs)
    assert -bias / bound == pytest.approx(math.sqrt(2 / math.pi), rel=1e-3)


def slope(sizes, biases):
    """Of log |bias| over log N."""
    return np.polyfit(np.log(sizes), np.log(np.abs(biases)), 1)[0]


SIZES = [200, 400, 800, 1600, 3200, 6400]


def biases_of(values, probabilities, tail_fraction):
    return [
        empirical_cvar_bias(values, probabilities, num_examples=n, tail_fraction=tail_fraction)
        for n in SIZES
    ]


@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5])
def test_a_gap_at_the_quantile_has_the_rate_of_the_lemma(alpha):
    biases = biases_of([0, 2], [1 - alpha, alpha], alpha)
    assert slope(SIZES, biases) == pytest.approx(-0.5, abs=0.01)
    limit = 2 * math.sqrt((1 - alpha) / (2 * math.pi * alpha * SIZES[-1]))
    assert -biases[-1] == pytest.approx(limit, rel=0.01)


def atoms_of_the_uniform(size):
    return (np.arange(size) + 0.5) / size, np.full(size, 1 / size)


@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5])
def test_a_density_at_the_quantile_falls_as_one_over_n(alpha):
    biases = biases_of(*atoms_of_the_uniform(8000), alpha)
    assert slope(SIZES, biases) == pytest.approx(-1, abs=0.01)
    # The mean of the k' largest of N uniforms is 1 - (k' + 1) / (2 (N + 1)).
    exact = [alpha / 2 - (alpha * n + 1) / (2 * (n + 1)) for n in SIZES]
    np.testing.assert_allclose(biases, exact, rtol=2e-3)


def test_an_atom_across_the_quantile_has_almost_no_bias():
    # P[U > 1] = 0.1 < alpha = 0.3 < P[U >= 1] = 0.5.
    biases = biases_of([0, 1, 3], [0.5, 0.4, 0.1], 0.3)
    assert -biases[0] < 1e-8
    assert -biases[2] < 1e-15
