"""What a numba kernel takes: plain arrays, and ids that are rows of a table."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.jit import jit

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
