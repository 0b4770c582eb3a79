"""Checksums of files, and the manifest by which a copy of a data set is checked."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from evenhand.errors import UserError
from evenhand.files import open_input, read_json, write_json

ProgressFn = Callable[[str, int, int | None], None]  # what is read, bytes done, bytes in all

MANIFEST = "manifest.json"
PIECE_BYTES = 2**22


def file_digest(path: Path, kind: str, *, progress_fn: ProgressFn | None = None) -> str:
    """The checksum of a file, md5 or sha256 by `kind`, in hexadecimal."""
    digest, done, total = hashlib.new(kind, usedforsecurity=False), 0, path.stat().st_size
    with open_input(path) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            if progress_fn is not None:
                progress_fn(path.name, done, total)
    return digest.hexdigest()


def write_manifest(folder: Path, files: Sequence[Path], *, progress_fn: ProgressFn) -> None:
    """Writes the lengths and checksums of files of a folder."""
    about = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": file_digest(path, "sha256", progress_fn=progress_fn),
        }
        for path in files
    }
    write_json(folder / MANIFEST, {"format": "evenhand manifest", "version": 1, "files": about})


def check_manifest(folder: Path, *, progress_fn: ProgressFn | None = None) -> int:
    """Compares every file with the manifest of its folder; returns how many there are."""
    known, remedy = read_json(folder / MANIFEST), "copy it again, or make the data set again"
    try:
        for name, about in known["files"].items():
            path, expected = folder / name, f"{int(about['bytes'])} bytes, sha256 {about['sha256']}"
            if path.parent != folder or not path.is_file():
                raise UserError(f"{path} is missing; {remedy}")
            digest = file_digest(path, "sha256", progress_fn=progress_fn)
            found = f"{path.stat().st_size} bytes, sha256 {digest}"
            if found != expected:
                raise UserError(f"{path} is damaged ({found}; expected {expected}); {remedy}")
        return len(known["files"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise UserError(
            f"{folder / MANIFEST} is damaged ({error}); make the data set again"
        ) from error
