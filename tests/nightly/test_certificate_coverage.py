"""A certificate holds as often as promised, on thousands of samples of known laws."""

import argparse
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from benchmarks import certificate as study
from evenhand.theory.cvar import cvar_curve
from evenhand.theory.subpopulation_bounds import all_hold_probability, worst_law
from test_certificate import FINE, cvar_of_atoms, loss_lists

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


@given(loss_lists, st.integers(0, 100))
def test_the_bounds_lie_above_every_law_in_the_band(losses, seed):
    generator = np.random.default_rng(seed)
    values, shares = generator.random(6), generator.dirichlet(np.ones(6))
    largest = np.sort(losses)[::-1]
    masses = np.array([min(1, shares[values > loss].sum()) for loss in largest])  # just hold
    worst, probabilities = worst_law(largest, masses)
    truth = [cvar_of_atoms(values, shares, fraction) for fraction in FINE]
    found = cvar_curve(worst, FINE, probabilities=probabilities)
    assert np.all(found >= np.array(truth) - 1e-9)


def test_the_probability_of_a_single_rank_is_a_beta_law_for_many_draws_too():
    for rank, mass in (1, 1e-4), (50, 0.002), (3000, 0.15), (19_900, 0.996):
        found = all_hold_probability(np.array([rank]), np.array([mass]), 20_000)
        assert math.isclose(found, beta.cdf(mass, rank, 20_001 - rank), abs_tol=1e-8)
