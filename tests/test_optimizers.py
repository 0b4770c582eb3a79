import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.kernels.rows import EPSILON
from evenhand.models.encoders import RowGradients
from evenhand.training.optimizers import RowAdagrad, RowAdam

NUM_ROWS, WIDTH = 5, 3
OPTIMIZERS = {
    "adam": RowAdam,
    "adam of other betas": lambda table: RowAdam(table, betas=(0.5, 0.9)),
    "adagrad": RowAdagrad,
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


# Slow twins: rows as lists, one number at a time; a row that is not touched does not move.


class SlowAdam:
    def __init__(self, table, betas=(0.9, 0.999)):
        self.table, self.betas, self.num_steps = table, betas, 0
        self.momentum = [[0.0] * WIDTH for _ in table]
        self.second_moments = [0.0] * len(table)

    def step(self, gradients, learning_rate):
        first, second = self.betas
        self.num_steps += 1
        for row, gradient in gradients.items():
            square = sum(g**2 for g in gradient) / WIDTH
            moment = second * self.second_moments[row] + (1 - second) * square
            self.second_moments[row] = moment
            for column, g in enumerate(gradient):
                momentum = first * self.momentum[row][column] + (1 - first) * g
                self.momentum[row][column] = momentum
                # Bias corrections count the steps of the table, not of the row.
                mean = momentum / (1 - first**self.num_steps)
                deviation = math.sqrt(moment / (1 - second**self.num_steps))
                self.table[row][column] -= learning_rate * mean / (deviation + EPSILON)


class SlowAdagrad:
    def __init__(self, table):
        self.table, self.sums = table, [0.0] * len(table)

    def step(self, gradients, learning_rate):
        for row, gradient in gradients.items():
            self.sums[row] += sum(g**2 for g in gradient) / WIDTH
            for column, g in enumerate(gradient):
                self.table[row][column] -= learning_rate * g / (math.sqrt(self.sums[row]) + EPSILON)


SLOW_TWINS = {
    "adam": SlowAdam,
    "adam of other betas": lambda table: SlowAdam(table, betas=(0.5, 0.9)),
    "adagrad": SlowAdagrad,
}


def random_table(seed=0):
    return torch.randn(
        NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def random_gradients(generator, num_touched):
    ids = torch.randperm(NUM_ROWS, generator=generator)[:num_touched]
    values = torch.randn(num_touched, WIDTH, generator=generator, dtype=torch.float64)
    return RowGradients(ids, values)


@every_optimizer
@given(st.lists(st.integers(0, NUM_ROWS), max_size=6), st.integers(0, 2**31))
def test_every_step_is_that_of_the_slow_twin(name, touched_by_step, seed):
    table = random_table()
    fast, slow = OPTIMIZERS[name](table), SLOW_TWINS[name](table.tolist())
    generator = torch.Generator().manual_seed(seed)
    for step, num_touched in enumerate(touched_by_step):
        gradients = random_gradients(generator, num_touched)
        fast.step(gradients, learning_rate=0.1 / (1 + step))
        by_row = dict(zip(gradients.ids.tolist(), gradients.values.tolist(), strict=True))
        slow.step(by_row, 0.1 / (1 + step))
    for actual, expected in zip(table.tolist(), slow.table, strict=True):
        assert actual == pytest.approx(expected, rel=1e-12, abs=1e-14)


@every_optimizer
def test_saved_and_loaded_it_goes_on_to_the_same_bits(name):
    generator = torch.Generator().manual_seed(0)
    batches = [random_gradients(generator, 3) for _ in range(8)]
    table = random_table()
    optimizer = OPTIMIZERS[name](table)
    for gradients in batches[:4]:
        optimizer.step(gradients, learning_rate=0.1)
    resumed_table = table.clone()
    resumed = OPTIMIZERS[name](resumed_table)
    resumed.load({key: value.clone() for key, value in optimizer.state().items()})
    for gradients in batches[4:]:
        optimizer.step(gradients, learning_rate=0.1)
        resumed.step(gradients, learning_rate=0.1)
    assert torch.equal(resumed_table, table)
    for key, value in optimizer.state().items():
        assert torch.equal(resumed.state()[key], value)


def test_adam_of_a_table_one_wide_is_the_adam_of_torch():
    table = torch.randn(4, 1, dtype=torch.float64)
    dense = table.clone().requires_grad_()
    fast, slow = RowAdam(table), torch.optim.Adam([dense], lr=0.05)
    for _ in range(10):
        gradient = torch.randn(4, 1, dtype=torch.float64)
        fast.step(RowGradients(torch.arange(4), gradient), learning_rate=0.05)
        dense.grad = gradient
        slow.step()
    torch.testing.assert_close(table, dense.detach(), rtol=1e-10, atol=1e-12)
