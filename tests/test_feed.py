"""Batches: every pair once an epoch, any place by itself, random enough, and made ahead."""

import itertools

import numpy as np
import pytest
import torch

from evenhand.data import Part, Rows, pairs_of
from evenhand.data.csr import PairIndex
from evenhand.training.feed import PairFeed, PairOrder

CPU = torch.device("cpu")
POSITIVES = [[4], [1, 3, 0], [], [2, 4], [5], [0, 1], [3]]  # 10 pairs of 7 queries
PAIRS = sorted((query, label) for query, labels in enumerate(POSITIVES) for label in labels)


def rows_from(lists, values=None):
    flat = np.array([entry for row in lists for entry in row], dtype=np.int32)
    offsets = np.cumsum([0, *[len(row) for row in lists]])
    return Rows(offsets, flat, values)


def dense_part():
    """The first feature of a query is its number: a batch tells which queries it holds."""
    features = np.stack([np.arange(7), np.arange(7) ** 2], axis=1).astype(np.float32)
    features.flags.writeable = False  # as when it is memory-mapped
    return Part(features, rows_from(POSITIVES))


def feed_of(part=None, *, masks_all_positives=False, seed=0, **settings):
    settings = {"batch_size": 3, "device": CPU, **settings}
    return PairFeed(
        dense_part() if part is None else part,
        masks_all_positives=masks_all_positives or settings.get("has_whole_queries", False),
        generator=torch.Generator().manual_seed(seed),
        **settings,
    )


def pairs_in(batch):
    queries = batch.features[:, 0].int()
    queries = queries if batch.query_rows is None else queries[batch.query_rows]
    return list(zip(queries.tolist(), batch.label_ids.tolist(), strict=True))


def batches_of(feed, count):
    return [feed.next_batch() for _ in range(count)]


def assert_same(first, second):
    for name in ("features", "label_ids", "positive_ids"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_the_mask_of_all_positives_holds_every_one_of_the_query_and_the_drawn_one_first():
    """The paper's mask holds the drawn one alone."""
    for batch in batches_of(feed_of(), 6):
        assert torch.equal(batch.positive_ids, batch.label_ids.unsqueeze(1))
    for batch in batches_of(feed_of(masks_all_positives=True), 6):
        rows = batch.positive_ids.tolist()
        for (query, label), row in zip(pairs_in(batch), rows, strict=True):
            assert row[0] == label
            assert sorted(entry for entry in row if entry >= 0) == sorted(POSITIVES[query])


@pytest.mark.parametrize("has_whole_queries", [False, True])
@pytest.mark.parametrize("num_taken", range(5))  # 3 batches an epoch: at and across its border
def test_a_saved_place_goes_on_with_the_same_batches(num_taken, has_whole_queries):
    how = {"masks_all_positives": True, "has_whole_queries": has_whole_queries}
    feed = feed_of(**how)
    batches_of(feed, num_taken)
    state = feed.state()  # which does not change as the feed goes on
    expected = batches_of(feed, 8)
    resumed = feed_of(seed=99, **how)
    resumed.load(state)
    for first, second in zip(batches_of(resumed, 8), expected, strict=True):
        assert_same(first, second)
    resumed.load(state)  # what was made ahead is thrown away
    assert_same(resumed.next_batch(), expected[0])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 11])  # some have no example at all
