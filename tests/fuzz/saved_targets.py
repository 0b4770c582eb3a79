"""What Evenhand itself left on a disk: manifests, the index of an old split model."""

import contextlib
import functools
import json
from pathlib import Path

import safetensors.torch
import torch

from evenhand.build import build_model
from evenhand.config import build_config
from evenhand.data.checksums import MANIFEST as DATA_MANIFEST
from evenhand.data.checksums import check_manifest, write_manifest
from evenhand.distributed.ranks import Ranks
from evenhand.saved_models import check_shapes, fill_model, open_weights
from evenhand.store import MANIFEST, Table, open_store, save_tensors, sign
from experiments.simulated_ranks import run_ranks

from .record_targets import JSON_WORDS
from .target import Target, answer, require, scratch

TINY = build_config({"model": {"embedding_dim": 2}})


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
def _old_model() -> Path:
    """The files of two ranks as version 0.1.0 wrote them."""
    folder = scratch() / "old/model"
    (folder / "shards-1").mkdir(parents=True)
    state = MODEL.state_dict()
    for rank, (labels, features) in enumerate([((0, 2), (0, 3)), ((2, 4), (3, 5))]):
        own = {
            "label_table": state["label_table"][slice(*labels)].clone(),
            "encoder.weight": state["encoder.weight"][slice(*features)].clone(),
        }
        path = folder / f"shards-1/weights-0000{rank + 1}-of-00002.safetensors"
        safetensors.torch.save_file(own, path)
    return folder


MODEL = build_model(TINY, 5, 4, is_sparse=True)
INDEX_SEED = b'{"version": 1, "folder": "shards-1"}'


def _read_index(data: bytes) -> Exception | None:
    folder = _old_model()
    (folder / "weights.index.json").write_bytes(data)

    def load() -> None:
        saved = open_weights(folder.parent)
        check_shapes(saved, MODEL)
        fill_model(MODEL, saved)

    _, refusal = answer(load)
    if refusal is None:
        require(json.loads(data)["folder"] == "shards-1", "files from elsewhere")
    return refusal


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
    Target("weights-index", _read_index, (INDEX_SEED,), WORDS),
    Target("data-manifest", _read_data_manifest, (_data_seed(),), WORDS),
)
