"""Prefetches rows of a table into the CPU cache, a few rows ahead.

The rows of a step lie anywhere in a table, and no processor guesses which comes next. But their
ids are known: a row that is asked for a few rows ahead has arrived when its turn comes. By hand
because numba has no such instruction; without it a step takes up to a tenth longer.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from evenhand.kernels.jit import jit

ROWS_AHEAD = 4  # 1, 2 and 8 gain less on an AMD EPYC
_NUMBERS_OF_LINE = 16  # float32 in a line of the cache, which is what memory is fetched by
_utilities: Any = cgutils  # numba has no types
_BYTES, _INT32 = ir.IntType(8).as_pointer(), ir.IntType(32)


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
