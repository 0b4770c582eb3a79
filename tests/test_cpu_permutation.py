import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from evenhand.kernels.cpu_permutation import walked
from evenhand.kernels.permutation import num_bits, permuted, places_of


@given(
    st.integers(1, 10**9),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**62 - 1), min_size=4, max_size=4),
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
    numbers = np.array([below(size) for size in sizes]).reshape(len(sizes), width)
    largest = max(sizes)
    columns = {"sizes": torch.tensor(sizes)[:, None]}
    torch_keys = torch.tensor(keys)[:, None]

    arrays = np.array(keys), np.array(sizes), num_bits(largest)
    values = walked(numbers, *arrays, False)
    expected = permuted(torch.tensor(numbers), torch_keys, largest, **columns)
    assert values.dtype == np.int64
    assert values.tolist() == expected.tolist()

    places = walked(numbers, *arrays, True)
    expected = places_of(torch.tensor(numbers), torch_keys, largest, **columns)
    assert places.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_every_number_stands_at_one_place(size):
    numbers = np.arange(size)[None].repeat(3, axis=0)
    arrays = np.array([0, 1, 2**62 - 1]), np.array([size] * 3), num_bits(size)
    values = walked(numbers, *arrays, False)
    assert (np.sort(values, axis=1) == numbers).all()
    assert (walked(values, *arrays, True) == numbers).all()
    assert (numbers == np.arange(size)).all()  # what was given is not changed
