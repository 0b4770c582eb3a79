"""Held-out training queries against loops: who may be held out, and the bins of what is left."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data.csr import rows_from_lists
from evenhand.data.held_out import frequency_bins, hold_out_queries

NUM_LABELS = 9
# Queries with several labels, with one and with none; labels that are frequent, rare and never.
label_sets = st.lists(st.integers(0, NUM_LABELS - 2), max_size=4, unique=True)
data_sets = st.lists(label_sets, min_size=1, max_size=12)
each_share = st.sampled_from([0.0, 0.1, 0.5, 1.0])
seeds = st.integers(0, 10**6)


def held_out(lists, share, seed):
    return hold_out_queries(
        rows_from_lists(lists), num_labels=NUM_LABELS, share=share, seed=seed
    ).tolist()


def pairs_left(lists, is_held_out):
    """label -> how many of its pairs are not held out."""
    counts = dict.fromkeys(range(NUM_LABELS), 0)
    for labels, is_out in zip(lists, is_held_out, strict=True):
        for label in labels:
            counts[label] += not is_out
    return counts


@given(data_sets, each_share, seeds)
def test_no_label_loses_its_last_pair_and_those_put_back_are_the_ones_that_had_it(
    lists, share, seed
):
    """Whole queries are chosen, so that no pair of one that is held out is learnt from."""
    is_chosen = (np.random.default_rng(seed).random(len(lists)) < share).tolist()
    left = pairs_left(lists, is_chosen)
    is_held_out = held_out(lists, share, seed)
    assert is_held_out == [
        is_out and all(left[label] for label in labels)
        for labels, is_out in zip(lists, is_chosen, strict=True)
    ]
    left = pairs_left(lists, is_held_out)
    assert all(left[label] for labels in lists for label in labels)
    assert held_out(lists, share, seed) == is_held_out


def test_the_share_is_that_of_the_queries_and_another_seed_holds_out_others():
    lists = [[q % 3] for q in range(20_000)]
    assert not any(held_out(lists, 0.0, 0))
    first, second = (np.array(held_out(lists, 0.02, seed)) for seed in (0, 1))
    assert first.sum() == pytest.approx(400, abs=80)  # four deviations
    assert 0 < (first & second).sum() < 30


@given(data_sets, each_share, seeds)
def test_bins_are_of_the_pairs_left_in_1_and_2_and_3_to_4_and_so_on(lists, share, seed):
    is_held_out = held_out(lists, share, seed)
    bins = frequency_bins(rows_from_lists(lists), np.array(is_held_out), num_labels=NUM_LABELS)
    left = pairs_left(lists, is_held_out)
    bin_of = (
        {1: 0, 2: 1, 3: 2, 4: 2} | dict.fromkeys(range(5, 9), 3) | dict.fromkeys(range(9, 17), 4)
    )
    pairs = [(label, is_out) for q, is_out in enumerate(is_held_out) for label in lists[q]]
    assert bins.pair_bins.tolist() == [2 * bin_of[left[label]] + is_out for label, is_out in pairs]
    for place, mean in enumerate(bins.shape):
        roots = [left[label] ** -0.5 for label, _ in pairs if bin_of[left[label]] == place]
        assert mean == pytest.approx(sum(roots) / max(1, len(roots)), rel=1e-12)


def test_labels_with_one_pair_left_are_measured_by_those_that_had_two():
    lists = [[0], [1], [1], [2], [2], [2]]
    is_held_out = np.array([False, True, False, False, True, False])
    bins = frequency_bins(rows_from_lists(lists), is_held_out, num_labels=3)
    assert bins.pair_bins.tolist() == [0, 1, 0, 2, 3, 2]  # label 1 beside label 0, which had one
