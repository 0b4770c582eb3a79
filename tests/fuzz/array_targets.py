"""Targets that read arrays: data sets, evaluations, weights, rankers."""

import functools
import io
import json
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from evenhand.build import build_model
from evenhand.config import build_config
from evenhand.data import (
    Dataset,
    Groups,
    Part,
    Rows,
    Strings,
    memberships,
    open_dataset,
    pad_rows,
    pairs_of,
    save_dataset,
    take_rows,
)
from evenhand.data import dataset as dataset_module
from evenhand.data.checks import check_all_ids
from evenhand.data.text import NgramFeaturizer, featurizer_from
from evenhand.evaluation import load_outcome
from evenhand.evaluation.outcome import _outcome, save_outcome
from evenhand.runs import build_searcher
from evenhand.saved_models import check_shapes, fill_model, open_weights
from evenhand.search import QueryData
from evenhand.search.query_data import load_query_data
from evenhand.search.ranker import load_ranker

from .record_targets import JSON_WORDS
from .target import Target, answer, in_memory, patched, require, scratch, written

open_array_of = dataset_module._open_array

# --- data sets ------------------------------------------------------------------------------------


@functools.cache
def small_dataset() -> Dataset:
    """A data set of every kind of array, on disk."""

    def part(num_rows: int) -> Part:
        offsets = np.arange(num_rows + 1) * 2
        ids = (np.arange(2 * num_rows) % 5).astype(np.int32)
        positives = Rows(np.arange(num_rows + 1), (np.arange(num_rows) % 4).astype(np.int32))
        sets = Rows(np.array([0, 2, 3]), np.array([0, 1, 0], np.int32))
        return Part(
            Rows(offsets, ids, np.ones(2 * num_rows, np.float32)),
            positives,
            {
                "script": Groups(np.full(num_rows, -1, np.int32), ("THAI", "LATIN")),
                "tag": Groups((np.arange(num_rows) % 3 - 1).astype(np.int32), ("x", "y"), sets),
            },
            Strings.pack(["é"] * num_rows),
        )

    dataset = Dataset(
        "d", 5, 4, {"train": part(6), "test": part(2)},
        label_names=Strings.pack(["a", "b", "ウ", ""]),
        label_groups={"a/b": Groups(np.array([0, 0, -1, 0], np.int32), ("x",))},
        label_coordinates=np.zeros((4, 2), np.float32),
        featurizer={"kind": "ngrams", "min_length": 1, "max_length": 2, "num_buckets": 5},
    )  # fmt: skip
    return save_dataset(dataset, scratch() / "dataset")


def _use(dataset: Dataset) -> None:
    """What every reader of a data set does first; compiled code must stay within the arrays."""
    check_all_ids(dataset)
    for name, part in dataset.parts.items():
        require(len(part) >= 0, name)
        rows = np.arange(len(part))
        padded = pad_rows(part.positives, rows)
        require(padded.max(initial=-1) < dataset.num_labels, f"a label of {name}")
        require(len(pairs_of(part.positives).query_ids) == len(part.positives.ids), "pairs")
        features = part.features
        if isinstance(features, Rows):
            require(len(features) == len(part), "features of other queries")
            taken = take_rows(features, rows)
            require(taken.ids.max(initial=-1) < dataset.num_features, f"a feature of {name}")
            require(taken.ids.min(initial=0) >= 0, f"a feature of {name}")
        else:
            require(features.shape == (len(part), dataset.num_features), "dense features")
        require(part.texts is None or len(part.texts) == len(part), "texts of other queries")
        for group in part.groups.values():
            num_ids = len(part) if group.sets is None else len(part.positives.ids)
            require(len(group.ids) == num_ids, "groups of other queries or pairs")
            _, group_ids = memberships(group)
            require(group_ids.max(initial=-1) < len(group.names), "a group without a name")
            require(group_ids.min(initial=0) >= 0, "a group below the first")
        list(part.texts or ())
    if "train" in dataset.parts:
        require(len(dataset.label_counts()) == dataset.num_labels, "counts")
    for label in range(min(dataset.num_labels, 10)):
        dataset.label_name(label)
    if dataset.featurizer is not None:
        answer(lambda: featurizer_from(dataset.featurizer).featurize(["abc"]))


def _open(folder: Path, changed: str = "") -> Exception | None:
    """Opens a data set of which one array was changed; the others are kept open, for speed."""
    opened_before = _opened_arrays()

    def open_array(folder: Path, name: str, shape: list[int]):
        if name == changed or str(shape) != opened_before.get(name, (None,))[0]:
            return open_array_of(scratch() / "dataset", name, shape)
        return opened_before[name][1]

    with patched(dataset_module, _open_array=open_array):
        dataset, refusal = answer(lambda: open_dataset(folder))
    if refusal is None:
        _, refusal = answer(lambda: _use(dataset))
    return refusal


