"""Vectors with their ids, biases and names as files for other programs: .npy or Parquet.

Rows come a block at a time and are written as they come, so that memory does not grow with their
number.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evenhand.data.csr import FloatArray
from evenhand.files import NpyWriter, file_digest


class Block(NamedTuple):
    """Some rows, one after another."""

    ids: NDArray[np.int64]  # (n,)
    vectors: FloatArray  # (n, D)
    biases: FloatArray | None = None  # (n,)
    names: list[str] | None = None


def write_blocks(
    folder: Path, stem: str, blocks: Iterable[Block], *, file_format: str, shape: tuple[int, int]
) -> list[dict[str, Any]]:
    """Writes blocks to files that begin with `stem`; `shape` is that of all vectors together.

    Returns what the manifest says of each file; it holds 'vectors', 'ids', 'biases', 'names', or
    'all' as columns of one table.
    """
    write_fn = _write_npy if file_format == "npy" else _write_parquet
    return [
        {
            "name": path.name,
            "holds": holds,
            "num_rows": shape[0],
            "num_bytes": path.stat().st_size,
            "sha256": file_digest(path, "sha256"),
        }
        for holds, path in write_fn(folder, stem, blocks, shape[1]).items()
    ]


def _write_npy(folder: Path, stem: str, blocks: Iterable[Block], dim: int) -> dict[str, Path]:
    """One array a file, and the names as JSON, a string a line."""
    dtypes = {"vectors": "<f4", "ids": "<i8", "biases": "<f4"}
    paths: dict[str, Path] = {}
    arrays: dict[str, NpyWriter] = {}
    for block in blocks:
        for holds, dtype in dtypes.items():
            rows = getattr(block, holds)
            if rows is None:
                continue
            if holds not in arrays:
                paths[holds] = folder / f"{stem}.{holds}.npy"
                arrays[holds] = NpyWriter(paths[holds], dtype, (dim,) if holds == "vectors" else ())
            arrays[holds].append(rows)
        if block.names is not None:
            paths["names"] = folder / f"{stem}.names.jsonl"
            with open(paths["names"], "ab") as names:
                for name in block.names:
                    names.write((json.dumps(name, ensure_ascii=False) + "\n").encode())
    for array in arrays.values():
        array.close()
    return paths


def _write_parquet(folder: Path, stem: str, blocks: Iterable[Block], dim: int) -> dict[str, Path]:
    """A table with the columns id, vector and, where there are any, bias and name."""
    path = folder / f"{stem}.parquet"
    with contextlib.ExitStack() as stack:
        file = None
        for block in blocks:
            values = pa.array(np.ascontiguousarray(block.vectors, np.float32).ravel())
            columns = {
                "id": pa.array(block.ids),
                "vector": pa.FixedSizeListArray.from_arrays(values, dim),
            }
            if block.biases is not None:
                columns["bias"] = pa.array(block.biases)
            if block.names is not None:
                columns["name"] = pa.array(block.names, type=pa.string())
            table = pa.table(columns)
            if file is None:
                # Vectors do not compress, and a dictionary of their numbers would be as large.
                file = stack.enter_context(
                    pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
                )
            file.write_table(table)
    return {"all": path}
