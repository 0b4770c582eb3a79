import decimal
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.certificate import certify, is_certifiable, query_losses
from evenhand.theory.cvar import cvar_curve
from evenhand.theory.subpopulation_bounds import (
    all_hold_probability,
    certificate,
    tail_masses,
    worst_law,
)
from small import part_of
from test_evaluation import evaluated

DELTA = 0.05
FINE = np.concatenate([np.geomspace(0.004, 1, 60), [0.1, 0.2, 0.5]])  # tail fractions

# --- laws with a known truth ----------------------------------------------------------------------


def cvar_of_atoms(values, shares, fraction):
    """The worst subpopulation, taken greedily."""
    left, total = fraction, 0.0
    for value, share in sorted(zip(values, shares, strict=True), reverse=True):
        taken = min(left, share)
        total, left = total + taken * value, left - taken
    return total / fraction


def certified(losses):
    return certificate(losses, delta=DELTA).bounds(FINE)


# --- coverage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draws", [1, 2, 7, 30, 120])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.2, 0.8), (0.0, 0.5), (0.6, 1.0)])
def test_two_point_laws_are_covered_exactly(num_draws, low, high):
    """No chance here: every possible sample is weighed by its probability."""
    bounds = np.stack(
        [certified(np.repeat([low, high], [num_draws - k, k])) for k in range(num_draws + 1)]
    )
    for share in (0.004, 0.02, 0.1, 0.25, 0.5, 0.8, 0.97):
        truth = [cvar_of_atoms([low, high], [1 - share, share], fraction) for fraction in FINE]
        fails = (bounds < np.array(truth) - 1e-12).any(axis=1)
        assert binom.pmf(np.flatnonzero(fails), num_draws, share).sum() <= DELTA


# --- the curve ------------------------------------------------------------------------------------

loss_lists = st.lists(
    st.one_of(st.sampled_from([0.0, 0.5, 2 / 3, 1.0]), st.floats(0, 1)), min_size=1, max_size=60
)


@given(loss_lists, st.sampled_from([0.01, 0.05, 0.3]))
def test_bounds_fall_with_the_fraction_and_lie_between_the_estimate_and_one(losses, delta):
    fractions = np.sort(FINE)
    found = certificate(losses, delta=delta)
    bounds = found.bounds(fractions)
    assert np.all(np.diff(bounds) <= 1e-12)
    assert np.all(np.diff(fractions * bounds) >= -1e-12)  # a larger part has more loss
    assert np.all(bounds >= found.estimates(fractions) - 1e-12)
    assert np.all(bounds <= 1 + 1e-12)


def test_the_whole_delta_is_that_of_the_band():
    losses = np.random.default_rng(0).random(400)
    ranks, masses = tail_masses(400, DELTA)
    expected = worst_law(np.sort(losses)[::-1][ranks - 1], masses)
    found = certificate(losses, delta=DELTA)
    np.testing.assert_array_equal(found.worst_losses, expected[0])
    np.testing.assert_array_equal(found.worst_probabilities, expected[1])


@given(loss_lists.filter(lambda losses: len(losses) > 1), st.integers(0, 100))
def test_a_band_bounds_by_the_worst_law_inside_it(losses, seed):
    """All that the band allows above each loss is put on the next larger one, the rest on 1."""
    largest = np.sort(losses)[::-1]
    masses = np.sort(np.random.default_rng(seed).random(len(losses)))
    values, shares = [1.0, *largest], np.diff([0.0, *masses, 1.0])
    worst, probabilities = worst_law(largest, masses)
    expected = [cvar_of_atoms(values, shares, fraction) for fraction in FINE]
    found = cvar_curve(worst, FINE, probabilities=probabilities)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


# --- the band -------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 6))
def test_the_probability_of_the_band_is_a_sum_over_all_counts(data, num_draws):
    size = data.draw(st.integers(1, min(4, num_draws)))
    ranks = data.draw(st.permutations(range(1, num_draws + 1)))[:size]
    masses = st.lists(st.floats(0.01, 1), min_size=size, max_size=size)
    ranks, masses = np.sort(ranks), np.sort(data.draw(masses))
    expected = 1 - float(chance_to_fail(ranks, masses, num_draws))
    assert math.isclose(all_hold_probability(ranks, masses, num_draws), expected, abs_tol=1e-9)


@pytest.mark.parametrize("num_draws", [1, 2, 25, 300])
def test_the_band_fails_with_probability_delta(num_draws):
    ranks, masses = tail_masses(num_draws, DELTA)
    generator = np.random.default_rng(0)
    uniforms = (np.sort(generator.random((1000, num_draws)), axis=1) for _ in range(20))
    fails = sum(int((drawn[:, ranks - 1] > masses).any(axis=1).sum()) for drawn in uniforms)
    error = math.sqrt(DELTA * (1 - DELTA) / 20_000)
    assert abs(fails / 20_000 - DELTA) < 5 * error


