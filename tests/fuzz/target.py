"""What a target is, and what an answer to a damaged input may be."""

import contextlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from evenhand import files
from evenhand.errors import UserError

MAX_MESSAGE = 200_000  # characters: it may name what it refuses, but must not grow beyond the input


class Target(NamedTuple):
    """One parser. The function returns the refusal, or None where the input was read."""

    name: str
    check_fn: Callable[[bytes], Exception | None]
    seeds: tuple[bytes, ...]  # inputs that are read
    words: tuple[bytes, ...] = ()  # what this format is made of


class FindingError(AssertionError):
    """A parser that answered wrongly."""


def answer(parse_fn: Callable[[], Any], *also: type[Exception]) -> tuple[Any, Exception | None]:
    """What a parser gives, or how it refuses; any error but a `UserError` goes on its way.

    Args:
        also: other errors that the parser documents.
    """
    try:
        return parse_fn(), None
    except UserError as error:
        require(0 < len(str(error)) <= MAX_MESSAGE, f"a message of {len(str(error))} characters")
        return None, error
    except also as error:
        return None, error


def require(is_true: Any, otherwise: str) -> None:
    if not is_true:
        raise FindingError(otherwise)


def agree(found: Any, expected: Any, refusal: Exception | None) -> None:
    """A parser and its twin refuse the same inputs and read the same from the others.

    `expected` is None where the twin refuses.
    """
    if refusal is not None:
        require(expected is None, f"refused ({refusal}), but the twin reads {str(expected)[:200]}")
    else:
        require(expected is not None, f"read {str(found)[:200]}, but the twin refuses it")
        require(found == expected, f"read {str(found)[:200]}, the twin {str(expected)[:200]}")


MEMORY = Path("/dev/shm")
# A campaign gives each of its processes a folder, and removes it whatever became of the process.
FOLDER_BASE = os.environ.get("EVENHAND_FUZZ_FOLDER") or (
    MEMORY if os.access(MEMORY, os.W_OK) else None
)
_folders: list[Path] = []  # the one of this process, or none yet


def scratch() -> Path:
    """A folder of this process, in memory where there is such a place."""
    if not _folders:
        prefix = f"evenhand-fuzz-{os.getpid()}-"
        _folders.append(Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER_BASE)))
    return _folders[0]


def forget_scratch() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def written(name: str, data: bytes) -> Path:
    """A file of the scratch folder with this content."""
    path = scratch() / name
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    """Other values for some names of a module, for as long as the block lasts."""
    before = {name: getattr(module, name) for name in values}
    try:
        vars(module).update(values)
        yield
    finally:
        vars(module).update(before)


class MemoryPath(type(Path())):  # type: ignore[misc]
    """A path of which the content is in memory: files are slow, thousands a second, on any disk."""

    contents: ClassVar[dict[str, bytes]] = {}

    def is_file(self) -> bool:
        return str(self) in self.contents

    exists = is_file

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        file = io.BytesIO(self.contents[str(self)])
        return io.TextIOWrapper(file, encoding=encoding, errors=errors).read()

    def stat(self, **_: Any) -> Any:
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, len(self.contents[str(self)]), 0, 0, 0))

    def open(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not to be opened")


def in_memory(name: str, data: bytes) -> MemoryPath:
    """A file with this content, for readers that use `evenhand.files`."""
    path = MemoryPath(f"/memory/{name}")
    path.contents[str(path)] = data
    return path


def _open(path: Any, mode: str = "rb") -> Any:
    if isinstance(path, MemoryPath):
        return io.BytesIO(path.contents[str(path)])
    return open(path, mode)


files.open = _open  # type: ignore[attr-defined]
