"""Rows of split tables to and from files, by torch.distributed.checkpoint as safetensors.

Every rank writes its own rows and reads those it needs, whoever wrote them. A file holds at most
FILE_BYTES of a table, so that no more than that is ever in memory twice.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from evenhand.training.checkpoint_files import Table

FILE_BYTES = 1 << 26


# --- writing --------------------------------------------------------------------------------------


def write_tables(folder: Path, tables: dict[str, Table], *, rank: int) -> dict[str, dict[str, Any]]:
    """Writes the rows of this rank, each file synced; what the manifest will say of each file."""
    writer = _Writer(folder)
    planner = _Rows(tables)
    plan = SavePlan(planner.write_items(), storage_data={"shard_index": rank + 1})
    writer.write_data(plan, planner).wait()
    return writer.fs.written


class _Writer(HuggingFaceStorageWriter):
    """Many files of a rank, where the library has one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.fs: _HashedFiles = _HashedFiles()
        self.per_thread_copy_ahead = 0  # the rows are on the CPU: nothing to overlap

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        # The names of the files say how many there are: that is taken from this mapping.
        buckets = self._split_by_storage_plan(None, plan.items)
        plan.storage_data["fqn_to_index_mapping"] = {"": max(buckets, default=1)}
        return super().write_data(plan, planner)

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        """Fills a file until it is large; a table is in a file once."""
        buckets: list[list[WriteItem]] = []
        num_bytes = 0
        names: set[str] = set()
        for item in items:
            size = _num_bytes(item)
            if not buckets or num_bytes + size > FILE_BYTES or item.index.fqn in names:
                buckets.append([])
                num_bytes, names = 0, set()
            buckets[-1].append(item)
            num_bytes += size
            names.add(item.index.fqn)
        return dict(enumerate(buckets, start=1))


class _HashedFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[IO[bytes]]:  # type: ignore[override]
        with _HashedFile(path, mode) as stream:
            yield stream
            about = {"size": stream.size, "sha256": stream.digest.hexdigest()}
            place = Path(path)
            self.written[f"{place.parent.name}/{place.name}"] = about


class _HashedFile(io.FileIO):
    """Without a buffer of its own: the library syncs before it closes."""

    def __init__(self, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        """Takes the bytes of a whole safetensors file."""
        header = _ordered_header(data)
        for part in (memoryview(header), memoryview(data)[len(header) :]):
            self.digest.update(part)
            self.size += len(part)
            while part:
                part = part[super().write(part) :]  # a file may take less than all
        return len(data)


def _ordered_header(data: bytes) -> bytes:
    """The header with its remarks in order: safetensors has them in any, and files would differ."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    return data[:8] + text if len(text) == end - 8 else data[:end]


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _Rows(SavePlanner, LoadPlanner):
    """Which rows go where. A rank plans for itself: ranges of rows do not overlap."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self.tables = tables

    def write_items(self) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=table.rows.dtype),
                    size=torch.Size([table.total, *table.rows.shape[1:]]),
                ),
            )
            for name, table in self.tables.items()
            for chunk in _chunks(table)
        ]

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        table = self.tables[write_item.index.fqn]
        start = chunk.offsets[0] - table.first_row
        return table.rows[start : start + chunk.sizes[0]].detach().contiguous().cpu()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        start = read_item.dest_offsets[0]
        rows = self.tables[read_item.dest_index.fqn].rows
        return rows[start : start + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The rows were filled in place."""

    # What the library asks for between ranks is not needed here.

    def set_up_planner(self, *arguments: Any, **options: Any) -> None: ...

    def create_local_plan(self) -> Any:
        raise NotImplementedError

    def create_global_plan(self, *plans: Any) -> Any:
        raise NotImplementedError

    def finish_plan(self, *plans: Any) -> Any:
        raise NotImplementedError

    def load_bytes(self, *arguments: Any) -> None:
        raise NotImplementedError


def _chunks(table: Table) -> list[ChunkStorageMetadata]:
    """The rows of this rank, in pieces that a file can hold."""
    rows = table.rows
    row_bytes = max(1, rows[:1].numel() * rows.element_size())
    step = max(1, FILE_BYTES // row_bytes)
    return [
        _chunk(table, start, min(step, len(rows) - start)) for start in range(0, len(rows), step)
    ]


def _chunk(table: Table, start: int, count: int) -> ChunkStorageMetadata:
    other = table.rows.shape[1:]
    offsets = torch.Size([table.first_row + start, *[0] * len(other)])
    return ChunkStorageMetadata(offsets, torch.Size([count, *other]))


# --- reading --------------------------------------------------------------------------------------


def read_tables(folder: Path, tables: dict[str, Table]) -> None:
    """Fills the rows of this rank in place.

    Raises:
        ValueError: the files hold other tables.
    """
    reader, saved = _opened(folder)
    items: list[ReadItem] = []
    for name, table in tables.items():
        if table.total:
            held = saved.get(name)
            _check_same(name, table, held)
            assert held is not None
            wanted = _chunk(table, 0, len(table.rows))
            found = (
                create_read_items_for_chunk_list(name, held, [wanted]) if len(table.rows) else []
            )
            num_found = sum(item.lengths[0] for item in found)
            if num_found != len(table.rows):
                raise ValueError(f"it has {num_found} of {len(table.rows)} rows of {name}")
            items += found
    if saved.keys() - tables.keys():
        raise ValueError(f"it has a table {min(saved.keys() - tables.keys())}")
    with torch.no_grad():
        reader.read_data(LoadPlan(items), _Rows(tables)).wait()


def read_whole_tables(folder: Path) -> dict[str, Table]:
    """All rows of all tables in new memory."""
    _, saved = _opened(folder)
    tables = {
        name: Table(torch.empty(held.size, dtype=held.properties.dtype))
        for name, held in saved.items()
    }
    read_tables(folder, tables)
    return tables


def _opened(folder: Path) -> tuple[HuggingFaceStorageReader, dict[str, TensorStorageMetadata]]:
    reader = HuggingFaceStorageReader(str(folder))
    metadata: Metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return reader, metadata.state_dict_metadata  # type: ignore[return-value]


def _check_same(name: str, table: Table, held: TensorStorageMetadata | None) -> None:
    if held is None:
        raise ValueError(f"it has no table {name}")
    ours = torch.Size([table.total, *table.rows.shape[1:]])
    if held.size != ours or held.properties.dtype != table.rows.dtype:
        raise ValueError(
            f"its {name} is {tuple(held.size)} of {held.properties.dtype}, "
            f"and this run's is {tuple(ours)} of {table.rows.dtype}"
        )
