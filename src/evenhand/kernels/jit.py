"""numba with our options (no GIL, disk cache), argument checks, threads of torch, prefetching."""

import ctypes
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numba.core.cgutils
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
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


# --- rows shared out among all cores: loops on the very threads that torch computes with ----------
#
# Between two operations of torch its OpenMP threads spin for milliseconds. Threads of one's own
# share the cores with them and, where that was measured, gained nothing. But the OpenMP library
# runs any function on its threads, and starts it at once where they spin. Where there is no such
# library, one thread does all.
#
# A kernel computes each row from its arguments alone, so no result depends on the parts.
#
# By hand, because numba's `prange` is no faster, compiles twice as long, and hangs in a process
# that was forked after its parent's first parallel loop (docs/experiments.md).

SMALLEST_WORK = 2**15  # numbers to read; fewer are not worth a second thread, as in torch
_PREFIX = "evenhand_"  # of the library's functions in compiled code
_START, _INDEX, _COUNT = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
_BYTES, _INT32, _INT64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def num_threads_for(work: int) -> int:
    """Threads for a kernel that reads so many numbers, about: all of torch's, or one."""
    return torch.get_num_threads() if work >= SMALLEST_WORK and _HAS_OPENMP else 1


def _in_parts(
    typing_context: Any, kernel: Any, num_rows: Any, num_threads: Any, arguments: Any
) -> tuple[Any, Callable[..., Any]]:
    """What numba makes of `in_parts(kernel, num_rows, num_threads, arguments)` in compiled code.

    It calls `kernel(first, last, *arguments)` on each of so many threads, for a part of the rows:
    there is a function `part` for the library to run, which finds all it needs behind a pointer.
    """
    call_type = kernel.get_call_type(typing_context, (types.int64, types.int64, *arguments), {})

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        def call_kernel(builder: Any, first: Any, last: Any, packed: Any) -> None:
            compiled = kernel.dispatcher.get_compile_result(call_type)
            context.active_code_library.add_linking_library(compiled.library)
            unpacked = [builder.extract_value(packed, place) for place in range(len(arguments))]
            values = [first, last, *unpacked]
            context.call_internal_no_propagate(builder, compiled.fndesc, call_type, values)

        _, rows, threads, packed = values
        with builder.if_else(builder.icmp_signed(">", threads, _INT64(1))) as (many, one):
            with many:
                part = _part(builder.module, packed.type, call_kernel)
                _call_start(builder, part, threads, _shared(builder, rows, packed))
            with one:
                call_kernel(builder, _INT64(0), rows, packed)
        return context.get_dummy_value()

    return types.void(kernel, types.int64, types.int64, arguments), generate


in_parts: Any = intrinsic(_in_parts)


def _shared(builder: Any, rows: Any, packed: Any) -> Any:
    """Where the threads find the number of rows and the arguments: a pointer to both."""
    shared_type = ir.LiteralStructType([rows.type, packed.type])
    with builder.goto_entry_block():
        pointer = builder.alloca(shared_type)
    value = builder.insert_value(ir.Constant(shared_type, ir.Undefined), rows, 0)
    builder.store(builder.insert_value(value, packed, 1), pointer)
    return builder.bitcast(pointer, _BYTES)


def _part(module: Any, packed_type: Any, call_kernel: Callable[..., None]) -> Any:
    """The function that every thread runs: the kernel for the rows that fall to it."""
    part_type = ir.FunctionType(ir.VoidType(), [_BYTES])
    part = ir.Function(module, part_type, module.get_unique_name("part"))
    part.linkage = "internal"
    builder = ir.IRBuilder(part.append_basic_block())
    shared_type = ir.LiteralStructType([_INT64, packed_type])
    shared = builder.load(builder.bitcast(part.args[0], shared_type.as_pointer()))
    rows, packed = builder.extract_value(shared, 0), builder.extract_value(shared, 1)
    # As many threads as there are, which may be fewer than were asked for.
    asked = (builder.call(_external(module, name, _INT32), []) for name in (_INDEX, _COUNT))
    index, count = (builder.sext(number, _INT64) for number in asked)
    first = builder.sdiv(builder.mul(rows, index), count)
    last = builder.sdiv(builder.mul(rows, builder.add(index, _INT64(1))), count)
    call_kernel(builder, first, last, packed)
    builder.ret_void()
    return part


def _call_start(builder: Any, part: Any, threads: Any, shared: Any) -> None:
    arguments = [part, shared, builder.trunc(threads, _INT32), _INT32(0)]
    kinds = [argument.type for argument in arguments]
    builder.call(_external(builder.module, _START, ir.VoidType(), kinds), arguments)


def _external(module: Any, name: str, result: Any, arguments: Any = ()) -> Any:
    name = _PREFIX + name
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


def _has_openmp() -> bool:
    """Tells compiled code where the library is; without one, where anything is, for the linker."""
    names = [_START, _INDEX, _COUNT]  # GNU's names, which LLVM's and Intel's libraries have too
    try:
        library = ctypes.CDLL(None)
        functions = [getattr(library, name) for name in names]
    except (AttributeError, OSError, TypeError):  # TypeError: there is no such handle on Windows
        functions = []
    for place, name in enumerate(names):
        function = functions[place] if functions else ctypes.pythonapi.Py_IsInitialized
        address = ctypes.cast(function, ctypes.c_void_p).value
        llvmlite.binding.add_symbol(_PREFIX + name, address)
    return bool(functions)


_HAS_OPENMP = _has_openmp()


# --- rows of a table, fetched into the CPU cache ahead --------------------------------------------
#
# The rows of a step lie anywhere in a table, and no processor guesses which comes next. But their
# ids are known: a row that is asked for a few rows ahead has arrived when its turn comes. By hand
# because numba has no such instruction; without it a step takes up to a tenth longer.

ROWS_AHEAD = 4  # 1, 2 and 8 gain less on an AMD EPYC
_NUMBERS_OF_LINE = 16  # float32 in a line of the cache, which is what memory is fetched by
_utilities: Any = numba.core.cgutils  # numba has no types


@jit
def fetch_later_row(table: NDArray[np.float32], ids: NDArray[np.int64], place: int) -> None:
    """Prefetches the row of the table whose turn comes a few places later."""
    later = ids[min(place + ROWS_AHEAD, len(ids) - 1)]
    for column in range(0, table.shape[1], _NUMBERS_OF_LINE):
        _prefetch(table, later, column)


def _typed_prefetch(
    typing_context: Any, table: Any, row: Any, column: Any
) -> tuple[Any, Callable[..., Any]]:
    """numba's code for `_prefetch(table, row, column)`: an instruction that cannot fail."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        pointer = _utilities.get_item_pointer(
            context, builder, signature.args[0], array, values[1:], wraparound=False
        )
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        function = _utilities.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        is_written, nearness, is_data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(function, [builder.bitcast(pointer, _BYTES), is_written, nearness, is_data])
        return context.get_dummy_value()

    return types.void(table, types.int64, types.int64), generate


_prefetch: Any = intrinsic(_typed_prefetch)
