"""Optimisers for tables of which a step touches a few rows: nothing of the table's size is read.

State is kept row by row. `RowAdam` and `RowAdagrad` scale a whole row by one number, the root of
its mean squared gradient, where the dense forms keep one for every weight: half the memory, and
directions within a row are kept.
"""

import dataclasses

import torch
from torch import Tensor

from evenhand.kernels.rows import adagrad_, adam_
from evenhand.models import RowGradients

# Of a step, by the names in `state.TABLES`: those of touched rows. Dense weights of the encoder
# hold theirs in `.grad`.
Gradients = dict[str, RowGradients]


class RowAdam:
    """Adam on touched rows: a momentum for each weight, one second moment for each row."""

    def __init__(self, table: Tensor, *, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.table = table  # (R, D), changed in place
        self.betas = betas
        self.momentum = torch.zeros_like(table, dtype=_state_dtype(table))
        self.second_moments = table.new_zeros(len(table), dtype=_state_dtype(table))
        self.num_steps = 0

    @torch.no_grad()
    def step(self, gradients: RowGradients, *, learning_rate: float) -> None:
        self.num_steps += 1
        adam_(
            self.table,
            self.momentum,
            self.second_moments,
            *gradients,
            betas=self.betas,
            learning_rate=learning_rate,
            step=self.num_steps,
        )

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
        self.sums = table.new_zeros(len(table), dtype=_state_dtype(table))

    @torch.no_grad()
    def step(self, gradients: RowGradients, *, learning_rate: float) -> None:
        adagrad_(self.table, self.sums, *gradients, learning_rate=learning_rate)

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self.sums.copy_(state["sums"])


RowOptimizer = RowAdam | RowAdagrad


@dataclasses.dataclass
class Optimizers:
    """One for every table of the model, and one for the dense weights of the encoder, if any."""

    rows: dict[str, RowOptimizer]  # by the names in `state.TABLES`
    dense: torch.optim.AdamW | None
    dense_rate: float = 1.0  # times the learning rate of the tables

    def step(self, gradients: Gradients, *, learning_rate: float) -> None:
        for name, rows in gradients.items():
            self.rows[name].step(rows, learning_rate=learning_rate)
        if self.dense is not None:
            for group in self.dense.param_groups:
                group["lr"] = learning_rate * self.dense_rate
            self.dense.step()
            self.dense.zero_grad(set_to_none=True)


def _state_dtype(table: Tensor) -> torch.dtype:
    """The table's own, but never less than float32: small squares must add up."""
    return torch.promote_types(table.dtype, torch.float32)
