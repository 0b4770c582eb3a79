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
import dataclasses
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
from evenhand.files import open_input, parse_json, read_text, sync

FORMAT = 2  # 1: the checkpoints of versions before this module
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"rank-\d{1,6}-file-\d{1,6}\.safetensors")
FILE_BYTES = 2**28  # of tensors in a file, unless a single row is larger: files are hashed at once
BLOCK_BYTES = 2**24  # of rows in memory at once
MOST_THREADS = 8
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Table(NamedTuple):
    """A table of which this process holds a range of rows, or all."""

    rows: Tensor  # (n, ...) the live rows, not a copy
    first_row: int = 0
    num_rows: int | None = None  # of the whole table; None: all of them are here

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole table."""
        if self.num_rows is None:
            return tuple(self.rows.shape)
        return (self.num_rows, *self.rows.shape[1:])


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


class DamagedError(UserError):
    """A store, or one of its files, is not what was written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} is damaged ({problem})")


# --- writing --------------------------------------------------------------------------------------


def save_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    tables: Mapping[str, Table] = NOTHING,
    *,
    state: Mapping[str, Any] = NOTHING,
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
    rank = 0 if ranks is None else ranks.rank
    staging = staging_folder(folder)

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)  # what a crash may have left
            staging.mkdir(parents=True)

    def finish() -> None:
        if rank != 0:
            return
        manifest: dict[str, Any] = {"format": FORMAT, "state": dict(state), "tensors": {}}
        manifest["files"] = {name: about for report in reports for name, about in report[1].items()}
        for name, entry in (item for report in reports for item in report[0].items()):
            tensor = manifest["tensors"].setdefault(name, {**entry, "pieces": []})
            tensor["pieces"] += entry["pieces"]
        _parse_entries(manifest)  # ranks that hold too few rows are found here
        text = json.dumps(sign(manifest), indent=1, sort_keys=True)
        (staging / MANIFEST).write_text(text + "\n", encoding="utf-8")
        sync(staging / MANIFEST)
        sync(staging)
        _replace(staging, folder)

    try:
        _on_all(begin, folder, ranks)  # no rank writes before the first has cleared up
        alike = tensors if rank == 0 else {}
        reports = _on_all(lambda: _write_rows(staging, alike, tables, rank), folder, ranks)
        _on_all(finish, folder, ranks)
    except UserError:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _on_all(part_fn: Callable[[], Any], folder: Path, ranks: Ranks | None) -> list[Any]:
    """Every rank does its part; what each returned, or the same error on all of them."""
    answer, cause, problem = None, None, ""
    try:
        answer = part_fn()
    except Exception as error:  # of any kind: the other ranks wait to be told
        cause = error
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reports = gather_json([answer, problem], ranks)
    if problems := [f"rank {rank}: {said}" for rank, (_, said) in enumerate(reports) if said]:
        raise UserError(
            f"{folder} could not be written ({problem if ranks is None else problems[0]}); what "
            f"was saved before is untouched: free some space and try again (a run goes on with "
            f"--resume)"
        ) from cause
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


