"""Reads and writes the arrays that a run keeps beside its weights, with checks of sparse rows."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from evenhand.data import Rows
from evenhand.data.checks import check_ids, check_offsets, check_spans
from evenhand.errors import UserError
from evenhand.files import atomic_path, check_is_file, parse_json


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], **about: Any) -> None:
    """Writes arrays, and a few words as JSON, to a file: all of it or nothing."""
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with atomic_path(path) as staging:
        staging.write_bytes(safetensors.numpy.save(plain, metadata={"about": json.dumps(about)}))


@contextlib.contextmanager
def open_arrays(
    path: Path, dtypes: Mapping[str, str]
) -> Iterator[tuple[dict[str, NDArray[Any]], Any]]:
    """What `save_arrays` wrote; anything wrong with it, found in the block too, is a `UserError`.

    Args:
        dtypes: of the last part of an array's name. All arrays have one dimension.
    """
    try:
        check_is_file(path)
        with safe_open(path, framework="numpy") as file:
            about = parse_json((file.metadata() or {}).get("about", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, array in arrays.items():
            dtype = dtypes.get(name.rpartition(".")[2])
            # Not converted: that could make one id of another.
            if dtype is None or array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} holds a number that is not finite")
        yield arrays, about
    except (  # of types that numpy lacks, the library raises one or the other
        SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path} is damaged, or of another run ({type(error).__name__}: {error}); remove it "
            f"and write it again: evenhand train --resume --run {path.parent.parent}"
        ) from error


def check_rows(
    rows: Rows, limit: int, name: str, *, needs_values: bool = False, num_rows: int | None = None
) -> None:
    """Refuses, by a `ValueError`, rows with which compiled code would read beyond an array.

    Args:
        limit: ids must be below it.
        num_rows: how many there must be.
    """
    if needs_values and rows.values is None:
        raise ValueError(f"{name} must have values")
    num_rows = rows.offsets.size - 1 if num_rows is None else num_rows
    check_spans(name, num_rows, rows.offsets, *(array for array in rows[1:] if array is not None))
    check_offsets(name, rows.offsets)
    check_ids(f"ids of {name}", rows.ids, limit)
