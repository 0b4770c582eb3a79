"""Reads regular files only, and writes so that a crash leaves the old file or the new one."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from evenhand.errors import UserError
from evenhand.locking import locked_file

MAX_DEPTH = 50  # of lists and objects in each other
MAX_TEXT_BYTES = 2**30  # of a text file, which is read whole; ours are far smaller
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


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well.

    Its name holds the process number, so two writers of one file do not share a temporary file; the
    last to finish wins. Temporary files left by writers that have died are removed.
    """
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
