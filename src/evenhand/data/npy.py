"""The header of a .npy file, looked at before numpy makes an array of it.

Numpy divides by the size of a type, and a type of no bytes ("<(0,)i8") ends the whole process.
"""

from typing import IO

import numpy as np


def check_npy_header(file: IO[bytes]) -> None:
    """Refuses, with a ValueError, what is no plain array of numbers."""
    major, minor = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if (major, minor) not in readers:
        raise ValueError(f"format {major}.{minor} of .npy is not read")
    shape, _, dtype = readers[major, minor](file)
    if dtype.subdtype is not None or dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"entries must be plain numbers, got {dtype}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"sizes must be from 0, got {shape}")
