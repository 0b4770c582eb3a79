"""Search over the labels of several ranks, against one index over all of them."""

import pytest
import torch

from evenhand.distributed.ranks import Shards
from evenhand.distributed.search import SplitIndex
from evenhand.search import ExactIndex
from ranks import run_ranks

NUM_RANKS = [1, 3, 7]


def whole_numbers(*shape, seed=0, most=3):
    """Small ones, so that products are exact in any order and many scores tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def answers_of(num_ranks, vectors, bias, ask_fn):
    """What each rank is answered."""

    def rank_fn(ranks):
        rows = slice(*Shards(len(vectors), num_ranks).rows_of(ranks.rank))
        own = ExactIndex(vectors[rows], label_bias=None if bias is None else bias[rows])
        return ask_fn(SplitIndex(own, len(vectors), ranks))

    return run_ranks(num_ranks, rank_fn)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_labels", "num_results"),
    [(300, 10), (300, 299), (20, 50), (5, 3), (1, 1)],
)
@pytest.mark.parametrize("num_queries", [1, 23])  # fewer than ranks, and more
def test_search_and_scores_and_ties_are_those_of_one_index(
    num_ranks, dtype, num_labels, num_results, num_queries
):
    vectors, queries = (
        whole_numbers(count, 4, seed=count).to(dtype) for count in (num_labels, num_queries)
    )
    bias = whole_numbers(num_labels, seed=2).to(dtype)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(-1, num_labels, (num_queries, 6), generator=generator)
    for label_bias in (None, bias):
        whole = ExactIndex(vectors, label_bias=label_bias)

        def ask(index):
            return *index.search(queries, num_results), index.scores_of(queries, chosen)

        for answer in answers_of(num_ranks, vectors, label_bias, ask):
            for found, expected in zip(answer, ask(whole), strict=True):
                assert torch.equal(found, expected)
                assert found.dtype == expected.dtype


def test_what_a_rank_sends_does_not_grow_with_labels_and_hardly_with_ranks():
    queries = whole_numbers(64, 4, seed=1)

    def sent_of(num_ranks, num_labels):
        def search(index):
            index.search(queries, 10)
            return sum(index.ranks.sent.values())

        return max(answers_of(num_ranks, whole_numbers(num_labels, 4), None, search))

    answer = 64 * 10 * (8 + 4)  # bytes
    assert sent_of(2, 300) == sent_of(2, 3000) == answer
    assert sent_of(16, 3000) < 2 * answer


def test_an_index_of_other_labels_is_refused():
    def rank_fn(ranks):
        with pytest.raises(ValueError, match="holds 3 of 6 labels, got an index of 2"):
            SplitIndex(ExactIndex(torch.zeros(2, 4)), 6, ranks)
        index = SplitIndex(ExactIndex(torch.zeros(3, 4)), 6, ranks)
        assert len(index) == 6
        with pytest.raises(ValueError, match="at least 1, got 0"):
            index.search(torch.zeros(1, 4), 0)

    run_ranks(2, rank_fn)
