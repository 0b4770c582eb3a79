"""Arrays in .npy files: headers are checked before mapping, and arrays written in pieces.

Headers are checked before numpy makes an array of them: numpy divides by the size of a type, and a
type of no bytes ("<(0,)i8") ends the whole process.
"""

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenhand.files import open_input


def open_npy(path: Path, *, is_empty: bool) -> NDArray[Any]:
    """The array of a file, memory-mapped unless it is empty: nothing cannot be mapped."""
    with open_input(path) as file:
        shape = check_npy_header(file)
    if is_empty and 0 not in shape:  # it would be read whole, however large
        raise ValueError(f"it must be empty, and is of shape {shape}")
    array: NDArray[Any] = np.load(path, mmap_mode=None if is_empty else "r", allow_pickle=False)
    return array


def check_npy_header(file: IO[bytes]) -> tuple[int, ...]:
    """The shape of an array; what is none of plain numbers is refused by a `ValueError`."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"the version of .npy must be 1.0 or 2.0, got {version[0]}.{version[1]}")
    shape, _, dtype = readers[version](file)
    if dtype.subdtype is not None or dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"entries must be plain numbers, got {dtype}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"sizes must be whole numbers from 0, got {shape}")
    return tuple(shape)


class NpyWriter:
    """A .npy file that rows are appended to; their number is filled in when it is closed.

    Args:
        row_shape: that of one row: () for an array of numbers.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.dtype, self.row_shape, self.num_rows = np.dtype(dtype), row_shape, 0
        self._write_header()

    def append(self, rows: NDArray[Any]) -> None:
        """Appends (n, *row_shape) rows."""
        self.file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.num_rows += len(rows)

    def close(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.close()

    def _write_header(self) -> None:
        # numpy leaves room for a longer number of rows, so that a header can be written again.
        shape = (self.num_rows, *self.row_shape)
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, about)
