"""A certificate holds as often as promised, on thousands of samples of known laws."""

import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from evenhand.theory.subpopulation_bounds import certificate, weighted_cvar
from test_certificate import DELTA, FINE, certified, clustered_truth, clusters, cvar_of_atoms

TRIALS = 1000

# --- laws with a known truth ----------------------------------------------------------------------

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


@pytest.mark.parametrize("law", ["a tenth fails", "uniform", "beta", "reciprocal rank"])
def test_the_plain_estimate_is_refuted(law):
    def estimate(losses):
        return weighted_cvar(losses, np.ones(len(losses)), FINE)

    assert is_refuted(num_failures(law, 40, estimate))


def test_a_normal_interval_is_refuted():
    def normal(losses):
        """Right for one fraction and many draws: all fractions, few draws, a rare failure."""
        quantiles = np.quantile(losses, 1 - FINE)[:, None]
        errors = np.maximum(losses - quantiles, 0).std(axis=1) / FINE
        estimate = weighted_cvar(losses, np.ones(len(losses)), FINE)
        return estimate + 1.645 * errors / math.sqrt(len(losses))

    assert is_refuted(num_failures("rare", 40, normal))


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