@pytest.mark.parametrize("has_whole_queries", [False, True])
def test_the_shares_of_the_ranks_are_the_batch_in_order(num_ranks, has_whole_queries):
    how = {"batch_size": 4 if has_whole_queries else 10, "has_whole_queries": has_whole_queries}
    how["pair_groups"] = np.arange(len(PAIRS))  # a group for each pair, to tell them apart
    whole = feed_of(**how)
    shares = [feed_of(share=(rank, num_ranks), **how) for rank in range(num_ranks)]
    for _ in range(7):
        batch, parts = whole.next_batch(), [feed.next_batch() for feed in shares]
        assert [pair for part in parts for pair in pairs_in(part)] == pairs_in(batch)
        assert torch.equal(torch.cat([part.group_ids for part in parts]), batch.group_ids)
        if not has_whole_queries:
            ends = [10 * rank // num_ranks for rank in range(num_ranks + 1)]
            assert [len(part.label_ids) for part in parts] == np.diff(ends).tolist()


# --- whole queries ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
def test_whole_queries_are_each_in_a_batch_once_and_their_pairs_side_by_side(batch_size):
    feed = feed_of(batch_size=batch_size, has_whole_queries=True)
    orders = set()
    for _ in range(8):  # epochs
        pairs = []
        for batch in batches_of(feed, 10 // batch_size):
            queries = batch.features[:, 0].int().tolist()
            assert len(set(queries)) == len(queries)  # each once
            assert batch.query_rows.unique().tolist() == list(range(len(queries)))
            for query, positives in zip(queries, batch.positive_ids.tolist(), strict=True):
                assert sorted(p for p in positives if p >= 0) == sorted(POSITIVES[query])
            pairs += pairs_in(batch)
        assert len(pairs) == len(set(pairs)) == 10 // batch_size * batch_size
        assert set(pairs) <= set(PAIRS)
        runs = [query for query, _ in itertools.groupby(query for query, _ in pairs)]
        assert len(set(runs)) == len(runs)  # also over the ends of batches
        orders.add(tuple(pairs))
    assert len(orders) > 1


def test_a_feed_that_cannot_be_is_refused():
    for settings, sentence in (
        *(({"batch_size": n}, rf"between 1 and 10 \(.* pairs\), got {n}") for n in (-1, 0, 11)),
        *(({"share": share}, "share must be") for share in ((-1, 2), (2, 2), (0, 0))),
        ({"has_whole_queries": True, "masks_all_positives": False}, "mask all their positives"),
    ):
        settings = {"batch_size": 3, "masks_all_positives": True, **settings}
        with pytest.raises(ValueError, match=sentence):
            PairFeed(dense_part(), generator=torch.Generator(), device=CPU, **settings)


# --- the order of an epoch ------------------------------------------------------------------------

ORDERS = [
    PairOrder(num_pairs, block_pairs, pool_blocks)
    for num_pairs in (1, 97, 300)
    for block_pairs in (1, 10, 64, 5000)
    for pool_blocks in (1, 3)
]


def key_of(number):
    return torch.randint(2**63 - 1, (1, 1), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_has_every_pair_once_in_whatever_pieces_it_is_asked_for(order):
    """A pool of it is made of a few runs of consecutive pairs."""
    for number in range(2):
        key = key_of(number)
        whole = order.pairs_at(0, order.num_pairs, key)
        assert torch.equal(whole.sort().values, torch.arange(order.num_pairs))
        for size in (17, 64):
            firsts = range(0, order.num_pairs, size)
            ends = [min(first + size, order.num_pairs) for first in firsts]
            pieces = [order.pairs_at(a, b, key) for a, b in zip(firsts, ends, strict=True)]
            assert torch.equal(torch.cat(pieces), whole)
        for pool in range(order.num_pools):
            pairs = whole[order.pool_start(pool) : order.pool_start(pool + 1)].sort().values
            num_runs = 1 + int((pairs.diff() > 1).sum())
            assert num_runs <= 2 * order.pool_blocks + 1  # the last block, or one around the end


def test_a_pair_is_as_likely_at_any_place():
    order, num_epochs = PairOrder(30, 4, 2), 900
    epochs = torch.stack([order.pairs_at(0, 30, key_of(n)) for n in range(num_epochs)])
    counts = torch.nn.functional.one_hot(epochs).sum(dim=0)  # (30, 30) by place and pair
    statistic = float(((counts - num_epochs / 30) ** 2 / (num_epochs / 30)).sum())
    # Of 30 x 30 cells with fixed sums: chi-square of 29 * 29, within 4 standard deviations.
    assert abs(statistic - 29**2) < 4 * (2 * 29**2) ** 0.5


def random_rows(lengths, seed=0):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(50, size=offsets[-1]).astype(np.int32)
    return Rows(offsets, ids)


@pytest.mark.parametrize(
    "lengths",
    [
        [1], [0, 0, 5, 0], [0] * 100 + [1] + [0] * 100 + [3], [17, 0, 16, 0, 15],
        np.random.default_rng(1).integers(0, 4, size=500).tolist(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("most_entries", [10**6, 7, 1])
def test_the_index_finds_the_pairs_of_pairs_of(lengths, most_entries):
    rows = random_rows(lengths)
    expected, index = pairs_of(rows), PairIndex(rows, most_entries=most_entries)
    assert len(index.first_rows) <= most_entries + 2
    pair_ids = np.random.default_rng(2).permutation(len(rows.ids))
    found = index.pairs_at(pair_ids)
    assert found.query_ids.dtype == found.label_ids.dtype == np.int64
    assert np.array_equal(found.query_ids, expected.query_ids[pair_ids])
    assert np.array_equal(found.label_ids, expected.label_ids[pair_ids])
