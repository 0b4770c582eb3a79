"""Targets that read what runs leave: JSON records, arrays, weights, rankers."""

import contextlib
import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from evenhand.building import build_model, check_all_ids
from evenhand.config import build_config
from evenhand.data import dataset as dataset_module
from evenhand.data.dataset import (
    Dataset,
    Groups,
    Part,
    Rows,
    Strings,
    open_dataset,
    padded_rows,
    pairs_of,
    save_dataset,
    taken_rows,
)  # fmt: skip
from evenhand.data.text import featurizer_from
from evenhand.evaluation import load_outcome
from evenhand.evaluation.outcome import _outcome, save_outcome
from evenhand.files import read_json
from evenhand.ranking import load_ranker
from evenhand.report import curves, page
from evenhand.reproduce.belonging import claim
from evenhand.reproduce.table2 import chosen_rates, earlier_result
from evenhand.runs import _read_scores, check_trained_on, read_about, read_metrics
from evenhand.saved_models import fill_model
from evenhand.tables import results_table, row_title
from evenhand.training.metrics_file import rewind_metrics
from evenhand.tuning import search as tuning
from evenhand.tuning.choice import chosen_trial, pareto_front
from evenhand.tuning.space import shown_settings, with_settings

from . import twins
from .target import FindingError, Target, answer, in_memory, require, scratch, written

open_array_of = dataset_module._open_array

JSON_WORDS = (
    b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b'"', b"{}", b"[]", b'{"a": 1}',
    b"[null]",
    b'"\\ud800"', b'"\\u0000"', b"1.5", b'""', b"[[1]]", b"99999999999999999999", b"\xe2\x80\xa8",
    b",",
)  # fmt: skip


def _json(value) -> bytes:
    return json.dumps(value, indent=1).encode()


# --- runs -----------------------------------------------------------------------------------------

ABOUT = {
    "name": "a", "method": "snm", "seed": 1, "command": "evenhand train", "is_complete": True,
    "started": "2025-11-15T09:06:00+00:00", "commit": None, "versions": {"torch": "2.11"},
    "device": "cpu", "training_seconds": 3.5, "best_step": 7,
    "dataset": {"name": "d", "fingerprint": "f", "num_labels": 4, "num_queries": {"train": 3}},
}  # fmt: skip


def _read_about(data: bytes) -> Exception | None:
    path = in_memory("run/run.json", data)
    about, refusal = answer(lambda: read_about(path.parent))
    if refusal is not None:
        return refusal
    answer(lambda: check_trained_on(path.parent, small_dataset()))
    for key, value in about.items():
        require(isinstance(page._shown(key, value), str), key)
    page._about_run(about)
    seconds = [about.get(f"{name}_seconds", 0.0) for name in ("training", "ranker")]
    require(math.isfinite(sum(seconds)), f"seconds {seconds}")
    return None


RUN = Target("run-json", _read_about, (_json(ABOUT),), (*JSON_WORDS, b'"training_seconds": 1'))


def _read_metrics(data: bytes) -> Exception | None:
    path = in_memory("metrics.jsonl", data)
    rows, refusal = answer(lambda: read_metrics(path))
    if refusal is None:
        whole = twins.json_lines(path.read_text("utf-8"))
        require(len(rows) == len(whole), f"{len(rows)} of {len(whole)} lines")
        for row, line in zip(rows, whole, strict=True):
            require(str(row) == str(json.loads(line)), "another line")
        lines = []
        curves._add_line(lines, 0, ((row.get("step"), row.get("loss")) for row in rows))
    if len(data) % 4:  # a file is written, which takes long
        return refusal
    path = written("metrics.jsonl", data)
    _, rewind_refusal = answer(lambda: rewind_metrics(path, step=2))
    if refusal is None and rewind_refusal is None:
        rows = [row for row in rows if row["step"] <= 2]
        require(str(read_metrics(path)) == str(rows), "other lines are kept")
    return refusal


METRICS = Target(
    "metrics",
    _read_metrics,
    (
        b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25, "validation": {"mrr": 0.1}}\n',
        b'{"step": 1}\n{"step": 2}\n{"step": 3, "lo',
    ),
    (*JSON_WORDS, b'{"step": 4}\n', b'"loss": ', b'"step": '),
)

SCORE = {
    "metric": "recall@10", "column": "all", "group": "all", "value": 0.5, "low": 0.4, "high": None,
    "count": 10, "is_judged": True, "members": [],
}  # fmt: skip


def _read_score_file(data: bytes) -> Exception | None:
    path = in_memory("scores.json", data)
    scores, refusal = answer(lambda: _read_scores(path))
    if refusal is None:
        results_table([("a", scores)]) if scores else None
        for score in scores:
            require(isinstance(row_title(score), str), "title")
            require(isinstance(score.value, float | int), f"value {score.value!r}")
    return refusal


SCORES = Target(
    "scores-json",
    _read_score_file,
    (
        _json([SCORE, SCORE | {"column": "script", "group": "worst 3", "members": ["A", "B"]}]),
        _json([SCORE | {"value": None, "low": None, "is_judged": False}]),
    ),
    JSON_WORDS,
)

