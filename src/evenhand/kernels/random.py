"""Counter-based random numbers: integer mixers, keyed permutations, and draws of labels.

Runs resume, and texts are hashed, by these very bits. The Triton twins of `mix32` and of the order
are in `kernels.gpu.permutation`.
"""

from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn.functional import pad

from evenhand.kernels.jit import jit

# --- mixers: every bit of a word is spread over the word, one to one ------------------------------

WORD = 0xFFFFFFFF  # the bits of a word of 32
FIRST32, SECOND32 = 0x7FEB352D, 0x846CA68B
GOLDEN32 = 0x9E3779B9  # 2 ** 32 over the golden ratio: odd, and its multiples are far apart
GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)

_FIRST32, _SECOND32 = np.uint32(FIRST32), np.uint32(SECOND32)
_15, _16 = np.uint32(15), np.uint32(16)
_FIRST64, _SECOND64 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)

Words = TypeVar("Words", Tensor, int)
Words64 = TypeVar("Words64", np.uint64, NDArray[np.uint64])


def mix32(words: Words) -> Words:
    """Mixes words below 2 ** 32, a plain int or an int64 tensor: Wellons' lowbias32.

    Example:
        >>> hex(mix32(1))
        '0x688990c0'
    """
    words = words ^ (words >> 16)
    words = (words * FIRST32) & WORD
    words = words ^ (words >> 15)
    words = (words * SECOND32) & WORD
    return words ^ (words >> 16)


@jit
def jit_mix32(word: np.uint32) -> np.uint32:
    """`mix32` in compiled code: products that wrap at 32 bits, so a vector holds twice as many."""
    word = np.uint32(word ^ (word >> _16))
    word = np.uint32(word * _FIRST32)
    word = np.uint32(word ^ (word >> _15))
    word = np.uint32(word * _SECOND32)
    return np.uint32(word ^ (word >> _16))


def mix64(words: Words64) -> Words64:
    """Mixes an array of uint64: the finaliser of SplitMix64; products wrap."""
    words = (words ^ (words >> _30)) * _FIRST64
    words = (words ^ (words >> _27)) * _SECOND64
    return words ^ (words >> _31)


jit_mix64 = jit(mix64)  # the same in compiled code, of one word


# --- a keyed permutation of 0 .. n - 1 ------------------------------------------------------------
#
# A shuffle holds n numbers, and a draw without repeats must look for them. A Feistel network is a
# permutation by construction: it cuts the number in two halves of bits and adds to each, in turn, a
# hash of the other half and of a key. So the M first places of the order are M distinct labels, at
# a cost of M whatever n; and the inverse, which kernels on a GPU use, tells at once whether, and
# where, a label was drawn.
# Powers of two only: a result of n or more is sent through again until it is below ("cycle
# walking"), which keeps it a permutation.
#
# Keys (R, 1) give each row an order of its own. `permute_in_torch` is the definition; the numba
# twin and the Triton twin agree with it bit for bit. The numba twin is by hand because torch makes
# a pass over memory for each of some hundred operations; here a round is one pass over a row's
# halves, which stay in the cache.

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
    ends = torch.full_like(keys, size) if sizes is None else sizes.expand_as(keys).contiguous()
    places, bits = places.expand(len(keys), -1), num_bits(size)
    if places.device.type == "cpu":
        found = places.clone(memory_format=torch.contiguous_format)
        _permute_(found.numpy(), keys[:, 0].numpy(), ends[:, 0].numpy(), bits)
        return found
    if places.is_cuda and find_spec("triton"):
        from evenhand.kernels.gpu import permutation as gpu_permutation

        # Triton launches on the current device.
        with torch.cuda.device_of(places):  # type: ignore[no-untyped-call]
            return gpu_permutation.apply(places, keys, ends, bits)
    return permute_in_torch(places, keys, ends, bits)


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


