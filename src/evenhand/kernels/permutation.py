"""A random order that needs no memory: a keyed permutation of 0 .. n - 1, and its inverse.

A shuffle holds n numbers, and a draw without repeats must look for them. A Feistel network is a
permutation by construction: it cuts the number in two halves of bits and adds to each, in turn, a
hash of the other half and of a key. So the M first places of the order are M distinct labels, at a
cost of M whatever n; and the inverse tells at once whether, and where, a label was drawn. Powers
of two only: a result of n or more is sent through again until it is below ("cycle walking"), which
keeps it a permutation.

Keys (R, 1) give each row an order of its own. The Triton twin in `kernels.gpu` is bit for bit the
same.
"""

from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

NUM_ROUNDS = 8  # an order of few labels is visibly not uniform with 4, and is with 6
SMALLEST_BITS = 6  # a half of 1 or 2 bits would have too few hashes to choose from
GOLDEN = 0x9E3779B9
WORD = 0xFFFFFFFF

Words = TypeVar("Words", Tensor, int)


def permuted(places: Tensor, keys: Tensor, size: int, *, sizes: Tensor | None = None) -> Tensor:
    """What stands at these places of the order: (R, M) from 0 to n - 1 -> the same, int64.

    Args:
        keys: (R, 1) int64, one order each.
        size: n, or the largest of `sizes`, which decides the number of bits.
        sizes: (R, 1) where rows have an n of their own.

    Example:
        >>> permuted(torch.arange(10).view(1, -1), torch.tensor([[7]]), 10).sort().values
        tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    """
    return _walked(places, keys, size, sizes, is_inverse=False)


def places_of(values: Tensor, keys: Tensor, size: int, *, sizes: Tensor | None = None) -> Tensor:
    """At which places of the order these stand: the inverse of `permuted`.

    Example:
        >>> keys = torch.tensor([[7]])
        >>> places_of(permuted(torch.tensor([[3, 9]]), keys, 10), keys, 10)
        tensor([[3, 9]])
    """
    return _walked(values, keys, size, sizes, is_inverse=True)


def row_keys(key: Tensor, num_rows: int) -> Tensor:
    """A key for each row of a batch, (R, 1), from the one key (1, 1) of the batch.

    Example:
        >>> row_keys(torch.tensor([[7]]), 3).unique().numel()
        3
    """
    return keys_for(key, torch.arange(num_rows, device=key.device).unsqueeze(1))


def keys_for(key: Words, numbers: Words) -> Words:
    """A key for each number below 2 ** 32, from one key: (1, 1) and (R, 1), or two plain ints."""
    low = _mixed(_mixed(key & WORD) ^ numbers)
    high = _mixed(low ^ ((key >> 32) & WORD))
    return (high << 32) | low


def num_bits(size: int) -> int:
    """Bits of the numbers that the network permutes: the fewest that hold `size - 1`."""
    return max(SMALLEST_BITS, (size - 1).bit_length())


def _walked(
    numbers: Tensor, keys: Tensor, size: int, sizes: Tensor | None, *, is_inverse: bool
) -> Tensor:
    ends = torch.full_like(keys, size) if sizes is None else sizes
    numbers, bits = numbers.expand(len(keys), -1), num_bits(size)
    ends = ends.expand_as(keys).contiguous()
    if numbers.device.type == "cpu":
        from evenhand.kernels import cpu_permutation

        array = cpu_permutation.walked(
            numbers.numpy(), keys[:, 0].numpy(), ends[:, 0].numpy(), bits, is_inverse
        )
        return torch.from_numpy(array)
    if numbers.is_cuda and find_spec("triton"):
        from evenhand.kernels.gpu import permutation as gpu_permutation

        # Triton launches on the current device.
        with torch.cuda.device_of(numbers):  # type: ignore[no-untyped-call]
            return gpu_permutation.walked(numbers, keys, ends, bits, is_inverse=is_inverse)
    return walked_in_torch(numbers, keys, ends, bits, is_inverse=is_inverse)


def walked_in_torch(
    numbers: Tensor, keys: Tensor, ends: Tensor, bits: int, *, is_inverse: bool
) -> Tensor:
    """The network, and again for what is outside: (R, M), (R, 1), (R, 1) -> (R, M)."""
    walked = _network(numbers, keys, bits, is_inverse=is_inverse)
    rows, columns = (walked >= ends).nonzero(as_tuple=True)
    keys, ends = keys[:, 0], ends[:, 0]
    while len(rows):
        again = _network(walked[rows, columns], keys[rows], bits, is_inverse=is_inverse)  # (n,)
        walked[rows, columns] = again
        is_outside = again >= ends[rows]
        rows, columns = rows[is_outside], columns[is_outside]
    return walked


def _network(numbers: Tensor, keys: Tensor, bits: int, *, is_inverse: bool) -> Tensor:
    right_bits = bits // 2
    left_mask, right_mask = (1 << (bits - right_bits)) - 1, (1 << right_bits) - 1
    left, right = numbers >> right_bits, numbers & right_mask
    low, high = keys & WORD, (keys >> 32) & WORD
    rounds = range(NUM_ROUNDS)
    for number in reversed(rounds) if is_inverse else rounds:
        round_keys = _mixed(_mixed((low + GOLDEN * number) & WORD) ^ high)
        if number % 2:
            right = right ^ (_mixed(left ^ round_keys) & right_mask)
        else:
            left = left ^ (_mixed(right ^ round_keys) & left_mask)
    return (left << right_bits) | right


def _mixed(words: Words) -> Words:
    """Spreads every bit of a 32-bit word over the word (multipliers: Wellons' lowbias32)."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & WORD
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & WORD
    return words ^ (words >> 16)
