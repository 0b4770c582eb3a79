import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.losses import (
    averaged_loss,
    bowl_loss,
    contrastive_loss,
    crammer_singer_loss,
)
from loss_table import LOSSES, MARGIN_LOSSES, every_loss, every_margin_loss

EMPTY = -torch.inf


def random_scores(batch_size, num_labels, *, seed=0, share_empty=0.0, dtype=torch.float64):
    """positives (B,), negatives (B, k), some of which are empty slots."""
    generator = torch.Generator().manual_seed(seed)
    scores = 1.5 * torch.randn(batch_size, 1 + num_labels, generator=generator, dtype=dtype)
    is_empty = torch.rand(batch_size, num_labels, generator=generator) < share_empty
    return scores[:, 0], scores[:, 1:].masked_fill(is_empty, EMPTY)


def gradients(loss_fn, positives, negatives):
    positives, negatives = positives.clone().requires_grad_(), negatives.clone().requires_grad_()
    return torch.autograd.grad(loss_fn(positives, negatives).sum(), [positives, negatives])


# Values


@every_margin_loss
@given(st.floats(-30, 30))
def test_a_margin_loss_matches_its_oracle(name, margin):
    phi, oracle = MARGIN_LOSSES[name]
    actual = phi(torch.tensor([margin], dtype=torch.float64)).item()
    # log(1 + exp(-z)), as the oracle writes it, is good to about 1e-16, not to 1e-12 of itself.
    assert actual == pytest.approx(oracle(margin), rel=1e-12, abs=1e-15)


@every_loss
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([0, 0.5, 1]))
def test_a_loss_matches_its_oracle(name, batch_size, num_labels, seed, share_empty):
    positives, negatives = random_scores(batch_size, num_labels, seed=seed, share_empty=share_empty)
    before = positives.clone(), negatives.clone()
    actual = LOSSES[name].loss_fn(positives, negatives)
    assert torch.equal(positives, before[0])  # arguments stay as they are
    assert torch.equal(negatives, before[1])
    expected = [
        LOSSES[name].oracle(positive, row, num_labels)
        for positive, row in zip(positives.tolist(), negatives.tolist(), strict=True)
    ]
    assert actual.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_default_margin_of_the_contrastive_loss_is_three_tenths_and_its_power_two():
    positives, negatives = torch.tensor([0.5]), torch.tensor([[0.7]])
    expected = (1 - 0.5) ** 2 + (0.7 - 0.3) ** 2
    assert contrastive_loss(positives, negatives).item() == pytest.approx(expected)


@every_margin_loss
def test_bowl_over_one_label_is_crammer_singer(name):
    phi, _ = MARGIN_LOSSES[name]
    positives, negatives = random_scores(5, 7, share_empty=0.2)
    hardest = negatives.max(dim=1, keepdim=True).values
    torch.testing.assert_close(
        bowl_loss(positives, hardest, margin_loss=phi),
        crammer_singer_loss(positives, negatives, margin_loss=phi),
    )


@every_margin_loss
def test_bowl_over_every_other_label_is_the_averaged_loss(name):
    phi, _ = MARGIN_LOSSES[name]
    positives, negatives = random_scores(5, 7)
    expected = phi(positives) + sum(phi(-column) for column in negatives.T) / 7
    torch.testing.assert_close(averaged_loss(positives, negatives, margin_loss=phi), expected)
    torch.testing.assert_close(bowl_loss(positives, negatives, margin_loss=phi), expected)


# Gradients


@every_loss
@pytest.mark.parametrize("num_labels", [1, 4])
def test_the_gradient_is_numerically_correct(name, num_labels):
    positives, negatives = random_scores(4, num_labels, seed=3)
    inputs = positives.requires_grad_(), negatives.requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[name].loss_fn, inputs)


# Properties


