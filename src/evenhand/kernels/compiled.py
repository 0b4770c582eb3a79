"""Loops that numba compiles when they are first called."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code that runs beside other threads; kept for the next process.

    It is kept beside its source, or else in the user's cache folder. Where neither can be written,
    as in many containers, numba refuses to keep a function: then every process compiles its own.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)
