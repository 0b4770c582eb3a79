"""How the runs were made: their losses and validations step by step, and what run.json says."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from evenhand.report.charts import Plot, Series, line_plot
from evenhand.report.rendering import NOTHING, format_duration, format_time, number
from evenhand.report.run_set import RunSet

MAX_POINTS = 150  # of a line; more are averaged in stretches
CURVES = {"loss": "Loss", "zero_loss_share": "Share of examples with zero loss"}
TITLES = {  # run.json, in the order it is shown
    "method": "Method", "seed": "Seed", "started": "Started", "num_steps": "Steps",
    "best_step": "Step that is kept", "training_seconds": "Training time",
    "milliseconds_a_step": "Milliseconds a step", "ranker_seconds": "Time to fit the ranker",
    "step": "Training step", "device": "Device", "num_ranks": "Ranks",
    "bytes_sent_a_step": "Bytes a rank sent in a step", "interruptions": "Interrupted",
    "is_complete": "Complete", "commit": "Commit", "command": "Command", "versions": "Versions",
    "dataset": "Data set",
}  # fmt: skip
ELSEWHERE = ("name", "is_running")  # shown elsewhere on the page


def training_plots(runs: RunSet) -> list[Plot]:
    """What the runs recorded while they trained."""
    panels: dict[str, list[Series]] = {title: [] for title in CURVES.values()}
    for run, result in enumerate(runs.results):
        for key, title in CURVES.items():
            panels[title] += make_series(run, result.metrics, key)
        validations = [
            {"step": row.get("step"), **row["validation"]}
            for row in result.metrics
            if isinstance(row.get("validation"), dict)
        ]
        names = dict.fromkeys(key for row in validations for key in row if key != "step")
        for name in names if len(validations) > 1 else ():  # one point is no curve
            panels.setdefault(f"Validation: {name}", []).extend(make_series(run, validations, name))
    plots = []
    for title, series in panels.items():
        is_named = "Share" in title or title.startswith("Validation")
        is_share = is_named and all(0 <= y <= 1 for _, _, ys in series for y in ys)
        if series:
            plots.append(line_plot(title, series, "step", is_share=is_share))
    return plots


def make_series(run: int, rows: Iterable[dict[str, Any]], key: str) -> list[Series]:
    """One series of a recorded value by step, thinned to means over equal stretches, or none."""

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and abs(value) < 1e300  # as JSON may hold any

    pairs = [(row.get("step"), row.get(key)) for row in rows]
    points = np.array([(x, y) for x, y in pairs if is_number(x) and is_number(y)], dtype=float)
    if not len(points):
        return []
    pieces = np.array_split(points, min(MAX_POINTS, len(points)))
    means = np.array([piece.mean(axis=0) for piece in pieces])  # (at most MAX_POINTS, 2)
    return [(run, means[:, 0].tolist(), means[:, 1].tolist())]


# --- facts ----------------------------------------------------------------------------------------


def fact_rows(runs: RunSet) -> list[tuple[str, list[str]]]:
    """(title, a text for each run) of every fact that some run has."""
    abouts = [result.about for result in runs.results]
    keys = dict.fromkeys([*TITLES, *(key for about in abouts for key in about)])
    return [
        (TITLES.get(key, key), [format_fact(key, about.get(key)) for about in abouts])
        for key in keys
        if key not in ELSEWHERE and any(about.get(key) is not None for about in abouts)
    ]


def format_fact(key: str, value: Any) -> str:
    """One value of run.json, whatever it holds."""
    if value is None or value != value:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_seconds") and isinstance(value, int | float):
        return format_duration(value)
    if key == "started":
        return format_time(str(value))
    if key == "interruptions" and isinstance(value, list):
        return "; ".join(_format_interruption(item) for item in value if isinstance(item, Mapping))
    if key == "step" and isinstance(value, Mapping):
        kind, reason = str(value.get("kind", NOTHING)), value.get("reason")
        return f"{kind} (no CUDA graph: {reason})" if reason else kind
    if isinstance(value, Mapping):
        shown = (f"{name.replace('_', ' ')} {format_fact('', v)}" for name, v in value.items())
        return ", ".join(shown)
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return number(value) if isinstance(value, int) and key != "seed" else str(value)


def _format_interruption(fact: Mapping[str, Any]) -> str:
    """'resumed at step 50 (20 steps trained again), 2025-11-15 09:06 UTC; a damaged file'."""
    step, lost = fact.get("resumed_at_step", 0), fact.get("lost_steps", 0)
    again = f" ({lost} steps trained again)" if lost else ""
    sentences = fact.get("damaged_checkpoints")
    damaged = "".join(f"; {said}" for said in sentences) if isinstance(sentences, list) else ""
    return f"resumed at step {step}{again}, {format_time(str(fact.get('at', '')))}{damaged}"
