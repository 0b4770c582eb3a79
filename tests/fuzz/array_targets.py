"""Targets that read arrays: data sets, evaluations, weights, rankers."""

import functools
import io
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch

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
from evenhand.data.dataset import check_all_ids
from evenhand.data.text import NgramFeaturizer, featurizer_from
from evenhand.evaluation import load_outcome
from evenhand.evaluation.outcome import _outcome, save_outcome
from evenhand.run_search import build_searcher
from evenhand.search.reranker import load_ranker
from evenhand.search.searcher import load_query_data

from .target import answer, require, scratch, target, write

MODEL = build_model(build_config({"model": {"embedding_dim": 2}}), 5, 4, is_sparse=True)

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


@functools.cache
def dataset_files() -> dict[str, bytes]:
    """The files of it by their names."""
    small_dataset()
    files = sorted((scratch() / "dataset").iterdir())
    return {path.name: path.read_bytes() for path in files}


ARRAYS = [name for name in dataset_files() if name.endswith(".npy")]


def _use(folder: Path) -> None:
    """What every reader of a data set does first; compiled code must stay within the arrays."""
    dataset = open_dataset(folder)
    check_all_ids(dataset)
    for name, part in dataset.parts.items():
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
        require(part.texts is None or len(list(part.texts)) == len(part), "texts of other queries")
        for group in part.groups.values():
            num_ids = len(part) if group.sets is None else len(part.positives.ids)
            require(len(group.ids) == num_ids, "groups of other queries or pairs")
            _, group_ids = memberships(group)
            require(group_ids.max(initial=-1) < len(group.names), "a group without a name")
            require(group_ids.min(initial=0) >= 0, "a group below the first")
    if "train" in dataset.parts:
        require(len(dataset.label_counts()) == dataset.num_labels, "counts")
    for label in range(min(dataset.num_labels, 10)):
        dataset.label_name(label)
    if dataset.featurizer is not None:
        answer(lambda: featurizer_from(dataset.featurizer).featurize(["abc"]))


def _read_changed(name: str, data: bytes) -> Exception | None:
    """The refusal of a data set of which one file was changed."""
    path = write(f"dataset/{name}", data)
    try:
        return answer(lambda: _use(path.parent))[1]
    finally:
        write(f"dataset/{name}", dataset_files()[name])


@target("dataset-json", dataset_files()["dataset.json"])
def read_dataset(data: bytes) -> Exception | None:
    return _read_changed("dataset.json", data)


@target("dataset-array", *(bytes([i]) + dataset_files()[name] for i, name in enumerate(ARRAYS)))
def read_array(data: bytes) -> Exception | None:
    """One array of a data set: the first byte says which."""
    return _read_changed(ARRAYS[data[0] % len(ARRAYS) if data else 0], data[1:])


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


@target("outcome-npz", *_outcome_seeds())
def read_outcome(data: bytes) -> Exception | None:
    folder = write("evaluated/outcome.npz", data).parent
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


RANKER = {
    "offsets": np.array([0, 1, 1, 3, 4]),
    "features": np.array([0, 1, 4, 2], np.int32),
    "values": np.ones(4, np.float32),
    "biases": np.full(4, -1, np.float32),
}


@target("ranker", safetensors.numpy.save(RANKER))
def read_ranker(data: bytes) -> Exception | None:
    path = write("ranked/model/ranker.safetensors", data)
    ranker, refusal = answer(lambda: load_ranker(path, num_features=5, num_labels=4))
    if refusal is None:
        weights = ranker.weights
        require(len(weights) == len(ranker) == 4 and weights.ids.ndim == 1, "labels")
        saved = safetensors.numpy.load(data)
        require((saved["features"] == weights.ids).all(), "other features than in the file")
        features = small_dataset().parts["test"].features
        scores = ranker.scores(features, np.array([[0, 1], [3, -1]]))
        require(scores.shape == (2, 2) and np.isfinite(scores).all(), "scores")
    return refusal


ABOUT = {"version": 1, "name": "a", "fingerprint": "b", "num_features": 5, "num_labels": 4}
ABOUT |= {"is_sparse": True, "featurizer": NgramFeaturizer(num_buckets=5).settings()}
QUERY_DATA = {
    "label_names.offsets": np.arange(5), "label_names.utf8": np.frombuffer(b"wxyz", np.uint8),
    "label_counts": np.arange(4), "feature_weights": np.ones(5, np.float32),
    "train_features.offsets": np.array([0, 2, 3]),
    "train_features.ids": np.array([0, 4, 2], np.int32),
    "train_features.values": np.ones(3, np.float32),
    "train_positives.offsets": np.array([0, 1, 2]),
    "train_positives.ids": np.array([3, 0], np.int32),
}  # fmt: skip
VOTING = build_config(
    {"model": {"embedding_dim": 2}, "search": {"num_neighbours": 2, "frequency_discount": 0.1}}
)


@target("query-data", safetensors.numpy.save(QUERY_DATA, metadata={"about": json.dumps(ABOUT)}))
def read_query_data(data: bytes) -> Exception | None:
    """Rows that vote, where the data have what they take."""
    path = write("queries/model/query_data.safetensors", data)
    loaded, refusal = answer(lambda: load_query_data(path))
    if refusal is not None or (loaded.num_features, loaded.num_labels) != (5, 4):
        return refusal
    require(loaded.label_names is None or len(list(loaded.label_names)) == 4, "names")
    if loaded.is_sparse and loaded.label_counts is not None:
        queries = Rows(np.array([0, 1, 3]), np.array([4, 0, 2], np.int32), np.ones(3, np.float32))
        found, refusal = answer(
            lambda: build_searcher(MODEL, loaded, VOTING).search(queries, 3).label_ids
        )
        require(refusal is not None or found.shape == (2, 3), "results")
    return refusal
