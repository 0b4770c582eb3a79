"""What Evenhand itself left on a disk: manifests, the index of a split model."""

import functools
import json
from pathlib import Path

import torch

from evenhand.building import build_model
from evenhand.config import build_config
from evenhand.data.checksums import MANIFEST as DATA_MANIFEST
from evenhand.data.checksums import check_manifest, write_manifest
from evenhand.distributed.weights import index_path, save_split
from evenhand.models.initial import RowRange
from evenhand.saved_models import fill_model
from evenhand.training.checkpoint import Checkpoint, save_checkpoint
from evenhand.training.checkpoint_files import MANIFEST, Table, problem_of
from experiments.simulated_ranks import run_ranks

from .record_targets import JSON_WORDS
from .target import Target, answer, require, scratch

TINY = build_config({"model": {"embedding_dim": 2}})


@functools.cache
def _checkpoint() -> Path:
    tables = {"rows": Table(torch.ones(4, 2))}
    save_checkpoint(scratch() / "kept", Checkpoint({"a": torch.ones(3)}, {}, tables), step=7)
    return scratch() / "kept" / "step-00000007"


def _read_checkpoint(data: bytes) -> Exception | None:
    """A manifest: what it does not vouch for, file by file, must be told as a problem."""
    folder = _checkpoint()
    whole = json.loads(_checkpoint_seed())
    (folder / MANIFEST).write_bytes(data)
    problem = problem_of(folder)
    if problem:
        return ValueError(problem)
    require(json.loads(data)["files"] == whole["files"], "a manifest of other files")
    return None


@functools.cache
def _checkpoint_seed() -> bytes:
    return (_checkpoint() / MANIFEST).read_bytes()


@functools.cache
def _split_model() -> Path:
    def save(ranks):
        rows = [RowRange(0, 2), RowRange(2, 4)][ranks.rank]
        features = [RowRange(0, 3), RowRange(3, 5)][ranks.rank]
        model = build_model(TINY, 5, 4, is_sparse=True, label_rows=rows, feature_rows=features)
        save_split(scratch() / "split", model, ranks)

    run_ranks(2, save)
    return scratch() / "split"


@functools.cache
def _index_seed() -> bytes:
    return index_path(_split_model()).read_bytes()


MODEL = build_model(TINY, 5, 4, is_sparse=True)


def _read_index(data: bytes) -> Exception | None:
    folder = _split_model()
    _index_seed()  # before it is overwritten
    index_path(folder).write_bytes(data)
    _, refusal = answer(lambda: fill_model(MODEL, folder, MODEL))
    if refusal is None:
        files = json.loads(data)["files"]
        rows = [file["rows"][name] for file in files for name in file["rows"] if name[0] == "l"]
        require(sorted(rows) == [[0, 2], [2, 4]], "rows that are no model's")
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
    Target("checkpoint-manifest", _read_checkpoint, (_checkpoint_seed(),), WORDS),
    Target("weights-index", _read_index, (_index_seed(),), WORDS),
    Target("data-manifest", _read_data_manifest, (_data_seed(),), WORDS),
)
