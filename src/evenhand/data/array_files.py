"""Arrays and rows that grow block by block, in memory or in the files of a data set."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import Rows
from evenhand.files import NpyWriter, open_npy


def array_path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe=' ')}.npy"  # a group column may be called a/b


class ArrayWriter:
    """An array that rows are appended to: in memory or, given a folder, in a .npy file of it.

    In memory it grows in place: blocks joined at the end would all be held twice for a moment.
    """

    def __init__(
        self, folder: Path | None, name: str, dtype: str, row_shape: tuple[int, ...] = ()
    ) -> None:
        self.dtype, self.row_shape = dtype, row_shape
        self.buffer, self.file = bytearray(), None
        if folder is not None:
            self.file = NpyWriter(array_path(folder, name), dtype, row_shape)

    def append(self, rows: NDArray[Any]) -> None:
        """Appends (n, *row_shape) rows."""
        if self.file is not None:
            self.file.append(rows)
        elif rows.size:
            self.buffer += np.ascontiguousarray(rows, dtype=self.dtype).data

    def finish(self) -> NDArray[Any]:
        """The whole array; that of a file is memory-mapped."""
        if self.file is not None:
            self.file.close()
            return open_npy(self.file.path, is_empty=self.file.num_rows == 0)
        return np.frombuffer(self.buffer, dtype=self.dtype).reshape(-1, *self.row_shape)


class RowsWriter:
    """Rows that grow block by block, as `ArrayWriter`: all blocks have values, or none."""

    def __init__(self, folder: Path | None = None, name: str = "") -> None:
        self.folder, self.name, self.num_ids = folder, name, 0
        self.arrays: dict[str, ArrayWriter] = {}  # none, and no file, before the first block

    def append(self, rows: Rows) -> None:
        if not self.arrays:
            kinds = {"offsets": "<i8", "ids": "<i4", "values": "<f4"}
            self.arrays = {
                kind: ArrayWriter(self.folder, f"{self.name}.{kind}", dtype)
                for kind, dtype in kinds.items()
                if kind != "values" or rows.values is not None
            }
            self.arrays["offsets"].append(np.zeros(1))
        self.arrays["offsets"].append(rows.offsets[1:] + self.num_ids)
        self.arrays["ids"].append(rows.ids)
        if rows.values is not None:
            self.arrays["values"].append(rows.values)
        self.num_ids += len(rows.ids)

    def finish(self) -> Rows:
        """All rows, of one block at least; those of files are memory-mapped."""
        return Rows(*(array.finish() for array in self.arrays.values()))


def collect_rows(blocks: Iterable[Rows], folder: Path | None = None, name: str = "") -> Rows:
    """The rows of all blocks, one block after the other; given a folder, never all in memory."""
    writer = RowsWriter(folder, name)
    for block in blocks:
        writer.append(block)
    return writer.finish()
