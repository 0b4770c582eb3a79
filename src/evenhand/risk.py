"""How much each example of a batch counts: losses (B,) -> weights (B,), without gradient.

Every risk is sum_b w_b * loss_b with the weights held fixed, so one backward pass serves them
all, and only examples with a weight need one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from evenhand.mining import hardest_examples

RiskFn = Callable[[Tensor], Tensor]  # (B,) -> (B,)


@torch.no_grad()
def mean_weights(losses: Tensor) -> Tensor:
    """1/B each: plain SGD.

    Example:
        >>> mean_weights(torch.tensor([3.0, 1.0]))
        tensor([0.5000, 0.5000])
    """
    return torch.full_like(losses, 1 / len(losses))


@torch.no_grad()
def top_weights(losses: Tensor, *, num_hard_examples: int) -> Tensor:
    """1/k' for the k' largest losses, 0 for the rest (equation 11).

    Example:
        >>> top_weights(torch.tensor([3.0, 1.0, 2.0]), num_hard_examples=2)
        tensor([0.5000, 0.0000, 0.5000])
    """
    positions = hardest_examples(losses, num_hard_examples)  # (k',)
    return torch.zeros_like(losses).index_fill(0, positions, 1 / num_hard_examples)