TUNING = {
    "command": "evenhand tune", "criterion": "recall@10 on tail", "average": "recall@10",
    "max_drop": 0.005, "seed": 0, "fingerprint": "f" * 64,
    "space": {"loss.margin": "0.1,0.2", "training.learning_rate": "0.01..0.04"},
    "planned": [
        {"role": "SNM", "settings": {"mining.method": "snm", "mining.num_hard_examples": 2048}},
        {"role": "", "settings": {"mining.method": "s2m", "mining.num_hard_examples": 64}},
    ],
    "is_complete": False, "chosen": None, "front": [1],
    "trials": [{
        "number": 1, "role": "SNM", "average": 0.5, "criterion": 0.25, "low": None, "high": None,
        "settings": {"mining.method": "snm", "mining.num_hard_examples": 2048},
        "figures": {"tail": 0.25}, "seconds": 3.0, "failure": "",
    }],
}  # fmt: skip


DEFAULT = build_config({})
tuning.read_settings = lambda path: dataclasses.asdict(DEFAULT)  # base.toml has a target of its own


def _read_search(data: bytes) -> Exception | None:
    path = in_memory("search/tuning.json", data)
    opened, refusal = answer(lambda: tuning.open_search(path.parent))
    if refusal is not None:
        return refusal
    search, trials = opened
    for trial in search.planned:
        with_settings(search.config, trial.settings)
    require(len(trials) <= len(search.planned), "more trials than were planned")
    chosen_trial(trials, max_drop=search.max_drop)
    pareto_front(trials)
    if trials:
        shown_settings([trial.settings for trial in trials])
        require(all(isinstance(t.num_hard_examples, int) for t in trials), "k'")
        f"{trials[0].seconds:.0f}{search.fingerprint[:12]}"
    return None


SEARCH = Target(
    "tuning-json", _read_search, (_json(TUNING),), (*JSON_WORDS, b'"mining.batch_size": 1')
)


def _read_reproduction(data: bytes) -> Exception | None:
    """The three records of a folder of `reproduce`, each from the same bytes."""
    path = in_memory("reproduce/settings.json", data)
    rates, refusal = answer(lambda: chosen_rates(path, ["a", "b"]))
    if refusal is None:
        require(set(rates) >= {"a", "b"}, f"rates of {list(rates)}")
        require(all(0 < rate < math.inf for rate in rates.values()), f"{rates}")
    result, refused = answer(lambda: earlier_result(path))
    if refused is None:
        require(math.isfinite(result["seconds"] + 1) and result["curve"] is not None, "result")
    answer(lambda: claim(path.parent, {"steps": 3}))
    return refusal


REPRODUCTION = Target(
    "reproduce-json",
    _read_reproduction,
    (
        _json({"chosen": [{"name": n, "learning_rate": 0.1} for n in "ab"], "steps": 3}),
        _json(
            {"seconds": 3, "curve": [], "chosen": [{"name": n, "learning_rate": 1} for n in "ab"]}
        ),
    ),
    (*JSON_WORDS, b'"chosen"', b'"learning_rate": 0'),
)


def _read_any_json(data: bytes) -> Exception | None:
    path = in_memory("any.json", data)
    value, refusal = answer(lambda: read_json(path))
    if refusal is None:
        require(str(value) == str(json.loads(data)), "another value")
        json.dumps(value, ensure_ascii=False).encode()
    elif b"\\u" not in data and b"[[" not in data and b'{"a":{' not in data:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(data.decode("utf-8"))
            raise FindingError("refused, although it is JSON")
    return refusal


ANY_JSON = Target(
    "json", _read_any_json, (_json(ABOUT), _json(TUNING), b"[1, 2.5e3, null]"), JSON_WORDS
)

# --- data sets ------------------------------------------------------------------------------------


@functools.cache
def small_dataset() -> Dataset:
    """A data set of every kind of array, on disk."""

    def part(num_rows: int) -> Part:
        offsets = np.arange(num_rows + 1) * 2
        ids = (np.arange(2 * num_rows) % 5).astype(np.int32)
        positives = Rows(np.arange(num_rows + 1), (np.arange(num_rows) % 4).astype(np.int32))
        return Part(
            Rows(offsets, ids, np.ones(2 * num_rows, np.float32)),
            positives,
            {"script": Groups(np.full(num_rows, -1, np.int32), ("THAI", "LATIN"))},
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
        padded = padded_rows(part.positives, rows)
        require(padded.max(initial=-1) < dataset.num_labels, f"a label of {name}")
        require(len(pairs_of(part.positives).query_ids) == len(part.positives.ids), "pairs")
        features = part.features
        if isinstance(features, Rows):
            require(len(features) == len(part), "features of other queries")
            taken = taken_rows(features, rows)
            require(taken.ids.max(initial=-1) < dataset.num_features, f"a feature of {name}")
            require(taken.ids.min(initial=0) >= 0, f"a feature of {name}")
        else:
            require(features.shape == (len(part), dataset.num_features), "dense features")
        require(part.texts is None or len(part.texts) == len(part), "texts of other queries")
        for group in part.groups.values():
            require(len(group.ids) == len(part), "groups of other queries")
            require(group.ids.max(initial=-1) < len(group.names), "a group without a name")
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

    dataset_module._open_array = open_array
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
    np.savez_compressed(file, **OUTCOME)
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
    _, refusal = answer(lambda: fill_model(MODEL, path.parent, MODEL))
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
    folder = written("ranked/model/ranker.safetensors", data).parent.parent
    ranker, refusal = answer(lambda: load_ranker(folder, TINY, small_dataset()))
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

TARGETS = (
    RUN, METRICS, SCORES, SEARCH, REPRODUCTION, ANY_JSON, DATASET, ARRAY, EVALUATION, WEIGHTS,
    RANKERS,
)  # fmt: skip
