"""What lies in the folder of a checkpoint, and how one knows that it is whole.

step-00001000/tables/shard-*.safetensors   rows of the split tables, many files (checkpoint_tables)
step-00001000/tensors.safetensors          what every rank holds alike; written by rank 0
step-00001000/state.json                   the step, the best so far, which run it is of
step-00001000/manifest.json                size and SHA-256 of all of these, written last
.step-00001000                             one in the making, or on its way out
step-00001000.replaced                     the old one, while another of the same step moves in
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from evenhand.errors import UserError
from evenhand.files import check_is_file, open_input, parse_json, read_text, sync

FORMAT = 1
MANIFEST, STATE, TENSORS, TABLES = "manifest.json", "state.json", "tensors.safetensors", "tables"
MANY_BYTES = 1 << 22  # read at once for a digest
STEP_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


class Table(NamedTuple):
    """A table of which this process holds a range of rows, or all."""

    rows: Tensor  # (n, ...) those of this process: the live ones, not a copy
    first_row: int = 0
    num_rows: int | None = None  # of the whole table; None: all of them are here

    @property
    def total(self) -> int:
        return len(self.rows) if self.num_rows is None else self.num_rows


class Group(Protocol):
    """The ranks that save and load together. `process_group` must carry CPU tensors (gloo)."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def process_group(self) -> dist.ProcessGroup: ...


def gathered(value: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank said, in the order of ranks, as JSON: nothing is unpickled."""
    if process_group is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    num_ranks = dist.get_world_size(process_group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=process_group)
    longest = int(torch.cat(sizes).max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.zeros_like(padded) for _ in range(num_ranks)]
    dist.all_gather(texts, padded, group=process_group)
    return [
        json.loads(text[: int(size)].numpy().tobytes())
        for text, size in zip(texts, sizes, strict=True)
    ]


# --- one checkpoint -------------------------------------------------------------------------------


def about_file(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    digest, size = hashlib.sha256(), 0
    with open_input(path) as file:
        while block := file.read(MANY_BYTES):
            digest.update(block)
            size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    manifest = {"format": FORMAT, "files": dict(sorted(files.items()))}
    text = json.dumps(manifest, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in (folder / MANIFEST, folder / TABLES, folder):
        sync(path)


def problem_of(folder: Path, *, part: int = 0, num_parts: int = 1) -> str:
    """What is wrong with a checkpoint, or nothing: "".

    Args:
        part, num_parts: of the files, the digests of one part alone are checked.
    """
    try:
        manifest = parse_json(read_text(folder / MANIFEST))
    except FileNotFoundError:
        return f"{MANIFEST} is missing, or it was written by an earlier version of Evenhand"
    except (OSError, ValueError, UserError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"{MANIFEST} does not list any files"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} is of format {manifest.get('format')!r}, and only {FORMAT} is known"
    files = manifest["files"]
    for name in (STATE, TENSORS):
        if name not in files:
            return f"{MANIFEST} does not list {name}"
    try:
        present = [path for path in folder.rglob("*") if path.is_file()]
        names = {path.relative_to(folder).as_posix() for path in present}
        unknown = sorted(names - {MANIFEST, *files})
        if unknown:
            return f"{unknown[0]} is not listed in {MANIFEST}"
        named = sorted(files.items())[part::num_parts]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            problems = threads.map(lambda item: _problem_of_file(folder, *item), named)
            return next(filter(None, problems), "")
    except OSError as error:
        return f"it cannot be read: {error}"


def _problem_of_file(folder: Path, name: str, expected: Any) -> str:
    path = folder / name
    is_told = isinstance(expected, dict) and set(expected) == {"size", "sha256"}
    if not is_told or not isinstance(expected["size"], int):
        return f"{MANIFEST} has no size and sha256 of {name}"
    try:
        check_is_file(path)
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except UserError as error:
        return str(error)
    if size != expected["size"]:
        return f"{name} has {size:,} bytes instead of {expected['size']:,}"
    if about_file(path) != expected:
        return f"{name} has another content than its SHA-256 tells"
    return ""


# --- the folder of all of them --------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def staging_of(target: Path) -> Path:
    return target.with_name(f".{target.name}")


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Every checkpoint with its step; the newest is last."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = STEP_NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(found)]


def move_into_place(staging: Path, target: Path) -> None:
    """At every moment there is an old one or the new one, also where both are of one step."""
    replaced = target.with_name(f"{target.name}.replaced")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(staging, target)
    sync(target.parent)


def remove_others(
    folder: Path, *, newest_step: int, keep_last: int, best_step: int, keeps_later: bool = False
) -> None:
    """Keeps the last few and the best. Those of later steps are of a course given up."""
    steps = {step for step, path in complete(folder) if path == step_folder(folder, step)}
    later = {step for step in steps if step > newest_step}
    kept = {*sorted(steps - later)[-keep_last:], best_step} & steps - later
    if keeps_later:
        kept |= later
    for step, path in complete(folder):
        if step not in kept or path != step_folder(folder, step):
            with contextlib.suppress(OSError):  # out of sight at once, and then gone
                away = staging_of(path)
                shutil.rmtree(away, ignore_errors=True)
                os.replace(path, away)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
