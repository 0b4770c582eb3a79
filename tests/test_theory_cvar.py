"""CVaR in three ways against each other, a linear program, and the paper's two lemmas on it."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import theory_oracles as oracles
from evenhand.theory.cvar import (
    agnostic_top,
    cvar_by_definition,
    cvar_by_top,
    cvar_by_worst_density,
    cvar_curve,
    cvar_of_nonnegative_thresholds,
)


def value_by_worst_density(losses, tail_fraction, **law):
    return cvar_by_worst_density(losses, tail_fraction, **law).value


def value_of_curve(losses, tail_fraction, **law):
    return cvar_curve(losses, [tail_fraction], **law)[0]


WAYS = [cvar_by_definition, cvar_by_top, value_by_worst_density, value_of_curve]
every_way = pytest.mark.parametrize("cvar_fn", WAYS)
whole_numbers = st.integers(-9, 9)  # of both signs, with ties
some_losses = st.lists(whole_numbers, min_size=1, max_size=8)
fractions = st.fractions(Fraction(1, 50), 1, max_denominator=50)


@st.composite
def laws(draw):
    """Losses with probabilities, some of them 0."""
    losses = draw(some_losses)
    shares = [draw(st.integers(0, 5)) for _ in losses]
    shares[draw(st.integers(0, len(losses) - 1))] += 1
    return losses, [Fraction(share, sum(shares)) for share in shares]


def near(value):
    return pytest.approx(float(value), rel=1e-12, abs=1e-12)


def floats(values):
    return [float(value) for value in values]


# The three ways and the curve.


@every_way
@given(law=laws(), tail_fraction=fractions, is_even=st.booleans())
def test_every_way_is_the_mean_of_the_worst_share(cvar_fn, law, tail_fraction, is_even):
    losses, probabilities = law
    given = {} if is_even else {"probabilities": floats(probabilities)}
    if is_even:
        probabilities = [Fraction(1, len(losses))] * len(losses)
    expected = oracles.cvar_by_quantiles(losses, probabilities, tail_fraction)
    assert cvar_fn(losses, float(tail_fraction), **given) == near(expected)


@every_way
@given(losses=some_losses, data=st.data())
def test_where_alpha_n_is_whole_it_is_the_average_of_the_top(cvar_fn, losses, data):
    count = data.draw(st.integers(1, len(losses)))
    expected = Fraction(oracles.average_of_top(losses, count)).limit_denominator(100)
    assert cvar_fn(losses, count / len(losses)) == near(expected)


@every_way
def test_where_alpha_n_is_not_whole_it_is_the_average_of_no_top(cvar_fn):
    # alpha N = 3/8 of 4 = 1.5: the largest, and half of the second.
    losses = [4.0, 1.0, 3.0, 2.0]
    assert cvar_fn(losses, 3 / 8) == near((4 + 3 / 2) / 1.5)
    for count in range(1, 5):
        assert cvar_fn(losses, 3 / 8) != near(oracles.average_of_top(losses, count))


@given(losses=some_losses, tail_fraction=fractions)
def test_the_definition_is_the_least_of_many_thresholds(losses, tail_fraction):
    # The losses themselves are among the thresholds tried.
    risks = [
        threshold + sum(max(0, loss - threshold) for loss in losses) / len(losses) / tail_fraction
        for threshold in (Fraction(step, 4) for step in range(-40, 41))
    ]
    assert cvar_by_definition(losses, float(tail_fraction)) == near(min(risks))
    actual = cvar_of_nonnegative_thresholds(losses, float(tail_fraction))
    assert actual == near(min(risks[40:]))


def test_thresholds_from_zero_are_another_number_where_the_quantile_is_negative():
    losses = [2.0, -1.0, -3.0, -6.0]
    # At alpha = 3/4 the worst three average -2/3. The best threshold is negative; at 0 it costs
    # E[U+] / alpha = (2 / 4) / (3 / 4).
    assert cvar_by_definition(losses, 3 / 4) == near((2 - 1 - 3) / 3)
    assert cvar_of_nonnegative_thresholds(losses, 3 / 4) == near(2 / 3)
    # With the quantile above 0 the two agree again, negative losses or not.
    assert cvar_of_nonnegative_thresholds(losses, 1 / 4) == near(2)


# The worst density.


@given(law=laws(), tail_fraction=fractions)
def test_the_worst_density_solves_the_linear_program(law, tail_fraction):
    losses, probabilities = law[0], floats(law[1])
    alpha = float(tail_fraction)
    value, weights = cvar_by_worst_density(losses, alpha, probabilities=probabilities)
    limits = [(0, probability / alpha) for probability in probabilities]
    solved = linprog(-np.array(losses), A_eq=[[1] * len(losses)], b_eq=[1], bounds=limits)
    assert solved.status == 0
    assert value == pytest.approx(-solved.fun, rel=1e-9, abs=1e-9)
    # The weights are feasible, and reach the value.
    assert weights.sum() == near(1)
    assert ((weights >= -1e-15) & (weights <= np.array(limits)[:, 1] + 1e-12)).all()
    assert np.dot(weights, losses) == near(value)


def test_the_weights_are_in_the_order_of_the_losses():
    density = cvar_by_worst_density([1.0, 9.0, 5.0, 7.0, 3.0], 0.5)
    assert density.weights == pytest.approx([0, 2 / 5, 1 / 5, 2 / 5, 0], rel=1e-15)


# The curve.


@given(law=laws(), levels=st.lists(fractions, min_size=2, max_size=6))
def test_the_curve_falls_from_the_maximum_to_the_mean(law, levels):
    losses, probabilities = law
    levels = sorted([Fraction(1, 10**9), *levels, Fraction(1)])
    curve = cvar_curve(losses, floats(levels), probabilities=floats(probabilities))
    assert curve.shape == (len(levels),)
    possible = [loss for loss, share in zip(losses, probabilities, strict=True) if share]
    assert curve[0] == near(max(possible))
    mean = sum(loss * share for loss, share in zip(losses, probabilities, strict=True))
    assert curve[-1] == near(mean)
    assert (np.diff(curve) <= 1e-12).all()


def test_the_curve_of_many_losses_agrees_with_each_level_alone():
    losses = np.random.default_rng(0).exponential(size=10_001)
    levels = np.linspace(0.001, 1, 37)
    expected = [cvar_by_definition(losses, level) for level in levels]
    assert cvar_curve(losses, levels) == pytest.approx(expected, rel=1e-12)
    assert cvar_curve([1.0], []).shape == (0,)


# Groups.


@st.composite
def grouped(draw):
    losses = draw(some_losses)
    group_ids = [draw(st.integers(0, 3)) for _ in losses]
    return losses, group_ids, draw(st.integers(1, len(losses)))


@given(grouped())
def test_the_worst_mixture_of_groups_is_that_of_all_mixtures_enumerated(problem):
    losses, group_ids, count = problem
    fractions_of = [Fraction(loss) for loss in losses]
    expected, best_counts = oracles.agnostic_top(fractions_of, group_ids, count)
    value, mixture = agnostic_top(losses, group_ids, num_hard_examples=count)
    assert value == near(expected)
    assert tuple(round(share * count) for share in mixture) in best_counts
    assert mixture * count == pytest.approx(np.round(mixture * count), abs=1e-12)


@given(grouped())
def test_it_is_the_cvar_however_the_groups_are_drawn(problem):
    losses, group_ids, count = problem
    value = agnostic_top(losses, group_ids, num_hard_examples=count).value
    assert value == near(cvar_by_definition(losses, count / len(losses)))


@given(grouped())
def test_no_group_of_at_least_the_share_has_a_larger_mean_than_the_cvar(problem):
    losses, group_ids, _ = problem
    for group in set(group_ids):
        members = [loss for loss, other in zip(losses, group_ids, strict=True) if other == group]
        for share in range(1, len(members) + 1):
            risk = cvar_by_top(losses, share / len(losses))
            assert sum(members) / len(members) <= risk + 1e-12


def test_the_cvar_is_the_mean_of_a_group_that_is_the_hardest_share():
    losses = [1.0, 8.0, 2.0, 6.0, 3.0, 0.0]  # the group of losses 8 and 6 is a third
    assert cvar_by_top(losses, 1 / 3) == near((8 + 6) / 2)
    assert cvar_by_top(losses, 1 / 3 + 0.01) < (8 + 6) / 2


def test_a_group_without_examples_has_no_part():
    value, mixture = agnostic_top([1.0, 2.0], [2, 0], num_hard_examples=1)
    assert (value, mixture.tolist()) == (2, [1, 0, 0])


# Refusals.


@every_way
def test_what_is_no_share_or_no_law_is_refused(cvar_fn):
    for tail_fraction in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="tail_fraction must be above 0 and at most 1"):
            cvar_fn([1.0, 2.0], tail_fraction)
    for losses, probabilities, message in (
        ([], None, "losses must be one row of finite numbers"),
        ([[1.0]], None, "losses must be one row of finite numbers"),
        ([1.0, math.inf], None, "losses must be one row of finite numbers"),
        ([1.0, 2.0], [1.0], "probabilities must be 2 numbers of at least 0"),
        ([1.0, 2.0], [1.5, -0.5], "probabilities must be 2 numbers of at least 0"),
        ([1.0, 2.0], [0.5, 0.4], "probabilities must sum to 1, got a sum of 0.9"),
        ([1.0, 2.0], [0.5, 0.50001], "probabilities must sum to 1, got a sum of 1.00001"),
    ):
        with pytest.raises(ValueError, match=message):
            cvar_fn(losses, 0.5, probabilities=probabilities)


def test_groups_that_do_not_fit_are_refused():
    for group_ids in ([0], [0.0, 1.0], [-1, 0]):
        with pytest.raises(ValueError, match="group_ids must be 2 whole numbers from 0"):
            agnostic_top([1.0, 2.0], group_ids, num_hard_examples=1)
    with pytest.raises(ValueError, match=r"between 1 and 2 \(the number of losses\), got 3"):
        agnostic_top([1.0, 2.0], [0, 0], num_hard_examples=3)
