import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.models import encoders
from evenhand.models.encoders import (
    BagEncoder,
    Bags,
    MlpEncoder,
    backward,
    random_rows,
    take_features,
)

NUM_FEATURES, WIDTH = 7, 3


def bags_from(rows, values=None):
    """Bags from lists of feature ids and, where given, lists of their values."""
    ids = torch.tensor([feature for row in rows for feature in row], dtype=torch.int64)
    offsets = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    if values is None:
        return Bags(ids, offsets)
    flat = [value for row in values for value in row]
    return Bags(ids, offsets, torch.tensor(flat, dtype=torch.float64))


def rows_of(bags):
    """[[(feature, value), ...], ...]; a value of None where the bags have none."""
    values = [None] * len(bags.ids) if bags.values is None else bags.values.tolist()
    entries = list(zip(bags.ids.tolist(), values, strict=True))
    offsets = bags.offsets.tolist()
    return [entries[start:stop] for start, stop in pairwise(offsets)]


@st.composite
def random_bags(draw):
    """Some bags may be empty, and a bag may name a feature twice."""
    rows = draw(
        st.lists(st.lists(st.integers(0, NUM_FEATURES - 1), max_size=5), min_size=1, max_size=6)
    )
    if draw(st.booleans()):
        return bags_from(rows)
    value = st.floats(-2, 2)
    lengths = [len(row) for row in rows]
    return bags_from(rows, [draw(st.lists(value, min_size=n, max_size=n)) for n in lengths])


def bag_encoder():
    return BagEncoder(NUM_FEATURES, WIDTH, generator=torch.Generator().manual_seed(0)).double()


def weights_of(row):
    """What each feature of a bag counts: its value, or its share of the bag."""
    return [(feature, 1 / len(row) if value is None else value) for feature, value in row]


# Bags


@given(random_bags())
def test_a_bag_is_the_weighted_sum_or_the_mean_of_its_rows(bags):
    encoder = bag_encoder()
    table = encoder.weight.tolist()
    actual = encoder(bags).tolist()
    for vector, row in zip(actual, rows_of(bags), strict=True):
        for column in range(WIDTH):
            expected = sum(weight * table[feature][column] for feature, weight in weights_of(row))
            assert vector[column] == pytest.approx(expected, rel=1e-12, abs=1e-14)


@given(random_bags())
def test_the_way_back_through_a_bag_matches_the_loops(bags):
    rows = rows_of(bags)
    gradients = torch.randn(len(rows), WIDTH, dtype=torch.float64)
    ids, values = bag_encoder().row_gradients(bags, gradients)
    expected = torch.zeros(NUM_FEATURES, WIDTH, dtype=torch.float64)
    for gradient, row in zip(gradients, rows, strict=True):
        for feature, weight in weights_of(row):
            expected[feature] += weight * gradient
    assert sorted(ids.tolist()) == sorted(set(bags.ids.tolist()))
    assert values.shape == (len(ids), WIDTH)
    actual = torch.zeros_like(expected).index_copy(0, ids, values)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    values = None if bags.values is None else bags.values.float()
    ids, rows = bag_encoder().row_gradients(bags._replace(values=values), gradients.float())
    assert rows.dtype == torch.float32
    actual = torch.zeros_like(expected).index_copy(0, ids, rows.double())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# Taking examples out of a batch


@given(random_bags(), st.data())
def test_taken_bags_are_the_chosen_ones_in_their_order(bags, data):
    rows = rows_of(bags)
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    taken = take_features(bags, torch.tensor(positions))
    assert rows_of(taken) == [rows[position] for position in positions]
    assert (taken.values is None) == (bags.values is None)


# Dense features


