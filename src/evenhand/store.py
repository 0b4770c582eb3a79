"""Tensors on disk: checkpoints and the weights of trained models, all in one format.

A store is a folder that one process or many ranks write, and any number of ranks read:

    manifest.json                the type and shape of every tensor and which file holds which rows,
                                 the size and SHA-256 of every file, and a small state as JSON
    rank-0-file-0.safetensors    some rows of some tensors

A rank writes the rows that it holds; rank 0 also writes what all ranks hold alike. The folder is
written as `.name`, synced, and renamed. While it replaces an older one, that one is called
`name.replaced`, so at every moment there is a whole store, the old one or the new one.

This is built on safetensors alone because the public interface of torch.distributed.checkpoint
(torch 2.13) does not suffice: its safetensors writer takes twice a file's size in memory, it has no
checksums, and its ranks exchange pickled plans.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from evenhand.distributed.ranks import Ranks
from evenhand.errors import UserError
from evenhand.files import check_is_file, open_input, parse_json, read_text, sync

FORMAT = 2  # 1: the checkpoints of versions before this module
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"rank-\d{1,6}-file-\d{1,6}\.safetensors")
FILE_BYTES = 2**28  # of tensors in a file, unless a single row is larger: files are hashed at once
BLOCK_BYTES = 2**24  # of rows in memory at once
MOST_THREADS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Table(NamedTuple):
    """A table of which this process holds a range of rows, or all."""

    rows: Tensor  # (n, ...) the live rows, not a copy
    first_row: int = 0
    num_rows: int | None = None  # of the whole table; None: all of them are here

    @property
    def total(self) -> int:
        return len(self.rows) if self.num_rows is None else self.num_rows


class Piece(NamedTuple):
    """Some rows of one tensor, in one file."""

    file_name: str
    first: int
    last: int  # the row after the last one


class Entry(NamedTuple):
    """What a manifest says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_table: bool  # whether ranks may hold different rows of it
    pieces: list[Piece]  # ascending, and of all rows; a scalar is a row

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DamagedError(UserError):
    """A store, or one of its files, is not what was written."""

    def __init__(self, folder: Path, problem: str, *, what: str = "is damaged") -> None:
        super().__init__(f"{folder} {what} ({problem})")


# --- writing --------------------------------------------------------------------------------------


def save_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    tables: Mapping[str, Table] = MappingProxyType({}),
    *,
    state: Mapping[str, Any] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> None:
    """Writes a store, or replaces one, whole or not at all; when it returns, it is on the disk.

    Args:
        tensors: what all ranks hold alike; those of rank 0 are written.
        tables: the rows that this rank holds; the ranks together must hold every row once.
        state: a few values for JSON.
        ranks: those that write together; all make this call.

    Raises:
        UserError: on all ranks, if one of them could not write; the old store is untouched.
    """
    is_first = ranks is None or ranks.rank == 0
    staging = staging_folder(folder)

    def begin() -> None:
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)  # what a crash may have left
            staging.mkdir(parents=True)

    def write() -> dict[str, Any]:
        own = tables if not is_first else {**tables, **{n: Table(t) for n, t in tensors.items()}}
        return _write_files(staging, own, is_table=set(tables), rank=ranks.rank if ranks else 0)

    def finish() -> None:
        if is_first:
            _write_manifest(staging, reports, state)
            _replace(staging, folder)

    try:
        _on_all(begin, ranks)
        reports = _on_all(write, ranks)
        _on_all(finish, ranks)
    except _WriteError as error:
        if is_first:
            shutil.rmtree(staging, ignore_errors=True)
        raise UserError(
            f"{folder} could not be written ({error}); what was saved before is untouched: free "
            f"some space and try again (a run goes on with --resume)"
        ) from error


class _WriteError(Exception):
    """On all ranks: what went wrong on one of them."""


def _on_all(part_fn: Callable[[], Any], ranks: Ranks | None) -> list[Any]:
    """Every rank does its part; what each returned, or the same error on all of them."""
    answer, cause, problem = None, None, ""
    try:
        answer = part_fn()
    except Exception as error:  # of any kind: the other ranks wait to be told
        cause = error
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    try:
        reports = gather_json([answer, problem], ranks)
    except RuntimeError as error:
        raise _WriteError(f"a rank was lost: {error}") from error
    for rank, (_, problem) in enumerate(reports):
        if problem:
            raise _WriteError(f"rank {rank}: {problem}" if ranks else problem) from cause
    return [answer for answer, _ in reports]


