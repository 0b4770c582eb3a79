"""The keyed permutation of `kernels.random`, inside a kernel: bit for bit the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels import random

NUM_ROUNDS = tl.constexpr(random.NUM_ROUNDS)
GOLDEN = tl.constexpr(random.GOLDEN32)
WORD = tl.constexpr(random.WORD)
FIRST = tl.constexpr(random.FIRST32)
SECOND = tl.constexpr(random.SECOND32)


def apply(numbers: Tensor, keys: Tensor, sizes: Tensor, bits: int) -> Tensor:
    """`random.permute`: (R, M), (R, 1), (R, 1) -> (R, M)."""
    num_rows, width = numbers.shape
    out = torch.empty_like(numbers, memory_format=torch.contiguous_format)
    _apply[(num_rows, triton.cdiv(width, 1024))](
        numbers.contiguous(), keys, sizes, out, width, BITS=bits, BLOCK=1024
    )
    return out


@triton.jit
def _apply(numbers, keys, sizes, out, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = tl.load(numbers + row * width + columns, mask=columns < width, other=0)
    key, size = tl.load(keys + row), tl.load(sizes + row)
    found = permute(places, key, size, BITS)
    tl.store(out + row * width + columns, found, mask=columns < width)


@triton.jit
def permute(places, key, size, BITS: tl.constexpr):
    """What stands at these places (int64) of the order of 0 .. size - 1 that belongs to `key`."""
    return walk(places, key, size, BITS, False)


@triton.jit
def places_of(values, key, size, BITS: tl.constexpr):
    """At which places these stand; a value that is not in 0 .. size - 1 gives one that is."""
    values = tl.minimum(tl.maximum(values, 0), size - 1)
    return walk(values, key, size, BITS, True)


@triton.jit
def walk(numbers, key, size, BITS: tl.constexpr, IS_INVERSE: tl.constexpr):
    """The network, again and again until a number is below the size."""
    numbers = network(numbers, key, BITS, IS_INVERSE)
    while tl.max((numbers >= size).to(tl.int32)) > 0:
        numbers = tl.where(numbers >= size, network(numbers, key, BITS, IS_INVERSE), numbers)
    return numbers


@triton.jit
def row_key(key, row):
    """A key for each row of a batch, from the key of the step."""
    low = mix(mix(key.to(tl.uint32)) ^ row.to(tl.uint32))
    high = mix(low ^ (key >> 32).to(tl.uint32))
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def network(numbers, key, BITS: tl.constexpr, IS_INVERSE: tl.constexpr):
    RIGHT_BITS: tl.constexpr = BITS // 2
    LEFT_MASK: tl.constexpr = (1 << (BITS - RIGHT_BITS)) - 1
    RIGHT_MASK: tl.constexpr = (1 << RIGHT_BITS) - 1
    left = (numbers >> RIGHT_BITS).to(tl.uint32)
    right = (numbers & RIGHT_MASK).to(tl.uint32)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for turn in tl.static_range(NUM_ROUNDS):
        left, right = one_round(
            left, right, low, high, NUM_ROUNDS - 1 - turn if IS_INVERSE else turn, LEFT_MASK,
            RIGHT_MASK,
        )  # fmt: skip
    return (left.to(tl.int64) << RIGHT_BITS) | right.to(tl.int64)


@triton.jit
def one_round(
    left, right, low, high, NUMBER: tl.constexpr, LEFT_MASK: tl.constexpr, RIGHT_MASK: tl.constexpr
):  # fmt: skip
    ADDED: tl.constexpr = (GOLDEN * NUMBER) & WORD
    round_key = mix(mix((low + ADDED).to(tl.uint32)) ^ high)
    if NUMBER % 2 == 1:
        right = right ^ (mix(left ^ round_key) & RIGHT_MASK)
    else:
        left = left ^ (mix(right ^ round_key) & LEFT_MASK)
    return left, right


@triton.jit
def mix(words):
    """`kernels.random.mix32`, of uint32."""
    words = words ^ (words >> 16)
    words = (words * FIRST).to(tl.uint32)
    words = words ^ (words >> 15)
    words = (words * SECOND).to(tl.uint32)
    return words ^ (words >> 16)
