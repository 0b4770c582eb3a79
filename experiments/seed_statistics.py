"""Figures over seeds: mean, spread, paired difference with its interval; and the printed table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import stdtrit

PARTS = ("tail", "head", "full")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over the seeds that did not diverge."""
    finite = np.array([value for value in values if not math.isnan(value)])
    return {
        "mean": float(finite.mean()) if len(finite) else math.nan,
        "sd": float(finite.std(ddof=1)) if len(finite) > 1 else math.nan,
        "seeds": len(finite),
    }


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Mean of value - baseline over seeds, with its 95 % interval by Student's t."""
    mean, deviation, count = summary(list(np.subtract(values, baseline))).values()
    half = float(stdtrit(count - 1, 0.975)) * deviation / math.sqrt(max(1, count))
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": count}


def add_summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row's per-seed figures with their mean, spread and difference to the SGD row."""
    sgd = next(row for row in rows if row["is_baseline"])
    for row in rows:
        for part in PARTS:
            values = [seed[part] for seed in row["per_seed"]]
            baseline = [seed[part] for seed in sgd["per_seed"]]
            row[part] = summary(values)
            if row is not sgd:
                row[part]["minus_sgd"] = paired_difference(values, baseline)
    return rows


def format_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Ours beside the paper's."""
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    table.add_column("learning rate", justify="right")
    for part in PARTS:
        table.add_column(f"{part}: ours", justify="right")
        table.add_column("paper", justify="right")
        table.add_column("minus SGD", justify="right")
    for row in rows:
        num_diverged = sum(seed["diverged"] for seed in row["per_seed"])
        note = f" ({num_diverged} of {len(row['per_seed'])} diverged)" if num_diverged else ""
        cells = [row["name"] + note, f"{row['learning_rate']:g}"]
        for part in PARTS:
            figures, paper = row[part], row["paper"]
            cells += [
                _with_sd(figures),
                "" if paper is None else f"{paper[part]:.4f}",
                _difference(figures.get("minus_sgd")),
            ]
        table.add_row(*cells)
    return table


def _with_sd(figures: Mapping[str, float]) -> str:
    if math.isnan(figures["mean"]):
        return "diverged"
    spread = "" if math.isnan(figures["sd"]) else f" ± {figures['sd']:.4f}"
    return f"{figures['mean']:.4f}{spread}"


def _difference(interval: Mapping[str, float] | None) -> str:
    if interval is None or math.isnan(interval["mean"]):
        return ""
    text = f"{interval['mean']:+.4f}"
    if math.isnan(interval["low"]):
        return text
    return f"{text} [{interval['low']:+.4f}, {interval['high']:+.4f}]"
