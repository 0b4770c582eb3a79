"""The weights of random draws, against all draws enumerated and against whole numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import theory_oracles as oracles
from evenhand.theory.order_weights import (
    batch_weights,
    inclusion_probabilities,
    label_weights,
    order_weighted_average,
    shared_label_weights,
)

BILLION = 10**9
whole_numbers = st.integers(-20, 20)  # small, so that ties are frequent


@st.composite
def draws(draw, largest=7):
    """(population, drawn, kept)"""
    population = draw(st.integers(1, largest))
    drawn = draw(st.integers(1, population))
    return population, drawn, draw(st.integers(1, drawn))


def spread_ranks(last):
    """A hundred ranks or more from 1 to the last, some by their logarithm, some evenly."""
    logarithmic, evenly = np.geomspace(1, last, 60), np.linspace(1, last, 60)
    ranks = np.unique(np.concatenate([logarithmic, evenly]).astype(np.int64))
    assert len(ranks) >= 100
    return ranks


# The order-weighted average.


@given(st.lists(st.tuples(whole_numbers, whole_numbers), min_size=1, max_size=8))
def test_the_order_weighted_average_is_the_sum_of_the_sorted(pairs):
    values, weights = map(list, zip(*pairs, strict=True))
    expected = oracles.order_weighted_average(values, weights)
    assert order_weighted_average(values, weights) == expected


def test_the_order_weighted_average_is_of_each_row_and_each_value_needs_a_weight():
    values = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    averages = order_weighted_average(values, [0.5, 0.25, 0.25])
    assert averages.tolist() == [3 / 2 + 2 / 4 + 1 / 4, 6 / 2 + 5 / 4 + 4 / 4]
    assert values.tolist() == [[1, 3, 2], [5, 4, 6]]  # the argument is as it was
    with pytest.raises(ValueError, match=r"weights must have the shape \(2,\)"):
        order_weighted_average([1.0, 2.0], [1.0])


# Weights against every draw.


@given(draws())
def test_the_weights_of_a_batch_are_those_of_every_batch_enumerated(problem):
    population, drawn, kept = problem
    weights = batch_weights(population, batch_size=drawn, num_hard_examples=kept)
    ranks = range(1, population + 1)
    expected = [float(oracles.weight_of_rank(rank, ranks, drawn, kept)) for rank in ranks]
    assert weights == pytest.approx(expected, rel=1e-13)
    assert weights.sum() == pytest.approx(1, rel=1e-13)


@given(draws())
def test_labels_drawn_for_each_example_have_weights_of_the_same_form(problem):
    num_negatives, drawn, kept = problem
    weights = label_weights(num_negatives, num_sampled_labels=drawn, num_hard_labels=kept)
    expected = batch_weights(num_negatives, batch_size=drawn, num_hard_examples=kept)
    assert weights.tolist() == expected.tolist()


@given(draws())
def test_labels_drawn_for_the_batch_have_the_weights_of_every_draw_enumerated(problem):
    num_labels, drawn, kept = problem
    weights = shared_label_weights(num_labels, num_sampled_labels=drawn, num_hard_labels=kept)
    ranks = range(num_labels)  # 0: the positive
    expected = [float(oracles.weight_of_rank(rank, ranks, drawn, kept)) for rank in ranks[1:]]
    assert weights == pytest.approx(expected, rel=1e-13)


# A billion.


def last_rank_above(floor, population, drawn, kept):
    """The last rank whose probability is above the floor, by whole numbers and halving."""
    low, high = 1, population + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_above = oracles.inclusion_probability(middle, population, drawn, kept) > floor
        low, high = (middle, high) if is_above else (low, middle)
    return low


@pytest.mark.parametrize(
    ("drawn", "kept"), [(64, 1), (512, 1), (512, 128), (2048, 64), (4096, 16), (512, 500)]
)
def test_a_hundred_ranks_of_a_billion_agree_with_whole_numbers(drawn, kept):
    ranks = spread_ranks(last_rank_above(1e-300, BILLION, drawn, kept))
    expected = [oracles.inclusion_probability(int(rank), BILLION, drawn, kept) for rank in ranks]
    assert max(expected) == 1
    assert min(expected) < (1e-200 if kept < drawn / 2 else 1e-60)
    actual = inclusion_probabilities(BILLION, num_drawn=drawn, num_kept=kept, ranks=ranks)
    assert actual == pytest.approx(expected, rel=1e-10, abs=0)
    weights = batch_weights(BILLION, batch_size=drawn, num_hard_examples=kept, ranks=ranks)
    expected = [probability * drawn / (BILLION * kept) for probability in expected]
    assert weights == pytest.approx(expected, rel=1e-10, abs=0)


def test_every_weight_of_a_population_also_half_drawn_keeps_its_digits():
    for size, drawn, kept in ((3000, 1500, 400), (100_000, 256, 16)):
        ranks = spread_ranks(size)
        expected = [oracles.inclusion_probability(int(rank), size, drawn, kept) for rank in ranks]
        assert min(expected) < 1e-200
        is_normal = np.array(expected) > 1e-307
        every = inclusion_probabilities(size, num_drawn=drawn, num_kept=kept)[ranks - 1]
        assert every[is_normal] == pytest.approx(np.array(expected)[is_normal], rel=1e-10, abs=0)


# Refusals.


def test_a_count_that_cannot_be_is_refused():
    def of_ranks(ranks):
        return batch_weights(4, batch_size=2, num_hard_examples=1, ranks=ranks)

    for weights_fn, message in (
        (lambda: batch_weights(4, batch_size=5, num_hard_examples=1), "batch_size .* 1 and 4"),
        (lambda: batch_weights(4, batch_size=3, num_hard_examples=4), "num_hard_examples .* 3"),
        (lambda: label_weights(4, num_sampled_labels=5, num_hard_labels=1), "sampled_labels .* 4"),
        (lambda: shared_label_weights(4, num_sampled_labels=4, num_hard_labels=5), "hard_l.* 4"),
        (lambda: inclusion_probabilities(4, num_drawn=2, num_kept=0), "num_kept .* got 0"),
        (lambda: of_ranks([0, 4]), "ranks must be between 1 and 4 .*got 0 to 4"),
        (lambda: of_ranks([1.5]), "ranks must be whole numbers, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            weights_fn()
