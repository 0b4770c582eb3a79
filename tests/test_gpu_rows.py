"""The Triton kernels of row-wise optimisers against the torch ones, and their bfloat16."""

import pytest
import torch

from evenhand.kernels.rows import EPSILON, SMALLEST_NORM
from evenhand.models import RowGradients
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


def update(table, ids, gradients, *, learning_rate=0.1, step_number=1, **how):
    device = table.table.device
    now = scalars(device, learning_rate=learning_rate, step_number=step_number)
    how = {name: x.to(device) if torch.is_tensor(x) else x for name, x in how.items()}
    rows.update_rows(table, ids.to(device), gradients.to(device), **now, **how)


def test_constants_are_those_of_the_torch_code():
    assert rows.EPSILON.value == EPSILON
    assert rows.SMALLEST_NORM.value == SMALLEST_NORM


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
        how = {"touched": touched, "is_cosine": is_cosine}
        update(table, ids, gradients, step_number=step_number, **how)
        assert_state_is(table, twin)


def test_bias_corrections_hold_from_the_first_step_to_the_last(device):
    for step_number in (1, 2, 1000, 10**7):
        table = make_table(2, 4, optimizer="adam", device=device)
        twin = twin_of(table, "adam")
        twin.num_steps = step_number - 1
        ids, gradients = torch.tensor([1, 0]), torch.randn(2, 4)
        twin.step(RowGradients(ids, gradients.double()), learning_rate=0.1)
        update(table, ids, gradients, step_number=step_number)
        assert_state_is(table, twin)


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


def round_by(values, words=None):
    """To nearest, or by these random words."""
    out = torch.empty(len(values), dtype=torch.bfloat16, device=values.device)
    has_words = words is not None
    words = words if has_words else values
    _round[(1,)](values, words, out, BLOCK=len(values), BY_CHANCE=has_words)
    return out


def awkward_numbers():
    """(64,) float32: ordinary, half way between neighbours, at the ends, and no numbers."""
    halves = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, 255 / 256 + 1 / 512])
    ends = torch.tensor([0.0, -0.0, 3.3895e38, -3.3895e38, 1e-37, 1.9999999, 0.99999994])
    no_numbers = torch.tensor([float("inf"), -float("inf"), float("nan")])
    # What CUDA's arithmetic calls NaN: one more in its bits, and it is -0.
    nan_of_cuda = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    return torch.cat([torch.randn(49), halves, ends, no_numbers, nan_of_cuda])


def test_rounding_to_nearest_is_that_of_torch(device):
    values = awkward_numbers().to(device)
    out = round_by(values)
    is_number = ~values.isnan()
    assert torch.equal(out.isnan(), ~is_number)
    bits, expected = out.view(torch.int16), values.bfloat16().view(torch.int16)
    assert torch.equal(bits[is_number], expected[is_number])


def test_rounding_by_chance_keeps_to_the_neighbours_with_the_right_odds(device):
    values = awkward_numbers()
    words = torch.full((64,), 0xFFFF, dtype=torch.int32, device=device)
    rounded = round_by(values.to(device), words).float().cpu()
    assert torch.equal(rounded[-4:].nan_to_num(7.0), values[-4:].nan_to_num(7.0))  # no numbers
    values = values[values.isfinite()][:32]
    low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)  # the neighbour towards 0
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)
    share = (values.view(torch.int32) & 0xFFFF) / 2**16
    num_high = torch.zeros(32)
    # The 16 random bits in equal steps: how many round away from 0 is then known to the last.
    for word in range(0, 2**16, 2**10):
        words = torch.full((32,), word + 2**9 + 7 * 2**16, dtype=torch.int32, device=device)
        result = round_by(values.to(device), words).float().cpu()
        assert ((result == low) | (result == high)).all()
        num_high += (result == high) & (share > 0)
    assert ((num_high / 64 - share).abs() <= 1 / 64).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bfloat16_table_is_the_float32_step_rounded_to_nearest(device, optimizer):
    table = make_table(6, 17, optimizer=optimizer, device=device, dtype=torch.bfloat16)
    wide = make_table(6, 17, optimizer=optimizer, device=device)
    ids, gradients = torch.tensor([4, 0, 2]), torch.randn(3, 17)
    for step_number in (1, 2):
        wide.table.copy_(table.table)
        for each in (table, wide):
            update(each, ids, gradients, step_number=step_number)
        assert torch.equal(table.table, wide.table.bfloat16())
        assert torch.equal(table.moments, wide.moments)


def test_steps_too_small_for_bfloat16_are_taken_on_average(device):
    """All weights are 1 and step down by 0.3 of the distance to the next bfloat16."""
    tables = []
    for seed in range(by_device(device, 6, 50)):
        weights = torch.ones(4, 1000, dtype=torch.bfloat16, device=device)
        table = rows.RowTable(weights, torch.zeros(4, device=device), seed=seed)
        update(table, torch.arange(4), torch.ones(4, 1000), learning_rate=0.3 / 256)
        tables.append(table.table.float().cpu())
    is_down = torch.stack(tables) == 1 - 1 / 256
    assert (is_down | (torch.stack(tables) == 1)).all()
    error = (0.3 * 0.7 / is_down.numel()) ** 0.5
    assert abs(is_down.double().mean() - 0.3) < 4 * error
    # And for every row, along it, and between seeds: a hash of too little would show here.
    by_row = is_down.double().mean(dim=2)
    assert ((by_row - 0.3).abs() < 5 * (0.3 * 0.7 / 1000) ** 0.5).all()
    others = [is_down.roll(1, dims=dim) for dim in range(3)]
    for other in others:
        pairs = (is_down & other).double().mean()
        assert abs(pairs - 0.09) < 6 * (0.09 * 0.91 / is_down.numel()) ** 0.5
