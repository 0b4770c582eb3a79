from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracles
from evenhand.risk import mean_weights, top_weights

losses_of_a_batch = st.lists(st.floats(0, 100), min_size=1, max_size=8)


def risk(weights, losses):
    return (weights * losses).sum().item()


@given(losses_of_a_batch)
def test_the_mean_weights_give_the_mean(values):
    losses = torch.tensor(values, dtype=torch.float64)
    expected = sum(values) / len(values)
    assert risk(mean_weights(losses), losses) == pytest.approx(expected, rel=1e-12)


@given(losses_of_a_batch, st.data())
def test_the_top_weights_give_the_average_of_the_largest(values, data):
    count = data.draw(st.integers(1, len(values)))
    losses = torch.tensor(values, dtype=torch.float64)
    weights = top_weights(losses, num_hard_examples=count)
    assert risk(weights, losses) == pytest.approx(oracles.average_of_top(values, count), rel=1e-12)
    assert sorted(weights.tolist()) == [0] * (len(values) - count) + [1 / count] * count


@given(losses_of_a_batch)
def test_the_top_risk_falls_from_the_maximum_to_the_mean_as_more_examples_count(values):
    losses = torch.tensor(values, dtype=torch.float64)
    risks = [
        risk(top_weights(losses, num_hard_examples=count), losses)
        for count in range(1, len(values) + 1)
    ]
    assert risks[0] == max(values)
    assert risks[-1] == pytest.approx(sum(values) / len(values), rel=1e-12)
    assert all(later <= earlier + 1e-12 * earlier for earlier, later in pairwise(risks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_like_the_losses_and_without_gradient(dtype):
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5], dtype=dtype, requires_grad=True)
    before = losses.detach().clone()
    for weights in [mean_weights(losses), top_weights(losses, num_hard_examples=2)]:
        assert weights.dtype == dtype
        assert weights.shape == (4,)
        assert not weights.requires_grad
    assert torch.equal(losses, before)


def test_examples_of_equal_loss_share_no_weight_but_fill_the_count():
    weights = top_weights(torch.ones(5), num_hard_examples=2)
    assert sorted(weights.tolist()) == [0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize("count", [0, 4])
def test_a_count_out_of_range_is_refused(count):
    with pytest.raises(
        ValueError, match=f"num_hard_examples must be between 1 and 3 .*got {count}"
    ):
        top_weights(torch.ones(3), num_hard_examples=count)
