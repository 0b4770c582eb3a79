import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metric_oracles as oracles
from evenhand.search import ExactIndex, exact


def vectors(*shape, seed=0, integers=False):
    """Small integers make exact ties, and products without rounding."""
    generator = torch.Generator().manual_seed(seed)
    if integers:
        return torch.randint(-2, 3, shape, generator=generator).float()
    return torch.randn(*shape, generator=generator)


@settings(max_examples=150, deadline=None)
@given(
    num_queries=st.integers(0, 6),
    num_labels=st.integers(1, 200),
    num_results=st.integers(1, 12),
    block_size=st.integers(1, 210),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_matches_a_full_sort_with_ties_by_id(
    num_queries, num_labels, num_results, block_size, has_bias, seed
):
    queries = vectors(num_queries, 2, seed=seed, integers=True)
    labels = vectors(num_labels, 2, seed=seed + 1, integers=True)
    bias = vectors(num_labels, seed=seed + 2, integers=True) if has_bias else None
    scores = queries @ labels.T + (0 if bias is None else bias)
    found = ExactIndex(labels, label_bias=bias, block_size=block_size).search(queries, num_results)
    expected = [oracles.search(row, num_results) for row in scores.tolist()]
    assert found.label_ids.tolist() == expected
    assert found.label_ids.shape == (num_queries, min(num_results, num_labels))
    torch.testing.assert_close(found.scores, scores.gather(1, found.label_ids), rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [1000, 1777, 3000])
def test_the_two_stages_find_the_same_as_one_top_k(block_size, monkeypatch):
    monkeypatch.setattr(exact, "SCORES_AT_ONCE", 7 * block_size)  # 7 queries or more, not 20
    queries, labels = vectors(20, 8), vectors(3000, 8, seed=1)
    found = ExactIndex(labels, block_size=block_size).search(queries, 10)
    expected = (queries @ labels.T).topk(10)
    assert (found.label_ids == expected.indices).all()
    torch.testing.assert_close(found.scores, expected.values)


def test_all_labels_alike_come_in_the_order_of_their_ids():
    found = ExactIndex(torch.ones(5000, 3), block_size=1024).search(torch.zeros(4, 3), 20)
    assert (found.label_ids == torch.arange(20)).all()


def test_a_score_that_is_not_a_number_does_not_break_the_search():
    labels = torch.ones(2000, 1)
    labels[[5, 900]] = torch.nan
    found = ExactIndex(labels).search(torch.ones(1, 1), 4)
    assert sorted(found.label_ids[0].tolist()) == [0, 1, 5, 900]


def test_asking_for_more_than_there_is_returns_every_label_once():
    queries, labels = vectors(3, 4), vectors(5, 4, seed=1)
    found = ExactIndex(labels, block_size=2).search(queries, 50)
    assert found.label_ids.sort(dim=1).values.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert (found.scores.diff(dim=1) <= 0).all()


def test_scores_of_chosen_labels_agree_with_the_search(monkeypatch):
    monkeypatch.setattr(exact, "GATHER_FLOATS", 50)  # two rows at once
    queries, labels, bias = vectors(7, 4), vectors(30, 4, seed=1), vectors(30, seed=2)
    index = ExactIndex(labels, label_bias=bias)
    found = index.search(queries, 6)
    torch.testing.assert_close(index.scores_of(queries, found.label_ids), found.scores)
    chosen = found.label_ids.clone()
    chosen[2, 3] = -1
    assert (index.scores_of(queries, chosen) == -torch.inf).nonzero().tolist() == [[2, 3]]
    assert index.scores_of(queries, chosen[:, :0]).shape == (7, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_that_of_the_vectors_and_nothing_is_changed(dtype):
    queries, labels = vectors(3, 4).to(dtype), vectors(9, 4, seed=1).to(dtype)
    before = queries.clone(), labels.clone()
    assert ExactIndex(labels).search(queries, 2).scores.dtype == dtype
    assert queries.equal(before[0])
    assert labels.equal(before[1])


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"label_bias must have shape \(4,\)"):
        ExactIndex(torch.ones(4, 2), label_bias=torch.ones(3))
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        ExactIndex(torch.ones(4, 2), block_size=0)
    with pytest.raises(ValueError, match="num_results must be at least 1, got 0"):
        ExactIndex(torch.ones(4, 2)).search(torch.ones(1, 2), 0)
