"""Targets that read what runs leave: JSON records and logs."""

import contextlib
import dataclasses
import json
import math

from evenhand.config import build_config
from evenhand.files import read_json
from evenhand.report import curves, facts
from evenhand.run_folder import _read_scores, check_trained_on, read_about, read_metrics
from evenhand.tables import results_table, row_title
from evenhand.training.metrics_file import rewind_metrics
from evenhand.tuning import search as tuning
from evenhand.tuning.results import Results
from evenhand.tuning.space import format_settings, parse_space, plan_trials, with_settings

from . import twins
from .settings_targets import GROUPED
from .target import FindingError, Target, answer, in_memory, patched, require, written

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
    answer(lambda: check_trained_on(path.parent, GROUPED))
    for key, value in about.items():
        require(isinstance(facts.format_fact(key, value), str), key)
    facts.summarize_run(about)
    seconds = [about.get(f"{name}_seconds", 0.0) for name in ("training", "ranker")]
    require(math.isfinite(sum(seconds)), f"seconds {seconds}")
    return None


RUN = Target("run-json", _read_about, (_json(ABOUT),), (*JSON_WORDS, b'"training_seconds": 1'))


def _read_metrics(data: bytes) -> Exception | None:
    path = in_memory("metrics.jsonl", data)
    rows, refusal = answer(lambda: read_metrics(path))
    if refusal is None:
        whole = twins.json_lines(data.decode("utf-8"))
        require(len(rows) == len(whole), f"{len(rows)} of {len(whole)} lines")
        for row, line in zip(rows, whole, strict=True):
            require(str(row) == str(json.loads(line)), "another line")
        curves.make_series(0, rows, "loss")
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

DEFAULT = build_config({})
DEFAULT_SECTIONS = dataclasses.asdict(DEFAULT)  # of base.toml, which has a target of its own
SPACE = {"loss.margin": "0.1,0.2", "training.learning_rate": "0.01..0.04"}
PLANNED = plan_trials(
    DEFAULT,
    parse_space([f"{name}={axis}" for name, axis in SPACE.items()], DEFAULT),
    num_trials=2,
    seed=0,
)
TUNING = {
    "command": "evenhand tune", "criterion": "recall@10 on tail", "average": "recall@10",
    "max_drop": 0.005, "seed": 0, "fingerprint": "f" * 64,
    "space": SPACE,
    "planned": [{"role": trial.role, "settings": trial.settings} for trial in PLANNED],
    "is_complete": False, "chosen": None, "front": [1],
    "trials": [{
        "number": 1, "role": "SNM", "average": 0.5, "criterion": 0.25, "low": None, "high": None,
        "settings": PLANNED[0].settings, "figures": {"tail": 0.25}, "seconds": 3.0, "failure": "",
    }],
}  # fmt: skip


def _read_search(data: bytes) -> Exception | None:
    path = in_memory("search/tuning.json", data)
    with patched(tuning, read_settings=lambda _: DEFAULT_SECTIONS):
        opened, refusal = answer(lambda: tuning.open_search(path.parent))
    if refusal is not None:
        return refusal
    search, trials = opened
    for trial in search.planned:
        with_settings(search.config, trial.settings)
    require(len(trials) <= len(search.planned), "more trials than were planned")
    results = Results(trials, search.rule)
    require(bool(results.feasible) == bool(results.front), "a front without a choice")
    if trials:
        format_settings([trial.settings for trial in trials])
        require(all(isinstance(t.num_hard_examples, int) for t in trials), "k'")
        f"{trials[0].seconds:.0f}{search.fingerprint[:12]}"
    return None


SEARCH = Target(
    "tuning-json", _read_search, (_json(TUNING),), (*JSON_WORDS, b'"mining.batch_size": 1')
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

TARGETS = (RUN, METRICS, SCORES, SEARCH, ANY_JSON)
