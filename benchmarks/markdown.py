"""Markdown tables of the committed results."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(heads), "|---" * len(heads) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def share(value: float) -> str:
    """.8659"""
    return f"{value:.4f}".removeprefix("0")
