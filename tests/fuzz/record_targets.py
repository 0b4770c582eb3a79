"""Targets that read what runs leave: JSON records, logs, manifests."""

import contextlib
import functools
import json
import math
from pathlib import Path

import torch

from evenhand.data import Dataset
from evenhand.distributed.ranks import Ranks
from evenhand.files import read_json
from evenhand.report import page
from evenhand.result_tables import results_table, row_title
from evenhand.run_folder import (
    check_trained_on,
    read_about,
    read_scores,
)
from evenhand.tensor_store import MANIFEST, Table, open_store, save_tensors, sign
from evenhand.training.loop import rewind_metrics
from tests.helpers.ranks import run_ranks

from .target import FindingError, answer, require, scratch, target, write


def _json(value) -> bytes:
    return json.dumps(value, indent=1).encode()


# --- runs -----------------------------------------------------------------------------------------

ABOUT = {
    "name": "a", "method": "snm", "seed": 1, "command": "evenhand train", "is_complete": True,
    "started": "2025-11-15T09:06:00+00:00", "commit": None, "versions": {"torch": "2.11"},
    "device": "cpu", "training_seconds": 3.5, "best_step": 7,
    "dataset": {"name": "d", "fingerprint": "f", "num_labels": 4, "num_queries": {"train": 3}},
}  # fmt: skip
SCORE = {
    "metric": "recall@10", "column": "all", "group": "all", "value": 0.5, "low": 0.4, "high": None,
    "count": 10, "is_judged": True, "members": [],
}  # fmt: skip


@target("json", _json(ABOUT), _json([SCORE]), '["\\ud83d\\ude00", "é", 2.5e3, null]'.encode())
def read_any_json(data: bytes) -> Exception | None:
    path = write("any.json", data)
    value, refusal = answer(lambda: read_json(path))
    if refusal is None:
        require(str(value) == str(json.loads(data)), "another value")
        json.dumps(value, ensure_ascii=False).encode()
    elif b"\\u" not in data and b"[[" not in data and b'{"a":{' not in data:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(data.decode("utf-8"))
            raise FindingError("refused, although it is JSON")
    return refusal


@target("run-json", _json(ABOUT))
def read_run(data: bytes) -> Exception | None:
    folder = write("run/run.json", data).parent
    about, refusal = answer(lambda: read_about(folder))
    if refusal is None:
        answer(lambda: check_trained_on(folder, Dataset("d", 3, 2, {})))
        for key, value in about.items():
            require(isinstance(page.format_fact(key, value), str), key)
        seconds = [about.get(f"{name}_seconds", 0.0) for name in ("training", "ranker")]
        require(math.isfinite(sum(seconds)), f"seconds {seconds}")
    return refusal


@target(
    "metrics",
    b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25, "validation": {"mrr": 0.1}}\n',
    '{"step": 1, "a": "\u2028\x85"}\n{"step": 2}\n{"step": 3, "lo'.encode(),
)
def rewind_log(data: bytes) -> Exception | None:
    path = write("metrics.jsonl", data)
    _, refusal = answer(lambda: rewind_metrics(path, step=2))
    if refusal is None:
        rows = [json.loads(line) for line in data.decode("utf-8").split("\n")[:-1]]
        kept = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
        require(str(kept) == str([row for row in rows if row["step"] <= 2]), "other lines are kept")
    return refusal


@target(
    "scores-json",
    _json([SCORE, SCORE | {"column": "script", "group": "worst 3", "members": ["A", "B"]}]),
    _json([SCORE | {"value": None, "low": None, "is_judged": False}]),
)
def read_score_file(data: bytes) -> Exception | None:
    path = write("scores.json", data)
    scores, refusal = answer(lambda: read_scores(path))
    if scores:
        results_table([("a", scores)])
        for score in scores:
            require(isinstance(row_title(score), str), "title")
            require(isinstance(score.value, float | int), f"value {score.value!r}")
    return refusal


# --- manifests ------------------------------------------------------------------------------------


@functools.cache
def _store() -> tuple[Path, bytes]:
    """A folder of two files, the rows of two ranks; and its manifest."""

    def save(ranks: Ranks) -> None:
        tables = {"rows": Table(torch.ones(2, 2), 2 * ranks.rank, 4)}
        save_tensors(scratch() / "kept", {"a": torch.ones(3)}, tables, state={"b": 1}, ranks=ranks)

    run_ranks(2, save)
    return scratch() / "kept", (scratch() / "kept" / MANIFEST).read_bytes()


@target("store-manifest", _store()[1])
def read_store(data: bytes) -> Exception | None:
    """A manifest, signed if it is one: what is read must be what was saved."""
    folder, _ = _store()
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        data = json.dumps(sign(value)).encode() if isinstance(value, dict) else data
    (folder / MANIFEST).write_bytes(data)

    def read() -> dict[str, torch.Tensor]:
        saved = open_store(folder)
        saved.verify()
        return {name: saved.load(name) for name in saved.entries}

    tensors, refusal = answer(read)
    for tensor in (tensors or {}).values():
        require(bool((tensor == 1).all()), "numbers that were not saved")
        require(tensor.numel() <= 100, "rows that were not saved")
    return refusal
