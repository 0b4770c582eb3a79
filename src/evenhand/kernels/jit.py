"""numba's compiler with the project's options (no GIL, cached on disk), and what its code takes."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

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


# --- arguments of compiled code -------------------------------------------------------------------

CLASSES = (Tensor, torch.nn.Parameter)  # and none made of them, which may hold no numbers
TYPES = (torch.float32, torch.int64)


def are_plain(*tensors: Tensor) -> bool:
    """Whether numba kernels can work on these: on the CPU, float32 or int64, without gradient."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in CLASSES
        and tensor.device.type == "cpu"
        and tensor.dtype in TYPES
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in tensors
    )


def check_ids(ids: Tensor, num_rows: int) -> None:
    """Refuses ids that are not rows of a table: a kernel would read, or write, beyond it."""
    if not _are_below(ids.flatten().numpy(), num_rows):
        raise IndexError(
            f"ids must be from 0 to {num_rows - 1}, got {int(ids.min())} to {int(ids.max())}"
        )


@jit
def _are_below(ids: NDArray[np.int64], limit: int) -> bool:
    num_outside = 0
    for place in range(len(ids)):
        num_outside += ids[place] < 0 or ids[place] >= limit
    return num_outside == 0
