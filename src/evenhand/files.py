"""Reading regular files alone; writing so that a crash leaves the old one or the new one."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from evenhand.errors import UserError
from evenhand.locking import locked_file

MAX_DEPTH = 50  # of lists and objects in each other
MAX_TEXT_BYTES = 2**30  # of a text that is read whole; none of ours is near it
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_is_file(path: Path) -> None:
    """Refuses what is there and is no regular file; what is not there, its reader will miss.

    To open a pipe waits for somebody to write to it, perhaps for ever; a device has no end.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{path} is {kind}, not a file; put a file there, or name another")


def open_input(path: Path) -> IO[bytes]:
    """Opens a regular file to read; every file that others may have made is opened by this."""
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

    Its name tells the process, so that two that write the same file do not write into one another;
    the last one to finish wins. What killed processes left is removed.
    """
    staging = _staging(path)
    try:
        _make(path.parent)
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
    """A temporary folder beside `folder`, which must not exist, that becomes it, whole, at the end.

    Another process that is just making the same folder is named, and this one refused.
    """
    staging = _staging(folder)
    try:
        _make(folder.parent)
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


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # which says of a file there that it exists
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _clear_leftovers(path: Path) -> None:
    """Removes what writers of `path` left that are no more; those of other machines may be meant
    too, and then find their file gone and say so: a wrong file there never is."""
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
    """Whether another process has this number; our own leftovers are those of an earlier one."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # there is one, of another user
        return True
    return True


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as staging:
        # Of names that are no UTF-8, as that of a working folder may be, something must be shown.
        staging.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON; NaN, which JSON does not know, becomes null."""
    write_text(path, json.dumps(_without_nan(value), ensure_ascii=False, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return parsed_json(read_text(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is damaged ({error})") from error


def parsed_json(text: str) -> Any:
    """What a JSON text says; one that is wrong, or no sane program writes, is a `ValueError`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\u" in text:  # half a surrogate pair can be neither shown nor written again
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    inner = [value]
    for _ in range(MAX_DEPTH):
        inner = [item for outer in inner for item in _items(outer) if isinstance(item, dict | list)]
    if inner:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def sync(path: Path) -> None:
    """Asks the disk to hold what was written to a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """`sync` of every file and folder within, and of the folder itself last."""
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
