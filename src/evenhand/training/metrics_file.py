"""metrics.jsonl: a line for every logged step and validation, in the order they happened."""

import json
from pathlib import Path
from typing import Any

from evenhand.errors import UserError
from evenhand.files import open_input, parse_json, read_text, write_text


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
    if not path.exists():
        return
    try:
        *lines, _ = read_text(path).split("\n")
        kept = [f"{line}\n" for line in lines if parse_json(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:  # not UTF-8, not JSON, not our JSON
        raise UserError(
            f"{path} is damaged ({error}); restore it, or remove it: --resume then writes the "
            f"lines after step {step} alone"
        ) from error
    write_text(path, "".join(kept))


def last_logged_step(path: Path) -> int:
    """The last step that the file tells of, 0 where it tells of none; a torn line is none."""
    last = 0
    if not path.exists():
        return last
    with open_input(path) as file:
        for line in file:
            try:
                last = max(last, int(parse_json(line.decode())["step"]))
            except (ValueError, KeyError, TypeError):
                continue
    return last
