"""What the numba kernels share: which tensors they take, and how they run on all cores.

Between two of its operations torch's OpenMP threads spin for milliseconds. Threads of one's own
would share the cores with them: measured, they gained nothing. But the OpenMP library starts any
function on the very threads that torch computes with. Where it is not found, one thread does all.

A kernel computes each row from its arguments alone, so no result depends on the parts.
"""

import ctypes
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALLEST_WORK = 2**19  # numbers to read; for fewer, to start the threads takes as long
TYPES = (torch.float32, torch.int64)


def are_plain(*tensors: Tensor) -> bool:
    """Whether numba kernels can read and write these: on the CPU, float32 or int64, no gradient."""
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype in TYPES
        and tensor.is_contiguous()
        and not tensor.requires_grad
        for tensor in tensors
    )


def check_ids(ids: Tensor, num_rows: int) -> None:
    """Refuses ids that are not rows of a table: a kernel would read, or write, beyond it."""
    if not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= num_rows:
        raise IndexError(f"ids must be from 0 to {num_rows - 1}, got {least} to {most}")


class _Job(NamedTuple):
    kernel: Callable[..., None]
    arguments: tuple[Any, ...]
    parts: list[tuple[int, int]]  # not taken yet: first row, row after the last
    errors: list[BaseException]


def in_parts(kernel: Callable[..., None], num_rows: int, *arguments: Any, work: int) -> None:
    """Calls `kernel(first, last, *arguments)` until all rows are done, on all of torch's threads.

    Args:
        arguments: tensors are given to the kernel as numpy arrays.
        work: how many numbers the kernel reads, about.
    """
    arguments = tuple(value.numpy() if isinstance(value, Tensor) else value for value in arguments)
    num_parts = torch.get_num_threads() if work >= SMALLEST_WORK else 1
    ends = [num_rows * part // num_parts for part in range(num_parts + 1)]
    job = _Job(kernel, arguments, list(pairwise(ends)), [])
    if num_parts > 1 and _start is not None:
        _start(_take_part, job, num_parts, 0)
    for part in job.parts:  # of one thread; or a library that started fewer than it was asked for
        kernel(*part, *arguments)
    if job.errors:
        raise job.errors[0]


def _take(job: _Job) -> None:
    try:
        job.kernel(*job.parts.pop(), *job.arguments)
    except BaseException as error:  # which C cannot raise
        job.errors.append(error)


_take_part = ctypes.CFUNCTYPE(None, ctypes.py_object)(_take)


def _found_start() -> Callable[..., None] | None:
    try:
        start = ctypes.CDLL(None).GOMP_parallel  # GNU's name; LLVM's and Intel's have it too
    except (AttributeError, OSError, TypeError):  # TypeError: there is no such handle on Windows
        return None
    start.argtypes = [type(_take_part), ctypes.py_object, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


_start = _found_start()
