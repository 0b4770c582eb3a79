"""Files, plain or compressed (.gz, .bz2, .xz, .zst by ending), and texts read a block at a time.

A path that goes through a .zip archive, as in `data.zip/train.txt`, is a member of it, which is
read where it is: nothing is unpacked.
Whatever can be wrong with a file is a `UserError` that names it: absent, cut short, not UTF-8.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from evenhand.errors import UserError
from evenhand.files import check_is_file, open_input


def _open_zstandard(file: IO[bytes], mode: str = "rb") -> io.BufferedReader:
    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


OPENERS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
BLOCK_BYTES = 2**19  # with what is parsed of it, this fits the cache of a core
MAX_LINE_BYTES = 2**26  # a longer line is not text but the wrong file
SHOWN_CHARACTERS = 40
NEWLINE = ord("\n")


def plain_suffix(path: Path) -> str:
    """The ending that tells the format: `.csv` of both `a.csv` and `a.csv.gz`."""
    return (path.with_suffix("") if path.suffix in OPENERS else path).suffix.lower()


def quote_value(text: bytes | str) -> str:
    """A value from a file, fit for one line of a message: quoted, escaped, not too long."""
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    more = "..." if len(words) > SHOWN_CHARACTERS else ""
    return repr(words[:SHOWN_CHARACTERS]) + more


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes, int]]:
    r"""Blocks of whole lines: (number of the first line, text, bytes of the file read so far).

    Every line ends with \n, also the last one and those that ended with \r\n. Numbers are from 1.
    """
    line_number = 1
    with open_input_stream(path) as (file, stored), readable(path):
        while True:
            block = file.read(block_bytes)
            rest = b"" if block.endswith(b"\n") else file.readline(MAX_LINE_BYTES)
            if not block:
                return
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
            yield line_number, block, stored.tell()
            line_number += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE))


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, without their ends and without a byte-order mark."""
    for first_line, block, _ in read_blocks(path):
        for line_number, line in enumerate(block[:-1].split(b"\n"), start=first_line):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {line_number}: {quote_value(line)} is not UTF-8 text; "
                    f"save the file as UTF-8, or convert it: "
                    f"iconv -f latin1 -t utf-8 {shlex.quote(path.name)} > NEW"
                ) from error
            yield text.removeprefix("\ufeff") if line_number == 1 else text


@contextlib.contextmanager
def open_input_stream(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """What a file holds, decompressed, and the file as it is stored, which tells how far one is."""
    with _open_stored(path) as stored, contextlib.ExitStack() as stack:
        file = stored
        if path.suffix in OPENERS and not isinstance(stored, zipfile.ZipExtFile):
            file = stack.enter_context(OPENERS[path.suffix](stored, "rb"))
        yield file, stored


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever the readers of damaged files raise in the block becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except EOFError as error:
        raise UserError(
            f"{path}: the archive is cut short; fetch or copy the file again"
        ) from error
    except Exception as error:  # of a dozen kinds
        raise UserError(
            f"{path} cannot be read ({error}); fetch or copy the file again, and check that its "
            f"ending tells what it is"
        ) from error


def _open_stored(path: Path) -> IO[bytes]:
    """A file as it is stored, or the text of a member of an archive."""
    try:
        return open_input(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        archives = [p for p in path.parents if p.suffix.lower() == ".zip" and p.exists()]
        if not archives or archives[0].is_dir():
            raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror or error})") from error
    check_is_file(archives[0])
    name = path.relative_to(archives[0]).as_posix()
    with open_archive(archives[0]) as archive:
        if name not in archive.namelist():
            raise UserError(f"{archives[0]} has no member {quote_value(name)}")
        return archive.open(name)  # which keeps the file open for itself


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A .zip archive for the block, in which whatever its reader raises becomes a `UserError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except UserError:
        raise
    except Exception as error:  # damaged, encrypted, not implemented: a dozen kinds
        raise UserError(
            f"{path} is not a whole .zip archive ({error}); fetch or copy it again"
        ) from error
