"""The keyed permutation of `kernels.permutation` for numpy arrays: bit for bit the same.

The torch form makes a pass over memory for each of some hundred operations. Here a round is one
pass over a row's halves, which stay in the cache, and a vector instruction does several numbers.
"""

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.compiled import compiled
from evenhand.kernels.permutation import GOLDEN, NUM_ROUNDS

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_15, _16 = np.uint32(15), np.uint32(16)


def walked(
    numbers: NDArray[np.int64],
    keys: NDArray[np.int64],
    sizes: NDArray[np.int64],
    bits: int,
    is_inverse: bool,
) -> NDArray[np.int64]:
    """`permutation.permuted`, or its inverse: (R, M) from 0 to size - 1, (R,), (R,) -> (R, M).

    Args:
        sizes: of each row; time grows with 2 ** bits / size.
        bits: `permutation.num_bits` of the largest size; at most 62.

    Example:
        >>> numbers, key, size = np.arange(10)[None], np.array([7]), np.array([10])
        >>> np.sort(walked(numbers, key, size, 6, False))
        array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    """
    result = np.array(numbers, dtype=np.int64)
    _walk(result, keys, sizes, bits, is_inverse)
    return result


@compiled
def _walk(
    numbers: NDArray[np.int64],
    keys: NDArray[np.int64],
    sizes: NDArray[np.int64],
    bits: int,
    is_inverse: bool,
) -> None:
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
                key = _mixed(np.uint32(_mixed(np.uint32(low + GOLDEN * number)) ^ high))
                if number % 2:
                    for place in range(count):
                        rights[place] ^= np.uint32(
                            _mixed(np.uint32(lefts[place] ^ key)) & right_mask
                        )
                else:
                    for place in range(count):
                        lefts[place] ^= np.uint32(
                            _mixed(np.uint32(rights[place] ^ key)) & left_mask
                        )
            num_outside = 0
            for place in range(count):
                column = columns[place]
                number = (np.int64(lefts[place]) << right_bits) | np.int64(rights[place])
                numbers[row, column] = number
                columns[num_outside] = column
                num_outside += number >= sizes[row]
            count = num_outside


@compiled
def _mixed(word: np.uint32) -> np.uint32:
    word = np.uint32(word ^ (word >> _16))
    word = np.uint32(word * _FIRST)
    word = np.uint32(word ^ (word >> _15))
    word = np.uint32(word * _SECOND)
    return np.uint32(word ^ (word >> _16))
