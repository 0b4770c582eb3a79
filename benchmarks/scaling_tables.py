"""The tables of docs/scaling.md, from the committed results and the cost model."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GRADIENTS = "labels: gradients"


def bytes_table() -> list[str]:
    """A line for each shape and number of labels: counted, expected, and what the kernel saw."""
    lines = _head(
        "shape", "labels", "counted", "model", "model over counted", "TCP payload", "loopback"
    )
    for row in _rows("ranks", "bytes"):
        counted = row["counted_sum"]
        cells = [row["shape"], f"{row['labels']:,}", f"{counted:,.0f}", f"{row['model_sum']:,.0f}"]
        cells += [_percent(row[key] / counted) for key in ("model_sum", "tcp_payload", "loopback")]
        lines.append(_line(cells))
    return lines


def purpose_table() -> list[str]:
    """What the bytes are, at a million labels: S2M and SNM of the same shape."""
    rows = {
        row["shape"]: row
        for row in _rows("ranks", "bytes")
        if row["labels"] == 10**6 and row["batch_size"] == 2048
    }
    heads = [f"{name}: {kind}" for name in ("S2M", "SNM") for kind in ("model", "counted")]
    lines = _head("bytes a rank a step", *heads)
    for what in next(iter(rows.values()))["model"]:
        cells = [
            f"{row[kind][what]:,.0f}" for row in rows.values() for kind in ("model", "counted")
        ]
        lines.append(_line([what, *cells]))
    return lines


def memory_table() -> list[str]:
    rows = _rows("ranks", "memory")
    alone = rows[0]
    lines = _head("process", "peak RSS, GB", "of one process", "anonymous, GB", "of one process",
                  "python and torch alone, GB", "tables and optimiser, model, GB")  # fmt: skip
    for row in rows:
        name = "alone" if row["ranks"] == 1 else f"rank {row['rank']} of {row['ranks']}"
        model = row["model"]["tables"] + row["model"]["optimiser"]
        cells = [
            name,
            _gigabytes(row["peak_rss"]),
            f"{row['peak_rss'] / alone['peak_rss']:.1%}",
            _gigabytes(row["anonymous"]),
            f"{row['anonymous'] / alone['anonymous']:.1%}",
            _gigabytes(row["empty_rss"]),
            _gigabytes(model),
        ]
        lines.append(_line(cells))
    return lines


def hundred_million_table() -> list[str]:
    """A line for each phase of the run of 10^8 labels."""
    found = _result("hundred-million")
    lines = _head(
        "phase", "seconds", "of them", "ms a step, median", "GPU, GB", "host, GB", "disk, GB"
    )
    for name, phase in found["phases"].items():
        seconds = dict(phase["seconds"])
        whole = seconds.pop("all")
        parts = ", ".join(f"{words} {value:.1f}" for words, value in seconds.items() if value >= 1)
        steps = phase.get("milliseconds_a_step") or {}
        cells = [name, f"{whole:.1f}", parts or "–", f"{steps['median']:.3f}" if steps else "–"]
        keys = ("device_peak_bytes", "host_anonymous_bytes_peak", "disk_bytes_peak")
        cells += [_gigabytes(phase[key]) if key in phase else "–" for key in keys]
        lines.append(_line(cells))
    return lines


def kills_table() -> list[str]:
    """What became of the runs that were killed."""
    found = _result("kills")
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
    return [*_head("", ""), *(_line([name, f"{value:,}"]) for name, value in rows.items())]


def real_table() -> list[str]:
    lines = _head("loss", "steps", "label gradients, of the model", "all bytes, of the model",
                  "fewest, most label gradients possible, of the model")  # fmt: skip
    for row in _rows("ranks", "real"):
        counted, model = row["counted"], row["model"]
        rows_of_model = model[GRADIENTS] / (4 * 128) / (1 - 1 / row["ranks"])
        bounds = ", ".join(f"{bound / rows_of_model:.2f}" for bound in row["kept_bounds"])
        first, last = row["steps"]
        ratios = [
            counted[GRADIENTS] / model[GRADIENTS],
            sum(counted.values()) / sum(model.values()),
        ]
        cells = [row["loss"], f"{first + 1} to {last}", *(f"{ratio:.2f}" for ratio in ratios)]
        lines.append(_line([*cells, bounds]))
    return lines


def simulation_table() -> list[str]:
    lines = _head("ranks", "batch", "ids in order of", "bytes a rank", "model",
                  "load: sent", "received", "label rows owed", "feature rows owed")  # fmt: skip
    for row in _rows("simulation", "exchange"):
        load = row["load"]
        names = ("sent", "received", "owed label rows", "owed feature rows")
        lines.append(
            _line(
                [
                    str(row["ranks"]),
                    f"{row['batch_size']:,}",
                    "chance" if row["order"] == "random" else "frequency",
                    f"{row['mean']['sent']:,.0f}",
                    _percent(row["model"]["sent"] / row["mean"]["sent"]),
                    *(f"{load[name]:.2f}" for name in names),
                ]
            )
        )
    return lines


def plan_table() -> list[str]:
    spec = importlib.util.spec_from_file_location("scale_plan", HERE / "scale" / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    plan = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = plan  # where its dataclass looks for itself
    spec.loader.exec_module(plan)
    table: list[str] = plan.table()
    return table


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


def _head(*names: str) -> list[str]:
    return [_line(names), "|---" * len(names) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f}"


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def _rows(file: str, part: str) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / f"scaling-{file}.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = found[part]["rows"]
    return rows
