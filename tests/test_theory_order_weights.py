"""The weights of random draws, against all draws enumerated and against whole numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import theory_oracles as oracles
from evenhand.theory import (
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


def test_the_order_weighted_average_is_of_each_row():
    values = np.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    averages = order_weighted_average(values, [0.5, 0.25, 0.25])
    assert averages.tolist() == [3 / 2 + 2 / 4 + 1 / 4, 6 / 2 + 5 / 4 + 4 / 4]
    assert values.tolist() == [[1, 3, 2], [5, 4, 6]]  # the argument is as it was


def test_each_value_needs_a_weight():
    with pytest.raises(ValueError, match=r"weights must have the shape \(2,\)"):
        order_weighted_average([1.0, 2.0], [1.0])


# Weights against every draw.


@given(draws())
def test_the_weights_of_a_batch_are_those_of_every_batch_enumerated(problem):
    population, drawn, kept = problem
    weights = batch_weights(population, batch_size=drawn, num_hard_examples=kept)
    expected = [
        oracles.weight_of_rank(rank, population, drawn, kept) for rank in range(1, population + 1)
    ]
    assert weights == pytest.approx([float(weight) for weight in expected], rel=1e-13)
    assert weights.sum() == pytest.approx(1, rel=1e-13)


@given(draws(), st.data())
def test_their_order_weighted_average_is_the_expected_top_of_a_batch(problem, data):
    population, drawn, kept = problem
    values = data.draw(st.lists(whole_numbers, min_size=population, max_size=population))
    weights = batch_weights(population, batch_size=drawn, num_hard_examples=kept)
    expected = oracles.expected_top_of_draw([Fraction(value) for value in values], drawn, kept)
    actual = order_weighted_average(values, weights)
    assert actual == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


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
    expected = [
        float(oracles.shared_weight_of_rank(rank, num_labels, drawn, kept))
        for rank in range(1, num_labels)
    ]
    assert weights == pytest.approx(expected, rel=1e-13)


@given(draws(largest=40))
def test_the_weights_of_chosen_ranks_are_those_of_all(problem):
    population, drawn, kept = problem
    ranks = np.arange(population, 0, -1)
    for weights_fn in (
        lambda **ranks: batch_weights(
            population, batch_size=drawn, num_hard_examples=kept, **ranks
        ),
        lambda **ranks: shared_label_weights(
            population + 1, num_sampled_labels=drawn, num_hard_labels=kept, **ranks
        ),
    ):
        assert weights_fn(ranks=ranks) == pytest.approx(weights_fn()[::-1], rel=1e-12)


@given(draws(largest=60))
def test_a_larger_loss_never_weighs_less(problem):
    population, drawn, kept = problem
    weights = batch_weights(population, batch_size=drawn, num_hard_examples=kept)
    assert (np.diff(weights) <= 0).all()
    assert (weights >= 0).all()


# Corners.


def test_a_batch_of_everything_is_the_plain_average_of_the_largest():
    weights = batch_weights(5, batch_size=5, num_hard_examples=2)
    assert weights.tolist() == [1 / 2, 1 / 2, 0, 0, 0]


def test_a_batch_of_which_all_counts_is_the_plain_mean():
    weights = batch_weights(5, batch_size=3, num_hard_examples=3)
    assert weights == pytest.approx([1 / 5] * 5, rel=1e-15)


def test_the_largest_of_a_batch_of_two():
    # Of the 6 pairs of 4, rank 1 is the largest of 3, rank 2 of 2, rank 3 of 1.
    weights = batch_weights(4, batch_size=2, num_hard_examples=1)
    assert weights == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0], rel=1e-15)


def test_one_example_of_one():
    assert batch_weights(1, batch_size=1, num_hard_examples=1).tolist() == [1]


def test_all_labels_drawn_for_the_batch_leave_each_example_all_but_its_positive():
    weights = shared_label_weights(4, num_sampled_labels=4, num_hard_labels=2)
    assert weights.tolist() == [1 / 2, 1 / 2, 0]


def test_where_the_positive_was_drawn_the_average_is_over_one_label_less():
    # Of 3 labels 2 are drawn and both kept: with probability 1/3 the example sees both negatives,
    # with 2/3 one of them, which then has the whole weight.
    weights = shared_label_weights(3, num_sampled_labels=2, num_hard_labels=2)
    assert weights == pytest.approx([1 / 3 / 2 + 2 / 3 / 2] * 2, rel=1e-15)


def test_one_label_drawn_for_the_batch_is_at_times_the_positive_and_then_adds_nothing():
    weights = shared_label_weights(4, num_sampled_labels=1, num_hard_labels=1)
    assert weights == pytest.approx([1 / 4] * 3, rel=1e-15)


def test_one_label_in_all_leaves_no_negative():
    assert shared_label_weights(1, num_sampled_labels=1, num_hard_labels=1).shape == (0,)


def test_no_ranks_have_no_weights():
    assert batch_weights(9, batch_size=3, num_hard_examples=1, ranks=[]).shape == (0,)


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


def test_a_weight_too_small_for_float64_is_zero_and_no_rank_fails():
    ranks = np.linspace(BILLION // 2, BILLION, 50).astype(np.int64)
    actual = inclusion_probabilities(BILLION, num_drawn=2048, num_kept=8, ranks=ranks)
    assert oracles.inclusion_probability(BILLION // 2, BILLION, 2048, 8) == 0
    assert actual.tolist() == [0] * 50


@pytest.mark.parametrize("exponent", [-20, -100, -200, -300])
def test_a_tiny_weight_of_a_billion_keeps_its_digits(exponent):
    # Where no larger value may be drawn, P is close to (1 - i / N) ** (n - 1): solved for i.
    drawn = 512
    rank = int(BILLION * (1 - 10 ** (exponent / (drawn - 1))))
    actual = inclusion_probabilities(BILLION, num_drawn=drawn, num_kept=1, ranks=[rank])
    expected = oracles.inclusion_probability(rank, BILLION, drawn, 1)
    assert 10.0 ** (exponent - 1) < expected < 10.0 ** (exponent + 1)
    assert actual == pytest.approx([expected], rel=1e-10, abs=0)


def test_the_tail_of_a_population_half_drawn_keeps_its_digits():
    ranks = spread_ranks(3000)
    actual = inclusion_probabilities(3000, num_drawn=1500, num_kept=400, ranks=ranks)
    expected = [oracles.inclusion_probability(int(rank), 3000, 1500, 400) for rank in ranks]
    is_normal = np.array(expected) > 1e-307
    assert actual[is_normal] == pytest.approx(np.array(expected)[is_normal], rel=1e-10, abs=0)


def test_the_weights_of_a_hundred_thousand_examples_keep_their_digits():
    size, drawn, kept = 100_000, 256, 16
    ranks = spread_ranks(size)
    every = inclusion_probabilities(size, num_drawn=drawn, num_kept=kept)
    expected = [oracles.inclusion_probability(int(rank), size, drawn, kept) for rank in ranks]
    assert min(expected) < 1e-200
    is_normal = np.array(expected) > 1e-307
    actual = every[ranks - 1]
    assert actual[is_normal] == pytest.approx(np.array(expected)[is_normal], rel=1e-10, abs=0)


# Refusals.


@pytest.mark.parametrize(
    ("weights_fn", "message"),
    [
        (
            lambda: batch_weights(4, batch_size=5, num_hard_examples=1),
            r"batch_size must be between 1 and 4 \(the number of examples\), got 5",
        ),
        (
            lambda: batch_weights(4, batch_size=3, num_hard_examples=4),
            r"num_hard_examples must be between 1 and 3 \(the number of examples of the batch\)",
        ),
        (
            lambda: label_weights(4, num_sampled_labels=5, num_hard_labels=1),
            r"num_sampled_labels must be between 1 and 4 \(the number of negative labels\), got 5",
        ),
        (
            lambda: shared_label_weights(4, num_sampled_labels=4, num_hard_labels=5),
            r"num_hard_labels must be between 1 and 4 \(the number of sampled labels\), got 5",
        ),
        (
            lambda: inclusion_probabilities(4, num_drawn=2, num_kept=0),
            r"num_kept must be between 1 and 2 \(the number of values drawn\), got 0",
        ),
        (
            lambda: batch_weights(4, batch_size=2, num_hard_examples=1, ranks=[0, 4]),
            r"ranks must be between 1 and 4 \(the number of values\), got 0 to 4",
        ),
        (
            lambda: batch_weights(4, batch_size=2, num_hard_examples=1, ranks=[1.5]),
            r"ranks must be whole numbers, got float64",
        ),
    ],
)
def test_a_count_that_cannot_be_is_refused(weights_fn, message):
    with pytest.raises(ValueError, match=message):
        weights_fn()
