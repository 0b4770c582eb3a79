"""A run folder: everything a training run leaves, and everything needed to repeat it.

config.toml        every setting, resolved; `evenhand train config.toml` repeats the run
run.json           what was run where: data set, versions, commit, device, time
metrics.jsonl      a line a logged step or validation; the same bytes whenever repeated
checkpoints/       where `--resume` continues
model/             the chosen weights (safetensors) and how to build the model
evaluation/<part>/ what happened to every pair, and the scores by subpopulation
report.html
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from evenhand.errors import UserError
from evenhand.evaluation import Outcome, Score, load_outcome, save_outcome
from evenhand.files import read_json, write_json


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


def save_result(folder: Path, part_name: str, outcome: Outcome, scores: list[Score]) -> None:
    place = folder / "evaluation" / part_name
    save_outcome(outcome, place)
    write_json(place / "scores.json", [dataclasses.asdict(score) for score in scores])


def load_result(folder: Path, part_name: str = "test") -> RunResult:
    """Opens an evaluated run."""
    place = folder / "evaluation" / part_name
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} is not a run folder: it holds no run.json")
    if not (place / "scores.json").is_file():
        raise UserError(
            f"{folder} has not been evaluated on the {part_name} part; "
            f"run: evenhand evaluate {folder} --part {part_name}"
        )
    return RunResult(
        name=folder.name,
        about=read_json(folder / "run.json"),
        config_text=(folder / "config.toml").read_text(encoding="utf-8"),
        metrics=read_metrics(folder / "metrics.jsonl"),
        part_name=part_name,
        scores=[_score(row) for row in read_json(place / "scores.json")],
        outcome=load_outcome(place),
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        rows.append(json.loads(line))
    return rows


def _score(row: dict[str, Any]) -> Score:
    numbers = {
        key: float("nan") if row[key] is None else row[key] for key in ("value", "low", "high")
    }
    return Score(**{**row, **numbers, "members": tuple(row["members"])})