def permute_in_torch(numbers: Tensor, keys: Tensor, ends: Tensor, bits: int) -> Tensor:
    """The network, and again for what is outside: (R, M), (R, 1), (R, 1) -> (R, M)."""
    found = _network(numbers, keys, bits)
    rows, columns = (found >= ends).nonzero(as_tuple=True)
    keys, ends = keys[:, 0], ends[:, 0]
    while len(rows):
        again = _network(found[rows, columns], keys[rows], bits)  # (n,)
        found[rows, columns] = again
        is_outside = again >= ends[rows]
        rows, columns = rows[is_outside], columns[is_outside]
    return found


def _network(numbers: Tensor, keys: Tensor, bits: int) -> Tensor:
    right_bits = bits // 2
    left_mask, right_mask = (1 << (bits - right_bits)) - 1, (1 << right_bits) - 1
    left, right = numbers >> right_bits, numbers & right_mask
    low, high = keys & WORD, (keys >> 32) & WORD
    for number in range(NUM_ROUNDS):
        round_keys = mix32(mix32((low + GOLDEN32 * number) & WORD) ^ high)
        if number % 2:
            right = right ^ (mix32(left ^ round_keys) & right_mask)
        else:
            left = left ^ (mix32(right ^ round_keys) & left_mask)
    return (left << right_bits) | right


@jit
def _permute_(
    numbers: NDArray[np.int64], keys: NDArray[np.int64], ends: NDArray[np.int64], bits: int
) -> None:
    """`permute_in_torch` in place; time grows with 2 ** bits / ends."""
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
            for number in range(NUM_ROUNDS):
                key = jit_mix32(np.uint32(jit_mix32(np.uint32(low + GOLDEN32 * number)) ^ high))
                if number % 2:
                    for place in range(count):
                        rights[place] ^= np.uint32(
                            jit_mix32(np.uint32(lefts[place] ^ key)) & right_mask
                        )
                else:
                    for place in range(count):
                        lefts[place] ^= np.uint32(
                            jit_mix32(np.uint32(rights[place] ^ key)) & left_mask
                        )
            num_outside = 0
            for place in range(count):
                column = columns[place]
                number = (np.int64(lefts[place]) << right_bits) | np.int64(rights[place])
                numbers[row, column] = number
                columns[num_outside] = column
                num_outside += number >= ends[row]
            count = num_outside


# --- draws of labels ------------------------------------------------------------------------------
#
# All of these work row by row: R rows, each with its own excluded ids, padded with -1.

BEYOND = 2**62  # sorts after every label; also the range of the random integers


def random_integers(num_rows: int, num_columns: int, generator: Generator) -> Tensor:
    # Not randint(num_labels): below 2**28 it takes 32 random bits modulo the range, and so prefers
    # small ids by up to 6 %.
    shape = (num_rows, num_columns)
    return torch.randint(BEYOND, shape, generator=generator, device=generator.device)


def inclusion(probabilities: Tensor, num_draws: int) -> Tensor:
    """1 - (1 - p) ** n, exact for small p."""
    return -torch.expm1(num_draws * torch.log1p(-probabilities.clamp(max=1)))


def is_first_occurrence(ids: Tensor) -> Tensor:
    """False where the same id stands further left in its row: (..., N) -> (..., N)."""
    values, order = ids.sort(dim=-1, stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[..., 1:] = values[..., 1:] != values[..., :-1]
    return torch.zeros_like(is_first).scatter(-1, order, is_first)


def without_repeats(ids: Tensor) -> Tensor:
    return ids.masked_fill(~is_first_occurrence(ids), -1)


def sorted_distinct(ids: Tensor) -> Tensor:
    """(R, P) -> (R, P + 1): each row's ids ascending and once each, filled with BEYOND."""
    is_absent = (ids < 0) | ~is_first_occurrence(ids)
    return pad(ids.masked_fill(is_absent, BEYOND).sort(dim=1).values, (0, 1), value=BEYOND)


def is_among(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """(R, M) True where the id is in its row of sorted_ids (R, P), whose last column is BEYOND."""
    return sorted_ids.gather(1, torch.searchsorted(sorted_ids, ids)) == ids
