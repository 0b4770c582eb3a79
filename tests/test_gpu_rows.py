"""The Triton kernels of row-wise optimisers against the torch ones, and their bfloat16."""

import pytest
import torch

from evenhand.kernels.rows import EPSILON, SMALLEST_NORM
from evenhand.models.encoders import RowGradients
from gpu_tables import (
    DEVICES,
    OPTIMIZERS,
    WIDTHS,
    assert_state_is,
    by_device,
    make_table,
    rows,
    scalars,
    triton,
    twin_of,
    unit_gradients,
)

tl = triton.language
rounded_to_nearest, rounded_by_chance = rows.rounded_to_nearest, rows.rounded_by_chance


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_constants_are_those_of_the_torch_code():
    assert rows.EPSILON.value == EPSILON
    assert rows.SMALLEST_NORM.value == SMALLEST_NORM


# One row at a time.


@pytest.mark.parametrize("is_cosine", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_take_the_steps_of_the_torch_optimizer(device, optimizer, width, is_cosine):
    if is_cosine and width == 1:
        pytest.skip("a unit row of one weight has no gradient, only rounding")
    num_rows = by_device(device, 7, 5000)
    table = make_table(num_rows, width, optimizer=optimizer, device=device)
    twin = twin_of(table, optimizer)
    for step_number in (1, 2, 3):
        ids = torch.randperm(num_rows)[: num_rows // 2 + 2]
        gradients = torch.randn(len(ids), width)
        ids[1] = -1
        touched = torch.ones(len(ids), dtype=torch.int32)
        touched[2] = 0
        is_step = (ids >= 0) & (touched > 0)
        expected = gradients[is_step].double()
        if is_cosine:
            expected = unit_gradients(expected, twin.table[ids[is_step]])
        twin.step(RowGradients(ids[is_step], expected), learning_rate=0.1)
        rows.update_rows(
            table,
            ids.to(device),
            gradients.to(device),
            touched=touched.to(device),
            is_cosine=is_cosine,
            **scalars(device, learning_rate=0.1, step_number=step_number),
        )
        assert_state_is(table, twin)


def test_bias_corrections_hold_from_the_first_step_to_the_last(device):
    for step_number in (1, 2, 1000, 10**7):
        table = make_table(2, 4, optimizer="adam", device=device)
        twin = twin_of(table, "adam")
        twin.num_steps = step_number - 1
        gradients = torch.randn(2, 4)
        twin.step(RowGradients(torch.tensor([1, 0]), gradients.double()), learning_rate=0.1)
        rows.update_rows(
            table,
            torch.tensor([1, 0], device=device),
            gradients.to(device),
            **scalars(device, learning_rate=0.1, step_number=step_number),
        )
        assert_state_is(table, twin)


def test_a_row_of_zeros_has_no_gradient_through_its_unit(device):
    table = make_table(2, 3, optimizer="adagrad", device=device)
    table.table.zero_()
    sums = table.moments.clone()
    rows.update_rows(
        table,
        torch.tensor([1], device=device),
        torch.ones(1, 3, device=device),
        is_cosine=True,
        **scalars(device, learning_rate=0.1, step_number=1),
    )
    assert (table.table == 0).all()
    assert (table.moments == sums).all()


# bfloat16.


@triton.jit
def _round(values, words, out, BLOCK: tl.constexpr, BY_CHANCE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, BLOCK)
    block = tl.load(values + places)
    if BY_CHANCE:
        rounded = rounded_by_chance(block, tl.load(words + places).to(tl.uint32))
    else:
        rounded = rounded_to_nearest(block)
    tl.store(out + places, rounded.to(tl.bfloat16))


def awkward_numbers():
    """(64,) float32: ordinary, half way between neighbours, at the ends, and no numbers."""
    halves = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, 255 / 256 + 1 / 512])
    ends = torch.tensor([0.0, -0.0, 3.3895e38, -3.3895e38, 1e-37, 1.9999999, 0.99999994])
    return torch.cat([torch.randn(49), halves, ends, no_numbers()])


def no_numbers():
    """The last is what CUDA's arithmetic calls NaN: one more in its bits, and it is -0."""
    others = torch.tensor([float("inf"), -float("inf"), float("nan")])
    return torch.cat([others, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])


