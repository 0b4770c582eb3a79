import dataclasses
import decimal
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.certificate import certify, is_certifiable, loss_sample
from evenhand.theory.mean_bounds import mean_bound
from evenhand.theory.subpopulation_bounds import (
    all_hold_probability,
    bounds_of,
    certificate,
    excess_curve,
    tail_masses,
    weighted_cvar,
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
    return certificate(losses, delta=DELTA).bound_at(FINE)


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


# --- clusters -------------------------------------------------------------------------------------


def clusters(generator, num_clusters):
    """Hard clusters are large, and the losses of a cluster are all but the same."""
    is_hard = generator.random(num_clusters) < 0.15
    sizes = generator.integers(np.where(is_hard, 15, 8), np.where(is_hard, 30, 16))
    ids = np.repeat(np.arange(num_clusters), sizes)
    level = np.where(is_hard, 0.9, generator.choice([0.0, 0.3], size=num_clusters))
    return np.minimum(1, level[ids] + 0.1 * (generator.random(len(ids)) < 0.5)), ids


def test_a_cap_of_one_bounds_the_mean_of_the_cluster_means():
    losses, ids = clusters(np.random.default_rng(0), 300)
    means = np.bincount(ids, weights=losses) / np.bincount(ids)
    found = certificate(losses, cluster_ids=ids, cap=1.0, tail_fractions=[1.0])
    assert math.isclose(found.estimates[0], means.mean())
    expected = mean_bound(means, delta=DELTA / len(found.thresholds))
    assert math.isclose(found.bounds[0], expected, abs_tol=2.0**-13)  # sums are rounded up


def test_for_the_anchors_losses_are_rounded_up():
    losses = np.random.default_rng(0).random(400)
    clusters_of_one = certificate(losses, delta=DELTA, cluster_ids=np.arange(400), cap=1.0)
    alone = certificate(losses, delta=DELTA)
    for found, share in (alone, 0.4 / 2), (clusters_of_one, 1 / len(clusters_of_one.thresholds)):
        exact = mean_bound(losses, delta=share * DELTA)
        assert exact < found.excesses[0] < exact + 2.0**-13


# --- the curve ------------------------------------------------------------------------------------

loss_lists = st.lists(
    st.one_of(st.sampled_from([0.0, 0.5, 2 / 3, 1.0]), st.floats(0, 1)), min_size=1, max_size=60
)


@given(loss_lists, st.sampled_from([0.01, 0.05, 0.3]))
def test_bounds_fall_with_the_fraction_and_lie_between_the_estimate_and_one(losses, delta):
    fractions = np.sort(FINE)
    for ids in (None, np.arange(len(losses)) // 3):
        found = certificate(losses, delta=delta, cluster_ids=ids, tail_fractions=fractions)
        assert np.all(np.diff(found.bounds) <= 1e-12)
        assert np.all(np.diff(fractions * found.bounds) >= -1e-12)  # a larger part has more loss
        assert np.all(found.bounds >= found.estimates - 1e-12)
        assert np.all(found.bounds <= 1)
        np.testing.assert_array_equal(found.bound_at(fractions), found.bounds)


def test_band_and_anchors_share_one_delta():
    losses = np.random.default_rng(0).integers(0, 65, 400) / 64  # not changed by rounding
    found = certificate(losses, delta=DELTA)
    excesses = dict(zip(found.thresholds, found.excesses, strict=True))
    anchors = [0.4 * DELTA / 2, 0.4 * DELTA / 2]
    ranks, masses = tail_masses(400, DELTA - sum(anchors))
    assert math.isclose(excesses[0.0], mean_bound(losses, delta=anchors[0]))
    half = 0.5 * mean_bound(np.maximum(2 * losses - 1, 0), delta=anchors[1])
    assert math.isclose(excesses[0.5], half)
    largest = np.sort(losses)[::-1][ranks - 1]
    alone = dict(zip(*excess_curve(largest, masses, np.zeros(0), np.zeros(0)), strict=True))
    assert math.isclose(excesses[0.75], alone[0.75])  # above the last anchor there is the band


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.lists(st.floats(0.01, 5), min_size=8, max_size=8),
    st.floats(0.01, 1),
)
def test_the_estimate_is_the_minimum_over_thresholds(losses, weights, fraction):
    losses, weights = np.array(losses), np.array(weights[: len(losses)])
    weights = weights / weights.sum()
    expected = min(t + np.sum(weights * np.maximum(losses - t, 0)) / fraction for t in losses)
    found = weighted_cvar(losses, weights, np.array([fraction]))
    np.testing.assert_allclose(found, [expected], rtol=1e-9, atol=1e-12)


@given(loss_lists.filter(lambda losses: len(losses) > 1), st.integers(0, 100))
def test_a_band_alone_bounds_by_the_worst_law_inside_it(losses, seed):
    """All that the band allows above each loss is put on the next larger one, the rest on 1."""
    largest = np.sort(losses)[::-1]
    masses = np.sort(np.random.default_rng(seed).random(len(losses)))
    values = [1.0, *largest]
    shares = np.diff([0.0, *masses, 1.0])
    curve = excess_curve(largest, masses, np.zeros(0), np.zeros(0))
    expected = [cvar_of_atoms(values, shares, fraction) for fraction in FINE]
    np.testing.assert_allclose(bounds_of(*curve, FINE), expected, rtol=1e-9)


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


# --- bounds of a mean -----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 1)), min_size=1, max_size=12),
    st.sampled_from([0.01, 0.2]),
)
def test_a_mean_bound_is_the_last_candidate_that_is_not_given_up(shares, delta):
    """The largest thousandth that no mean of stakes speaks against."""
    weights = np.array([weight for _, weight in shares])
    values = weights * [share for share, _ in shares]
    smallest = min(0.5, math.sqrt(2 * math.log(1 / delta) / len(values)))
    bets = [(1 - 2**-10) / 2**n for n in range(1 + math.ceil(math.log2(1 / smallest)))]
    expected = 0.0
    for candidate in np.arange(1, 1000) / 1000:
        gains = (candidate * weights - values) / (1 - candidate)
        if np.mean([np.prod(1 + bet * gains) for bet in bets]) < 1 / delta:
            expected = candidate
    found = mean_bound(values, weights=weights, delta=delta)
    assert expected - 1e-6 <= found <= expected + 0.0011


