"""Vectors with their ids, biases and names as files for other programs: .npy or Parquet.

Rows come a block at a time and are written as they come, so that memory does not grow with their
number.
"""

import contextlib
import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import FloatArray
from evenhand.errors import UserError

FORMATS = ("npy", "parquet")


class Block(NamedTuple):
    """Some rows, one after another."""

    ids: NDArray[np.int64]  # (n,)
    vectors: FloatArray  # (n, D)
    biases: FloatArray | None = None  # (n,)
    names: list[str] | None = None


class Written(NamedTuple):
    """A file, as the manifest has it."""

    name: str
    holds: str  # 'vectors', 'ids', 'biases', 'names', or 'all' as columns of one table
    num_rows: int
    num_bytes: int
    sha256: str


def write_blocks(
    folder: Path, stem: str, blocks: Iterable[Block], *, file_format: str, shape: tuple[int, int]
) -> list[Written]:
    """Writes blocks to files that begin with `stem`; `shape` is that of all vectors together."""
    write_fn = {"npy": _write_npy, "parquet": _write_parquet}[file_format]
    return [
        Written(path.name, holds, shape[0], path.stat().st_size, _sha256(path))
        for holds, path in write_fn(folder, stem, blocks, shape).items()
    ]


def check_format(file_format: str) -> None:
    """Refuses a format that cannot be written here, before anything is."""
    if file_format == "parquet":
        _pyarrow()


def _write_npy(
    folder: Path, stem: str, blocks: Iterable[Block], shape: tuple[int, int]
) -> dict[str, Path]:
    """One array a file, and the names as JSON, a string a line."""
    paths: dict[str, Path] = {}
    kinds = {"vectors": ("<f4", shape), "ids": ("<i8", shape[:1]), "biases": ("<f4", shape[:1])}
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for block in blocks:
            for holds in (name for name in (*kinds, "names") if getattr(block, name) is not None):
                if holds not in files:
                    ending = "names.jsonl" if holds == "names" else f"{holds}.npy"
                    paths[holds] = folder / f"{stem}.{ending}"
                    files[holds] = stack.enter_context(open(paths[holds], "wb"))
                    if holds in kinds:
                        _write_header(files[holds], *kinds[holds])
                if block.names is not None and holds == "names":
                    files[holds].writelines(map(_line, block.names))
                else:
                    rows = np.ascontiguousarray(getattr(block, holds), dtype=kinds[holds][0])
                    files[holds].write(rows.data)
    return paths


def _write_header(file: BinaryIO, kind: str, shape: tuple[int, ...]) -> None:
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _line(name: str) -> bytes:
    return (json.dumps(name, ensure_ascii=False) + "\n").encode()


def _write_parquet(
    folder: Path, stem: str, blocks: Iterable[Block], shape: tuple[int, int]
) -> dict[str, Path]:
    """A table with the columns id, vector and, where there are any, bias and name."""
    arrow = _pyarrow()
    path = folder / f"{stem}.parquet"
    with contextlib.ExitStack() as stack:
        file = None
        for block in blocks:
            values = arrow.array(np.ascontiguousarray(block.vectors, np.float32).ravel())
            columns = {
                "id": arrow.array(block.ids),
                "vector": arrow.FixedSizeListArray.from_arrays(values, shape[1]),
            }
            if block.biases is not None:
                columns["bias"] = arrow.array(block.biases)
            if block.names is not None:
                columns["name"] = arrow.array(block.names, type=arrow.string())
            table = arrow.table(columns)
            if file is None:
                # Vectors do not compress, and a dictionary of their numbers would be as large.
                file = stack.enter_context(
                    arrow.parquet.ParquetWriter(
                        path, table.schema, compression="none", use_dictionary=False
                    )
                )
            file.write_table(table)
    return {"all": path}


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UserError(
            "Parquet needs pyarrow, which is not installed; install it with: "
            "pip install 'evenhand[parquet]', or choose --format npy"
        ) from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