def _write_rows(
    folder: Path, tensors: Mapping[str, Tensor], tables: Mapping[str, Table], rank: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes the rows of one rank; what the manifest says of these tensors, and of the files.

    Wide types come first, so that every tensor begins aligned. A file has rows of a tensor once.
    """
    entries: dict[str, Any] = {}
    files: dict[str, dict[str, Tensor]] = {}  # by their names
    file_name, num_bytes = "", 0  # of the last of them
    own = {**{name: Table(tensor) for name, tensor in tensors.items()}, **tables}
    for name, table in sorted(own.items(), key=lambda item: (-item[1].rows.itemsize, item[0])):
        rows = table.rows.detach()
        pieces: list[Piece] = []
        about = {"dtype": DTYPE_NAMES[rows.dtype], "shape": table.shape, "pieces": pieces}
        entries[name] = {**about, "is_table": name in tables}
        rows = rows if rows.dim() else rows.view(1)
        for block in row_blocks(rows, FILE_BYTES) if rows.numel() else ():
            size = rows[block].nbytes
            if not files or num_bytes + size > FILE_BYTES or name in files[file_name]:
                file_name, num_bytes = f"rank-{rank}-file-{len(files)}.safetensors", 0
                files[file_name] = {}
            files[file_name][name] = rows[block]
            num_bytes += size
            first, last = table.first_row + block.start, table.first_row + block.stop
            pieces.append(Piece(file_name, first, last))
    return entries, {name: write_file(folder / name, rows) for name, rows in files.items()}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes and syncs a safetensors file, a block of rows at a time: its size and SHA-256."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        about = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**about, "data_offsets": [begin, end]}
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


def sign(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a SHA-256 of all else that it says."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(said, sort_keys=True)
    return {**said, "sha256": hashlib.sha256(text.encode()).hexdigest()}


# --- folders --------------------------------------------------------------------------------------


def staging_folder(folder: Path) -> Path:
    """Where a store is written before it gets its name, and goes to be removed."""
    return folder.with_name(f".{folder.name}")


def replaced_folder(folder: Path) -> Path:
    """Where the old store is while a new one takes its name."""
    return folder.with_name(f"{folder.name}.replaced")


def has_store(folder: Path) -> bool:
    return folder.is_dir() or replaced_folder(folder).is_dir()


def _replace(staging: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(replaced_folder(folder), ignore_errors=True)
        os.replace(folder, replaced_folder(folder))
    os.replace(staging, folder)
    sync(folder.parent)
    shutil.rmtree(replaced_folder(folder), ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a crash left beside a store."""
    shutil.rmtree(staging_folder(folder), ignore_errors=True)
    if folder.exists():
        shutil.rmtree(replaced_folder(folder), ignore_errors=True)


def remove_store(folder: Path) -> None:
    """Removes a store as far as possible; half of it is never seen under its name."""
    remove_leftovers(folder)
    with contextlib.suppress(OSError):
        os.replace(folder if folder.exists() else replaced_folder(folder), staging_folder(folder))
    remove_leftovers(folder)


# --- reading --------------------------------------------------------------------------------------


def open_store(folder: Path) -> "SavedTensors":
    """Reads the manifest of a store, or raises `DamagedError`; rows are read when asked for."""
    place = folder if folder.is_dir() else replaced_folder(folder)  # as a crash may leave it
    try:
        manifest = parse_json(read_text(place / MANIFEST))
        version = manifest.get("format")
        if version != FORMAT:
            raise ValueError(f"it has format {version!r:.40}, and this version reads {FORMAT}")
        if manifest != sign(manifest):
            raise ValueError("it does not match its SHA-256")
        return SavedTensors(place, *_parse_entries(manifest), dict(manifest["state"]))
    except FileNotFoundError as error:
        problem = f"{MANIFEST} is missing, or it was written by an earlier version of Evenhand"
        raise DamagedError(folder, problem) from error
    except (OSError, ValueError, UserError) as error:
        raise DamagedError(folder, f"{MANIFEST}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(folder, f"{MANIFEST} is not one of ours: {error}") from error


@dataclasses.dataclass
class SavedTensors:
    """The tensors of a store, of which any rows can be read."""

    folder: Path
    entries: Mapping[str, Entry]  # by the names of the tensors
    files: Mapping[str, Any]  # size and SHA-256 by name
    state: dict[str, Any]  # as it was saved
    verified: set[str] = dataclasses.field(default_factory=set)  # files that have been compared

    def verify(self, file_names: Set[str] | None = None) -> None:
        """Compares files, or all, with size and SHA-256, unless done; or raises `DamagedError`."""
        names = self.files.keys() if file_names is None else self.files.keys() & file_names
        left = sorted(names - self.verified)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(self._verify_file, left))
        self.verified.update(left)

    def _verify_file(self, name: str) -> None:
        expected, problem = self.files[name], ""
        try:
            with open_input(self.folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["size"]:
                    problem = f"has {size:,} bytes instead of {expected['size']:,}"
                elif hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:  # type: ignore[arg-type]
                    problem = "does not match its SHA-256"
        except (OSError, UserError) as error:
            problem = f"cannot be read: {error}"
        if problem:
            raise DamagedError(self.folder, f"{name} {problem}")

    def load(self, name: str) -> Tensor:
        """A whole tensor, in new memory."""
        tensor = torch.empty(self.entries[name].shape, dtype=self.entries[name].dtype)
        self.read(name, tensor)
        return tensor

    @torch.no_grad()
    def read(self, name: str, target: Tensor, *, first_row: int = 0) -> None:
        """Fills `target`, of any device and type, with the rows `first_row` and after.

        Files are verified before the first rows are read from them. Too few rows, or rows of
        another shape, are a `ValueError`.
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


def _parse_entries(manifest: Any) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The tensors and the files of a manifest, which anybody may have written.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not one of ours.
    """

    def count(number: Any) -> int:
        if type(number) is not int or not 0 <= number < 2**62:
            raise ValueError(f"{number!r:.40} is not a number of rows or bytes")
        return number

    files = manifest["files"]
    for file_name, about in files.items():
        if not FILE_NAME.fullmatch(file_name) or set(about) != {"size", "sha256"}:
            raise ValueError(f"{file_name!r:.40} is not a file of ours")
    room = sum(count(about["size"]) for about in files.values())
    entries = {}
    for name, said in manifest["tensors"].items():
        dtype, shape = DTYPES[said["dtype"]], tuple(map(count, said["shape"]))
        count(8 * math.prod(filter(None, shape)))  # strides are numbers too
        pieces = [Piece(*piece) for piece in said["pieces"]]
        row = 0
        for piece in pieces:
            if piece.file_name not in files or piece.first != row or piece.last <= row:
                raise ValueError(f"rows of {name!r:.40} are missing or doubled")
            row = count(piece.last)
        num_elements: int = math.prod(shape)
        room -= num_elements * dtype.itemsize
        if room < 0:
            raise ValueError("the tensors are larger than the files")
        if row != (shape[0] if shape else 1) and num_elements:
            raise ValueError(f"{name!r:.40} has {row} of {shape[:1]} rows")
        entries[name] = Entry(dtype, shape, bool(said["is_table"]), pieces)
    return entries, files


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
