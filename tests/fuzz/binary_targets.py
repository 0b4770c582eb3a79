"""Targets that read archives: .zip."""

import io
import zipfile

from evenhand.data.public_data import _find_in, check_archive
from evenhand.data.text_files import read_lines

from .target import Target, answer, require, written


def _zip(kind: int, *names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"1 2 3\n0 0:1\n", kind)
    return file.getvalue()


NAMES = ("train.txt", "test.txt")


def _read_zip(data: bytes) -> Exception | None:
    path = written("a.zip", data)
    files, refusal = answer(lambda: _find_in(path, NAMES))
    _, damage = answer(lambda: check_archive(path))
    if files is not None:
        for file in files:
            lines, unread = answer(lambda place=file: list(read_lines(place)))
            is_right = unread is not None or damage is not None or lines == ["1 2 3", "0 0:1"]
            require(is_right or b"1 2 3" not in data, "another text than was packed")
    return refusal or damage


ZIP = Target(
    "zip",
    _read_zip,
    (
        _zip(zipfile.ZIP_STORED, "a/train.txt", "a/test.txt", "__MACOSX/train.txt"),
        _zip(zipfile.ZIP_DEFLATED, "train.txt", "test.txt"),
        _zip(zipfile.ZIP_LZMA, "é/train.txt", "b/test.txt"),
        _zip(zipfile.ZIP_BZIP2, "/train.txt", "test.txt"),
    ),
    (
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"\x01\x00\x18\x00",
    ),
)

TARGETS = (ZIP,)
