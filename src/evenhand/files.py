"""Texts, JSON and arrays in files: reads regular ones only, and writes all of one or nothing.

One process at a time writes into a folder; readers are never locked out. `filelock` takes the
operating system's own lock, which ends with its process, so a killed run leaves nothing to clean
up. The lock file names its holder, for the error of a second writer.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy
from filelock import FileLock, Timeout
from numpy.typing import DTypeLike, NDArray
from safetensors import SafetensorError, safe_open

from evenhand.errors import UserError

ProgressFn = Callable[[str, int, int | None], None]  # what is read, bytes done, bytes in all

PIECE_BYTES = 2**22  # of a file, read at once
MAX_DEPTH = 50  # of lists and objects in each other
MAX_TEXT_BYTES = 2**30  # of a text file, which is read whole; ours are far smaller
# What file systems without locks answer: some network and user-space ones have none.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RETRY_SECONDS = 0.1  # a holder that is just leaving removes the file under our hands
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_is_file(path: Path) -> None:
    """Refuses anything that is not a regular file; a missing file is left to whoever opens it.

    Opening a pipe may wait for a writer for ever, and a device has no end.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{path} is {kind}, not a file; put a file there, or name another")


def open_input(path: Path) -> IO[bytes]:
    """Opens a regular file for reading; use it for every file that others may have made."""
    check_is_file(path)
    return open(path, "rb")


