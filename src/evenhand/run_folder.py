"""A run folder: everything a training run leaves, and everything needed to repeat it.

config.toml        every setting, resolved; `evenhand train config.toml` repeats the run
run.json           what was run where: data set, versions, commit, device, time
metrics.jsonl      a line a logged step or validation; the same bytes whenever repeated
checkpoints/       where `--resume` continues (the files of each: evenhand/tensor_store.py)
model/             the chosen weights, in the same format, and the ranker, where there is one;
                   query_data.safetensors, by which queries are answered without the data set
evaluation/<part>/ what happened to every pair, and the scores by subpopulation; slices.json, once
                   `evenhand slices` has looked for those that are failed
report.html
"""

import dataclasses
import math
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.config import Config, build
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation import Outcome, Score, load_outcome, save_outcome
from evenhand.files import parse_json, read_json, read_text, write_json
from evenhand.search import QueryData
from evenhand.version import __version__

SECONDS = ("training_seconds", "ranker_seconds")
MAX_SECONDS = 1e10  # three centuries


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One evaluated run, as the report and the comparison read it."""

    name: str
    about: dict[str, Any]  # run.json
    config_text: str
    metrics: list[dict[str, Any]]
    part_name: str
    scores: list[Score]
    outcome: Outcome
    validation: Outcome | None = None  # if it was evaluated there too: to choose groups by


def save_result(folder: Path, part_name: str, outcome: Outcome, scores: list[Score]) -> None:
    """Writes evaluation/<part>/, the outcome first."""
    place = folder / "evaluation" / part_name
    save_outcome(outcome, place)
    write_json(place / "scores.json", [dataclasses.asdict(score) for score in scores])


def load_result(folder: Path, part_name: str = "test") -> RunResult:
    """Opens an evaluated run."""
    place, about = folder / "evaluation" / part_name, read_about(folder)
    if not (place / "scores.json").exists():
        raise UserError(
            f"{folder} has not been evaluated on the {part_name} part; "
            f"run: evenhand evaluate {folder} --part {part_name}"
        )
    config_text, metrics = (
        _read_text(folder / "config.toml"),
        read_metrics(folder / "metrics.jsonl"),
    )
    scores, outcome = read_scores(place / "scores.json"), load_outcome(place)
    other, validation = folder / "evaluation" / "validation", None
    if part_name != "validation" and (other / "scores.json").exists():
        validation = load_outcome(other)
    return RunResult(
        folder.resolve().name, about, config_text, metrics, part_name, scores, outcome, validation
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    *lines, _ = _read_text(path).split("\n")  # other ends of lines may be part of a text
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: is damaged ({error})") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{path}, line {number}: is damaged (it does not name its step)")
        rows.append(row)
    return rows


def read_about(folder: Path) -> dict[str, Any]:
    """run.json, with what every reader of it needs."""
    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it holds no run.json")
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("dataset"), dict):
        raise UserError(f"{path} is damaged (it does not say what was trained on)")
    for name in SECONDS:
        seconds = about.get(name, 0.0)
        if not isinstance(seconds, int | float) or not 0 <= seconds < MAX_SECONDS:
            raise UserError(f"{path} is damaged ({name} is {str(seconds)[:40]})")
    return about


def check_trained_on(folder: Path, dataset: Dataset | QueryData) -> None:
    """Refuses a data set that is not the one a run was trained on."""
    fingerprint = read_about(folder)["dataset"].get("fingerprint")
    if fingerprint != dataset.fingerprint:
        raise UserError(
            f"{folder} was trained on another data set (fingerprint {str(fingerprint)[:12]}, "
            f"{dataset.name} now has {dataset.fingerprint[:12]}); name the right one with --data, "
            f"restore it, or train anew in another --run folder"
        )


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged ({error})") from error


def read_scores(path: Path) -> list[Score]:
    """What `save_result` wrote of scores; null stands for NaN."""
    rows = read_json(path)
    try:
        if not isinstance(rows, list):
            raise TypeError("it is no list")
        scores = []
        for row in rows:
            empty: Any = {key: math.nan for key, value in row.items() if value is None}
            score = build(Score, row | dict.fromkeys(empty, 0.0), section="score")
            scores.append(dataclasses.replace(score, **empty))
        return scores
    except (AttributeError, TypeError, UserError) as error:  # JSON, but not ours
        raise UserError(f"{path} is damaged ({error}); evaluate the run again") from error


def about_run(
    folder: Path, config: Config, dataset: Dataset, device: torch.device
) -> dict[str, Any]:
    """What run.json says when a run begins."""
    num_threads = torch.get_num_threads()
    device_name = f"{platform.machine()} CPU, {num_threads} thread{'s' * (num_threads > 1)}"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "name": folder.resolve().name,
        "method": config.mining.method,
        "seed": config.training.seed,
        "command": shlex.join(["evenhand", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "evenhand": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "device": device_name,
        "is_complete": False,
        "dataset": {
            "name": dataset.name,
            "folder": str(config.data.folder.absolute()),  # for whoever uses the run elsewhere
            "fingerprint": dataset.fingerprint,
            "num_labels": dataset.num_labels,
            "num_features": dataset.num_features,
            "num_queries": {name: len(part) for name, part in dataset.parts.items()},
            "attribution": dataset.attribution,
        },
    }


def _commit() -> str | None:
    """The commit of the source tree this package runs from, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    place = Path(__file__).parent
    try:
        answer = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
