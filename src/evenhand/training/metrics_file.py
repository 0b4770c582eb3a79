"""metrics.jsonl: a line for every logged step and validation, in the order they happened."""

import json
from pathlib import Path
from typing import Any

from evenhand.errors import UserError
from evenhand.files import write_text


def append_line(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); any checkpoint is "
            f"untouched: free some space, then continue with --resume"
        ) from error


def rewind_metrics(path: Path, *, step: int) -> None:
    """Forgets the lines after a step, which a resumed run will write again."""
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:  # not UTF-8, not JSON, not our JSON
        raise UserError(
            f"{path} is damaged ({error}); restore it, or remove it: --resume then writes the "
            f"lines after step {step} alone"
        ) from error
    write_text(path, "".join(kept))


def last_logged_step(path: Path) -> int:
    """The last step that the file tells of, 0 where it tells of none; a torn line is none."""
    last = 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            last = max(last, int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return last
