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
from typing import IO, Any

import numpy as np

from evenhand.errors import UserError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BLOCK_BYTES = 2**19  # with what is parsed of it, this fits the cache of a core
MAX_LINE_BYTES = 2**26  # a longer line is not text but the wrong file
SHOWN_CHARACTERS = 40
NEWLINE = ord("\n")


def plain_suffix(path: Path) -> str:
    """The ending that tells the format: `.csv` of both `a.csv` and `a.csv.gz`."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix.lower()


def shown(text: bytes | str) -> str:
    """A value from a file, fit for one line of a message: quoted, escaped, not too long."""
    words = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text
    more = "..." if len(words) > SHOWN_CHARACTERS else ""
    return repr(words[:SHOWN_CHARACTERS]) + more


def line_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    r"""Blocks of whole lines, each with the number of its first line (from 1).

    Every line ends with \n, also the last one and those that ended with \r\n.
    """
    line_number = 1
    with _opened(path) as file:
        while block := _read(file.read, block_bytes, path, line_number):
            if not block.endswith(b"\n"):
                rest = _read(file.readline, MAX_LINE_BYTES, path, line_number)
                block += rest
                if len(rest) == MAX_LINE_BYTES:
                    raise UserError(
                        f"{path}, line {line_number + block.count(NEWLINE)}: is longer than "
                        f"{MAX_LINE_BYTES} bytes; is this a text file?"
                    )
            if b"\r" in block:  # looked for first: to replace nothing takes 50 times as long
                block = block.removesuffix(b"\r").replace(b"\r\n", b"\n")
            if not block.endswith(b"\n"):
                block += b"\n"
            yield line_number, block
            line_number += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE))


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
        return OPENERS.get(path.suffix, open)(path, "rb")  # type: ignore[no-any-return]
    except NotADirectoryError as error:
        if (member := _opened_member(path)) is not None:
            return member
        raise UserError(f"{path} does not exist; check the path") from error
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror or error})") from error


def _opened_member(path: Path) -> IO[bytes] | None:
    """The member that a path through a .zip archive names; None if there is no archive in it."""
    for archive in path.parents:
        if archive.suffix.lower() == ".zip" and archive.is_file():
            name = path.relative_to(archive).as_posix()
            try:
                with zipfile.ZipFile(archive) as opened:
                    return opened.open(name)  # which keeps the file open for itself
            except KeyError as error:
                raise UserError(f"{archive} has no member {shown(name)}") from error
            except Exception as error:  # Python's reader of a damaged archive raises a dozen kinds
                raise UserError(f"{archive}: {name} cannot be read ({error})") from error
    return None


def _read(read_fn: Callable[[int], bytes], num_bytes: int, path: Path, line_number: int) -> bytes:
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
