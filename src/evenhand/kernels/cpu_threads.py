"""Numba kernels on all cores: on the very threads that torch computes with.

Between two of its operations torch's OpenMP threads spin for milliseconds. Threads of one's own
would share the cores with them, and gained nothing where that was measured. The OpenMP library
itself starts any function on its threads; where it is not found, one thread does all the work.

A kernel computes each row from its arguments alone, so no result depends on the parts.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

SMALLEST_WORK = 2**17  # numbers; to start the threads takes as long as to add that many


class _Job(NamedTuple):
    kernel: Callable[..., None]
    arguments: tuple[Any, ...]
    parts: list[tuple[int, int]]  # still to be taken: first row, row after the last
    errors: list[BaseException]


def in_parts(
    kernel: Callable[..., None],
    num_rows: int,
    *arguments: Any,
    work: int,
    work_before: NDArray[np.int64] | None = None,
) -> None:
    """Calls `kernel(first, last, *arguments)` until all rows are done, on all of torch's threads.

    Args:
        work: how many numbers the kernel reads, about; few are not worth a second thread.
        work_before: (R + 1,) ascending, the work before each row, where rows differ in it.
    """
    num_parts = torch.get_num_threads() if work >= SMALLEST_WORK else 1
    if num_parts == 1 or _start is None:
        kernel(0, num_rows, *arguments)
        return
    ends = [num_rows * part // num_parts for part in range(num_parts + 1)]
    if work_before is not None:
        shares = work_before[-1] * np.arange(1, num_parts) // num_parts
        ends[1:-1] = np.searchsorted(work_before[:-1], shares).tolist()
    parts = list(zip(ends[:-1], ends[1:], strict=True))
    job = _Job(kernel, arguments, parts, [])
    _start(_take_part, job, num_parts, 0)
    for part in parts:  # a library may start fewer threads than it was asked for
        kernel(*part, *arguments)
    if job.errors:
        raise job.errors[0]


@ctypes.CFUNCTYPE(None, ctypes.py_object)
def _take_part(job: _Job) -> None:
    try:
        kernel_part = job.parts.pop()
        job.kernel(*kernel_part, *job.arguments)
    except BaseException as error:  # C cannot raise it
        job.errors.append(error)


def _found_start() -> Callable[..., None] | None:
    try:
        start = ctypes.CDLL(None).GOMP_parallel  # in GNU's, LLVM's and Intel's libraries
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no such handle
        return None
    start.argtypes = [type(_take_part), ctypes.py_object, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start  # type: ignore[no-any-return]


_start = _found_start()