@functools.cache
def _dataset_files() -> dict[str, bytes]:
    small_dataset()
    files = sorted((scratch() / "dataset").iterdir())
    return {path.name: path.read_bytes() for path in files}


@functools.cache
def _opened_arrays() -> dict[str, tuple]:
    about = json.loads(_dataset_files()["dataset.json"])
    folder = scratch() / "dataset"
    return {
        name: (str(shape), np.array(open_array_of(folder, name, shape)))
        for name, shape in about["arrays"].items()
    }


def _read_dataset(data: bytes) -> Exception | None:
    return _open(in_memory("dataset/dataset.json", data).parent)


def _read_array(data: bytes) -> Exception | None:
    """One array of a data set: the first byte says which."""
    files = _dataset_files()
    names = [name for name in files if name.endswith(".npy")]
    name = names[data[0] % len(names)] if data else names[0]
    path = scratch() / "dataset" / name
    path.unlink()  # the old one may still be mapped
    path.write_bytes(data[1:])
    try:
        about = in_memory("dataset/dataset.json", files["dataset.json"])
        return _open(about.parent, unquote(name.removesuffix(".npy")))
    finally:
        path.unlink()
        path.write_bytes(files[name])


def _dataset_seeds() -> tuple[bytes, ...]:
    return (_dataset_files()["dataset.json"],)


def _array_seeds() -> tuple[bytes, ...]:
    names = [name for name in _dataset_files() if name.endswith(".npy")]
    return tuple(bytes([i]) + _dataset_files()[name] for i, name in enumerate(names))


ARRAY_WORDS = (
    b"'<i8'",
    b"'<i4'",
    b"'|O'",
    b"(7,)",
    b"(0,)",
    b"(-1,)",
    b"(9, 2)",
    b"True",
    b"'>f4'",
)
DATASET = Target("dataset-json", _read_dataset, _dataset_seeds(), (*JSON_WORDS, b'"a/b"', b"[7]"))
ARRAY = Target(
    "dataset-array", _read_array, _array_seeds(), (*ARRAY_WORDS, b"\x07" + bytes(7), b"\xff" * 8)
)

# --- evaluations, weights, rankers ----------------------------------------------------------------

OUTCOME = {
    "query_ids": np.array([0, 0, 1]), "label_ids": np.array([1, 2, 3]),
    "ranks": np.array([1, 0, 2], np.int32), "scores": np.ones(3, np.float32),
    "retrieved_ids": np.zeros((2, 10), np.int32), "num_results": 50, "cutoffs": np.array([1, 10]),
    "retrieved_scores": np.zeros((2, 10), np.float32), "metric mrr": np.ones(2, np.float32),
    "weight psp@1": np.ones(2, np.float32),
}  # fmt: skip


def _outcome_seeds() -> tuple[bytes, ...]:
    save_outcome(_outcome(OUTCOME), scratch() / "seed")
    file = io.BytesIO()
    np.savez(file, **OUTCOME)
    return (scratch() / "seed" / "outcome.npz").read_bytes(), file.getvalue()


def _read_outcome(data: bytes) -> Exception | None:
    folder = written("evaluated/outcome.npz", data).parent
    outcome, refusal = answer(lambda: load_outcome(folder))
    if refusal is not None:
        return refusal
    num_pairs, num_queries = len(outcome.query_ids), len(outcome.retrieved_ids)
    for name in ("label_ids", "ranks", "scores"):
        require(getattr(outcome, name).shape == (num_pairs,), f"shape of {name}")
    require(outcome.retrieved_scores.shape == outcome.retrieved_ids.shape, "retrieved")
    require(((outcome.query_ids >= 0) & (outcome.query_ids < num_queries)).all(), "query ids")
    require(((outcome.ranks >= 0) & (outcome.ranks <= outcome.num_results)).all(), "ranks")
    for values in (*outcome.query_metrics.values(), *outcome.query_weights.values()):
        require(values.shape == (num_queries,), "a metric of other queries")
    require(all(isinstance(cutoff, int) and cutoff > 0 for cutoff in outcome.cutoffs), "cutoffs")
    return None


EVALUATION = Target(
    "outcome-npz", _read_outcome, _outcome_seeds(), (*ARRAY_WORDS, b"PK\x05\x06", b"\x93NUMPY")
)

TINY = build_config({"model": {"embedding_dim": 2}, "ranker": {"num_mined_labels": 2}})
MODEL = build_model(TINY, 5, 4, is_sparse=True)