def test_counts_stand_for_repeats():
    values, counts = np.array([0.0, 0.3, 1.0]), np.array([40, 30, 20])
    counted = mean_bound(values, counts=counts, delta=DELTA)
    assert math.isclose(counted, mean_bound(np.repeat(values, counts), delta=DELTA))
    assert mean_bound(np.ones(1000), delta=DELTA) == 1


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
        ([0.5], {"tail_fractions": [0.0]}, "tail_fractions must be above 0"),
        ([0.5], {"cluster_ids": [1, 2]}, "cluster_ids must have one id a loss"),
        ([0.5], {"cluster_ids": [1], "cap": 0.5}, "cap must be at least 1"),
    ],
)
def test_wrong_calls_are_refused(losses, options, message):
    with pytest.raises(ValueError, match=message):
        certificate(losses, **options)


def test_a_mean_bound_refuses_values_above_their_weight():
    for value, weight in (1.2, 1.0), (0.5, 0.4), (-0.1, 1.0), (1.0, 1.5):
        with pytest.raises(ValueError, match="values must be between 0 and their weight"):
            mean_bound(np.array([value]), weights=np.array([weight]), delta=DELTA)
    with pytest.raises(ValueError, match="at least one draw"):
        mean_bound(np.zeros(0), delta=DELTA)


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
        sample = loss_sample(outcome, loss=loss, units="queries")
        np.testing.assert_array_equal(sample.ids, np.flatnonzero(has_positive))
        expected = 1 - outcome.query_metrics[metric][has_positive]
        np.testing.assert_allclose(sample.losses, expected, atol=1e-6)
        assert sample.cluster_ids is None


def test_losses_by_label_are_those_of_its_pairs(outcome):
    sample = loss_sample(outcome, loss="miss@10", units="labels", cap=2.0)
    whole = loss_sample(outcome, loss="miss@10", units="whole labels", cap=2.0)
    for n, (rank, label) in enumerate(zip(outcome.ranks, outcome.label_ids, strict=True)):
        mates = outcome.label_ids == label
        assert sample.losses[n] == (0.0 if 1 <= rank <= 10 else 1.0)
        assert np.array_equal(sample.cluster_ids == sample.cluster_ids[n], mates)
        assert sample.weights[n] == min(1, 2 / mates.sum())
        assert math.isclose(whole.losses[n], sample.losses[mates].mean(), abs_tol=1e-12)


@pytest.mark.parametrize("units", ["queries", "labels", "whole labels"])
@pytest.mark.parametrize("loss", ["reciprocal rank", "miss@1", "miss@20"])
def test_a_certificate_of_a_run_is_that_of_its_losses(outcome, dataset, loss, units):
    sample = loss_sample(outcome, loss=loss, units=units, cap=5.0)
    expected = certificate(sample.losses, cluster_ids=sample.cluster_ids, cap=5.0)
    found = certify(outcome, dataset, "test", loss=loss, units=units, cap=5.0)
    for field in dataclasses.fields(found):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name))


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
    with pytest.raises(ValueError, match="units must be one of queries, labels, whole labels"):
        certify(outcome, dataset, units="cities")
