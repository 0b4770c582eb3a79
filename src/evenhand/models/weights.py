"""Weights on disk, as safetensors, without a second copy of them in memory.

The library writes from the CPU and makes bytes of all tensors first: three times the table's size.
Here the header is written, then one block of rows after another, wherever the tensors lie. What
is read is a memory map, of which blocks are copied to where the tensors are.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

BLOCK_BYTES = 2**26  # moved at once
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], *, notes: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file; the widest types first, so that each tensor begins aligned.

    Args:
        notes: what the file says of itself, in its header.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            for rows in _blocks(tensor):
                here = tensor.detach()[rows] if tensor.dim() else tensor.detach().view(1)
                file.write(here.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


@torch.no_grad()
def read_weights(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fills tensors, of any device and type, from a file that must hold these and no others.

    Raises:
        RuntimeError: names or shapes differ.
        safetensors.SafetensorError: the file is damaged.
    """
    with safetensors.safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != set(targets):
            raise RuntimeError(
                f"it holds {', '.join(sorted(names))}, not {', '.join(sorted(targets))}"
            )
        for name, target in targets.items():
            found = file.get_slice(name)
            if list(found.get_shape()) != list(target.shape):
                raise RuntimeError(
                    f"{name} is {tuple(found.get_shape())} there, not {tuple(target.shape)}"
                )
            if not target.dim():
                target.copy_(file.get_tensor(name))
                continue
            copy_rows(found, target)


@torch.no_grad()
def copy_rows(found: Any, target: Tensor, *, first_row: int = 0) -> None:
    """Fills `target` with the rows `first_row` and after of a slice of safetensors."""
    for rows in _blocks(target):
        first, last, _ = rows.indices(len(target))
        target[rows].copy_(found[first_row + first : first_row + last])


def all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite, a block at a time: nothing of the table's size is made."""
    if not tensor.dim():
        return bool(tensor.isfinite())
    return all(bool(tensor[rows].isfinite().all()) for rows in _blocks(tensor))


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices of rows; a tensor without rows to divide is one."""
    if not tensor.dim() or not tensor.numel():
        yield slice(None)
        return
    row_bytes = max(1, tensor.numel() // len(tensor) * tensor.element_size())
    step = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, len(tensor), step):
        yield slice(first, min(first + step, len(tensor)))
