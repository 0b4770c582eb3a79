from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import metric_oracles as oracles
from evenhand.kernels.rows import unit
from evenhand.search import ExactIndex, SearchResult, exact
from evenhand.search.exact import BestSoFar


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
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_matches_a_full_sort_with_ties_by_id(
    num_queries, num_labels, num_results, block_size, has_bias, dtype, seed
):
    queries = vectors(num_queries, 2, seed=seed, integers=True).to(dtype)
    labels = vectors(num_labels, 2, seed=seed + 1, integers=True).to(dtype)
    bias = vectors(num_labels, seed=seed + 2, integers=True).to(dtype) if has_bias else None
    scores = queries @ labels.T + (0 if bias is None else bias)
    found = ExactIndex(labels, label_bias=bias, block_size=block_size).search(queries, num_results)
    expected = [oracles.search(row, num_results) for row in scores.tolist()]
    assert found.label_ids.tolist() == expected
    assert found.label_ids.shape == (num_queries, min(num_results, num_labels))
    assert found.scores.dtype == dtype
    torch.testing.assert_close(found.scores, scores.gather(1, found.label_ids), rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_threads_find_the_same_as_blocks(num_threads, has_bias, monkeypatch):
    """Queries of several tasks for a thread, blocks of a few labels, and a short last one."""
    monkeypatch.setattr(exact, "FEWEST_ROWS", 8)
    monkeypatch.setattr(exact, "ROWS_OF_THREAD", 10)
    monkeypatch.setattr(exact, "SCORES_OF_THREAD", 10 * 333)
    queries, labels = vectors(77, 8), vectors(3000, 8, seed=1)
    bias = vectors(3000, seed=2).requires_grad_() if has_bias else None
    index = ExactIndex(labels.requires_grad_(), label_bias=bias)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = index.search(queries.requires_grad_(), 70)
        assert torch.get_num_threads() == num_threads
        with ThreadPoolExecutor(1) as pool:  # and so for threads that start later
            assert pool.submit(torch.get_num_threads).result() == num_threads
    finally:
        torch.set_num_threads(threads_before)
    expected = SearchResult(torch.empty(77, 70, dtype=torch.long), torch.empty(77, 70))
    with torch.no_grad():
        index._search_in_blocks(queries, expected)
    assert found.label_ids.equal(expected.label_ids)
    torch.testing.assert_close(found.scores, expected.scores)


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


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"label_bias must have shape \(4,\)"):
        ExactIndex(torch.ones(4, 2), label_bias=torch.ones(3))
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        ExactIndex(torch.ones(4, 2), block_size=0)
    with pytest.raises(ValueError, match="num_results must be at least 1, got 0"):
        ExactIndex(torch.ones(4, 2)).search(torch.ones(1, 2), 0)


def awkward_scores(generator, shape):
    """Ties, zeros of both signs, infinities and NaN of both signs, or plain random numbers."""
    few = np.array([-np.inf, -1, -0.0, 0.0, 1, 1, np.inf, np.nan, -np.nan], np.float32)
    some = generator.choice(few[: generator.integers(1, len(few) + 1)], shape)
    plain = generator.standard_normal(shape).astype(np.float32)
    return np.where(generator.random(shape) < generator.choice([0, 0.5, 1]), some, plain)


def ranked_in_loops(row):
    """Label ids, best first: NaN before all, of equals the lowest."""
    return sorted(range(len(row)), key=lambda i: (not np.isnan(row[i]), -row[i].item(), i))


@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(0, 3),
    num_labels=st.integers(1, 700),
    num_results=st.integers(1, 200),
    width=st.integers(1, 700),
    order=st.sampled_from(["as drawn", "ascending", "descending"]),
    seed=st.integers(0, 2**31),
)
def test_the_best_of_blocks_are_those_of_a_full_sort(
    num_rows, num_labels, num_results, width, order, seed
):
    scores = awkward_scores(np.random.default_rng(seed), (num_rows, num_labels))
    if order != "as drawn":  # ascending: every block beats all that is held
        scores = np.sort(scores, axis=1)[:, :: 1 if order == "ascending" else -1]
    num_results = min(num_results, num_labels)
    best = BestSoFar(num_rows, num_results)
    for start in range(0, num_labels, width):
        block = np.ascontiguousarray(scores[:, start : start + width])
        best.add(block, first_label=start)
    if num_labels == num_results:
        with pytest.raises(ValueError, match="but fewer labels were added"):
            BestSoFar(1, num_results).ranked()
    label_ids, found_scores = best.ranked()
    expected = [ranked_in_loops(row)[:num_results] for row in scores]
    assert label_ids.tolist() == expected
    np.testing.assert_array_equal(found_scores, np.take_along_axis(scores, label_ids, axis=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [7, 65_536])
def test_vectors_made_of_rows_at_every_search_give_what_vectors_made_once_give(dtype, block_size):
    table, queries = vectors(500, 6).to(dtype), vectors(30, 6, seed=1)
    ids = torch.randint(-1, 500, (30, 3))
    once = ExactIndex(unit(table.float()))
    index = ExactIndex(table, block_size=block_size, vectors_fn=lambda rows: unit(rows.float()))
    for asked in (queries, queries[:1]):
        found, expected = index.search(asked, 5), once.search(asked, 5)
        assert torch.equal(found.label_ids, expected.label_ids)
        torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(index.scores_of(queries, ids), once.scores_of(queries, ids))
