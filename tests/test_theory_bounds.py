"""Proposition 5: the printed form, a valid one, and classes for which only the second holds."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

import theory_oracles as oracles
from evenhand.theory.bounds import (
    Sample,
    corrected_bound,
    finite_class_bound,
    known_membership_bound,
    mixture_bound,
    paper_bound,
    paper_covering_bound,
)


def sample_of(num_examples, tail_fraction, failure_probability, loss_bound=1.0):
    return Sample(
        num_examples=num_examples,
        tail_fraction=tail_fraction,
        failure_probability=failure_probability,
        loss_bound=loss_bound,
    )


def test_the_printed_bound_term_by_term():
    bound = paper_bound(0.3, sample_of(400, 0.1, 0.05, loss_bound=2.0))
    expected = (0.3 / 0.1, 2 / 20 / 0.1, math.sqrt(math.log(20) / 800))
    assert bound[:3] == pytest.approx(expected, rel=1e-12)
    assert bound.total == pytest.approx(sum(expected), rel=1e-12)


def test_the_corrected_bound_term_by_term():
    bound = corrected_bound(0.3, sample_of(2, 0.1, 0.05, loss_bound=3.0), contraction=math.sqrt(2))
    # Two signs: |mean| is 1 or 0, half of the time each.
    expected = (
        2 * math.sqrt(2) * 0.3 / 0.1,
        2 * (3 / 2) * (1 / 2) / 0.1,
        3 / 0.1 * math.sqrt(math.log(20) / 4),
    )
    assert bound[:3] == pytest.approx(expected, rel=1e-12)
    assert bound.total == pytest.approx(sum(expected), rel=1e-12)


def test_a_finite_class_costs_a_logarithm():
    bound = finite_class_bound(sample_of(50, 0.25, 0.1, loss_bound=3.0), num_functions=8)
    assert bound == pytest.approx(3 / 0.25 * math.sqrt(math.log(80) / 100), rel=1e-12)


def test_the_covering_form_as_printed_leaves_more_than_delta():
    alpha, delta, bound, diameter, n = 0.5, 0.05, 1.0, 2.0, 10_000
    sample = sample_of(n, alpha, delta, loss_bound=bound)
    epsilon = paper_covering_bound(sample, diameter=diameter)
    assert epsilon == pytest.approx(math.sqrt(math.log(2 / 0.025) / (0.5 * n)))
    left = diameter / (epsilon * alpha) * math.exp(-n * alpha * epsilon**2 / bound**2)
    assert left == pytest.approx(delta / epsilon)  # the proof needs at most delta
    assert left > 1.5
    few = paper_covering_bound(sample_of(1, 0.5, 0.05, loss_bound=9.0), diameter=0.04)
    assert few == pytest.approx(0.04 / 0.025)  # the first form is the smaller


LAW = (0.5, 0.3, 0.2)  # three points
LOSSES = ((0.0, 1.0, 0.5), (1.0, 0.0, 0.0), (0.25, 0.5, 1.0), (0.0, 0.0, 1.0))  # (M, 3)


def worst_gap(sample, alpha):
    """max over the class of CVaR - CVaR_hat; the law is exact in tenths."""
    tenths = [point for point, mass in enumerate(LAW) for _ in range(round(10 * mass))]
    return max(
        oracles.cvar_of_sample([row[point] for point in tenths], alpha)
        - oracles.cvar_of_sample([row[point] for point in sample], alpha)
        for row in LOSSES
    )


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_every_sample_of_five_keeps_to_the_corrected_bounds(alpha):
    """The mean gap is below complexity + threshold, and each bound fails for at most delta."""
    n = 5
    samples = list(itertools.product(range(3), repeat=n))
    masses = [math.prod(LAW[point] for point in sample) for sample in samples]
    gaps = [worst_gap(sample, alpha) for sample in samples]
    own = [
        oracles.rademacher([[row[point] for point in sample] for row in LOSSES])
        for sample in samples
    ]
    rademacher = sum(m * c for m, c in zip(masses, own, strict=True))
    mean_gap = sum(m * g for m, g in zip(masses, gaps, strict=True))
    for delta in (0.5, 0.2, 0.05):
        how = sample_of(n, alpha, delta)
        bound = corrected_bound(rademacher, how)
        assert mean_gap <= bound.complexity + bound.threshold
        for values in (
            [bound.total] * len(gaps),
            [corrected_bound(c, how, is_empirical=True).total for c in own],
            [finite_class_bound(how, num_functions=4)] * len(gaps),
        ):
            failed = sum(m for m, g, b in zip(masses, gaps, values, strict=True) if g > b + 1e-12)
            assert failed <= delta


def one_function_failure(total, n, alpha, bound):
    """P[CVaR - CVaR_hat > total] for losses 0 and B, P[B] = alpha: a sum over the binomial law."""
    masses = binom.pmf(range(n + 1), n, alpha)
    empirical = [bound * min(1.0, hard / (alpha * n)) for hard in range(n + 1)]
    return sum(m for m, value in zip(masses, empirical, strict=True) if bound - value > total)


@pytest.mark.parametrize(("alpha", "delta"), [(0.5, 1e-3), (0.25, 1e-3), (0.1, 1e-5)])
def test_without_the_range_the_deviation_is_too_small(alpha, delta):
    sample = sample_of(1000, alpha, delta, loss_bound=100.0)
    printed, corrected = paper_bound(0.0, sample).total, corrected_bound(0.0, sample).total
    assert one_function_failure(printed, 1000, alpha, 100.0) > 5 * delta
    assert one_function_failure(corrected, 1000, alpha, 100.0) < delta
    single = finite_class_bound(sample, num_functions=1)
    assert one_function_failure(single, 1000, alpha, 100.0) < delta


def test_groups_are_bounded_with_a_share_of_delta_each():
    bounds = known_membership_bound(
        [0.1, 0.2], [100, 25], loss_bound=2.0, failure_probability=0.1, contraction=3.0
    )
    deviations = [2 * math.sqrt(math.log(20) / 200), 2 * math.sqrt(math.log(20) / 50)]
    np.testing.assert_allclose(bounds, [0.6 + deviations[0], 1.2 + deviations[1]])


def test_a_mixture_weighs_its_groups_by_skewness():
    plain = {"rademacher": 0.0, "loss_bound": 2.0, "failure_probability": 0.05}
    own = mixture_bound([0.2, 0.8], [100, 400], **plain)  # the sample's own: as one group
    assert own == pytest.approx(2 * math.sqrt(math.log(20) / 1000))
    corner = mixture_bound([1.0, 0.0], [100, 400], **plain)
    alone = known_membership_bound([0.0], [100], loss_bound=2.0, failure_probability=0.05)
    assert corner == pytest.approx(alone[0])
    for share in np.linspace(0, 1, 11):
        assert mixture_bound([share, 1 - share], [100, 400], **plain) >= own - 1e-12


def test_a_cover_of_mixtures_costs_a_logarithm_and_a_radius():
    one = {"rademacher": 0.25, "loss_bound": 2.0, "failure_probability": 0.05, "contraction": 3.0}
    bound = mixture_bound([0.5, 0.5], [50, 50], num_mixtures=7, cover_radius=0.1, **one)
    deviation = 2 * math.sqrt(0.01 * math.log(140) / 2)
    assert bound == pytest.approx(1.5 + 0.2 + deviation)  # complexity, cover, deviation