def test_rounding_to_nearest_is_that_of_torch(device):
    values = awkward_numbers().to(device)
    out = torch.empty(64, dtype=torch.bfloat16, device=device)
    _round[(1,)](values, values, out, BLOCK=64, BY_CHANCE=False)
    assert torch.equal(out.isnan(), values.isnan())
    is_number = ~values.isnan()
    bits, expected = out.view(torch.int16), values.bfloat16().view(torch.int16)
    assert torch.equal(bits[is_number], expected[is_number])


def cut(values):
    """The bfloat16 neighbour towards 0, as float32."""
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32)


def test_rounding_by_chance_keeps_to_the_neighbours_with_the_right_odds(device):
    values = awkward_numbers()
    values = values[values.isfinite()][:32]
    low = cut(values)
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)
    share = (values.view(torch.int32) & 0xFFFF) / 2**16
    num_high = torch.zeros(32)
    # The 16 random bits in equal steps: how many round away from 0 is then known to the last.
    for word in range(0, 2**16, 2**10):
        out = torch.empty(32, dtype=torch.bfloat16, device=device)
        words = torch.full((32,), word + 2**9 + 7 * 2**16, dtype=torch.int32, device=device)
        _round[(1,)](values.to(device), words, out, BLOCK=32, BY_CHANCE=True)
        result = out.float().cpu()
        assert ((result == low) | (result == high)).all()
        num_high += (result == high) & (share > 0)
    assert ((num_high / 64 - share).abs() <= 1 / 64).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bfloat16_table_is_the_float32_step_rounded_to_nearest(device, optimizer):
    table = make_table(6, 17, optimizer=optimizer, device=device, dtype=torch.bfloat16)
    wide = make_table(6, 17, optimizer=optimizer, device=device)
    ids, gradients = torch.tensor([4, 0, 2], device=device), torch.randn(3, 17, device=device)
    for step_number in (1, 2):
        wide.table.copy_(table.table)
        for each in (table, wide):
            rows.update_rows(
                each, ids, gradients, **scalars(device, learning_rate=0.1, step_number=step_number)
            )
        assert torch.equal(table.table, wide.table.bfloat16())
        assert torch.equal(table.moments, wide.moments)


def chance_steps(device, *, seed, step_number, num_rows=4, width=1000):
    """All weights are 1 and step down by 0.3 of the distance to the next bfloat16."""
    table = rows.RowTable(
        torch.ones(num_rows, width, dtype=torch.bfloat16, device=device),
        torch.zeros(num_rows, device=device),
        seed=seed,
    )
    rows.update_rows(
        table,
        torch.arange(num_rows, device=device),
        torch.ones(num_rows, width, device=device),
        **scalars(device, learning_rate=0.3 / 256, step_number=step_number),
    )
    return table.table.float().cpu()


def test_steps_too_small_for_bfloat16_are_taken_on_average(device):
    seeds = range(by_device(device, 6, 50))
    tables = torch.stack([chance_steps(device, seed=seed, step_number=1) for seed in seeds])
    is_down = tables == 1 - 1 / 256
    assert (is_down | (tables == 1)).all()
    error = (0.3 * 0.7 / is_down.numel()) ** 0.5
    assert abs(is_down.double().mean() - 0.3) < 4 * error
    # And for every row, and along it: a hash that depends on too little would show here.
    by_row = is_down.double().mean(dim=2)
    assert ((by_row - 0.3).abs() < 5 * (0.3 * 0.7 / 1000) ** 0.5).all()
    pairs = (is_down[..., 1:] & is_down[..., :-1]).double().mean()
    assert abs(pairs - 0.09) < 6 * (0.09 * 0.91 / is_down.numel()) ** 0.5


def test_chance_depends_on_seed_step_row_and_column_alone(device):
    first = chance_steps(device, seed=1, step_number=1)
    assert torch.equal(first, chance_steps(device, seed=1, step_number=1))
    others = {
        "seed": chance_steps(device, seed=2, step_number=1),
        "high bits of the seed": chance_steps(device, seed=1 + 2**40, step_number=1),
        "step": chance_steps(device, seed=1, step_number=2),
        "row": first.roll(1, dims=0),
        "column": first.roll(1, dims=1),
    }
    for what, other in others.items():
        # Independent draws of odds 0.3 differ in 0.42 of the places.
        assert 0.36 < (first != other).double().mean() < 0.48, what