def dense_by_hand(encoder, features):
    """x W' + b for every layer, max(0, .) between them, in loops."""
    vectors = features.tolist()
    for number, layer in enumerate(encoder.layers):
        weight, bias = layer.weight.tolist(), layer.bias.tolist()
        vectors = [
            [
                sum(w * x for w, x in zip(row, vector, strict=True)) + b
                for row, b in zip(weight, bias, strict=True)
            ]
            for vector in vectors
        ]
        if number < len(encoder.layers) - 1:
            vectors = [[max(0.0, x) for x in vector] for vector in vectors]
    return vectors


@pytest.mark.parametrize("hidden_widths", [(), (5,), (6, 4)])
def test_an_mlp_matches_the_loops(hidden_widths):
    encoder = MlpEncoder(4, WIDTH, hidden_widths=hidden_widths).double()
    for layer in encoder.layers:
        layer.bias.data.normal_()
    features = torch.randn(5, 4, dtype=torch.float64)
    for actual, expected in zip(
        encoder(features).tolist(), dense_by_hand(encoder, features), strict=True
    ):
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_the_way_back_through_an_mlp_fills_grad_even_where_gradients_are_off():
    encoder = MlpEncoder(4, WIDTH, hidden_widths=(5,)).double()
    features = torch.randn(6, 4, dtype=torch.float64)
    gradients = torch.randn(6, WIDTH, dtype=torch.float64)
    expected = torch.autograd.grad(encoder(features), list(encoder.parameters()), gradients)
    with torch.no_grad():
        assert backward(encoder, features, gradients) is None
    for parameter, gradient in zip(encoder.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert backward(encoder.requires_grad_(False), features, gradients) is None  # a frozen one


# Beginnings


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def one_draw(num_rows, width, generator):
    return torch.randn(num_rows, width, generator=generator) / math.sqrt(width)


@pytest.mark.parametrize("width", [1, 3, 16, 20, 2**15 + 3])
def test_a_small_table_is_one_draw_to_the_bit(width, monkeypatch):
    for chunk in (encoders.CHUNK, 16, 1000):
        monkeypatch.setattr(encoders, "CHUNK", chunk)
        ours, theirs = generator(), generator()
        for num_rows in (0, 1, 2, 15, 17, 64, 50_000 // width):
            assert torch.equal(
                random_rows(num_rows, width, ours), one_draw(num_rows, width, theirs)
            )
            assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(encoders, "FIRST_BLOCK", 100)
    monkeypatch.setattr(encoders, "LATER_BLOCK", 30)
    monkeypatch.setattr(encoders, "CHUNK", 64)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_every_range_is_that_of_the_whole_table(width, small_blocks):
    num_rows, whole_draws = 237, generator()
    whole = random_rows(num_rows, width, whole_draws)
    assert torch.equal(whole[:100], one_draw(100, width, generator()))
    for first in range(0, num_rows + 1, 7):
        for last in {first, first + 1, first + 30, 100, 130, num_rows}:
            if first <= last <= num_rows:
                draws = generator()
                part = random_rows(num_rows, width, draws, rows=(first, last))
                assert torch.equal(part, whole[first:last])
                assert torch.equal(draws.get_state(), whole_draws.get_state())


def test_blocks_and_tables_differ(small_blocks):
    draws = generator()
    rows = torch.cat([random_rows(400, 8, draws), random_rows(400, 8, draws)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert abs(float(rows.norm(dim=1).mean()) - 1) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_the_float32_numbers_converted(dtype, small_blocks):
    ours = random_rows(300, 12, generator(), rows=(50, 250), dtype=dtype)
    assert torch.equal(ours, random_rows(300, 12, generator())[50:250].to(dtype))


def test_on_the_meta_device_nothing_is_drawn():
    draws = generator()
    assert random_rows(10**9, 128, draws, device="meta").shape == (10**9, 128)
    assert torch.equal(draws.get_state(), generator().get_state())


@pytest.mark.parametrize("rows", [(-1, 3), (0, 11), (5, 4), (11, 11)])
def test_a_range_outside_the_table_is_refused(rows):
    with pytest.raises(ValueError, match="rows must be a range within 0 to 10, got"):
        random_rows(10, 2, rows=rows)
