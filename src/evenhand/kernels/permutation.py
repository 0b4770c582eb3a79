"""A random order that needs no memory: a keyed permutation of 0 .. n - 1, and its inverse.

A shuffle holds n numbers, and a draw without repeats must look for them. A Feistel network is a
permutation by construction: it cuts the number in two halves of bits and adds to each, in turn, a
hash of the other half and of a key. So the M first places of the order are M distinct labels, at a
cost of M whatever n; and the inverse tells at once whether, and where, a label was drawn. Powers
of two only: a result of n or more is sent through again until it is below ("cycle walking"), which
keeps it a permutation.

Keys (R, 1) give each row an order of its own. `apply_in_torch` is the definition; the numba twin
below it and the Triton twin in `kernels.gpu` agree with it bit for bit. The numba twin is by hand
because torch makes a pass over memory for each of some hundred operations; here a round is one pass
over a row's halves, which stay in the cache.
"""

from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.jit import jit
from evenhand.kernels.mix import GOLDEN32, WORD, Words, jit_mix32, mix32

Ints = NDArray[np.int64]
NUM_ROUNDS = 8  # an order of few labels is visibly not uniform with 4, and is with 6
SMALLEST_BITS = 6  # a half of 1 or 2 bits would have too few hashes to choose from


def permute(places: Tensor, keys: Tensor, size: int, *, sizes: Tensor | None = None) -> Tensor:
    """The numbers at these places of the order: (R, M) from 0 to n - 1 -> the same, int64.

    Args:
        keys: (R, 1) int64, one order each.
        size: n, or the largest of `sizes`, which decides the number of bits.
        sizes: (R, 1) where rows have an n of their own.

    Example:
        >>> permute(torch.arange(10).view(1, -1), torch.tensor([[7]]), 10).sort().values
        tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    """
    return _apply(places, keys, size, sizes, is_inverse=False)


def places_of(values: Tensor, keys: Tensor, size: int, *, sizes: Tensor | None = None) -> Tensor:
    """The places of these numbers in the order: the inverse of `permute`.

    Example:
        >>> keys = torch.tensor([[7]])
        >>> places_of(permute(torch.tensor([[3, 9]]), keys, 10), keys, 10)
        tensor([[3, 9]])
    """
    return _apply(values, keys, size, sizes, is_inverse=True)


def row_keys(key: Tensor, num_rows: int) -> Tensor:
    """A key for each row of a batch, (R, 1), from the one key (1, 1) of the batch.

    Example:
        >>> row_keys(torch.tensor([[7]]), 3).unique().numel()
        3
    """
    return keys_for(key, torch.arange(num_rows, device=key.device).unsqueeze(1))


def keys_for(key: Words, numbers: Words) -> Words:
    """A key for each number below 2 ** 32, from one key: (1, 1) and (R, 1), or two plain ints."""
    low = mix32(mix32(key & WORD) ^ numbers)
    high = mix32(low ^ ((key >> 32) & WORD))
    return (high << 32) | low


def num_bits(size: int) -> int:
    """Bits of the numbers that the network permutes: the fewest that hold `size - 1`."""
    return max(SMALLEST_BITS, (size - 1).bit_length())


def _apply(
    numbers: Tensor, keys: Tensor, size: int, sizes: Tensor | None, *, is_inverse: bool
) -> Tensor:
    ends = torch.full_like(keys, size) if sizes is None else sizes
    numbers, bits = numbers.expand(len(keys), -1), num_bits(size)
    ends = ends.expand_as(keys).contiguous()
    if numbers.device.type == "cpu":
        array = apply_in_numpy(
            numbers.numpy(), keys[:, 0].numpy(), ends[:, 0].numpy(), bits, is_inverse=is_inverse
        )
        return torch.from_numpy(array)
    if numbers.is_cuda and find_spec("triton"):
        from evenhand.kernels.gpu import permutation as gpu_permutation

        # Triton launches on the current device.
        with torch.cuda.device_of(numbers):  # type: ignore[no-untyped-call]
            return gpu_permutation.apply(numbers, keys, ends, bits, is_inverse=is_inverse)
    return apply_in_torch(numbers, keys, ends, bits, is_inverse=is_inverse)