def gather_json(value: Any, ranks: Ranks | None) -> list[Any]:
    """The values of all ranks, in the order of ranks. They travel as JSON, never pickled."""
    if ranks is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(ranks.num_ranks, dtype=torch.long)
    sizes[ranks.rank] = len(text)
    counts = ranks.sum_(sizes, what="store").tolist()
    texts = torch.split(ranks.gather(text, counts=counts, what="store"), counts)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def _write_files(
    folder: Path, tables: Mapping[str, Table], *, is_table: set[str], rank: int
) -> dict[str, Any]:
    """Writes the rows of one rank; its share of the manifest.

    Wide types come first, so that every tensor begins aligned. A file has rows of a tensor once.
    """
    entries: dict[str, Any] = {}
    files: list[dict[str, Tensor]] = []
    num_bytes = 0  # of the last of them
    ordered = sorted(tables.items(), key=lambda item: (-item[1].rows.element_size(), item[0]))
    for name, table in ordered:
        rows = table.rows.detach()
        shape = [table.total, *rows.shape[1:]] if rows.dim() else []
        rows = rows if rows.dim() else rows.view(1)
        pieces = []
        for block in row_blocks(rows, FILE_BYTES) if rows.numel() else ():
            size = rows[block].numel() * rows.element_size()
            if not files or num_bytes + size > FILE_BYTES or name in files[-1]:
                files.append({})
                num_bytes = 0
            files[-1][name] = rows[block]
            num_bytes += size
            first, last = table.first_row + block.start, table.first_row + block.stop
            pieces.append(Piece(f"rank-{rank}-file-{len(files) - 1}.safetensors", first, last))
        entries[name] = {
            "dtype": DTYPE_NAMES[rows.dtype],
            "shape": shape,
            "is_table": name in is_table,
            "pieces": pieces,
        }
    written = {}
    for number, contents in enumerate(files):
        file_name = f"rank-{rank}-file-{number}.safetensors"
        written[file_name] = write_file(folder / file_name, contents)
    return {"tensors": entries, "files": written}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes and syncs a safetensors file from any device, a block of rows at a time.

    Returns:
        Its size and SHA-256.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data: Any) -> None:
            digest.update(data)
            file.write(data)

        write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for block in row_blocks(tensor):
                rows = tensor[block].contiguous().cpu()
                write(rows.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def _write_manifest(folder: Path, reports: list[Any], state: Mapping[str, Any]) -> None:
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for report in reports:
        files |= report["files"]
        for name, entry in report["tensors"].items():
            pieces = tensors.setdefault(name, {**entry, "pieces": []})["pieces"]
            pieces += entry["pieces"]
    manifest = {"format": FORMAT, "state": dict(state), "tensors": tensors, "files": files}
    _parse_entries(manifest)  # ranks that hold too few rows are found here
    text = json.dumps(sign(manifest), indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def sign(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a SHA-256 of all else that it says."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(said, sort_keys=True)
    return {**said, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def staging_folder(folder: Path) -> Path:
    """Where a store is written before it gets its name, and goes to be removed."""
    return folder.with_name(f".{folder.name}")


def replaced_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def _replace(staging: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(replaced_folder(folder), ignore_errors=True)
        os.replace(folder, replaced_folder(folder))
    os.replace(staging, folder)
    sync(folder.parent)
    shutil.rmtree(replaced_folder(folder), ignore_errors=True)


def remove_store(folder: Path) -> None:
    """Removes a store as far as possible; half of it is never seen under its name."""
    for path in (folder, replaced_folder(folder)):
        with contextlib.suppress(OSError):
            shutil.rmtree(staging_folder(folder), ignore_errors=True)
            os.replace(path, staging_folder(folder))
    shutil.rmtree(staging_folder(folder), ignore_errors=True)


# --- reading --------------------------------------------------------------------------------------


def has_store(folder: Path) -> bool:
    return folder.is_dir() or replaced_folder(folder).is_dir()


def open_store(folder: Path) -> "SavedTensors":
    """Reads the manifest of a store; its files are read when rows of them are.

    Raises:
        DamagedError: the manifest is not what was written.
    """
    place = folder if folder.is_dir() else replaced_folder(folder)  # as a crash may leave it
    try:
        manifest = parse_json(read_text(place / MANIFEST))
    except FileNotFoundError as error:
        problem = f"{MANIFEST} is missing, or it was written by an earlier version of Evenhand"
        raise DamagedError(folder, problem) from error
    except (OSError, ValueError, UserError) as error:
        raise DamagedError(folder, f"{MANIFEST} cannot be read: {error}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        problem = f"{MANIFEST} has format {version!r:.40}, and this version reads {FORMAT}"
        raise DamagedError(folder, problem, what="is damaged or of another version")
    if manifest != sign(manifest):
        raise DamagedError(folder, f"{MANIFEST} does not match its SHA-256")
    try:
        entries, files = _parse_entries(manifest)
        return SavedTensors(place, entries, files, dict(manifest["state"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(folder, f"{MANIFEST}: {type(error).__name__}: {error}") from error


class SavedTensors:
    """The tensors of a store, of which any rows can be read.

    Attributes:
        entries: type, shape and pieces of every tensor, by its name.
        files: size and SHA-256 of the files that have them.
        state: as it was saved.
    """

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, Entry],
        files: Mapping[str, Any] = MappingProxyType({}),
        state: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.folder, self.entries, self.files, self.state = folder, entries, files, dict(state)
        self.verified: set[str] = set()  # files whose digests have been compared

    def verify(self, file_names: Set[str] | None = None) -> None:
        """Compares files, or all of them, with size and SHA-256, unless that has been done.

        Raises:
            DamagedError: one of them is not what was written.
        """
        names = self.files if file_names is None else self.files.keys() & file_names
        left = sorted(set(names) - self.verified)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            for problem in threads.map(self._problem_of, left):
                if problem:
                    raise DamagedError(self.folder, problem)
        self.verified.update(left)

    def load(self, name: str) -> Tensor:
        """A whole tensor, in new memory."""
        tensor = torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype)
        self.read(name, tensor)
        return tensor

    @torch.no_grad()
    def read(self, name: str, target: Tensor, *, first_row: int = 0) -> None:
        """Fills `target`, of any device and type, with the rows `first_row` and after.

        Files are verified before the first rows are read from them.

        Raises:
            ValueError: the tensor has too few rows, or rows of another shape.
        """
        entry = self.entries[name]
        target = target if target.dim() else target.view(1)
        last_row = first_row + len(target)
        num_rows, *width = entry.shape or (1,)
        if list(target.shape[1:]) != width or not 0 <= first_row <= last_row <= num_rows:
            raise ValueError(
                f"{name} is {entry.shape} there, without rows {first_row} to {last_row} of shape "
                f"{tuple(target.shape[1:])}"
            )
        pieces = [p for p in entry.pieces if p.first < last_row and first_row < p.last]
        self.verify({piece.file_name for piece in pieces})
        for piece in pieces:
            first, last = max(first_row, piece.first), min(last_row, piece.last)
            part = target[first - first_row : last - first_row]
            try:
                with safetensors.safe_open(self.folder / piece.file_name, framework="pt") as file:
                    found, shape = file.get_slice(name), [piece.last - piece.first, *width]
                    if found.get_shape() != shape:
                        raise ValueError(f"{name} is {found.get_shape()}, not {shape}")
                    for block in row_blocks(part):
                        start = first - piece.first + block.start
                        part[block].copy_(found[start : start + len(part[block])])
            except (OSError, SafetensorError, ValueError) as error:
                raise DamagedError(self.folder, f"{piece.file_name}: {error}") from error

    def _problem_of(self, file_name: str) -> str:
        path, expected = self.folder / file_name, self.files[file_name]
        try:
            check_is_file(path)
            size = path.stat().st_size
            if size != expected["size"]:
                return f"{file_name} has {size:,} bytes instead of {expected['size']:,}"
            with open_input(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except FileNotFoundError:
            return f"{file_name} is missing"
        except (OSError, UserError) as error:
            return f"{file_name} cannot be read: {error}"
        return "" if digest == expected["sha256"] else f"{file_name} does not match its SHA-256"


def _parse_entries(manifest: Any) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The tensors and the files of a manifest, which anybody may have written.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not one of ours.
    """
    files = manifest["files"]
    for file_name, about in files.items():
        if not FILE_NAME.fullmatch(file_name) or set(about) != {"size", "sha256"}:
            raise ValueError(f"{file_name!r:.40} is not a file of ours")
        _check_count(about["size"])
    entries = {}
    for name, said in manifest["tensors"].items():
        shape = tuple(map(_check_count, said["shape"]))
        _check_count(8 * math.prod(filter(None, shape)))  # strides are numbers too
        pieces = [Piece(*piece) for piece in said["pieces"]]
        entry = Entry(DTYPES[said["dtype"]], shape, bool(said["is_table"]), pieces)
        row = 0
        for piece in pieces:
            if piece.file_name not in files or piece.first != row or piece.last <= row:
                raise ValueError(f"rows of {name!r:.40} are missing or doubled")
            row = _check_count(piece.last)
        if row != (shape[0] if shape else 1) and entry.num_bytes:
            raise ValueError(f"{name!r:.40} has {row} of {shape[:1]} rows")
        entries[name] = entry
    if sum(entry.num_bytes for entry in entries.values()) > sum(f["size"] for f in files.values()):
        raise ValueError("the tensors are larger than the files")
    return entries, files


def _check_count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError(f"{number!r:.40} is not a number of rows or bytes")
    return number


# --- blocks ---------------------------------------------------------------------------------------


def row_blocks(tensor: Tensor, num_bytes: int | None = None) -> Iterator[slice]:
    """Slices of rows that cover a tensor, of BLOCK_BYTES or another size each.

    Example:
        >>> list(row_blocks(torch.zeros(5, 2), num_bytes=16))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    row_bytes = max(1, math.prod(tensor.shape[1:]) * tensor.element_size())
    step = max(1, (BLOCK_BYTES if num_bytes is None else num_bytes) // row_bytes)
    for first in range(0, len(tensor), step):
        yield slice(first, min(first + step, len(tensor)))


def all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite; nothing of the tensor's size is allocated."""
    rows = tensor if tensor.dim() else tensor.view(1)
    return all(bool(rows[block].isfinite().all()) for block in row_blocks(rows))