def _weight_seeds() -> tuple[bytes, ...]:
    state = {name: tensor.contiguous() for name, tensor in MODEL.state_dict().items()}
    return (safetensors.torch.save(state),)


def _read_weights(data: bytes) -> Exception | None:
    path = written("model/weights.safetensors", data)

    def load() -> None:
        saved = open_weights(path.parent.parent)
        check_shapes(saved, MODEL)
        fill_model(MODEL, saved)

    _, refusal = answer(load)
    if refusal is None:
        shapes = {name: tensor.shape for name, tensor in MODEL.state_dict().items()}
        found = {name: tensor.shape for name, tensor in safetensors.torch.load(data).items()}
        require(found == shapes, "weights of another model")
        require(torch.isfinite(MODEL.label_table).all(), "weights that are no numbers")
    return refusal


TENSOR_WORDS = (
    b'"F32"', b'"F16"', b'"BF16"', b'"I64"', b'"U8"', b'"F8_E4M3"', b'"F4"', b'"F8_E8M0"', b"[4,2]",
    b"[8]", b"[]", b'"data_offsets":[0,0]', b'"__metadata__":{"a":"b"},', b'"BOOL"',
    b"\x00\x00\x80\x7f",
    b'"F64"', b'"C64"', b'"I32"', b"[1,1,8]",
)  # fmt: skip
WEIGHTS = Target("weights", _read_weights, _weight_seeds(), TENSOR_WORDS)

RANKER = {
    "offsets": np.array([0, 1, 1, 3, 4]),
    "features": np.array([0, 1, 4, 2], np.int32),
    "values": np.ones(4, np.float32),
    "biases": np.full(4, -1, np.float32),
}


def _read_ranker(data: bytes) -> Exception | None:
    path = written("ranked/model/ranker.safetensors", data)
    ranker, refusal = answer(lambda: load_ranker(path, num_features=5, num_labels=4))
    if refusal is None:
        weights, num_labels = ranker.weights, len(ranker)
        require(len(weights) == num_labels == 4 and weights.ids.ndim == 1, "labels")
        saved = safetensors.numpy.load(data)
        require((saved["features"] == weights.ids).all(), "other features than in the file")
        features = small_dataset().parts["test"].features
        scores = ranker.scores(features, np.array([[0, 1], [3, -1]]))
        require(scores.shape == (2, 2) and np.isfinite(scores).all(), "scores")
    return refusal


RANKERS = Target("ranker", _read_ranker, (safetensors.numpy.save(RANKER),), TENSOR_WORDS)

ABOUT = {"version": 1, "name": "a", "fingerprint": "b", "num_features": 5, "num_labels": 4}
ABOUT |= {"is_sparse": True, "featurizer": NgramFeaturizer(num_buckets=5).settings()}
QUERY_DATA = {
    "label_names.offsets": np.arange(5),
    "label_names.utf8": np.frombuffer(b"wxyz", np.uint8),
    "label_counts": np.arange(4),
    "feature_weights": np.ones(5, np.float32),
    "train_features.offsets": np.array([0, 2, 3]),
    "train_features.ids": np.array([0, 4, 2], np.int32),
    "train_features.values": np.ones(3, np.float32),
    "train_positives.offsets": np.array([0, 1, 2]),
    "train_positives.ids": np.array([3, 0], np.int32),
}
QUERY_DATA_SEED = safetensors.numpy.save(QUERY_DATA, metadata={"about": json.dumps(ABOUT)})
SEARCH = build_config(
    {"model": {"embedding_dim": 2}, "search": {"num_neighbours": 2, "frequency_discount": 0.1}}
)


def _read_query_data(data: bytes) -> Exception | None:
    path = written("queries/model/query_data.safetensors", data)
    loaded, refusal = answer(lambda: load_query_data(path))
    if refusal is None and (loaded.num_features, loaded.num_labels) == (5, 4):
        require(loaded.label_names is None or len(list(loaded.label_names)) == 4, "names")
        if loaded.is_sparse and loaded.label_counts is not None:
            _, refusal = answer(lambda: _search_all(loaded))
    return refusal


def _search_all(loaded: QueryData) -> None:
    """A text, and rows that vote, where the data have what they take."""
    searcher = build_searcher(build_model(SEARCH, 5, 4, is_sparse=True), loaded, SEARCH)
    queries = Rows(np.array([0, 1, 3]), np.array([4, 0, 2], np.int32), np.ones(3, np.float32))
    found = searcher.search(queries, 3)
    require(found.label_ids.shape == (2, 3), "results")


QUERIES = Target("query-data", _read_query_data, (QUERY_DATA_SEED,), TENSOR_WORDS)

TARGETS = (DATASET, ARRAY, EVALUATION, WEIGHTS, RANKERS, QUERIES)
