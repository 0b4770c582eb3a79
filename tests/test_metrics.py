import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metric_oracles as oracles
from evenhand.metrics import (
    label_propensities,
    mean_by_group,
    ndcg_at,
    pair_ranks,
    pair_recall_at,
    precision_at,
    propensity_scored_precision_at,
    query_metrics,
    recall_at,
    reciprocal_rank,
)

NUM_LABELS = 9


@st.composite
def rankings(draw):
    """retrieved (Q, R) and positives (Q, P), both padded with -1, as lists."""
    num_queries = draw(st.integers(1, 5))

    def padded(width):
        ids = draw(st.lists(st.integers(0, NUM_LABELS - 1), unique=True, max_size=width))
        return ids + [-1] * (width - len(ids))

    num_results, num_positives = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    retrieved = [padded(num_results) for _ in range(num_queries)]
    positives = [draw(st.permutations(padded(num_positives))) for _ in range(num_queries)]
    return retrieved, positives


def assert_equal(actual, expected):
    expected = torch.tensor([math.nan if value is None else value for value in expected])
    torch.testing.assert_close(actual, expected.to(actual.dtype), equal_nan=True)


@settings(max_examples=100, deadline=None)
@given(rankings(), st.integers(1, 10))
def test_every_metric_matches_its_slow_oracle(ranking, cutoff):
    retrieved, positives = ranking
    tensors = torch.tensor(retrieved), torch.tensor(positives)
    rows = list(zip(retrieved, positives, strict=True))
    for actual, oracle in [
        (recall_at(*tensors, cutoff=cutoff), oracles.recall),
        (precision_at(*tensors, cutoff=cutoff), oracles.precision),
        (ndcg_at(*tensors, cutoff=cutoff), oracles.ndcg),
    ]:
        assert_equal(actual, [oracle(*row, cutoff) for row in rows])
    assert_equal(reciprocal_rank(*tensors), [oracles.reciprocal_rank(*row) for row in rows])


@settings(max_examples=100, deadline=None)
@given(rankings(), st.integers(1, 10))
def test_ranks_and_pair_recall_match_a_loop_over_pairs(ranking, cutoff):
    retrieved, positives = ranking
    ranks = pair_ranks(torch.tensor(retrieved), torch.tensor(positives))
    expected = [
        [-1 if label == -1 else oracles.rank(found, label) for label in labels]
        for found, labels in zip(retrieved, positives, strict=True)
    ]
    assert ranks.tolist() == expected
    hits = pair_recall_at(torch.tensor(retrieved), torch.tensor(positives), cutoff=cutoff)
    assert_equal(
        hits.flatten(),
        [None if r == -1 else float(1 <= r <= cutoff) for row in expected for r in row],
    )


@settings(max_examples=100, deadline=None)
@given(rankings(), st.integers(1, 6), st.integers(0, 2**31))
def test_propensity_scored_precision_matches_the_ratio_of_sums(ranking, cutoff, seed):
    retrieved, positives = ranking
    generator = torch.Generator().manual_seed(seed)
    propensities = 0.05 + 0.95 * torch.rand(NUM_LABELS, generator=generator, dtype=torch.float64)
    values, weights = propensity_scored_precision_at(
        torch.tensor(retrieved), torch.tensor(positives), propensities, cutoff=cutoff
    )
    gains, bests = zip(
        *(
            oracles.propensity_gain_and_best(*row, propensities.tolist(), cutoff)
            for row in zip(retrieved, positives, strict=True)
        ),
        strict=True,
    )
    assert weights.tolist() == pytest.approx(bests, rel=1e-12)
    assert (values.isnan() == (weights == 0)).all()
    if sum(bests):
        actual = (values.nan_to_num() * weights).sum() / weights.sum()
        assert actual.item() == pytest.approx(sum(gains) / sum(bests), rel=1e-12)


def test_propensities_follow_the_formula_and_grow_with_the_count():
    counts = torch.tensor([0, 1, 10, 500])
    actual = label_propensities(counts.double(), 1000)
    expected = [oracles.propensity(count, 1000) for count in counts.tolist()]
    torch.testing.assert_close(actual, torch.tensor(expected))
    assert (actual.diff() > 0).all()
    for num_examples in (1, 2):  # log N - 1 is negative
        assert label_propensities(torch.tensor([0, 2]), num_examples).tolist() == [1, 1]


def test_the_bundle_holds_what_the_single_functions_return():
    retrieved = torch.tensor([[3, 1, 4], [0, 5, 2], [0, 1, 2]])
    positives = torch.tensor([[4, 3], [6, -1], [-1, -1]])
    propensities = torch.linspace(0.1, 0.9, 7)
    found = query_metrics(retrieved, positives, cutoffs=(1, 3), propensities=propensities)
    both = retrieved, positives
    expected = {
        f"{name}@{cutoff}": metric(*both, cutoff=cutoff)
        for cutoff in (1, 3)
        for name, metric in [
            ("query recall", recall_at),
            ("precision", precision_at),
            ("ndcg", ndcg_at),
        ]
    }
    expected["mrr"] = reciprocal_rank(*both)
    for cutoff in (1, 3):
        values, weights = propensity_scored_precision_at(*both, propensities, cutoff=cutoff)
        expected[f"psp@{cutoff}"] = values
        torch.testing.assert_close(found.weights[f"psp@{cutoff}"], weights)
    assert found.values.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found.values[name], values, equal_nan=True)
        assert values[2].isnan()
        assert not values[:2].isnan().any()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.floats(0, 1, width=32), st.integers(-1, 3)), min_size=1),
)
def test_group_means_match_a_loop_and_an_empty_group_is_not_zero(rows):
    values, groups = zip(*rows, strict=True)
    means, counts = oracles.group_means(values, groups, 4)
    actual = mean_by_group(
        torch.tensor([math.nan if value is None else value for value in values]),
        torch.tensor(groups, dtype=torch.int32),
        4,
    )
    assert_equal(actual.means, means)
    assert actual.counts.tolist() == counts


def test_no_results_and_no_positive_columns():
    nothing, positives = torch.empty(2, 0, dtype=torch.long), torch.tensor([[1], [-1]])
    assert pair_ranks(nothing, positives).tolist() == [[0], [-1]]
    assert reciprocal_rank(positives, nothing).isnan().all()
    assert recall_at(positives, nothing, cutoff=1).isnan().all()


def test_a_cutoff_below_one_is_refused():
    with pytest.raises(ValueError, match="cutoff must be at least 1, got 0"):
        recall_at(torch.tensor([[0]]), torch.tensor([[0]]), cutoff=0)
    with pytest.raises(ValueError, match="num_examples must be at least 1, got 0"):
        label_propensities(torch.tensor([1]), 0)
