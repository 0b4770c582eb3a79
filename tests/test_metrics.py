import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metric_oracles as oracles
from evenhand.metrics import label_propensities, pair_ranks, query_metrics

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


METRICS = {
    "query recall": oracles.recall,
    "precision": oracles.precision,
    "ndcg": oracles.ndcg,
}


@settings(max_examples=100, deadline=None)
@given(rankings(), st.integers(1, 10), st.integers(0, 2**31))
def test_every_metric_matches_its_slow_oracle(ranking, cutoff, seed):
    generator = torch.Generator().manual_seed(seed)
    propensities = 0.05 + 0.95 * torch.rand(NUM_LABELS, generator=generator, dtype=torch.float64)
    tensors, rows = tuple(map(torch.tensor, ranking)), list(zip(*ranking, strict=True))
    found = query_metrics(*tensors, cutoffs=(1, cutoff), propensities=propensities)
    assert_equal(found.values.pop("mrr"), [oracles.reciprocal_rank(*row) for row in rows])
    for k in {1, cutoff}:
        for name, oracle in METRICS.items():
            assert_equal(found.values.pop(f"{name}@{k}"), [oracle(*row, k) for row in rows])
        values, weights = found.values.pop(f"psp@{k}"), found.weights[f"psp@{k}"]
        sums = [oracles.propensity_gain_and_best(*row, propensities.tolist(), k) for row in rows]
        gains, bests = zip(*sums, strict=True)
        assert weights.tolist() == pytest.approx(bests, rel=1e-12)
        assert (values.isnan() == (weights == 0)).all()
        if sum(bests):  # the ratio of the sums
            actual = (values.nan_to_num() * weights).sum() / weights.sum()
            assert actual.item() == pytest.approx(sum(gains) / sum(bests), rel=1e-12)
    assert not found.values  # there is nothing else


@settings(max_examples=100, deadline=None)
@given(rankings())
def test_ranks_match_a_loop_over_pairs(ranking):
    retrieved, positives = map(torch.tensor, ranking)
    expected = [
        [-1 if label == -1 else oracles.rank(found, label) for label in labels]
        for found, labels in zip(*ranking, strict=True)
    ]
    assert pair_ranks(retrieved, positives).tolist() == expected


def test_propensities_follow_the_formula_and_grow_with_the_count():
    counts = torch.tensor([0, 1, 10, 500])
    actual = label_propensities(counts.double(), 1000)
    expected = [oracles.propensity(count, 1000) for count in counts.tolist()]
    torch.testing.assert_close(actual, torch.tensor(expected))
    assert (actual.diff() > 0).all()
    for num_examples in (1, 2):  # log N - 1 is negative
        assert label_propensities(torch.tensor([0, 2]), num_examples).tolist() == [1, 1]


def test_no_results_no_positive_columns_and_what_is_refused():
    nothing, positives = torch.empty(2, 0, dtype=torch.long), torch.tensor([[1], [-1]])
    assert pair_ranks(nothing, positives).tolist() == [[0], [-1]]
    for values in query_metrics(positives, nothing, cutoffs=(1,)).values.values():
        assert values.isnan().all()
    with pytest.raises(ValueError, match="cutoff must be at least 1, got 0"):
        query_metrics(positives, positives, cutoffs=(0,))
    with pytest.raises(ValueError, match="num_examples must be at least 1, got 0"):
        label_propensities(torch.tensor([1]), 0)
