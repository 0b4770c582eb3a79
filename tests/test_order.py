"""The order of an epoch: every pair once, any place by itself, and random enough."""

import numpy as np
import pytest
import torch

from evenhand.data.dataset import Part, Rows, pairs_of
from evenhand.data.pairs import PairIndex
from evenhand.kernels.permutation import permute
from evenhand.training.feed import PairFeed
from evenhand.training.order import Order, pairs_at

ORDERS = [
    Order(num_pairs, block_pairs, pool_blocks)
    for num_pairs in (1, 10, 97, 300)
    for block_pairs in (1, 10, 64, 5000)
    for pool_blocks in (1, 3)
]


def key_of(number):
    return torch.randint(2**63 - 1, (1, 1), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_has_every_pair_once_in_whatever_pieces_it_is_asked_for(order):
    for number in range(2):
        key = key_of(number)
        whole = pairs_at(0, order.num_pairs, key, order)
        assert torch.equal(whole.sort().values, torch.arange(order.num_pairs))
        for size in (17, 64):
            pieces = [
                pairs_at(first, min(first + size, order.num_pairs), key, order)
                for first in range(0, order.num_pairs, size)
            ]
            assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pool_is_made_of_a_few_runs_of_consecutive_pairs(order):
    for pool in range(order.num_pools):
        start, end = order.pool_start(pool), order.pool_start(pool + 1)
        assert order.pool_of(start) == order.pool_of(end - 1) == pool
        pairs = pairs_at(start, end, key_of(3), order).sort().values
        num_runs = 1 + int((pairs.diff() > 1).sum())
        assert num_runs <= 2 * order.pool_blocks + 1  # the last block, or one around the end


def test_without_blocks_the_order_is_the_keyed_permutation_of_before():
    key = key_of(1)
    expected = permute(torch.arange(5, 50).unsqueeze(0), key, 100)[0]
    assert torch.equal(pairs_at(5, 50, key, Order(100)), expected)


def test_a_pair_is_as_likely_at_any_place():
    order, num_epochs = Order(30, 4, 2), 900
    epochs = torch.stack([pairs_at(0, 30, key_of(n), order) for n in range(num_epochs)])
    expected = num_epochs / 30
    statistic = 0.0
    for place in range(30):
        counts = torch.bincount(epochs[:, place], minlength=30)
        statistic += float(((counts - expected) ** 2 / expected).sum())
    # Of 30 x 30 cells with fixed sums: chi-square of 29 * 29, within 4 standard deviations.
    assert abs(statistic - 29**2) < 4 * (2 * 29**2) ** 0.5


def test_two_pairs_of_a_random_storage_meet_in_a_batch_as_often_as_after_a_perfect_shuffle():
    """The stored order is random: an epoch of blocks is a perfect shuffle of what was stored."""
    generator = np.random.default_rng(0)
    order, batch_size, num_rounds = Order(60, 5, 3), 6, 1000
    meetings = np.zeros((60, 60))
    for number in range(num_rounds):
        stored = generator.permutation(60)  # as the converter stores them, with another seed
        batch = stored[pairs_at(12, 12 + batch_size, key_of(number), order).numpy()]
        meetings[np.ix_(batch, batch)] += 1
    counts = meetings[np.triu_indices(60, k=1)]
    share = batch_size * (batch_size - 1) / (60 * 59)
    expected = num_rounds * share
    statistic = ((counts - expected) ** 2 / (expected * (1 - share))).sum()
    assert abs(statistic - len(counts)) < 5 * (2 * len(counts)) ** 0.5


def rows_of(lengths, seed=0):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(50, size=offsets[-1]).astype(np.int32)
    return Rows(offsets, ids)


@pytest.mark.parametrize(
    "lengths",
    [
        [1], [0, 0, 5, 0], [40], [0] * 100 + [1] + [0] * 100 + [3], [1] * 200, [17, 0, 16, 0, 15],
        np.random.default_rng(1).integers(0, 4, size=500).tolist(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("most_entries", [10**6, 100, 7, 1])
def test_the_index_finds_the_pairs_of_pairs_of(lengths, most_entries):
    rows = rows_of(lengths)
    expected, index = pairs_of(rows), PairIndex(rows, most_entries=most_entries)
    assert len(index.first_rows) <= most_entries + 2
    pair_ids = np.random.default_rng(2).permutation(len(rows.ids))
    found = index.pairs_at(pair_ids)
    assert found.query_ids.dtype == found.label_ids.dtype == np.int64
    assert np.array_equal(found.query_ids, expected.query_ids[pair_ids])
    assert np.array_equal(found.label_ids, expected.label_ids[pair_ids])


def feed_of(part, **settings):
    return PairFeed(
        part,
        batch_size=32,
        masks_all_positives=False,
        generator=torch.Generator().manual_seed(0),
        device=torch.device("cpu"),
        **settings,
    )


def test_a_feed_in_blocks_hands_out_every_pair_once_and_goes_on_from_a_place():
    rows = rows_of(np.random.default_rng(1).integers(0, 4, size=500))
    part = Part(Rows(np.arange(501), np.arange(500, dtype=np.int32)), rows, block_pairs=13)
    feed, per_epoch = feed_of(part), len(rows.ids) // 32
    for _ in range(2):
        pair_ids = torch.cat([feed.next_batch().pair_ids for _ in range(per_epoch)])
        assert len(pair_ids.unique()) == 32 * per_epoch
    state = feed.state()
    expected = [feed.next_batch() for _ in range(5)]
    shares = [feed_of(part, share=(rank, 3)) for rank in range(3)]
    for share in shares:
        share.load(state)
    for batch in expected:
        pieces = [share.next_batch().pair_ids for share in shares]
        assert torch.equal(torch.cat(pieces), batch.pair_ids)
