"""On made data, bad slices are found, and chance is taken for one as often as the level allows."""

import numpy as np
import pytest
from scipy.stats import binom, chi2

from evenhand.evaluation import find_slices
from evenhand.evaluation.slice_attributes import nominal
from evenhand.evaluation.slice_search import is_in_slice, scorer_of, slabs_of
from test_slices import first_strata, looks_of, made


def null_losses(generator, query_ids, mean):
    """The same chance of failing for every pair of a query, drawn for each query."""
    chances = generator.beta(2 * mean, 2 * (1 - mean), size=query_ids[-1] + 1)
    return (generator.random(len(query_ids)) < chances[query_ids]).astype(float)


def uncorrected_p_value(losses, query_ids, attributes):
    """Of the best slice, as if nobody had looked at any other."""
    looks = looks_of(attributes, len(losses), min_pairs=30)
    scorer = scorer_of(
        losses,
        looks._replace(num_singles=1),
        slabs_of(query_ids, first_strata(query_ids)),
        mean_loss=float(losses.mean()),
    )
    return chi2.sf(2 * scorer.scores(looks.totals(losses[:, None])).max(), df=1) / 2


def test_where_there_is_nothing_to_find_it_is_claimed_in_one_of_twenty_at_most():
    num_sets, claims, num_naive, naive_claims = 200, 0, 0, 0
    for seed in range(num_sets):
        generator, query_ids, attributes = made([1, seed], int([150, 400][seed % 2]))
        losses = null_losses(generator, query_ids, mean=[0.1, 0.2, 0.3][seed % 3])
        found = find_slices(losses, query_ids, attributes, num_permutations=39, seed=seed)
        claims += len(found.slices) > 0
        if seed % 5 == 0:
            num_naive += 1
            naive_claims += uncorrected_p_value(losses, query_ids, attributes) < 0.05
    assert binom.sf(claims - 1, num_sets, 0.05) > 0.01, claims
    assert claims > 0  # a test that never claims is no test
    # The same allowance refuses the same search without its correction.
    assert binom.sf(naive_claims - 1, num_naive, 0.05) < 1e-9
    assert naive_claims > num_naive / 2


def test_labels_as_units_allow_for_labels_that_differ_and_queries_would_claim_too_much():
    """Every label has a difficulty of its own, and a group that has nothing to do with it."""
    claims = {"queries": 0, "labels": 0}
    for number in range(60):
        generator = np.random.default_rng(number)
        difficulty, groups = generator.beta(1, 3, size=120), generator.integers(5, size=120)
        label_ids = np.repeat(np.arange(120), generator.integers(3, 8, size=120))
        losses = (generator.random(len(label_ids)) < difficulty[label_ids]).astype(float)
        column = nominal("group", groups[label_ids], list("abcde"))
        query_ids = np.arange(len(label_ids))
        for name, units in (("queries", query_ids), ("labels", label_ids)):
            found = find_slices(
                losses, query_ids, [column], unit_ids=units, num_permutations=99, max_slices=1
            )
            claims[name] += bool(found.slices)
    assert claims["labels"] <= 8  # of 60 at 5 %: more has a chance below 1 in 100
    assert claims["queries"] > 15


@pytest.mark.parametrize(
    "wanted",
    [("script = 5",), ("country = 15",), ("style = 3", "length 7 or more"), ("script = 1",)],
)
def test_a_bad_slice_of_two_per_cent_or_more_is_found_first_without_a_chance_detail(wanted):
    for seed in range(8):
        generator, query_ids, attributes = made([2, seed], 3000)
        conditions = tuple(
            (place, attribute.conditions.index(words))
            for words in wanted
            for place, attribute in enumerate(attributes)
            if words in attribute.conditions
        )
        is_bad = is_in_slice(attributes, conditions)
        assert is_bad.mean() > 0.01
        losses = (generator.random(len(query_ids)) < np.where(is_bad, 0.6, 0.15)).astype(float)
        found = find_slices(losses, query_ids, attributes, num_permutations=39, seed=seed)
        assert set(found.slices[0].conditions) == set(wanted)
        assert found.slices[0].num_pairs == is_bad.sum()


def test_no_slice_that_is_better_than_average_is_claimed_and_losses_need_be_no_coins():
    generator, query_ids, attributes = made(6, 2000)
    chances = np.where(attributes[0].codes == 0, 0.8, np.where(attributes[1].codes == 0, 0.05, 0.2))
    losses = (generator.random(len(query_ids)) < chances).astype(float)
    found = find_slices(losses, query_ids, attributes, num_permutations=19)
    assert found.slices
    assert all(s.value < found.value and s.excess > 0 for s in found.slices)
    losses = 0.5 * generator.random(len(query_ids))
    losses[attributes[1].codes == 3] += 0.2
    found = find_slices(losses, query_ids, attributes, num_permutations=39)
    assert found.slices[0].conditions == ("style = 3",)
