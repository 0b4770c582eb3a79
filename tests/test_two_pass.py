"""Two passes against one: the same loss, differentiated by autograd over the whole batch.

The obvious formula multiplies by dropout masks that were read off the first pass by hooks, so it
knows nothing of how they are drawn.
"""

import copy
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from evenhand.encoding import (
    SeededDropout,
    draw_seeds,
    encode_in_chunks,
    take_examples,
    two_pass,
)
from evenhand.losses import softmax_loss
from evenhand.mining import mask_positives
from evenhand.models import Passes, Retriever, encode
from evenhand.objective import s2m_loss
from evenhand.risk import top_weights
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch
from evenhand.training.step import gradients_of, mine

WIDTH, LENGTH, B = 8, 5, 11


class Encoder(nn.Module):
    """Attention, a perceptron and dropout in all the places where transformers have it."""

    def __init__(self, share=0.4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=share, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, tokens):
        return self.layers(tokens).mean(1)


class Masked(nn.Module):
    """Dropout by given masks, or one that keeps what it draws for the rows of a chunk."""

    def __init__(self, share):
        super().__init__()
        self.share, self.drawn, self.given = share, [], None

    def forward(self, values):
        if self.given is not None:
            return values * self.given
        dropped = nn.functional.dropout(torch.ones_like(values), self.share, self.training)
        self.drawn.append(dropped)
        return values * dropped


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, WIDTH)
        self.inputs, self.hidden = Masked(0.2), Masked(0.5)

    def forward(self, features):
        return self.second(self.hidden(self.first(self.inputs(features)).tanh()))


def known_to_drop(encoder, features):
    """The encoder, of which it is known that it has dropout: no chunk is run twice any more."""
    encode_in_chunks(encoder, features, chunk_size=1, seeds=draw_seeds(1))
    for dropout in (encoder.inputs, encoder.hidden):
        dropout.drawn.clear()
    return encoder


class Problem(NamedTuple):
    """Scores of a batch, for losses of the query vectors and the label table."""

    labels: torch.Tensor
    label_ids: torch.Tensor
    sampled: torch.Tensor

    def loss(self, queries, num_hard_examples=3):
        positive = (queries * self.labels[self.label_ids]).sum(1)
        scores = queries @ self.labels[self.sampled].T
        scores = mask_positives(scores, self.sampled, self.label_ids.unsqueeze(1))
        return s2m_loss(positive, scores, num_hard_labels=4, num_hard_examples=num_hard_examples)


@pytest.fixture
def problem():
    torch.manual_seed(3)
    labels = torch.randn(30, WIDTH, dtype=torch.float64)
    return Problem(labels, torch.randint(30, (B,)), torch.randperm(30)[:9])


def gradients(encoder):
    return {name: weight.grad for name, weight in encoder.named_parameters()}


def assert_same_gradients(actual, expected):
    for name, gradient in expected.items():
        if gradient is None:
            assert actual[name] is None
        else:
            torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, B])
def test_it_is_the_gradient_of_the_obvious_formula_with_the_same_masks(problem, chunk_size):
    features = torch.randn(B, 6, dtype=torch.float64)
    encoder = known_to_drop(Perceptron().double().train(), features[:1])
    vectors = two_pass(encoder, features, chunk_size=chunk_size)
    for dropout in (encoder.inputs, encoder.hidden):
        dropout.masks = torch.cat(dropout.drawn)  # of the first pass
    loss = problem.loss(vectors)
    loss.backward()
    actual = copy.deepcopy(gradients(encoder))
    encoder.zero_grad()
    for dropout in (encoder.inputs, encoder.hidden):
        dropout.given = dropout.masks
    expected = problem.loss(encoder(features))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same_gradients(actual, gradients(encoder))
    assert float(encoder.first.weight.grad.abs().max()) > 0.01


@pytest.mark.parametrize(("chunk_size", "attention_share"), [(2, 0.4), (7, 0.4), (2, 0.0)])
def test_a_transformer_with_dropout_has_the_gradient_of_one_pass_whatever_the_chunks(
    problem, chunk_size, attention_share
):
    """In one chunk with all rows differentiated it is plain autograd under one mode."""
    encoder, seeds = Encoder().double(), draw_seeds(B)
    for layer in encoder.layers.layers:
        layer.self_attn.dropout = attention_share  # 0: a fused kernel, on a CPU too
    tokens = torch.randn(B, LENGTH, WIDTH, dtype=torch.float64)
    problem.loss(two_pass(encoder, tokens, chunk_size=chunk_size, seeds=seeds)).backward()
    actual = copy.deepcopy(gradients(encoder))
    encoder.zero_grad()
    with SeededDropout(seeds):
        vectors = encoder(tokens)
    problem.loss(vectors).backward()
    assert_same_gradients(actual, gradients(encoder))


