"""Row-wise optimisers against the formulas, one row at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenhand.kernels.rows import EPSILON
from evenhand.models import RowGradients
from evenhand.training.optimizers import RowAdagrad, RowAdam

NUM_ROWS, WIDTH = 5, 3
OPTIMIZERS = {
    "adam": RowAdam,
    "adam of other betas": lambda table: RowAdam(table, betas=(0.5, 0.9)),
    "adagrad": RowAdagrad,
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def slow_steps(name, table, steps):
    """The table after these (gradients, learning rate); a row that is not touched does not move."""
    first, second = (0.5, 0.9) if name.endswith("betas") else (0.9, 0.999)
    table, momentum, moments = table.clone(), torch.zeros_like(table), table.new_zeros(len(table))
    for number, ((ids, values), rate) in enumerate(steps, start=1):
        for row, gradient in zip(ids.tolist(), values, strict=True):
            square = float(gradient.square().mean())
            if name == "adagrad":
                moments[row] += square
                direction, deviation = gradient, moments[row].sqrt()
            else:  # bias corrections count the steps of the table, not of the row
                moments[row] = second * moments[row] + (1 - second) * square
                momentum[row] = first * momentum[row] + (1 - first) * gradient
                direction = momentum[row] / (1 - first**number)
                deviation = (moments[row] / (1 - second**number)).sqrt()
            table[row] -= rate * direction / (deviation + EPSILON)
    return table


def random_table():
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).double()


def random_gradients(generator, num_touched):
    ids = torch.randperm(NUM_ROWS, generator=generator)[:num_touched]
    values = torch.randn(num_touched, WIDTH, generator=generator, dtype=torch.float64)
    return RowGradients(ids, values)


@every_optimizer
@given(st.lists(st.integers(0, NUM_ROWS), max_size=6), st.integers(0, 2**31))
def test_every_step_is_that_of_the_formula(name, touched_by_step, seed):
    table, generator = random_table(), torch.Generator().manual_seed(seed)
    optimizer = OPTIMIZERS[name](table)
    steps = [
        (random_gradients(generator, count), 0.1 / (1 + step))
        for step, count in enumerate(touched_by_step)
    ]
    for gradients, rate in steps:
        optimizer.step(gradients, learning_rate=rate)
    expected = slow_steps(name, random_table(), steps)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-14)


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
