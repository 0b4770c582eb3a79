"""Counter-based random numbers: integer mixers, keyed permutations, and draws of labels.

Runs resume, and texts are hashed, by these very bits. The Triton twins of `mix32` and of the order
are in `kernels.gpu.permutation`.
"""

from importlib.util import find_spec
from typing import Protocol, TypeVar

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


# --- a keyed permutation of 0 .. n - 1, and its inverse -------------------------------------------
#
# A shuffle holds n numbers, and a draw without repeats must look for them. A Feistel network is a
# permutation by construction: it cuts the number in two halves of bits and adds to each, in turn, a
# hash of the other half and of a key. So the M first places of the order are M distinct labels, at
# a cost of M whatever n; and the inverse tells at once whether, and where, a label was drawn.
# Powers of two only: a result of n or more is sent through again until it is below ("cycle
# walking"), which keeps it a permutation.
#
# Keys (R, 1) give each row an order of its own. `apply_in_torch` is the definition; the numba twin
# and the Triton twin agree with it bit for bit. The numba twin is by hand because torch makes a
# pass over memory for each of some hundred operations; here a round is one pass over a row's
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
        found = numbers.clone(memory_format=torch.contiguous_format)
        _apply_(found.numpy(), keys[:, 0].numpy(), ends[:, 0].numpy(), bits, is_inverse)
        return found
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


@jit
def _apply_(
    numbers: NDArray[np.int64],
    keys: NDArray[np.int64],
    ends: NDArray[np.int64],
    bits: int,
    is_inverse: bool,
) -> None:
    """`apply_in_torch` in place; time grows with 2 ** bits / ends."""
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


# --- draws of labels with repeats, from spans of a line -------------------------------------------
#
# All of these work row by row: R rows, each with its own excluded ids, padded with -1.

BEYOND = 2**62  # sorts after every label; also the range of the random integers


class SpanDistribution(Protocol):
    """Labels, by rank, as adjacent spans of a line from 0 to `total`, as wide as likely."""

    total: Tensor

    def spans(self, ranks: Tensor) -> tuple[Tensor, Tensor]: ...  # starts and widths, like ranks
    def ranks_at(self, points: Tensor) -> Tensor: ...


def draw_ranks(
    distribution: SpanDistribution, excluded_ranks: Tensor, num_draws: int, generator: Generator
) -> Tensor:
    """Ranks (R, M) drawn with repeats, none of the row's excluded ones (R, P)."""
    excluded = sorted_distinct(excluded_ranks)
    starts, widths = _excluded_spans(distribution, excluded)
    # Cut the excluded spans out of the line, draw a point on what is left, then put back the
    # spans before it: no draw is rejected, however likely the excluded labels are.
    removed = pad(widths.cumsum(1), (1, 0))  # (R, 1 + P)
    lengths = (distribution.total - removed[:, -1:]).clamp(min=0)  # (R, 1)
    units = torch.rand(
        len(excluded), num_draws, generator=generator, device=generator.device, dtype=torch.float64
    )
    points = units.to(excluded.device) * lengths  # (R, M)
    num_passed = torch.searchsorted(starts - removed[:, :-1], points, right=True)
    ranks = distribution.ranks_at(points + removed.gather(1, num_passed))
    return ranks.masked_fill(is_among(ranks, excluded), -1)


def log_draw_counts(
    distribution: SpanDistribution, ranks: Tensor, excluded_ranks: Tensor, num_draws: int
) -> Tensor:
    """log(M * p), p the probability of a rank (R, N), renormalised without the excluded ones."""
    _, widths = distribution.spans(ranks.clamp(min=0))
    _, removed = _excluded_spans(distribution, sorted_distinct(excluded_ranks))
    lengths = distribution.total - removed.sum(1, keepdim=True)  # (R, P) -> (R, 1)
    return (num_draws * widths / lengths).log()


def _excluded_spans(distribution: SpanDistribution, excluded: Tensor) -> tuple[Tensor, Tensor]:
    is_absent = excluded == BEYOND
    starts, widths = distribution.spans(excluded.masked_fill(is_absent, 0))
    return starts.masked_fill(is_absent, torch.inf), widths.masked_fill(is_absent, 0)


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


def lookup(table: Tensor | None, ids: Tensor) -> Tensor:
    """table[ids], -1 staying -1; the ids themselves without a table."""
    return ids if table is None else table[ids.clamp(min=0)].masked_fill(ids < 0, -1)
