"""A certificate holds as often as promised, on thousands of samples of known laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from evenhand.theory.mean_bounds import mean_bound
from evenhand.theory.subpopulation_bounds import (
    all_hold_probability,
    bounds_of,
    certificate,
    excess_curve,
    weighted_cvar,
)
from test_certificate import DELTA, FINE, certified, clusters, cvar_of_atoms, loss_lists

TRIALS = 1000

RANKS = np.arange(2, 51)
RANK_SHARES = (1 / RANKS) / np.sum(1 / RANKS)
RECIPROCAL = (  # 1 - 1 / rank: four fifths found first, a tenth not at all
    np.concatenate([[0.0], 1 - 1 / RANKS, [1.0]]),
    np.concatenate([[0.8], 0.1 * RANK_SHARES, [0.1]]),
)
ATOMS = {
    "a tenth fails": ([0.0, 1.0], [0.9, 0.1]),
    "0.2 and 0.8": ([0.2, 0.8], [0.9, 0.1]),
    "rare": ([0.0, 1.0], [0.98, 0.02]),
    "reciprocal rank": RECIPROCAL,
}


def estimate(losses):
    return weighted_cvar(losses, np.ones(len(losses)), FINE)


def normal_bound(losses):
    """Right for one fraction and many draws: here are all, few draws and a rare failure."""
    quantiles = np.quantile(losses, 1 - FINE)[:, None]
    errors = np.maximum(losses - quantiles, 0).std(axis=1) / FINE
    return estimate(losses) + 1.645 * errors / math.sqrt(len(losses))


def truth_of(law):
    if law in ATOMS:
        return np.array([cvar_of_atoms(*ATOMS[law], fraction) for fraction in FINE])
    if law == "uniform":
        return 1 - FINE / 2  # the mean of the upper part of an interval
    # E[X; X > q] = E[X] P[Beta(a + 1, b) > q]
    quantiles = beta.isf(FINE, 0.5, 5)
    return 0.5 / 5.5 * beta.sf(quantiles, 1.5, 5) / FINE


def sample_of(law, generator, num_draws):
    if law in ATOMS:
        values, shares = ATOMS[law]
        return generator.choice(values, p=shares, size=num_draws)
    if law == "uniform":
        return generator.random(num_draws)
    return generator.beta(0.5, 5, num_draws)


def num_failures(law, num_draws, bounds_fn, seed=0):
    """In how many of 1,000 samples a bound lies below the truth, for any fraction at all."""
    generator, truth = np.random.default_rng(seed), truth_of(law)
    samples = (sample_of(law, generator, num_draws) for _ in range(TRIALS))
    return sum(bool(np.any(bounds_fn(sample) < truth - 1e-12)) for sample in samples)


def is_refuted(failures):
    """Whether so many failures of 1,000 speak against 'at most delta', at a level of 1 %."""
    return binom.sf(failures - 1, TRIALS, DELTA) < 0.01


@pytest.mark.parametrize("num_draws", [40, 250])
@pytest.mark.parametrize("law", [*ATOMS, "uniform", "beta"])
def test_all_bounds_hold_at_once_as_often_as_promised(law, num_draws):
    assert not is_refuted(num_failures(law, num_draws, certified))


@pytest.mark.parametrize(
    ("law", "bounds_fn"),
    [
        *((law, estimate) for law in ("a tenth fails", "uniform", "beta", "reciprocal rank")),
        ("rare", normal_bound),
    ],
)
def test_the_plain_estimate_and_a_normal_interval_are_refuted(law, bounds_fn):
    assert is_refuted(num_failures(law, 40, bounds_fn))


def test_bounds_by_cluster_hold_and_bounds_that_overlook_the_clusters_are_refuted():
    generator, truth = np.random.default_rng(1), clustered_truth(cap=29.0)
    failures = {"minded": 0, "overlooked": 0}
    for trial in range(TRIALS):
        losses, ids = clusters(generator, 40)
        minded = certificate(losses, delta=DELTA, cluster_ids=ids, cap=29.0).bound_at(FINE)
        failures["minded"] += bool(np.any(minded < truth - 1e-12))
        if trial % 5 == 0:
            few_lengths = len(losses) - len(losses) % 100  # each length needs a band of its own
            overlooked = certified(generator.permutation(losses)[:few_lengths])
            failures["overlooked"] += bool(np.any(overlooked < truth - 1e-12))
    assert not is_refuted(failures["minded"])
    assert failures["overlooked"] > 0.15 * TRIALS / 5


def test_the_estimate_by_cluster_is_that_of_the_weighted_queries():
    losses, ids = clusters(np.random.default_rng(0), 4000)
    for cap in (1.0, 30.0):
        found = certificate(losses, cluster_ids=ids, cap=cap, tail_fractions=FINE)
        assert np.abs(found.estimates - clustered_truth(cap))[FINE > 0.05].max() < 0.05
        assert found.num_units == 4000
        assert found.num_losses == len(losses)


def clustered_truth(cap):
    """The law of a query that counts min(1, cap / m), by its atoms."""
    hard = 0.15 * np.mean([min(size, cap) for size in range(15, 30)])
    easy = 0.85 * np.mean([min(size, cap) for size in range(8, 16)])
    shares = np.array([hard / 2, hard / 2, *[easy / 4] * 4])
    values = [0.9, 1.0, 0.0, 0.1, 0.3, 0.4]
    return np.array([cvar_of_atoms(values, shares / shares.sum(), f) for f in FINE])


@given(loss_lists, st.lists(st.floats(0, 0.99), min_size=1, max_size=4), st.integers(0, 100))
def test_the_curve_lies_above_every_law_that_meets_band_and_anchors(losses, anchors, seed):
    generator = np.random.default_rng(seed)
    values, shares = generator.random(6), generator.dirichlet(np.ones(6))
    largest, anchors = np.sort(losses)[::-1], np.array(anchors)

    def excess(t):
        return float(shares @ np.maximum(values - t, 0))

    masses = np.array([shares[values > loss].sum() for loss in largest])  # what just holds
    curve = excess_curve(largest, masses, anchors, np.array([excess(t) for t in anchors]))
    for t, bound in zip(*curve, strict=True):
        assert bound >= excess(t) - 1e-12
    truth = [cvar_of_atoms(values, shares, fraction) for fraction in FINE]
    assert np.all(bounds_of(*curve, FINE) >= np.array(truth) - 1e-9)


def test_the_probability_of_a_single_rank_is_a_beta_law_for_many_draws_too():
    for rank, mass in (1, 1e-4), (50, 0.002), (3000, 0.15), (19_900, 0.996):
        found = all_hold_probability(np.array([rank]), np.array([mass]), 20_000)
        assert math.isclose(found, beta.cdf(mass, rank, 20_001 - rank), abs_tol=1e-8)


@pytest.mark.parametrize("num_draws", [1, 5, 40, 400])
def test_a_mean_bound_covers_coins_exactly(num_draws):
    counts = [np.array([num_draws - k, k]) for k in range(num_draws + 1)]
    bounds = np.array([mean_bound(np.array([0.0, 1.0]), counts=c, delta=DELTA) for c in counts])
    for share in (0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99):
        fails = np.flatnonzero(bounds < share)
        assert binom.pmf(fails, num_draws, share).sum() <= DELTA
