"""The tables of docs/scaling.md, from the committed results and the cost model."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from markdown import read, table

GRADIENTS = "labels: gradients"


def bytes_table() -> list[str]:
    """A line for each shape and number of labels: counted, expected, and what the kernel saw."""
    lines = []
    for row in _rows("ranks", "bytes"):
        counted = row["counted_sum"]
        cells = [row["shape"], f"{row['labels']:,}", f"{counted:,.0f}", f"{row['model_sum']:,.0f}"]
        cells += [_percent(row[key] / counted) for key in ("model_sum", "tcp_payload", "loopback")]
        lines.append(cells)
    heads = "shape", "labels", "counted", "model", "model over counted", "TCP payload", "loopback"
    return table(heads, lines)


def purpose_table() -> list[str]:
    """What the bytes are, at a million labels: S2M and SNM of the same shape."""
    rows = {
        row["shape"]: row
        for row in _rows("ranks", "bytes")
        if row["labels"] == 10**6 and row["batch_size"] == 2048
    }
    kinds = ("model", "counted")
    heads = [f"{name}: {kind}" for name in ("S2M", "SNM") for kind in kinds]
    lines = [
        [what, *(f"{row[kind][what]:,.0f}" for row in rows.values() for kind in kinds)]
        for what in next(iter(rows.values()))["model"]
    ]
    return table(["bytes a rank a step", *heads], lines)


def memory_table() -> list[str]:
    rows, lines = _rows("ranks", "memory"), []
    alone = rows[0]
    for row in rows:
        name = "alone" if row["ranks"] == 1 else f"rank {row['rank']} of {row['ranks']}"
        model = row["model"]["tables"] + row["model"]["optimiser"]
        of_one = [f"{row[key] / alone[key]:.1%}" for key in ("peak_rss", "anonymous")]
        sizes = (row["peak_rss"], row["anonymous"], row["empty_rss"], model)
        peak, anonymous, empty, tables_ = map(_gigabytes, sizes)
        lines.append([name, peak, of_one[0], anonymous, of_one[1], empty, tables_])
    heads = ("process", "peak RSS, GB", "of one process", "anonymous, GB", "of one process",
             "python and torch alone, GB", "tables and optimiser, model, GB")  # fmt: skip
    return table(heads, lines)


def hundred_million_table() -> list[str]:
    """A line for each phase of the run of 10^8 labels."""
    lines = []
    for name, phase in read("hundred-million.json")["phases"].items():
        seconds = dict(phase["seconds"])
        whole = seconds.pop("all")
        parts = ", ".join(f"{words} {value:.1f}" for words, value in seconds.items() if value >= 1)
        steps = phase.get("milliseconds_a_step") or {}
        cells = [name, f"{whole:.1f}", parts or "–", f"{steps['median']:.3f}" if steps else "–"]
        keys = ("device_peak_bytes", "host_anonymous_bytes_peak", "disk_bytes_peak")
        lines.append(cells + [_gigabytes(phase[key]) if key in phase else "–" for key in keys])
    heads = "phase", "seconds", "of them", "ms a step, median", "GPU, GB", "host, GB", "disk, GB"
    return table(heads, lines)


def kills_table() -> list[str]:
    """What became of the runs that were killed."""
    found = read("kills.json")
    runs, summary = found["runs"], found["summary"]
    lost = [item["lost_steps"] for run in runs for item in run["interruptions"]]
    every = found["settings"]["training"]["checkpoint_every"]
    rows = {
        "runs": summary["runs"],
        "killed before their end": summary["killed_before_the_end"],
        "of them while a checkpoint was being written": summary["killed_within_a_checkpoint"],
        "of them on rank 0": sum(
            run["rank"] == 0 and run["killed_at_step"] is not None for run in runs
        ),
        "ended byte for byte as the undisturbed run, unaided": summary["as_undisturbed"],
        f"most logged steps trained again (a checkpoint every {every})": max(lost, default=0),
    }
    return table(["", ""], [[name, f"{value:,}"] for name, value in rows.items()])


def real_table() -> list[str]:
    lines = []
    for row in _rows("ranks", "real"):
        counted, model = row["counted"], row["model"]
        rows_of_model = model[GRADIENTS] / (4 * 128) / (1 - 1 / row["ranks"])
        bounds = ", ".join(f"{bound / rows_of_model:.2f}" for bound in row["kept_bounds"])
        first, last = row["steps"]
        whole = sum(counted.values()) / sum(model.values())
        ratios = [f"{counted[GRADIENTS] / model[GRADIENTS]:.2f}", f"{whole:.2f}"]
        lines.append([row["loss"], f"{first + 1} to {last}", *ratios, bounds])
    heads = ("loss", "steps", "label gradients, of the model", "all bytes, of the model",
             "fewest, most label gradients possible, of the model")  # fmt: skip
    return table(heads, lines)


def simulation_table() -> list[str]:
    names = ("sent", "received", "owed label rows", "owed feature rows")
    lines = [
        [
            str(row["ranks"]),
            f"{row['batch_size']:,}",
            "chance" if row["order"] == "random" else "frequency",
            f"{row['mean']['sent']:,.0f}",
            _percent(row["model"]["sent"] / row["mean"]["sent"]),
            *(f"{row['load'][name]:.2f}" for name in names),
        ]
        for row in _rows("simulation", "exchange")
    ]
    heads = ("ranks", "batch", "ids in order of", "bytes a rank", "model",
             "load: sent", "received", "label rows owed", "feature rows owed")  # fmt: skip
    return table(heads, lines)


def plan_table() -> list[str]:
    place = Path(__file__).parent / "scale" / "plan.py"
    spec = importlib.util.spec_from_file_location("scale_plan", place)
    assert spec is not None
    assert spec.loader is not None
    plan = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = plan  # where its dataclass looks for itself
    spec.loader.exec_module(plan)
    lines: list[str] = plan.table()
    return lines


def tables() -> dict[str, list[str]]:
    """Every table, by the mark in docs/scaling.md that it stands under."""
    return {
        "bytes": bytes_table(),
        "purposes": purpose_table(),
        "memory": memory_table(),
        "real": real_table(),
        "simulation": simulation_table(),
        "plan": plan_table(),
        "hundred_million": hundred_million_table(),
        "kills": kills_table(),
    }


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}"


def _rows(file: str, part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read(f"scaling-{file}.json")[part]["rows"]
    return rows
