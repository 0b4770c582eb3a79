import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from evenhand import objective
from evenhand.losses import softmax_loss
from evenhand.objective import s2m_loss, score_gradients
from evenhand.risk import mean_weights
from loss_table import LOSSES, every_loss


@st.composite
def problems(draw):
    """positives (B,), negatives (B, M) with empty slots, k, k'."""
    batch_size, num_sampled = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(batch_size, 1 + num_sampled, dtype=torch.float64, generator=generator)
    is_empty = torch.rand(batch_size, num_sampled, generator=generator) < draw(st.floats(0, 0.7))
    negatives = scores[:, 1:].masked_fill(is_empty, -torch.inf)
    num_hard = draw(st.integers(1, num_sampled)), draw(st.integers(1, batch_size))
    return scores[:, 0], negatives, *num_hard


def fixed_problem(batch_size=5, num_sampled=7, seed=0):
    # Random, not evenly spaced: a top-k has no gradient where two scores, or two losses, tie.
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch_size, 1 + num_sampled, dtype=torch.float64, generator=generator)
    return scores[:, 0], scores[:, 1:]


def s2m(positives, negatives, num_hard_labels, num_hard_examples, name):
    return s2m_loss(
        positives,
        negatives,
        num_hard_labels=num_hard_labels,
        num_hard_examples=num_hard_examples,
        loss_fn=LOSSES[name].loss_fn,
    )


# The obvious form


@every_loss
@given(problems())
def test_s2m_matches_the_slow_oracle(name, problem):
    positives, negatives, num_hard_labels, num_hard_examples = problem
    actual = s2m(positives, negatives, num_hard_labels, num_hard_examples, name).item()
    expected = oracles.s2m(
        LOSSES[name].oracle,
        positives.tolist(),
        negatives.tolist(),
        num_hard_labels,
        num_hard_examples,
    )
    assert actual == pytest.approx(expected, rel=1e-12)


@every_loss
def test_the_corners_are_sgd_snm_top_sgd_and_the_maximal_loss(name):
    positives, negatives = fixed_problem()
    rows, oracle = (positives.tolist(), negatives.tolist()), LOSSES[name].oracle
    corners = {
        (7, 5): oracles.sgd(oracle, *rows),  # every label and every example
        (1, 5): oracles.snm(oracle, *rows, 1),  # every example
        (3, 5): oracles.snm(oracle, *rows, 3),
        (7, 1): oracles.top_sgd(oracle, *rows, 1),  # every label
        (7, 3): oracles.top_sgd(oracle, *rows, 3),
        (3, 1): max(oracle(own, row, 3) for own, row in zip(*rows, strict=True)),
    }
    for counts, expected in corners.items():
        actual = s2m(positives, negatives, *counts, name).item()
        assert actual == pytest.approx(expected, rel=1e-12), counts


@every_loss
@pytest.mark.parametrize(("num_hard_labels", "num_hard_examples"), [(2, 2), (1, 1), (5, 4)])
def test_the_gradient_is_numerically_correct(name, num_hard_labels, num_hard_examples):
    positives, negatives = fixed_problem(batch_size=4, num_sampled=5)
    inputs = positives.clone().requires_grad_(), negatives.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *scores: s2m(*scores, num_hard_labels, num_hard_examples, name), inputs
    )


def test_the_default_loss_is_the_softmax():
    positives, negatives = fixed_problem()
    counts = {"num_hard_labels": 2, "num_hard_examples": 3}
    assert torch.equal(
        s2m_loss(positives, negatives, **counts),
        s2m_loss(positives, negatives, loss_fn=softmax_loss, **counts),
    )


def test_arguments_are_not_changed():
    positives, negatives = fixed_problem()
    before = positives.clone(), negatives.clone()
    s2m(positives, negatives, 2, 2, "softmax")
    score_gradients(positives, negatives, loss_fn=softmax_loss, risk_fn=mean_weights)
    assert torch.equal(positives, before[0])
    assert torch.equal(negatives, before[1])
    assert not positives.requires_grad
    assert not negatives.requires_grad


# The derivative by the scores


both_ways = pytest.mark.parametrize("few_scores", [0, 2**20], ids=["once more", "at once"])


@both_ways
@every_loss
def test_score_gradients_are_those_of_the_weighted_sum(monkeypatch, name, few_scores):
    monkeypatch.setattr(objective, "FEW_SCORES", few_scores)
    positives, negatives = fixed_problem()
    negatives = negatives.clone()
    negatives[1, 2] = negatives[4] = -torch.inf
    weights = torch.tensor([0.1, 0.0, 0.3, 0.4, 0.2], dtype=torch.float64)
    loss_fn = LOSSES[name].loss_fn
    actual = score_gradients(positives, negatives, loss_fn=loss_fn, risk_fn=lambda _: weights)
    inputs = positives.clone().requires_grad_(), negatives.clone().requires_grad_()
    losses = [
        loss_fn(inputs[0][b : b + 1], inputs[1][b : b + 1]).squeeze(0) for b in range(len(weights))
    ]
    expected = torch.autograd.grad(torch.stack(losses) @ weights, inputs)
    assert actual.losses.tolist() == pytest.approx([loss.item() for loss in losses], rel=1e-12)
    assert actual.survivors.tolist() == [0, 2, 3, 4]
    assert actual.weights.tolist() == [0.1, 0.3, 0.4, 0.2]
    kept = actual.survivors
    torch.testing.assert_close(actual.positive, expected[0][kept], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(actual.negative, expected[1][kept], rtol=1e-12, atol=1e-15)
    assert (actual.negative[3] == 0).all()  # no label


@both_ways
def test_score_gradients_of_an_example_without_weight_are_not_asked_for(monkeypatch, few_scores):
    """An infinite slope times no weight would be NaN, were it added to anything."""
    monkeypatch.setattr(objective, "FEW_SCORES", few_scores)
    positives, negatives = torch.tensor([0.0, 1.0]), torch.ones(2, 3)
    actual = score_gradients(
        positives,
        negatives,
        loss_fn=lambda own, others: own.sqrt() + others.sum(dim=1),
        risk_fn=lambda losses: torch.tensor([0.0, 1.0]),
    )
    assert actual.positive.tolist() == [0.5]


@both_ways
def test_score_gradients_need_no_gradient_around_them_and_leave_none_behind(
    monkeypatch, few_scores
):
    monkeypatch.setattr(objective, "FEW_SCORES", few_scores)
    positives, negatives = fixed_problem()
    positives.requires_grad_()

    def risk_fn(losses):
        assert not losses.requires_grad
        return torch.ones_like(losses)

    with torch.no_grad():
        quiet = score_gradients(positives, negatives, loss_fn=softmax_loss, risk_fn=risk_fn)
    assert not quiet.losses.requires_grad
    assert quiet.positive.abs().min() > 0
    assert not quiet.positive.requires_grad
    assert not quiet.negative.requires_grad
    assert positives.grad is None