@every_loss
def test_an_empty_slot_adds_no_loss_and_no_gradient(name):
    loss_fn = LOSSES[name].loss_fn
    positives, negatives = random_scores(3, 4)
    wider = torch.full((3, 7), EMPTY, dtype=torch.float64)
    wider[:, [1, 2, 4, 6]] = negatives
    torch.testing.assert_close(loss_fn(positives, wider), loss_fn(positives, negatives))
    nothing = torch.full_like(wider, EMPTY)
    alone = gradients(loss_fn, positives, nothing)
    assert (loss_fn(positives, nothing).isfinite() & alone[0].isfinite()).all()
    assert (alone[1] == 0).all()
    by_positive, by_negative = gradients(loss_fn, positives, negatives)
    by_positive_wider, by_negative_wider = gradients(loss_fn, positives, wider)
    torch.testing.assert_close(by_positive_wider, by_positive)
    torch.testing.assert_close(by_negative_wider[:, [1, 2, 4, 6]], by_negative)
    assert (by_negative_wider[:, [0, 3, 5]] == 0).all()


@every_loss
def test_a_score_that_is_no_number_is_not_an_empty_slot(name):
    positive = torch.tensor([0.3, -0.2])
    negatives = torch.tensor([[0.1, torch.nan, -torch.inf], [0.4, 0.2, -torch.inf]])
    assert LOSSES[name].loss_fn(positive, negatives).isnan().tolist() == [True, False]


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_stay_finite(name, dtype):
    size = 50 if "exponential" in name else 1e4
    positives = torch.tensor([size, -size, size, -size], dtype=dtype)
    negatives = torch.tensor([[size, -size], [-size, size], [-size, EMPTY], [size, size]])
    losses = LOSSES[name].loss_fn(positives, negatives.to(dtype))
    assert losses.isfinite().all()
    assert (losses >= 0).all()
    for gradient in gradients(LOSSES[name].loss_fn, positives, negatives.to(dtype)):
        assert gradient.isfinite().all()


@every_loss
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.float32, 1e-5)])
def test_every_number_format_is_kept(name, dtype, tolerance):
    positives, negatives = (
        scores.clamp(min=-3).to(dtype) for scores in random_scores(8, 5, seed=1)
    )
    negatives[0, 0] = EMPTY
    losses = LOSSES[name].loss_fn(positives, negatives)
    assert losses.dtype == dtype
    assert losses.shape == (8,)
    expected = LOSSES[name].loss_fn(positives.double(), negatives.double())
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_cosine_rounded_past_one_costs_nothing():
    positives = torch.tensor([1 + 1e-6], requires_grad=True)
    losses = contrastive_loss(positives, torch.tensor([[0.0]]), power=1.5)
    losses.sum().backward()
    assert losses.tolist() == [0]
    assert positives.grad.isfinite().all()


# Refusals


def squared_margin(margins):
    return (1 - margins) ** 2


@pytest.mark.parametrize("loss_fn", [bowl_loss, crammer_singer_loss, averaged_loss])
@pytest.mark.parametrize("phi", [squared_margin, torch.exp, lambda margins: margins * torch.nan])
def test_a_margin_loss_that_is_not_decreasing_is_refused(loss_fn, phi):
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(ValueError, match="margin_loss must be decreasing"):
            loss_fn(*random_scores(2, 2), margin_loss=phi)


def test_an_empty_slot_is_never_shown_to_a_margin_loss_of_ones_own():
    def hyperbola(margins):  # decreasing to 0, but not a number at infinity
        return (1 + margins.square()).sqrt() - margins

    positives, negatives = random_scores(2, 3)
    negatives[0, 1] = EMPTY
    loss_fn = functools.partial(bowl_loss, margin_loss=hyperbola)
    assert loss_fn(positives, negatives).isfinite().all()
    by_positive, by_negative = gradients(loss_fn, positives, negatives)
    assert by_positive.isfinite().all()
    assert by_negative.isfinite().all()
    assert by_negative[0, 1] == 0


@pytest.mark.parametrize("margin", [-1, 1])
def test_the_outermost_margins_are_allowed(margin):
    losses = contrastive_loss(torch.tensor([1.0]), torch.tensor([[1.0]]), margin=margin)
    assert losses.tolist() == [(1 - margin) ** 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"margin": m}, f"margin .* between -1 and 1 .*got {m}") for m in (-1.5, 1.01, math.nan)),
        *(({"power": p}, f"power must be at least 1 .*got {p}") for p in (0, 0.99, math.nan)),
    ],
)
def test_a_margin_that_is_no_cosine_and_a_power_below_one_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        contrastive_loss(torch.zeros(1), torch.zeros(1, 1), **settings)
