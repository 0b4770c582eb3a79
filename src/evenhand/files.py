"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evenhand.errors import UserError

MAX_DEPTH = 50  # of lists and objects in each other


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well.

    Its name is fixed, so that what a killed process left is overwritten and not kept for ever.
    """
    staging = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.unlink(missing_ok=True)
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


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as staging:
        staging.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON; NaN, which JSON does not know, becomes null."""
    write_text(path, json.dumps(_without_nan(value), ensure_ascii=False, indent=1) + "\n")


def read_json(path: Path) -> Any:
    try:
        return parsed_json(path.read_text(encoding="utf-8"))
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


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
