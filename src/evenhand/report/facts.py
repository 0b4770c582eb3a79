"""The report's run facts: what run.json says, formatted for people."""

from collections.abc import Mapping
from typing import Any

from evenhand.report.rendering import NOTHING, format_duration, format_time, number
from evenhand.report.run_set import RunSet

TITLES = {  # run.json, in the order it is shown
    "method": "Method", "seed": "Seed", "started": "Started", "num_steps": "Steps",
    "step": "Training step", "training_seconds": "Training time",
    "ranker_seconds": "Time to fit the ranker", "device": "Device", "num_ranks": "Ranks",
    "bytes_sent_a_step": "Bytes a rank sent in a step", "interruptions": "Interrupted",
    "commit": "Commit", "command": "Command", "versions": "Versions", "dataset": "Data set",
}  # fmt: skip
UNTOLD = ("name", "is_running")  # said elsewhere


def fact_rows(runs: RunSet) -> list[tuple[str, list[str]]]:
    """(title, a text for each run) of every fact that some run has."""
    abouts = [result.about for result in runs.results]
    keys = dict.fromkeys([*TITLES, *(key for about in abouts for key in about)])
    return [
        (TITLES.get(key, key), [format_fact(key, about.get(key)) for about in abouts])
        for key in keys
        if key not in UNTOLD and any(about.get(key) is not None for about in abouts)
    ]


def summarize_run(about: Mapping[str, Any]) -> str:
    """'method snm, seed 0, ...': the few facts that stand at the top of the page."""
    keys = ("method", "seed", "started", "device")
    return ", ".join(
        f"{key} {format_fact(key, about[key])}" for key in keys if about.get(key) is not None
    )


def format_fact(key: str, value: Any) -> str:
    """One value of run.json, whatever it holds."""
    if value is None or value != value:
        return NOTHING
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
        return ", ".join(f"{name} {format_fact('', item)}" for name, item in value.items())
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
