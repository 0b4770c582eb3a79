"""What collapses, what prevents it, and who notices."""

import pytest
import torch

from evenhand.losses import contrastive_loss, softmax_loss
from evenhand.objective import collapsed_loss
from evenhand.risk import count_below


def test_a_collapsed_model_has_the_loss_of_a_guess():
    assert collapsed_loss(softmax_loss, 128, score=20.0) == pytest.approx(4.8598, abs=1e-4)
    assert collapsed_loss(contrastive_loss, 5, score=1.0) == pytest.approx(0.7**2)


@pytest.mark.parametrize("ceiling", [-1.0, 0.0, 1.2, 2.0, 7.0, 100.0])
@pytest.mark.parametrize("num_hard_examples", [1, 4, 20])
def test_k_grows_to_the_least_that_is_below_the_ceiling(ceiling, num_hard_examples):
    losses = torch.rand(20, generator=torch.Generator().manual_seed(1)) ** 4 * 9
    count = count_below(losses, num_hard_examples, ceiling=ceiling)
    means = [losses.topk(k).values.mean().item() for k in range(1, 21)]
    below = [k for k in range(num_hard_examples, 21) if means[k - 1] <= ceiling]
    assert count == (below[0] if below else 20)
