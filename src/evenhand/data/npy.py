"""Arrays in .npy files, whose headers are looked at before numpy makes an array of them.

Numpy divides by the size of a type, and a type of no bytes ("<(0,)i8") ends the whole process.
"""

from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

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
    major, minor = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if (major, minor) not in readers:
        raise ValueError(f"the version of .npy must be 1.0 or 2.0, got {major}.{minor}")
    shape, _, dtype = readers[major, minor](file)
    if dtype.subdtype is not None or dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"entries must be plain numbers, got {dtype}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"sizes must be whole numbers from 0, got {shape}")
    return tuple(shape)
