"""What a target is, and what an answer to a damaged input may be."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from evenhand.errors import UserError

MAX_MESSAGE = 200_000  # characters: it may name what it refuses, but must not grow beyond the input
MEMORY = Path("/dev/shm")
# A campaign gives each of its processes a folder, and removes it whatever became of the process.
FOLDER_BASE = os.environ.get("EVENHAND_FUZZ_FOLDER") or (
    MEMORY if os.access(MEMORY, os.W_OK) else None
)
_folders: list[Path] = []  # the one of this process, or none yet

CheckFn = Callable[[bytes], Exception | None]


class Target(NamedTuple):
    """One parser. The function returns the refusal, or None where the input was read."""

    name: str
    check_fn: CheckFn
    seeds: tuple[bytes, ...]  # inputs that are read


TARGETS: dict[str, Target] = {}


def target(name: str, *seeds: bytes) -> Callable[[CheckFn], CheckFn]:
    """Registers the function below it."""

    def register(check_fn: CheckFn) -> CheckFn:
        TARGETS[name] = Target(name, check_fn, seeds)
        return check_fn

    return register


class FindingError(AssertionError):
    """A parser that answered wrongly."""


def require(is_true: Any, otherwise: str) -> None:
    if not is_true:
        raise FindingError(otherwise)


def answer(parse_fn: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a parser gives, or how it refuses; any error but a `UserError` goes on its way."""
    try:
        return parse_fn(), None
    except UserError as error:
        require(0 < len(str(error)) <= MAX_MESSAGE, f"a message of {len(str(error))} characters")
        return None, error


def scratch() -> Path:
    """A folder of this process, in memory where there is such a place."""
    if not _folders:
        prefix = f"evenhand-fuzz-{os.getpid()}-"
        _folders.append(Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER_BASE)))
        atexit.register(forget_scratch)  # targets make their seeds when they are imported
    return _folders[0]


def forget_scratch() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def write(name: str, data: bytes) -> Path:
    """A new file of the scratch folder with this content; an old one may still be mapped."""
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path