def test_dropout_that_begins_later_is_noticed_and_none_costs_nothing(monkeypatch):
    encoder, features = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0)), torch.randn(B, 6)
    entered = []
    enter = SeededDropout.__enter__
    monkeypatch.setattr(SeededDropout, "__enter__", lambda m: entered.append(1) or enter(m))
    vectors = two_pass(encoder, features, chunk_size=4)
    vectors.sum().backward()
    assert not entered
    encoder[1].p = 0.5
    state, seeds = torch.get_rng_state(), draw_seeds(B, torch.Generator().manual_seed(0))
    by_chunks = [encode_in_chunks(encoder, features, chunk_size=n, seeds=seeds) for n in (2, B)]
    assert entered
    torch.testing.assert_close(*by_chunks)
    assert torch.equal(state, torch.get_rng_state())  # masks are of the seeds alone


def test_only_survivors_are_encoded_again(problem):
    seen = []

    class Spy(nn.Linear):
        def forward(self, features):
            seen.append((torch.is_grad_enabled(), len(features)))
            return super().forward(features)

    encoder = Spy(6, WIDTH).double()
    features = torch.randn(B, 6, dtype=torch.float64)
    problem.loss(two_pass(encoder, features, chunk_size=4), num_hard_examples=5).backward()
    assert seen == [(False, 4), (False, 4), (False, 3), (True, 4), (True, 1)]


def test_both_sides_of_one_tower_and_accumulated_steps_add_up(problem):
    encoder, seeds = Encoder().double(), draw_seeds(2 * B)
    tokens = torch.randn(2 * B, LENGTH, WIDTH, dtype=torch.float64)
    queries, labels = seeds[:B], seeds[B:]

    def loss(encode):
        vectors = encode(tokens[B:], labels)
        own = problem._replace(
            labels=vectors, label_ids=torch.arange(B), sampled=torch.arange(0, B, 2)
        )
        return own.loss(encode(tokens[:B], queries))

    for _ in range(2):
        loss(lambda own, seeds: two_pass(encoder, own, chunk_size=3, seeds=seeds)).backward()
    actual = copy.deepcopy(gradients(encoder))
    encoder.zero_grad()

    def at_once(own, seeds):
        with SeededDropout(seeds):
            return encoder(own)

    (2 * loss(at_once)).backward()
    assert_same_gradients(actual, gradients(encoder))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_seeded_dropout_drops_its_share_and_belongs_to_the_example(share):
    seeds = draw_seeds(300, torch.Generator().manual_seed(0))
    values = torch.ones(300, 40, 20)
    with SeededDropout(seeds):
        first, second = (nn.functional.dropout(values, share) for _ in range(2))
    assert (first == 0).float().mean().item() == pytest.approx(share, abs=0.004)
    for dimension in range(3):  # no row, place or feature has a share of its own
        others = [d for d in range(3) if d != dimension]
        means = (first == 0).float().mean(others)
        assert (means - share).abs().max() < 5 * (
            share * (1 - share) * means.numel() / values.numel()
        ) ** 0.5 + 1e-9
    if 0 < share < 1:
        agree = (first == second).float().mean().item()
        assert agree == pytest.approx(share**2 + (1 - share) ** 2, abs=0.004)
        torch.testing.assert_close(first.max(), torch.tensor(1 / (1 - share)))
    own = torch.tensor([7, 200, 3])
    with SeededDropout(seeds[own]):  # in another chunk, and padded further
        again = nn.functional.dropout(torch.ones(3, 50, 20), share)
    assert torch.equal(again[:, :40], first[own])


def test_heads_and_feature_dropout_have_masks_of_their_examples():
    seeds = draw_seeds(6)
    heads = torch.ones(6 * 4, 5, 5)  # as in attention: an example's heads follow one another
    planes = torch.ones(6, 3, 4, 4)
    with SeededDropout(seeds):
        all_heads = nn.functional.dropout(heads, 0.5)
        all_planes = nn.functional.dropout2d(planes, 0.5)
    with SeededDropout(seeds[2:3]):
        assert torch.equal(nn.functional.dropout(heads[:4], 0.5), all_heads[8:12])
        assert torch.equal(nn.functional.dropout2d(planes[:1], 0.5), all_planes[2:3])
    assert all_heads.view(6, 4, 25).unique(dim=1).shape[1] > 1


