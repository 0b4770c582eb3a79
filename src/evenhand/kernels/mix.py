"""Integer mixers: every bit of a word is spread over the word, one to one.

`mix32` is Wellons' lowbias32, `mix64` the finaliser of SplitMix64. The Triton twin of `mix32` is in
`kernels.gpu.permutation`. Runs resume, and texts are hashed, by these very bits.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.jit import jit

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
    """Mixes words below 2 ** 32: a plain int, or an int64 tensor.

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
    """Mixes an array of uint64; products wrap."""
    words = (words ^ (words >> _30)) * _FIRST64
    words = (words ^ (words >> _27)) * _SECOND64
    return words ^ (words >> _31)


jit_mix64 = jit(mix64)  # the same in compiled code, of one word
