"""Loops that numba compiles when they are first called."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code that runs beside other threads; kept for the next process.

    It is kept beside its source, or else in the user's cache folder. Where neither can be written,
    as in many containers, numba refuses to keep a function: then every process compiles its own.
    """
    return _kept(function)


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`; sums may be added up in any order, which vector instructions need."""
    return _kept(function, fastmath={"reassoc", "contract"})


def _refuse(*arguments: Any, **options: Any) -> Any:
    """Instead of a loop that is not compiled, which would count in other types."""
    raise RuntimeError(
        "NUMBA_DISABLE_JIT turns off the compiler, without which evenhand does not work; unset it"
    )


def _kept(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return _refuse
    try:
        kept: Callable[P, R] = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:
        kept = njit(nogil=True, **options)(function)
    return kept