def chance_to_fail(ranks, masses, num_draws):
    """That fewer than `rank` of n uniform draws lie below a mass: a chain of binomial laws."""
    chances, reached, failing = {0: decimal.Decimal(1)}, decimal.Decimal(0), decimal.Decimal(0)
    for rank, mass in zip(ranks.tolist(), masses.tolist(), strict=True):
        if mass >= 1:
            break
        share = (decimal.Decimal(mass) - reached) / (1 - reached)
        reached, later = decimal.Decimal(mass), dict.fromkeys(range(num_draws + 1), 0)
        for count, chance in chances.items():
            left = num_draws - count
            for more in range(left + 1):
                ways = math.comb(left, more) * (share**more if more else 1)  # 0**0 is refused
                later[count + more] += chance * ways * (1 - share) ** (left - more)
        failing += sum(later.pop(count) for count in range(rank))
        chances = later
    return failing


@pytest.mark.parametrize(
    ("num_draws", "delta"),
    [
        (1, 1e-320), (1, 1e-16), (2, 1e-15), (10, 1e-14), (45, 1e-13), (45, 1e-9),
        (2, 0.1), (3, 0.1), (5, 0.05), (8, 0.05), (20, 0.01),
    ],
)  # fmt: skip
def test_the_band_fails_no_more_often_than_promised_not_even_by_rounding(num_draws, delta):
    """Of a tiny delta, 1 - delta has few digits."""
    with decimal.localcontext(prec=60):
        assert chance_to_fail(*tail_masses(num_draws, delta), num_draws) <= delta


# --- wrong calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        ([], {}, "losses must be one or more numbers between 0 and 1"),
        ([[0.5]], {}, "losses must be one or more numbers"),
        ([0.5, 1.5], {}, r"between 0 and 1, got \[0.5 1.5\]"),
        ([0.5, math.nan], {}, "numbers between 0 and 1"),
        ([0.5], {"delta": 0.0}, "delta must be between 0 and 1"),
        ([0.5], {"delta": 1.0}, "delta must be between 0 and 1"),
    ],
)
def test_wrong_calls_are_refused(losses, options, message):
    with pytest.raises(ValueError, match=message):
        certificate(losses, **options)


# --- from an outcome ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset():
    """300 queries of 0 to 3 of 30 labels."""
    generator = np.random.default_rng(0)
    rows = [generator.choice(30, size=n, replace=False) for n in generator.integers(0, 4, 300)]
    part = part_of(rows, generator.normal(size=(300, 4)).astype(np.float32))
    return Dataset("toy", 4, 30, {"train": part, "validation": part, "test": part})


@pytest.fixture(scope="module")
def outcome(dataset):
    return evaluated(dataset, num_results=20, cutoffs=(1, 10))[0]


def test_losses_of_queries_are_those_of_the_query_metrics(outcome):
    has_positive = ~np.isnan(outcome.query_metrics["mrr"])
    for loss, metric in ("reciprocal rank", "mrr"), ("miss@10", "query recall@10"):
        expected = 1 - outcome.query_metrics[metric][has_positive]
        np.testing.assert_allclose(query_losses(outcome, loss), expected, atol=1e-6)


@pytest.mark.parametrize("loss", ["reciprocal rank", "miss@1", "miss@20"])
def test_a_certificate_of_a_run_is_that_of_its_losses(outcome, dataset, loss):
    expected = certificate(query_losses(outcome, loss)).bounds(FINE)
    found = certify(outcome, dataset, "test", loss=loss).bounds(FINE)
    np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_certified_is_refused(outcome, dataset):
    certify(outcome, dataset, "validation")  # a figure, not a certificate
    assert [is_certifiable(name) for name in dataset.parts] == [False, False, True]
    for changes, message in (
        ({"part_name": "train"}, "fitted to the train part"),
        ({"loss": "hinge"}, "unknown loss .* known: 'reciprocal rank'"),
        ({"loss": "miss@"}, "unknown loss .* known: 'reciprocal rank'"),
        ({"loss": "miss@ten"}, "unknown loss .* known: 'reciprocal rank'"),
        ({"loss": "recall@10"}, "unknown loss .* known: 'reciprocal rank'"),
        ({"loss": "miss@0"}, "must look at 1 to 20 results"),
        ({"loss": "miss@21"}, "must look at 1 to 20 results"),
    ):
        with pytest.raises(UserError, match=message):
            certify(outcome, dataset, **changes)
