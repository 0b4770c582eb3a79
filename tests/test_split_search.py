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
