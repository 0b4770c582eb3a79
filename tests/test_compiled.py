import numba
import pytest

from evenhand.kernels.jit import jit


def function_without_a_file():
    """Numba has nowhere to keep such a function: as with folders that cannot be written."""
    names = {}
    exec("def plus_one(number): return number + 1", names)
    return names["plus_one"]


def test_a_function_that_cannot_be_kept_is_compiled_all_the_same():
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(function_without_a_file())
    function = jit(function_without_a_file())
    assert function(2) == 3
    assert len(function.signatures) == 1
