"""Scores by their definition, bags of features, and the rows that tables begin with."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand import models
from evenhand.losses import contrastive_loss
from evenhand.models import (
    Bags,
    MlpEncoder,
    Retriever,
    backward,
    random_rows,
)
from evenhand.risk import mean_weights
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch
from evenhand.training.step import gradients_of, mine

# --- the model ----------------------------------------------------------------------------------

WIDTH, NUM_LABELS = 4, 9
KINDS = {
    "cosine": {"is_cosine": True, "scale": 3.0},
    "dot": {"is_cosine": False, "scale": 0.5},
    "dot and bias": {"is_cosine": False, "has_label_bias": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def retriever(kind="cosine", seed=0):
    generator = torch.Generator().manual_seed(seed)
    encoder = MlpEncoder(5, WIDTH, generator=generator)
    model = Retriever(encoder, NUM_LABELS, WIDTH, generator=generator, **KINDS[kind]).double()
    if model.label_bias is not None:
        model.label_bias.data.normal_(generator=generator)
    return model


def score_by_hand(model, query, label_id):
    label = model.label_table[label_id].tolist()
    product = sum(q * v for q, v in zip(query, label, strict=True))
    if model.is_cosine:
        product /= math.hypot(*query) * math.hypot(*label)
    bias = 0 if model.label_bias is None else model.label_bias[label_id].item()
    return model.scale * product + bias


@every_kind
def test_scores_match_their_definition(kind):
    model, features = retriever(kind), torch.randn(3, 5, dtype=torch.float64)
    scores = model.query_vectors(features) @ model.label_vectors().T
    if model.biases() is not None:
        scores = scores + model.biases()
    for row, query in zip(scores.tolist(), model.encoder(features).tolist(), strict=True):
        expected = [score_by_hand(model, query, label_id) for label_id in range(NUM_LABELS)]
        assert row == pytest.approx(expected, rel=1e-12)


def test_a_query_of_zeros_does_not_throw_dense_weights_far_away():
    """With a bias that is still zero its vector is the zero vector."""
    encoder = MlpEncoder(3, WIDTH, hidden_widths=(4,))
    model = Retriever(encoder, NUM_LABELS, WIDTH)
    batch = Batch(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([[0], [1]]))
    queries = model.query_vectors(batch.features)
    sample = LabelSample(torch.tensor([2, 3]), torch.zeros(2))
    mined = mine(
        queries, batch, model, sample, num_hard_labels=2,
        loss_fn=contrastive_loss, risk_fn=mean_weights,
    )  # fmt: skip
    gradients_of(mined, queries, batch, model)
    gradients = [weights.grad for weights in encoder.parameters()]
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)


# --- bags -----------------------------------------------------------------------------------------

NUM_FEATURES = 7


@st.composite
def random_bags(draw):
    """Some bags may be empty, and a bag may name a feature twice."""
    feature = st.integers(0, NUM_FEATURES - 1)
    rows = draw(st.lists(st.lists(feature, max_size=5), min_size=1, max_size=6))
    ids = torch.tensor([*itertools.chain(*rows)], dtype=torch.int64)
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    if draw(st.booleans()):
        return Bags(ids, offsets)
    values = draw(st.lists(st.floats(-2, 2), min_size=len(ids), max_size=len(ids)))
    return Bags(ids, offsets, torch.tensor(values, dtype=torch.float64))


def matrix_of(bags):
    """(B, F): what each feature of a bag counts, its value or its share of the bag."""
    matrix = torch.zeros(len(bags.offsets) - 1, NUM_FEATURES, dtype=torch.float64)
    for row, own in enumerate(matrix):
        start, stop = bags.offsets[row : row + 2].tolist()
        for entry in range(start, stop):
            value = 1 / (stop - start) if bags.values is None else bags.values[entry]
            own[bags.ids[entry]] += value
    return matrix


@given(random_bags(), st.data())
def test_taken_bags_are_the_chosen_ones_in_their_order(bags, data):
    position = st.integers(0, len(bags.offsets) - 2)
    positions = torch.tensor(data.draw(st.lists(position, max_size=6)), dtype=torch.int64)
    taken = bags.take(positions)
    assert torch.equal(matrix_of(taken), matrix_of(bags)[positions])
    assert (taken.values is None) == (bags.values is None)


def test_a_frozen_encoder_has_no_gradient():
    encoder = MlpEncoder(4, WIDTH).requires_grad_(False)
    with torch.no_grad():
        assert backward(encoder, torch.randn(6, 4), torch.randn(6, WIDTH)) is None
    assert all(parameter.grad is None for parameter in encoder.parameters())


# --- the rows that tables begin with --------------------------------------------------------------


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def one_draw(num_rows, width, generator):
    return torch.randn(num_rows, width, generator=generator) / math.sqrt(width)


@pytest.mark.parametrize("width", [1, 3, 16, 20, 2**15 + 3])
def test_a_small_table_is_one_draw_to_the_bit(width, monkeypatch):
    for chunk in (models.CHUNK, 16, 1000):
        monkeypatch.setattr(models, "CHUNK", chunk)
        ours, theirs = generator(), generator()
        for num_rows in (0, 1, 2, 15, 17, 64, 50_000 // width):
            expected = one_draw(num_rows, width, theirs)
            assert torch.equal(random_rows(num_rows, width, ours), expected)
            assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(models, "FIRST_BLOCK", 100)
    monkeypatch.setattr(models, "LATER_BLOCK", 30)
    monkeypatch.setattr(models, "CHUNK", 64)


@pytest.mark.parametrize("width", [1, 3, 16])
def test_every_range_is_that_of_the_whole_table(width, small_blocks):
    num_rows, whole_draws = 237, generator()
    whole = random_rows(num_rows, width, whole_draws)
    assert torch.equal(whole[:100], one_draw(100, width, generator()))
    for first in range(0, num_rows + 1, 7):
        for last in {first, first + 1, first + 30, 100, 130, num_rows}:
            if first <= last <= num_rows:
                draws = generator()
                part = random_rows(num_rows, width, draws, rows=(first, last), dtype=torch.bfloat16)
                assert torch.equal(part, whole[first:last].bfloat16())
                assert torch.equal(draws.get_state(), whole_draws.get_state())


def test_blocks_and_tables_differ(small_blocks):
    draws = generator()
    rows = torch.cat([random_rows(400, 8, draws), random_rows(400, 8, draws)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert abs(float(rows.norm(dim=1).mean()) - 1) < 0.05


def test_on_the_meta_device_nothing_is_drawn():
    draws = generator()
    assert random_rows(10**9, 128, draws, device="meta").shape == (10**9, 128)
    assert torch.equal(draws.get_state(), generator().get_state())