def test_the_seeds_follow_the_generator_and_eval_drops_nothing():
    encoder, tokens = Encoder(), torch.randn(B, LENGTH, WIDTH)

    def encode():
        torch.manual_seed(5)
        return two_pass(encoder, tokens, chunk_size=4)

    assert torch.equal(encode(), encode())
    assert not torch.equal(encode(), two_pass(encoder, tokens, chunk_size=4))
    encoder.eval()
    torch.testing.assert_close(two_pass(encoder, tokens, chunk_size=4), encoder(tokens))


def test_features_of_every_form():
    tokens, lengths = torch.arange(12).view(4, 3), torch.arange(4)
    positions = torch.tensor([3, 1])
    taken = take_examples({"a": (tokens, ["w", "x", "y", "z"]), "b": lengths}, positions)
    assert torch.equal(taken["a"][0], tokens[positions])
    assert taken["a"][1] == ["z", "x"]
    assert taken["b"].tolist() == [3, 1]


def test_mixed_precision_is_that_of_the_first_pass():
    seen = []

    class Spy(nn.Linear):
        def forward(self, features):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            with torch.autocast("cpu", enabled=False):  # some CPUs cannot multiply bfloat16
                return super().forward(features)

    encoder = Spy(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors = two_pass(encoder, torch.ones(3, 2), chunk_size=3)
    vectors.sum().backward()
    assert seen == [(True, torch.bfloat16)] * 2


def test_what_cannot_be_repeated_is_refused():
    class Noise(nn.Module):
        def forward(self, features):
            return features + torch.randn_like(features)

    class Columns(nn.Module):
        def forward(self, features):
            return nn.functional.dropout(features.T, 0.5).T

    with pytest.raises(ValueError, match="two passes can repeat those of dropout alone"):
        two_pass(Noise(), torch.ones(3, 2), chunk_size=3)
    with pytest.raises(ValueError, match="the first dimension must be theirs"):
        two_pass(Columns(), torch.ones(3, 2), chunk_size=3)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        two_pass(nn.Linear(2, 2), torch.ones(3, 2), chunk_size=0)


def test_a_fused_attention_without_dropout_may_leave_it_out():
    heads = torch.zeros(1, 1, 2, 8, device="meta")
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    with SeededDropout(torch.zeros(1, dtype=torch.int64)):
        attend(heads, heads, heads)
        with pytest.raises(ValueError, match="set its dropout to 0"):
            attend(heads, heads, heads, 0.1)


def test_weights_changed_before_the_second_pass_are_refused():
    encoder = nn.Linear(2, 2)
    loss = two_pass(encoder, torch.ones(3, 2), chunk_size=3).sum()
    with torch.no_grad():
        encoder.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chunk_size", [2, 4, B])
def test_a_training_step_has_the_gradient_of_the_obvious_formula(problem, chunk_size):
    encoder, features = Perceptron(), torch.randn(B, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    model = Retriever(encoder, 30, WIDTH, scale=3.0, generator=generator).double()
    batch = Batch(features, problem.label_ids, problem.label_ids.unsqueeze(1))
    known_to_drop(encoder.train(), features[:1])
    passes = Passes(draw_seeds(B), chunk_size)
    raw_vectors = encode(encoder, features, passes)
    for dropout in (encoder.inputs, encoder.hidden):
        dropout.masks = torch.cat(dropout.drawn)  # of the first pass
    queries = model.as_queries(raw_vectors)
    mined = mine(
        queries, batch, model, LabelSample(problem.sampled, torch.zeros(9)), num_hard_labels=4,
        loss_fn=softmax_loss, risk_fn=partial(top_weights, num_hard_examples=3),
    )  # fmt: skip
    found = gradients_of(mined, queries, batch, model, raw_vectors=raw_vectors, passes=passes)
    actual = copy.deepcopy(gradients(encoder))
    encoder.zero_grad()
    for dropout in (encoder.inputs, encoder.hidden):
        dropout.given = dropout.masks
    table = model.label_table.detach().clone().requires_grad_()
    labels = nn.functional.normalize(table)
    problem._replace(labels=labels).loss(3 * nn.functional.normalize(encoder(features))).backward()
    assert_same_gradients(actual, gradients(encoder))
    ids, rows = found["labels"]
    torch.testing.assert_close(torch.zeros_like(table).index_copy(0, ids, rows), table.grad)
