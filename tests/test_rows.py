"""Compiled passes over rows (float32), and their torch form (float64), beside the obvious one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from evenhand.kernels import rows
from evenhand.kernels.rows import (
    adagrad_,
    adam_,
    scores_of_each,
    through_unit,
    unit,
)

DTYPES = {"compiled": torch.float32, "torch": torch.float64}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_width = pytest.mark.parametrize("width", [1, 2, 3, 8, 15, 33, 128])


def tolerance(dtype):
    return {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {}


def random_table(num_rows, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    return (table * 10.0 ** torch.randint(-3, 3, (num_rows, 1), generator=generator)).to(dtype)


@every_dtype
@every_width
def test_rows_become_as_long_as_one(dtype, width):
    table, ids = random_table(9, width, dtype), torch.tensor([8, 0, 3, 3])
    expected = F.normalize(table.double(), dim=1).to(dtype)
    torch.testing.assert_close(unit(table, ids), expected[ids], **tolerance(dtype))
    torch.testing.assert_close(unit(table), expected, **tolerance(dtype))


@every_dtype
@every_width
def test_the_way_back_from_unit_rows_is_that_of_autograd(dtype, width):
    table, ids = random_table(9, width, dtype), torch.tensor([8, 0, 3])
    gradients = torch.randn(9, width).to(dtype)
    vectors = table.double().requires_grad_()
    F.normalize(vectors, dim=1).backward(gradients.double())
    # Of a gradient along its row nothing is left but rounding, which is as large as the gradient.
    scales = gradients.norm(dim=1, keepdim=True) / table.norm(dim=1, keepdim=True)
    precision = 1e-12 if dtype == torch.float64 else 1e-6
    for actual, places in [
        (through_unit(gradients, table), torch.arange(9)),
        (through_unit(gradients[ids], table, ids), ids),
    ]:
        assert actual.dtype == dtype
        errors = (actual.double() - vectors.grad[places]) / scales[places]
        assert errors.abs().max() < precision


@every_dtype
@pytest.mark.parametrize("length", [0.0, 1e-14])
def test_a_zero_row_scores_zero_and_passes_no_gradient_on_any_path(dtype, length):
    table, ids = torch.full((2, 3), length, dtype=dtype), torch.tensor([1])
    gradients = torch.randn(1, 3).to(dtype)
    assert (unit(table, ids) == 0).all()
    assert (unit(table) == 0).all()
    assert (through_unit(gradients, table, ids) == 0).all()
    assert (through_unit(gradients, table[ids]) == 0).all()
    vectors = table[ids].requires_grad_()
    unit(vectors).backward(gradients)
    assert (vectors.grad == 0).all()
    queries, many = torch.ones(1, 3, dtype=dtype), torch.full((99, 3), length, dtype=dtype)
    assert (scores_of_each(queries, many, torch.tensor([[5]]), is_cosine=True) == 0).all()


@every_dtype
@every_width
def test_rows_whose_squares_overflow_have_a_direction_all_the_same(dtype, width):
    largest = torch.finfo(dtype).max
    huge = random_table(90, width, torch.float64).sign() * torch.rand(90, width).add(1).double()
    table, ids = (huge * (largest / 2)).to(dtype), torch.tensor([8, 0, 3])
    expected = F.normalize(huge, dim=1).to(dtype)
    torch.testing.assert_close(unit(table), expected)
    torch.testing.assert_close(unit(table, ids), expected[ids])
    torch.testing.assert_close(unit(table.clone().requires_grad_()).detach(), expected)
    queries, drawn = expected[:2].contiguous(), torch.tensor([[4], [9]])
    scores = scores_of_each(queries, table, drawn, is_cosine=True)
    torch.testing.assert_close(scores[:, 0], (queries * expected[drawn[:, 0]]).sum(1))
    gradients = torch.full((3, width), 1e3, dtype=dtype)
    assert through_unit(gradients, table, ids).abs().max() < 1e-30


@every_dtype
def test_a_row_that_is_no_number_spreads(dtype):
    table, ids = torch.ones(2, 3, dtype=dtype), torch.tensor([0, 1])
    table[1, 2] = torch.nan
    assert unit(table, ids).isnan().tolist() == [[False] * 3, [True] * 3]
    found = through_unit(torch.ones(2, 3, dtype=dtype), table, ids)
    assert found.isnan().any(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("place", [-1, 5])
def test_ids_that_are_no_rows_are_refused_before_anything_is_written(place):
    table, ids, gradients = torch.ones(5, 2), torch.tensor([0, place]), torch.ones(2, 2)
    state = torch.ones(5)
    with pytest.raises(IndexError, match="ids must be from 0 to 4, got"):
        unit(table, ids)
    with pytest.raises(IndexError):
        through_unit(gradients, table, ids)
    with pytest.raises(IndexError):
        adagrad_(table, state, ids, gradients, learning_rate=1.0)
    with pytest.raises(IndexError):
        adam_(table, table, state, ids, gradients, betas=(0.9, 0.999), learning_rate=1.0, step=1)
    assert (table == 1).all()
    assert (state == 1).all()


def updated(dtype, width, seed, num_steps=3):
    """Tables and states after steps of both optimisers on random rows, in float64."""
    generator = torch.Generator().manual_seed(seed)
    table = random_table(7, width, dtype, seed)
    tensors = [table.clone(), table.clone(), *(torch.zeros(7, dtype=dtype) for _ in range(2))]
    momentum = torch.zeros_like(table)
    for step in range(1, 1 + num_steps):
        ids = torch.randperm(7, generator=generator)[: step + 1]
        gradients = torch.randn(step + 1, width, generator=generator, dtype=torch.float64)
        gradients[0] *= 1e-4
        gradients[-1] *= 1e4
        gradients = gradients.to(dtype)
        adagrad_(tensors[0], tensors[2], ids, gradients, learning_rate=0.1)
        adam_(
            tensors[1],
            momentum,
            tensors[3],
            ids,
            gradients,
            betas=(0.8, 0.95),
            learning_rate=0.1,
            step=step,
        )
    return [tensor.double() for tensor in [*tensors, momentum]]


@every_width
@given(st.integers(0, 2**31))
def test_compiled_updates_are_those_of_torch(width, seed):
    for compiled, torch_form in zip(
        updated(torch.float32, width, seed), updated(torch.float64, width, seed), strict=True
    ):
        # Numbers of a row that nearly cancel are as precise as what they were made of.
        scales = torch_form.abs() if torch_form.dim() == 1 else torch_form.abs() + 0.1
        scales = scales if torch_form.dim() == 1 else scales.amax(dim=1, keepdim=True)
        assert ((compiled - torch_form).abs() <= 1e-5 * scales).all()


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_results_are_the_same_for_every_number_of_threads(monkeypatch, num_threads):
    def results():
        table, ids = random_table(40, 9, torch.float32), torch.randperm(40)[:23]
        return [
            *updated(torch.float32, 9, 1),
            unit(table, ids),
            through_unit(torch.randn(23, 9), table, ids),
        ]

    torch.manual_seed(1)
    alone = results()
    monkeypatch.setattr(rows, "num_threads_for", lambda work: num_threads)
    torch.manual_seed(1)
    assert all(torch.equal(*pair) for pair in zip(results(), alone, strict=True))
