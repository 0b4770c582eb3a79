"""The tables of docs/speed.md, from the committed results."""

from typing import Any

import numpy as np

from markdown import read, table


def step_table(file: str, *, dim: int, labels: list[int]) -> list[str]:
    """A line for each way: milliseconds and ratio to the product at each number of labels."""
    ways, digits = _ways(file, dim), 3 if "gpu" in file else 1
    lines = []
    for name, by_labels in ways.items():
        found = [by_labels.get(count, {}) for count in labels]
        if any(found):
            cells = [_cell(row, *key) for row in found
                     for key in (("milliseconds", digits), ("ratio_to_product", 1))]  # fmt: skip
            peaks = [row["peak_bytes"] for row in found if row and row["peak_bytes"] is not None]
            lines.append([name, *cells, f"{peaks[0] / 2**30:.2f}" if peaks else ""])
    heads = [head for count in labels for head in (f"{count:,} labels", "over the product")]
    return table(["step", *heads, "GiB"], lines)


def sweep_table(file: str, *, dim: int) -> list[str]:
    """A line for each way: milliseconds over the number of labels."""
    ways, digits = _ways(file, dim), 3 if "gpu" in file else 1
    labels = sorted({count for by_labels in ways.values() for count in by_labels})
    rows = [
        [name, *(_cell(by_labels.get(count, {}), "milliseconds", digits) for count in labels)]
        for name, by_labels in ways.items()
    ]
    return table(["ms", *(f"{count:,}" for count in labels)], rows)


def precision_table() -> list[str]:
    rows, lines = read("precision.json"), []
    for method, precision in dict.fromkeys((row["method"], row["precision"]) for row in rows):
        chosen = [r for r in rows if (r["method"], r["precision"]) == (method, precision)]
        cells = []
        for group in ("all", "worst 3 scripts"):
            values = [row[group] for row in chosen]
            spread = f" ({np.ptp(values):.4f})" if len(values) > 1 else " (one seed)"
            cells.append(f"{np.mean(values):.4f}{spread}")
        lines.append([method, precision, *cells])
    return table(["method", "precision", "all", "worst 3 scripts"], lines)


def tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/speed.md that it stands under."""
    return {
        "gpu": step_table("speed-gpu.json", dim=512, labels=[13_330, 10**6]),
        "gpu sweep": sweep_table("speed-gpu.json", dim=128),
        "precision": precision_table(),
        "cpu": step_table("speed-cpu.json", dim=512, labels=[13_330]),
        "cpu sweep": sweep_table("speed-cpu.json", dim=128),
    }


def _ways(file: str, dim: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Name of a way -> number of labels -> its row; our own names are bold."""
    ways: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read(file):
        if row["dim"] == dim and "ratio_to_product" in row:
            name = row["name"]
            shown = f"**{name}**" if name.startswith("evenhand") else name
            ways.setdefault(shown, {}).setdefault(row["labels"], row)
    return ways


def _cell(row: dict[str, Any], key: str, digits: int) -> str:
    return f"{row[key]:,.{digits}f}" if row else ""
