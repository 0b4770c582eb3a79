"""Optimisers for tables of which a step touches a few rows: nothing of the table's size is read.

State is kept row by row. `RowAdam` and `RowAdagrad` scale a whole row by one number, the root of
its mean squared gradient, where the dense forms keep one for every weight: half the memory, and
directions within a row are kept.
"""

import torch
from torch import Tensor

from evenhand.models.encoders import RowGradients

EPSILON = 1e-8


class RowAdam:
    """Adam on touched rows: a momentum for each weight, one second moment for each row."""

    def __init__(self, table: Tensor, *, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.table = table  # (R, D), changed in place
        self.betas = betas
        self.momentum = torch.zeros_like(table)
        self.second_moments = table.new_zeros(len(table))
        self.num_steps = 0

    @torch.no_grad()
    def step(self, gradients: RowGradients, *, learning_rate: float) -> None:
        self.num_steps += 1
        ids, values = gradients
        first, second = self.betas
        momentum = self.momentum.index_select(0, ids).mul_(first).add_(values, alpha=1 - first)
        squares = values.square().mean(dim=1)  # (T, D) -> (T,)
        moments = self.second_moments.index_select(0, ids).mul_(second)
        moments.add_(squares, alpha=1 - second)
        self.momentum.index_copy_(0, ids, momentum)
        self.second_moments.index_copy_(0, ids, moments)
        scales = (moments / (1 - second**self.num_steps)).sqrt_().add_(EPSILON)
        scales.mul_(1 - first**self.num_steps)
        _subtract(self.table, ids, momentum.div_(scales.unsqueeze(1)).mul_(learning_rate))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold; the same tensors, not copies."""
        return {
            "momentum": self.momentum,
            "second_moments": self.second_moments,
            "num_steps": torch.tensor(self.num_steps),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        self.momentum.copy_(state["momentum"])
        self.second_moments.copy_(state["second_moments"])
        self.num_steps = int(state["num_steps"])


class RowAdagrad:
    """Adagrad on touched rows: one sum of squares for each row, and no momentum."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # (R, D), changed in place
        self.sums = table.new_zeros(len(table))

    @torch.no_grad()
    def step(self, gradients: RowGradients, *, learning_rate: float) -> None:
        ids, values = gradients
        sums = self.sums.index_select(0, ids) + values.square().mean(dim=1)  # (T,)
        self.sums.index_copy_(0, ids, sums)
        updates = values / (sums.sqrt() + EPSILON).unsqueeze(1)
        _subtract(self.table, ids, updates.mul_(learning_rate))

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self.sums.copy_(state["sums"])


RowOptimizer = RowAdam | RowAdagrad


def _subtract(table: Tensor, ids: Tensor, updates: Tensor) -> None:
    """Rows are distinct, so reading and writing them back does; index_add takes longer."""
    table.index_copy_(0, ids, table.index_select(0, ids).sub_(updates))
