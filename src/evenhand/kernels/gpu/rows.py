"""One row-wise optimiser step on the touched rows, with one row per program.

The formulas are those of `RowAdam` and `RowAdagrad`. A row is read, changed and written once, in
float32 whatever the table is stored in. A bfloat16 weight is 2^8 times coarser than a small step:
rounded to nearest, most steps would leave it where it is. Rounded up or down by chance, with the
right odds, it moves by the step on average. Chance is a hash of seed, step, row and column.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.permutation import mix

EPSILON = tl.constexpr(1e-8)
SMALLEST_NORM = tl.constexpr(1e-12)
WEIGHTS_OF_WARP = 512  # where each row has a program of its own
LARGEST_WIDTH = 1024  # a row must fit the registers of a program


@dataclass(frozen=True)
class RowTable:
    """A table and its optimiser's state, all on the device and changed in place."""

    table: Tensor  # (R, D) float32 or bfloat16
    moments: Tensor  # (R,) float32: second moments of Adam, sums of squares of Adagrad
    momentum: Tensor | None = None  # (R, D) float32 or bfloat16; None: Adagrad
    betas: tuple[float, float] = (0.9, 0.999)
    seed: int | None = None  # of the rounding of a bfloat16 table by chance; None: to nearest

    @property
    def num_warps(self) -> int:
        """Four weights a thread."""
        return max(1, row_block(self.table.shape[1]) // 128)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Table, momentum and moments as kernels take them; Adagrad's never read a momentum."""
        momentum = self.table if self.momentum is None else self.momentum
        return self.table, momentum, self.moments

    def constants(self) -> dict[str, Any]:
        """What `step_scales` and `apply_row` take besides tensors, by name."""
        return {
            "seed": self.seed or 0,
            "FIRST_BETA": self.betas[0],
            "SECOND_BETA": self.betas[1],
            "IS_ADAM": self.momentum is not None,
            "IS_STOCHASTIC": self.seed is not None and self.table.dtype == torch.bfloat16,
        }


def row_block(width: int) -> int:
    """The power of two that holds a row; layouts of less than a few lanes are not worth it."""
    return max(16, 1 << (width - 1).bit_length())


def update_rows(
    rows: RowTable, row_ids: Tensor, gradients: Tensor, *, learning_rate: Tensor,
    step_number: Tensor, is_cosine: bool = False, touched: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of the optimiser on the rows of these ids.

    Args:
        row_ids: (N,) int64 or int32, distinct; -1: none.
        gradients: (N, D) float32.
        learning_rate: (1,) float32 on the device.
        step_number: (1,) integer on the device, counted from 1.
        is_cosine: the gradients are by the unit rows, not by the rows themselves.
        touched: (N,) int32; a row is left alone where this is 0.
    """
    width = gradients.shape[1]
    _update_rows[(len(row_ids),)](
        *rows.tensors(), row_ids, gradients, row_ids if touched is None else touched,
        learning_rate, step_number, width, IS_COSINE=is_cosine, HAS_TOUCHED=touched is not None,
        BLOCK=row_block(width), num_warps=max(1, row_block(width) // WEIGHTS_OF_WARP),
        **rows.constants(),
    )  # fmt: skip


@triton.jit
def _update_rows(
    table, momentum, moments, row_ids, gradients, touched, learning_rate_at, step_number_at,
    width, seed, IS_COSINE: tl.constexpr, HAS_TOUCHED: tl.constexpr, BLOCK: tl.constexpr,
    FIRST_BETA: tl.constexpr, SECOND_BETA: tl.constexpr, IS_ADAM: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row_id = tl.load(row_ids + place).to(tl.int64)
    is_touched = row_id >= 0
    if HAS_TOUCHED:
        is_touched = is_touched & (tl.load(touched + place) != 0)
    if is_touched:
        dims = tl.arange(0, BLOCK)
        is_dim = dims < width
        gradient = tl.load(
            gradients + place.to(tl.int64) * width + dims, mask=is_dim, other=0.0
        ).to(tl.float32)
        row = load_row(table, row_id, dims, is_dim, width)
        if IS_COSINE:
            gradient = through_unit(gradient, row)
        step_number = tl.load(step_number_at)
        rate, moment_scale = step_scales(
            tl.load(learning_rate_at), step_number, FIRST_BETA, SECOND_BETA, IS_ADAM
        )
        apply_row(
            table, momentum, moments, row_id, row, gradient, dims, is_dim, width, rate,
            moment_scale, step_number, seed, FIRST_BETA, SECOND_BETA, IS_ADAM, IS_STOCHASTIC,
        )  # fmt: skip


@triton.jit
def load_row(table, row_id, dims, is_dim, width):
    """A row as float32, 0 beyond its width."""
    place = row_id.to(tl.int64) * width
    return tl.load(table + place + dims, mask=is_dim, other=0.0).to(tl.float32)


@triton.jit
def through_unit(gradient, row):
    """The gradient by a row from that by its unit row; both 0 beyond the row's width."""
    norm = tl.sqrt(tl.sum(row * row, axis=0))
    norm = tl.where(norm <= SMALLEST_NORM, float("inf"), norm)  # a zero row has a zero gradient
    unit = row / norm
    along = tl.sum(gradient * unit, axis=0)  # only the part across changes the unit row
    return (gradient - along * unit) / norm


@triton.jit
def step_scales(
    learning_rate, step_number, FIRST_BETA: tl.constexpr, SECOND_BETA: tl.constexpr,
    IS_ADAM: tl.constexpr,
):  # fmt: skip
    """The rate and the factor of the second moments, Adam's bias corrections within.

    In float64: 1 - 0.999 has lost a third of float32's digits. Once in a program is enough.
    """
    rate = learning_rate.to(tl.float32)
    moment_scale = rate * 0.0 + 1.0
    if IS_ADAM:
        number = step_number.to(tl.float64)
        first = _power(FIRST_BETA, number)
        second = _power(SECOND_BETA, number)
        rate = (rate.to(tl.float64) / (1.0 - first)).to(tl.float32)
        moment_scale = (1.0 / (1.0 - second)).to(tl.float32)
    return rate, moment_scale


@triton.jit
def _power(BASE: tl.constexpr, number):
    """BASE ** number, in float64; BASE is a Python number, which float32 would cut short."""
    return tl.exp(number * tl.log(number * 0.0 + BASE))


@triton.jit
def apply_row(
    table, momentum, moments, row_id, row, gradient, dims, is_dim, width, rate, moment_scale,
    step_number, seed, FIRST_BETA: tl.constexpr, SECOND_BETA: tl.constexpr,
    IS_ADAM: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One step on one row, of which the caller has the weights and the gradient in registers.

    `row` (from `load_row`) and `gradient` are float32 blocks, 0 beyond the width; `rate` and
    `moment_scale` are from `step_scales`; no other program may touch the row.
    """
    row_id = row_id.to(tl.int64)
    places = row_id * width + dims
    square = tl.sum(gradient * gradient, axis=0) / width
    moment = tl.load(moments + row_id)
    direction = gradient
    if IS_ADAM:
        direction = tl.load(momentum + places, mask=is_dim, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread reads the moment, and one writes it: not before all have
    if IS_ADAM:
        direction = direction * FIRST_BETA + gradient * (1 - FIRST_BETA)
        _store_rounded(momentum, places, direction, is_dim)
        moment = moment * SECOND_BETA + square * (1 - SECOND_BETA)
    else:
        moment = moment + square
    tl.store(moments + row_id, moment)
    new = row - rate * (direction / (tl.sqrt(moment * moment_scale) + EPSILON))
    if IS_STOCHASTIC:
        new = rounded_by_chance(new, random_words(seed, step_number, row_id, dims))
    _store_rounded(table, places, new, is_dim)


@triton.jit
def _store_rounded(pointer, places, values, mask):
    if pointer.dtype.element_ty == tl.bfloat16:
        tl.store(pointer + places, rounded_to_nearest(values).to(tl.bfloat16), mask=mask)
    else:
        tl.store(pointer + places, values, mask=mask)


@triton.jit
def rounded_to_nearest(values):
    """The nearest bfloat16, as a float32; half way, the one with an even mantissa.

    By the bits, because Triton's interpreter cuts off where the compiled cast rounds.
    """
    bits = values.to(tl.uint32, bitcast=True)
    return _cut(bits, bits + 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def rounded_by_chance(values, words):
    """One of the two nearest bfloat16, as a float32, so that the mean is the value itself."""
    bits = values.to(tl.uint32, bitcast=True)
    return _cut(bits, bits + (words & 0xFFFF))


@triton.jit
def _cut(bits, raised):
    """The upper half of raised bits; infinities and NaN stay as they are."""
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, raised & 0xFFFF0000, bits).to(tl.float32, bitcast=True)


@triton.jit
def random_words(seed, step_number, row_id, dims):
    """32 random bits for each column: a strong hash for the row, a cheap one along it."""
    low = row_id.to(tl.uint32)
    high = (row_id >> 32).to(tl.uint32)
    number = step_number.to(tl.uint32)
    key, _, _, _ = tl.philox(seed, low, high, number, number ^ number)
    return mix(dims.to(tl.uint32) ^ key)
