"""A certificate holds as often as promised, on thousands of samples of known laws."""

import argparse
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from benchmarks import certificate as study
from evenhand.theory.mean_bounds import mean_bound
from evenhand.theory.subpopulation_bounds import (
    all_hold_probability,
    bounds_of,
    certificate,
    excess_curve,
)
from test_certificate import DELTA, FINE, cvar_of_atoms, loss_lists

OPTIONS = argparse.Namespace(trials=1000, seed=0)
LAWS = study._laws()


def refuted(rows):
    """The methods whose failures speak against 'at most delta', at a level of 1 %."""
    return {row["method"] for row in rows if row["p_value"] < 0.01}


@pytest.mark.parametrize("num_draws", [40, 250])
@pytest.mark.parametrize("law", LAWS)
def test_all_bounds_hold_at_once_as_often_as_promised(monkeypatch, law, num_draws):
    methods = {name: study.METHODS[name] for name in ("certificate", "estimate", "normal")}
    monkeypatch.setattr(study, "METHODS", methods)
    found = refuted(study._studied(law, LAWS[law], num_draws, OPTIONS))
    assert "certificate" not in found
    if num_draws == 40:  # what promises too much: the plain estimate, and a normal interval
        assert "estimate" in found
        assert "normal" in found or "fiftieth" not in law


def test_bounds_by_cluster_hold_and_bounds_that_overlook_the_clusters_are_refuted():
    assert refuted(study._studied_clusters(40, study.LARGEST_CLUSTER, OPTIONS)) == {"overlooked"}


def test_the_estimate_by_cluster_is_that_of_the_weighted_queries():
    losses, ids = study._clusters(np.random.default_rng(0), 4000)
    for cap in (1.0, 30.0):
        found = certificate(losses, cluster_ids=ids, cap=cap, tail_fractions=study.FRACTIONS)
        differences = np.abs(found.estimates - study._clustered_truth(cap))
        assert differences[study.FRACTIONS > 0.05].max() < 0.05
        assert found.num_units == 4000
        assert found.num_losses == len(losses)


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
