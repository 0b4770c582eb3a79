"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenhand.errors import UserError
from evenhand.locking import locked_file


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
            staging.mkdir()
            yield staging
            sync_tree(staging)
            os.rename(staging, folder)
            sync(folder.parent)
    except OSError as error:
        raise UserError(
            f"{folder} could not be written ({error.strerror or error}); nothing was left there, "
            f"make room or choose another folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
        staging.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON; NaN, which JSON does not know, becomes null."""
    write_text(path, json.dumps(_without_nan(value), ensure_ascii=False, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error})") from error


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