def read_text(path: Path) -> str:
    """All of a UTF-8 file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    with open_input(path) as file:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(f"{path} has more than {MAX_TEXT_BYTES} bytes; is it another file?")
        return file.read().decode("utf-8")


def file_digest(path: Path, kind: str, *, progress_fn: ProgressFn | None = None) -> str:
    """The checksum of a file, md5 or sha256 by `kind`, in hexadecimal."""
    digest, done, total = hashlib.new(kind, usedforsecurity=False), 0, path.stat().st_size
    with open_input(path) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            if progress_fn is not None:
                progress_fn(path.name, done, total)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well.

    Its name holds the process number, so two writers of one file do not share a temporary file; the
    last to finish wins. Temporary files left by writers that have died are removed. A device or a
    folder is refused: a user with all rights would lose it.
    """
    check_is_file(path)
    staging = _staging(path)
    try:
        _make_folder(path.parent)
        _clear_leftovers(path)
        yield staging
        sync(staging)
        os.replace(staging, path)
        sync(path.parent)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); what stood there before "
            f"is untouched"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder`, which must not exist, when the block ends well.

    A `UserError` names the process if another one is writing the same folder.
    """
    staging = _staging(folder)
    try:
        _make_folder(folder.parent)
        with locked_file(folder.with_name(f".{folder.name}.lock"), folder):
            if folder.exists():
                raise UserError(f"{folder} exists already; choose another folder or remove it")
            _clear_leftovers(folder)
            try:
                staging.mkdir()
                yield staging
                sync_tree(staging)
                os.rename(staging, folder)
                sync(folder.parent)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except BrokenPipeError:  # of what the block prints: the folder has no part in it
        raise
    except OSError as error:
        raise UserError(
            f"{folder} could not be written ({error.strerror or error}); nothing was left there, "
            f"make room or choose another folder"
        ) from error


def _make_folder(folder: Path) -> None:
    """Makes a folder and its parents; a file in its place is the usual `NotADirectoryError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _clear_leftovers(path: Path) -> None:
    """Removes temporary files of `path` left by writers that have died.

    A writer on another machine may lose its file too; it then fails, and never writes a wrong one.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(\d{{1,10}})\.partial")
    with os.scandir(path.parent) as entries:
        leftovers = [(entry.path, pattern.fullmatch(entry.name)) for entry in entries]
    for leftover, match in leftovers:
        if match is None or _is_running(int(match[1])):
            continue
        if os.path.isdir(leftover) and not os.path.islink(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(leftover)


def _is_running(pid: int) -> bool:
    """Whether another process has this number; files with our own are of an earlier process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # there is one, of another user
        return True
    return pid != os.getpid()


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as staging:
        # The text may hold file names that are no UTF-8.
        staging.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON; NaN, which JSON does not know, becomes null."""
    write_text(path, json.dumps(_without_nan(value), ensure_ascii=False, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is damaged ({error})") from error


def parse_json(text: str) -> Any:
    """Parses JSON; a text that is wrong, or that no sane program writes, is a `ValueError`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:  # half a surrogate pair can be neither printed nor written
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def sync(path: Path) -> None:
    """Flushes a file or a folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Syncs every file and folder within, and the folder itself last."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


# --- locks ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it for the block; a `UserError` if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} could not be made ({error.strerror})") from error
    with locked_file(folder / ".lock", folder):
        yield


@contextlib.contextmanager
def locked_file(path: Path, thing: Path) -> Iterator[None]:
    """Locks `thing` by a lock file at any path; see `locked`."""
    lock = FileLock(path, timeout=RETRY_SECONDS, poll_interval=0.01, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{thing} is in use by {_holder(path)}; wait for it or stop it, or choose another "
            f"folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"{thing} could not be locked ({path}: {error.strerror}); make its folder "
                f"writable, or choose another"
            ) from error
        print(
            f"evenhand: {thing} lies on a file system without locks ({error.strerror}): make sure "
            f"that no other process writes there",
            file=sys.stderr,
        )
    try:
        if lock.is_locked:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            about = {"pid": os.getpid(), "host": platform.node(), "since": now}
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                path.write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        # Before the release: a process that has opened this file already finds it unlinked.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        if not path.is_file():  # reading a pipe could block for ever
            return "another process"
        about = json.loads(path.read_text(encoding="utf-8"))
        pid, host, since = int(about["pid"]), str(about["host"]), str(about["since"])
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or gone by now
        return "another process"
    return f"process {pid} on {host} (since {since})"


# --- arrays ---------------------------------------------------------------------------------------


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


def open_npy(path: Path, *, is_empty: bool) -> NDArray[Any]:
    """The array of a file, memory-mapped unless it is empty: nothing cannot be mapped."""
    with open_input(path) as file:
        shape = check_npy_header(file)
    if is_empty and 0 not in shape:  # it would be read whole, however large
        raise ValueError(f"it must be empty, and is of shape {shape}")
    array: NDArray[Any] = np.load(path, mmap_mode=None if is_empty else "r", allow_pickle=False)
    return array


def check_npy_header(file: IO[bytes]) -> tuple[int, ...]:
    """The shape of an array; what is none of plain numbers is refused by a `ValueError`.

    Before numpy makes an array of it: numpy divides by the size of a type, and a type of no bytes
    ("<(0,)i8") ends the whole process.
    """
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"the version of .npy must be 1.0 or 2.0, got {version[0]}.{version[1]}")
    shape, _, dtype = readers[version](file)
    if dtype.subdtype is not None or dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"entries must be plain numbers, got {dtype}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"sizes must be whole numbers from 0, got {shape}")
    return tuple(shape)


class NpyWriter:
    """A .npy file that rows are appended to; their number is filled in when it is closed.

    Args:
        row_shape: that of one row: () for an array of numbers.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row_shape = path, np.dtype(dtype), row_shape
        self.num_rows = 0
        with open(path, "wb") as file:
            self._write_header(file)

    def append(self, rows: NDArray[Any]) -> None:
        """Appends (n, *row_shape) rows."""
        with open(self.path, "ab") as file:
            file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.num_rows += len(rows)

    def close(self) -> None:
        with open(self.path, "r+b") as file:
            self._write_header(file)

    def _write_header(self, file: IO[bytes]) -> None:
        # numpy leaves room for a longer number of rows, so that a header can be written again.
        shape = (self.num_rows, *self.row_shape)
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, about)
