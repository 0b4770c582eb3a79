"""Text files, plain or compressed (.gz, .bz2, .xz by ending), read a block at a time.

A path that goes through a .zip archive, as in `data.zip/train.txt`, is a member of it, which is
read where it is: nothing is unpacked.
Whatever can be wrong with a file is a `UserError` that names it: absent, cut short, not UTF-8.
"""

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from evenhand.errors import UserError
from evenhand.files import check_is_file, open_input

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BLOCK_BYTES = 2**19  # with what is parsed of it, this fits the cache of a core
MAX_LINE_BYTES = 2**26  # a longer line is not text but the wrong file
SHOWN_CHARACTERS = 40
NEWLINE = ord("\n")

T = TypeVar("T")


def plain_suffix(path: Path) -> str:
    """The ending that tells the format: `.csv` of both `a.csv` and `a.csv.gz`."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix.lower()


def shown(text: bytes | str) -> str:
    """A value from a file, fit for one line of a message: quoted, escaped, not too long."""
    words = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text
    more = "..." if len(words) > SHOWN_CHARACTERS else ""
    return repr(words[:SHOWN_CHARACTERS]) + more


class PlacedBlock(NamedTuple):
    """Whole lines of a file, and where in it they are."""

    first_line: int  # its number, from 1
    text: bytes
    end: int  # bytes of the text up to here, as they are when nothing is compressed
    stored_end: int  # bytes of the file that were read for it


def line_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    r"""Blocks of whole lines, each with the number of its first line (from 1).

    Every line ends with \n, also the last one and those that ended with \r\n.
    """
    for block in placed_blocks(path, block_bytes=block_bytes):
        yield block.first_line, block.text


def placed_blocks(
    path: Path, *, block_bytes: int = BLOCK_BYTES, start: int = 0, first_line: int = 1
) -> Iterator[PlacedBlock]:
    """The blocks of `line_blocks` from a place on: a line's first byte, and its number."""
    line_number = first_line
    with _opened(path) as stored, _unpacked(stored, path) as file:
        if start:
            _read(file.seek, start, path, line_number)
        while block := _read(file.read, block_bytes, path, line_number):
            if not block.endswith(b"\n"):
                rest = _read(file.readline, MAX_LINE_BYTES, path, line_number)
                block += rest
                if len(rest) == MAX_LINE_BYTES:
                    raise UserError(
                        f"{path}, line {line_number + block.count(NEWLINE)}: is longer than "
                        f"{MAX_LINE_BYTES} bytes; is this a text file?"
                    )
            start += len(block)
            if b"\r" in block:  # looked for first: to replace nothing takes 50 times as long
                block = block.removesuffix(b"\r").replace(b"\r\n", b"\n")
            if not block.endswith(b"\n"):
                block += b"\n"
            yield PlacedBlock(line_number, block, start, stored.tell())
            line_number += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE))


def stored_size(path: Path) -> int | None:
    """Bytes of a file, compressed or not; None for a member of an archive."""
    return path.stat().st_size if path.is_file() else None


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, without their ends and without a byte-order mark."""
    for first_line, block in line_blocks(path):
        for line_number, line in enumerate(block[:-1].split(b"\n"), start=first_line):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {line_number}: {shown(line)} is not UTF-8 text; "
                    f"save the file as UTF-8"
                ) from error
            yield text.removeprefix("\ufeff") if line_number == 1 else text


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_input(path)
    except NotADirectoryError as error:
        if (member := _opened_member(path)) is not None:
            return member
        raise UserError(f"{path} does not exist; check the path") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror or error})") from error


def _unpacked(stored: IO[bytes], path: Path) -> IO[bytes]:
    """The text of a compressed file; anything else, as a member of an archive, as it is."""
    if path.suffix not in OPENERS or isinstance(stored, zipfile.ZipExtFile):
        return stored
    return OPENERS[path.suffix](stored, "rb")  # type: ignore[no-any-return]


def _opened_member(path: Path) -> IO[bytes] | None:
    """The member that a path through a .zip archive names; None if there is no archive in it."""
    for archive in path.parents:
        if archive.suffix.lower() == ".zip" and archive.exists():
            check_is_file(archive)
            name = path.relative_to(archive).as_posix()
            try:
                with zipfile.ZipFile(archive) as opened:
                    return opened.open(name)  # which keeps the file open for itself
            except KeyError as error:
                raise UserError(f"{archive} has no member {shown(name)}") from error
            except Exception as error:  # Python's reader of a damaged archive raises a dozen kinds
                raise UserError(f"{archive}: {name} cannot be read ({error})") from error
    return None


def _read(read_fn: Callable[[int], T], num_bytes: int, path: Path, line_number: int) -> T:
    try:
        return read_fn(num_bytes)
    except EOFError as error:
        raise UserError(
            f"{path}: the archive is cut short, in or after line {line_number}; "
            f"fetch or copy the file again"
        ) from error
    except Exception as error:  # Python's readers of damaged archives raise a dozen kinds
        raise UserError(
            f"{path}: cannot be read beyond line {line_number - 1} ({error}); fetch or copy the "
            f"file again, and check that its ending tells how it is compressed"
        ) from error
