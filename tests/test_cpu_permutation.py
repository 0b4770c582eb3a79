import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evenhand.kernels.random import apply_in_numpy, apply_in_torch, num_bits


@given(
    st.integers(1, 10**9),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
    st.integers(0, 70),
    st.randoms(),
)
@example(1, [1], [0] * 4, 3, None)
@example(65, [1, 2, 3, 4], [2**62 - 1, 2**32, 2**32 - 1, 0], 64, None)
@example(2**40 + 1, [1, 3], [1, 2, 3, 4], 9, None)
def test_the_numbers_are_those_of_the_torch_form(size, divisors, keys, width, random):
    def below(size):
        return [random.randrange(size) if random else place % size for place in range(width)]

    sizes = [max(1, size // divisor) for divisor in divisors]
    keys = keys[: len(sizes)]
    numbers = np.array([below(size) for size in sizes], np.int64).reshape(len(sizes), width)
    bits = num_bits(max(sizes))
    columns = [torch.tensor(values).unsqueeze(1) for values in (keys, sizes)]  # (R, 1)
    for is_inverse in (False, True):
        actual = apply_in_numpy(
            numbers, np.array(keys), np.array(sizes), bits, is_inverse=is_inverse
        )
        expected = apply_in_torch(torch.tensor(numbers), *columns, bits, is_inverse=is_inverse)
        assert actual.dtype == np.int64
        assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_every_number_stands_at_one_place(size):
    numbers = np.arange(size)[None].repeat(3, axis=0)
    arrays = np.array([0, 1, 2**62 - 1]), np.array([size] * 3), num_bits(size)
    values = apply_in_numpy(numbers, *arrays, is_inverse=False)
    assert (np.sort(values, axis=1) == numbers).all()
    assert (apply_in_numpy(values, *arrays, is_inverse=True) == numbers).all()
    assert (numbers == np.arange(size)).all()  # what was given is not changed
