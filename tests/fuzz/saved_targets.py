"""What Evenhand itself left on a disk: manifests."""

import contextlib
import functools
import json
from pathlib import Path

import torch

from evenhand.data.checksums import MANIFEST as DATA_MANIFEST
from evenhand.data.checksums import check_manifest, write_manifest
from evenhand.distributed.ranks import Ranks
from evenhand.store import MANIFEST, Table, open_store, save_tensors, sign
from experiments.simulated_ranks import run_ranks

from .record_targets import JSON_WORDS
from .target import Target, answer, require, scratch


@functools.cache
def _store() -> Path:
    """Two files: the rows of two ranks."""

    def save(ranks: Ranks) -> None:
        tables = {"rows": Table(torch.ones(2, 2), 2 * ranks.rank, 4)}
        save_tensors(scratch() / "kept", {"a": torch.ones(3)}, tables, state={"b": 1}, ranks=ranks)

    run_ranks(2, save)
    return scratch() / "kept"


def _read_store(data: bytes) -> Exception | None:
    """A manifest, signed if it is one: what is read must be what was saved."""
    folder = _store()
    _store_seed()  # before it is overwritten
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        data = json.dumps(sign(value)).encode() if isinstance(value, dict) else data
    (folder / MANIFEST).write_bytes(data)

    def read() -> dict[str, torch.Tensor]:
        saved = open_store(folder)
        saved.verify()
        return {name: saved.load(name) for name in saved.entries}

    tensors, refusal = answer(read)
    if refusal is None:
        for tensor in tensors.values():
            require(bool((tensor == 1).all()), "numbers that were not saved")
            require(tensor.numel() <= 100, "rows that were not saved")
    return refusal


@functools.cache
def _store_seed() -> bytes:
    return (_store() / MANIFEST).read_bytes()


@functools.cache
def _data_folder() -> Path:
    folder = scratch() / "streamed"
    folder.mkdir()
    for name in ("a.npy", "b.npy"):
        (folder / name).write_bytes(name.encode())
    files = sorted(folder.iterdir())
    write_manifest(folder, files, progress_fn=lambda what, done, total: None)
    return folder


@functools.cache
def _data_seed() -> bytes:
    return (_data_folder() / DATA_MANIFEST).read_bytes()


def _read_data_manifest(data: bytes) -> Exception | None:
    folder = _data_folder()
    _data_seed()
    (folder / DATA_MANIFEST).write_bytes(data)
    count, refusal = answer(lambda: check_manifest(folder))
    require(refusal is not None or 0 <= count <= 3, "more files than there are")
    return refusal


WORDS = (*JSON_WORDS, b'"../x"', b'"sha256"', b'"size": -1', b"[0, 2]", b"[2, 4]", b'"/etc/passwd"')
TARGETS = (
    Target("store-manifest", _read_store, (_store_seed(),), WORDS),
    Target("data-manifest", _read_data_manifest, (_data_seed(),), WORDS),
)