def apply_in_torch(
    numbers: Tensor, keys: Tensor, ends: Tensor, bits: int, *, is_inverse: bool
) -> Tensor:
    """The network, and again for what is outside: (R, M), (R, 1), (R, 1) -> (R, M)."""
    found = _network(numbers, keys, bits, is_inverse=is_inverse)
    rows, columns = (found >= ends).nonzero(as_tuple=True)
    keys, ends = keys[:, 0], ends[:, 0]
    while len(rows):
        again = _network(found[rows, columns], keys[rows], bits, is_inverse=is_inverse)  # (n,)
        found[rows, columns] = again
        is_outside = again >= ends[rows]
        rows, columns = rows[is_outside], columns[is_outside]
    return found


def _network(numbers: Tensor, keys: Tensor, bits: int, *, is_inverse: bool) -> Tensor:
    right_bits = bits // 2
    left_mask, right_mask = (1 << (bits - right_bits)) - 1, (1 << right_bits) - 1
    left, right = numbers >> right_bits, numbers & right_mask
    low, high = keys & WORD, (keys >> 32) & WORD
    rounds = range(NUM_ROUNDS)
    for number in reversed(rounds) if is_inverse else rounds:
        round_keys = mix32(mix32((low + GOLDEN32 * number) & WORD) ^ high)
        if number % 2:
            right = right ^ (mix32(left ^ round_keys) & right_mask)
        else:
            left = left ^ (mix32(right ^ round_keys) & left_mask)
    return (left << right_bits) | right


# --- compiled -------------------------------------------------------------------------------------


def apply_in_numpy(numbers: Ints, keys: Ints, ends: Ints, bits: int, *, is_inverse: bool) -> Ints:
    """`apply_in_torch` for arrays: (R, M), (R,), (R,) -> (R, M).

    Args:
        ends: the size of each row; time grows with 2 ** bits / size.
        bits: `num_bits` of the largest size; at most 62.

    Example:
        >>> numbers, key, size = np.arange(10)[None], np.array([7]), np.array([10])
        >>> np.sort(apply_in_numpy(numbers, key, size, 6, is_inverse=False))
        array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    """
    result = np.array(numbers, dtype=np.int64)
    _apply_(result, keys, ends, bits, is_inverse)
    return result


@jit
def _apply_(numbers: Ints, keys: Ints, ends: Ints, bits: int, is_inverse: bool) -> None:
    width = numbers.shape[1]
    lefts, rights = np.empty(width, np.uint32), np.empty(width, np.uint32)
    right_bits = bits // 2
    left_mask = np.uint32((1 << (bits - right_bits)) - 1)
    right_mask = np.uint32((1 << right_bits) - 1)
    for row in range(len(numbers)):
        low, high = np.uint32(keys[row]), np.uint32(keys[row] >> 32)
        columns, count = np.arange(width), width  # those still to be sent through
        while count:
            for place in range(count):
                number = numbers[row, columns[place]]
                lefts[place], rights[place] = number >> right_bits, number & right_mask
            for step in range(NUM_ROUNDS):
                number = NUM_ROUNDS - 1 - step if is_inverse else step
                key = jit_mix32(np.uint32(jit_mix32(np.uint32(low + GOLDEN32 * number)) ^ high))
                if number % 2:
                    for place in range(count):
                        mixed = jit_mix32(np.uint32(lefts[place] ^ key))
                        rights[place] ^= np.uint32(mixed & right_mask)
                else:
                    for place in range(count):
                        mixed = jit_mix32(np.uint32(rights[place] ^ key))
                        lefts[place] ^= np.uint32(mixed & left_mask)
            num_outside = 0
            for place in range(count):
                column = columns[place]
                number = (np.int64(lefts[place]) << right_bits) | np.int64(rights[place])
                numbers[row, column] = number
                columns[num_outside] = column
                num_outside += number >= ends[row]
            count = num_outside
