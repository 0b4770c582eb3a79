"""The tables of docs/reproduction.md, from the committed results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PARTS = ("tail", "head", "full")


def tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/reproduction.md that it stands under."""
    return {
        "mnist": table2("table2-mnist.json"),
        "mnist standardised": table2("table2-mnist-standardised.json"),
        "cifar10": table2("table2-cifar10.json"),
        "quality": quality("bibtex", "delicious"),
    }


def table2(file: str) -> list[str]:
    """A line for each row of the paper's table 2: ours, the paper's, the difference to SGD."""
    heads = [f"{part} | paper | minus SGD" for part in PARTS]
    lines = [f"| method | learning rate | {' | '.join(heads)} |", "|---" * 11 + "|"]
    for row in json.loads((RESULTS / file).read_text("utf-8"))["rows"]:
        cells = [_name(row), f"{row['learning_rate']:g}"]
        for part in PARTS:
            figures, paper = row[part], row["paper"]
            cells += [
                f"{figures['mean']:.4f} ± {figures['sd']:.4f}",
                "" if paper is None else f"{paper[part]:.4f}",
                _difference(figures.get("minus_sgd")),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def quality(*names: str) -> list[str]:
    """A line for each system and data set: recall of head / torso / tail (over labels) / all."""
    cutoffs = ("5", "10", "25", "50")
    heads = ["P@1", *(f"recall@{cutoff}" for cutoff in cutoffs)]
    lines = [f"| data | system | train s | {' | '.join(heads)} |", "|---" * 8 + "|"]
    for name in names:
        report = json.loads((RESULTS / f"quality-{name}.json").read_text("utf-8"))
        for system, row in report["systems"].items():
            groups = [row["recall"]["labels"][cutoff].values() for cutoff in cutoffs]
            recalls = [" / ".join(f"{value:.3f}"[1:] for value in cell) for cell in groups]
            cells = [name, system, f"{row['train_seconds']:.1f}", f"{row['precision@1']:.3f}"]
            lines.append(f"| {' | '.join(cells + recalls)} |")
    return lines


def _name(row: dict[str, Any]) -> str:
    num_diverged = sum(seed["diverged"] for seed in row["per_seed"])
    note = f" ({num_diverged} of {len(row['per_seed'])} diverged)" if num_diverged else ""
    return f"{row['name']}{note}"


def _difference(interval: dict[str, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval['mean']:+.4f} ({interval['low']:+.4f} to {interval['high']:+.4f})"
