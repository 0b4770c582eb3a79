"""The tables of docs/speed.md, from the committed results."""

import json
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def step_table(file: str, *, dim: int, labels: list[int]) -> list[str]:
    """A line for each way: milliseconds and ratio to the product at each number of labels."""
    rows = [row for row in _rows(file) if row["dim"] == dim and "ratio_to_product" in row]
    names = list(dict.fromkeys(row["name"] for row in rows if row["labels"] in labels))
    digits = 3 if "gpu" in file else 1
    heads = [f"{count:,} labels | over the product" for count in labels]
    lines = [f"| step | {' | '.join(heads)} | GiB |", "|---" * (2 * len(labels) + 2) + "|"]
    for name in names:
        cells, peak = [], ""
        for count in labels:
            found = [row for row in rows if (row["name"], row["labels"]) == (name, count)]
            cells += [_cell(found, "milliseconds", digits), _cell(found, "ratio_to_product", 1)]
            if found and not peak and found[0]["peak_bytes"] is not None:
                peak = f"{found[0]['peak_bytes'] / 2**30:.2f}"
        shown = f"**{name}**" if name.startswith("evenhand") else name
        lines.append(f"| {shown} | {' | '.join(cells)} | {peak} |")
    return lines


def sweep_table(file: str, *, dim: int) -> list[str]:
    """A line for each way: milliseconds over the number of labels."""
    rows = [row for row in _rows(file) if row["dim"] == dim and "ratio_to_product" in row]
    labels = sorted({row["labels"] for row in rows})
    digits = 3 if "gpu" in file else 1
    lines = [
        f"| ms | {' | '.join(f'{count:,}' for count in labels)} |",
        "|---" * (len(labels) + 1) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        cells = [
            _cell(
                [r for r in rows if (r["name"], r["labels"]) == (name, count)],
                "milliseconds",
                digits,
            )
            for count in labels
        ]
        shown = f"**{name}**" if name.startswith("evenhand") else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return lines


def precision_table() -> list[str]:
    rows = _rows("precision.json")
    lines = ["| method | precision | all | worst 3 scripts |", "|---|---|---|---|"]
    for method, precision in dict.fromkeys((row["method"], row["precision"]) for row in rows):
        chosen = [r for r in rows if (r["method"], r["precision"]) == (method, precision)]
        cells = []
        for group in ("all", "worst 3 scripts"):
            values = [row[group] for row in chosen]
            spread = f" ({np.ptp(values):.4f})" if len(values) > 1 else " (one seed)"
            cells.append(f"{np.mean(values):.4f}{spread}")
        lines.append(f"| {method} | {precision} | {' | '.join(cells)} |")
    return lines


def tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/speed.md that it stands under."""
    return {
        "gpu": step_table("speed-gpu.json", dim=512, labels=[13_330, 10**6]),
        "gpu sweep": sweep_table("speed-gpu.json", dim=128),
        "precision": precision_table(),
        "cpu": step_table("speed-cpu.json", dim=512, labels=[13_330]),
        "cpu sweep": sweep_table("speed-cpu.json", dim=128),
    }


def _cell(found: list[dict[str, Any]], key: str, digits: int) -> str:
    return f"{found[0][key]:,.{digits}f}" if found else ""


def _rows(file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / file).read_text("utf-8"))
    return rows
