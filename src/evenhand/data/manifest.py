"""A checksum of every file of a data set, so that a copy or an old disk can be checked."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from evenhand.errors import UserError
from evenhand.files import open_input, read_json, write_json

ProgressFn = Callable[[str, int, int | None], None]

MANIFEST = "manifest.json"
PIECE_BYTES = 2**24


def write_manifest(path: Path, files: Sequence[Path], *, progress_fn: ProgressFn) -> None:
    """Writes the lengths and checksums of files that are in the manifest's folder."""
    sums = _sums(files, progress_fn)
    write_json(
        path,
        {
            "format": "evenhand manifest",
            "version": 1,
            "files": {
                file.name: {"bytes": file.stat().st_size, "sha256": sums[file]} for file in files
            },
        },
    )


def check_manifest(
    folder: Path, *, progress_fn: ProgressFn = lambda what, done, total: None
) -> int:
    """Compares every file with the manifest of its folder; returns how many there are."""
    path = folder / MANIFEST
    known = read_json(path)
    try:
        files = {folder / name: dict(about) for name, about in known["files"].items()}
        is_there = {file: file.parent == folder and file.is_file() for file in files}
        lengths = {file: int(about["bytes"]) for file, about in files.items()}
        sums = {file: str(about["sha256"]) for file, about in files.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); make the data set again") from error
    for file, length in lengths.items():
        if not is_there[file]:
            raise UserError(f"{file} is missing; copy it again, or make the data set again")
        if file.stat().st_size != length:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes and had {length} when it was written; "
                f"copy it again, or make the data set again"
            )
    for file, found in _sums(list(files), progress_fn).items():
        if found != sums[file]:
            raise UserError(
                f"{file} is damaged: its checksum is {found[:12]}…, expected {sums[file][:12]}…; "
                f"copy it again, or make the data set again"
            )
    return len(files)


def _sums(files: Sequence[Path], progress_fn: ProgressFn) -> dict[Path, str]:
    total, done, sums = sum(file.stat().st_size for file in files), 0, {}
    for path in files:
        digest = hashlib.sha256()
        with open_input(path) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                done += len(piece)
                progress_fn("checksums", done, total)
        sums[path] = digest.hexdigest()
    return sums
