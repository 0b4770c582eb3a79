"""Text files, plain or compressed (.gz, .bz2, .xz by ending), read a few megabytes at a time.

Whatever can be wrong with a file is a `UserError` that names it: absent, cut short, not UTF-8.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from evenhand.errors import UserError

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BLOCK_BYTES = 2**21
MAX_LINE_BYTES = 2**26  # a longer line is not text but the wrong file
SHOWN_CHARACTERS = 40


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
    line_number, rest = 1, b""
    with _opened(path) as file:
        while chunk := _read(file, path, block_bytes, line_number):
            text = rest + chunk
            end = text.rfind(b"\n") + 1
            rest = text[end:]
            if end:
                yield line_number, text[:end].replace(b"\r\n", b"\n")
                line_number += text.count(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise UserError(
                    f"{path}, line {line_number}: is longer than {MAX_LINE_BYTES} bytes; "
                    f"is this a text file?"
                )
    if rest:
        yield line_number, rest.removesuffix(b"\r") + b"\n"


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
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror or error})") from error


def _read(file: IO[bytes], path: Path, num_bytes: int, line_number: int) -> bytes:
    try:
        return file.read(num_bytes)
    except EOFError as error:
        raise UserError(
            f"{path}: the archive is cut short, in or after line {line_number}; "
            f"fetch or copy the file again"
        ) from error
    except (OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be read beyond line {line_number - 1} ({error}); fetch or copy the "
            f"file again, and check that its ending tells how it is compressed"
        ) from error
