"""numba's compiler with the project's options: no GIL, cached on disk."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function on its first call, to run without the GIL.

    The machine code is cached beside the source, or else in the user's cache folder. Where neither
    can be written, as in many containers, numba refuses to cache: then every process compiles.
    """
    return _njit(function)


def jit_sums(function: Callable[P, R]) -> Callable[P, R]:
    """`jit`, with sums in any order, which vector instructions need."""
    return _njit(function, fastmath={"reassoc", "contract"})


def _refuse(*arguments: Any, **options: Any) -> Any:
    """Stands in for every function under NUMBA_DISABLE_JIT: as Python, integers would not wrap."""
    raise RuntimeError(
        "NUMBA_DISABLE_JIT turns off the compiler, without which evenhand does not work; unset it"
    )


def _njit(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return _refuse
    try:
        compiled: Callable[P, R] = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:
        compiled = njit(nogil=True, **options)(function)
    return compiled
