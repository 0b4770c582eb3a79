"""Table 2 of the paper: the average of the k' largest losses, on pictures with rare classes.

A folder holds every training that is finished, so the same command continues after a stop:

    trainings.json    the figures of every training, those that chose the learning rates included
    tuning.json       every trial on validation, and the learning rates chosen
    result.json       every figure of every seed
"""

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit

from evenhand.errors import UserError
from evenhand.files import read_json, write_json
from evenhand.progress import count_bar
from evenhand.version import __version__
from experiments.image_data import ImageData
from experiments.image_training import Job, has_diverged, predict, train_models
from experiments.imbalanced_images import accuracies, held_out, pictures_of, training_rows
from experiments.table2_rows import Row

PARTS = ("tail", "head", "full")
KEY = ("kind", "num_hard_examples", "is_even", "learning_rate", "seed", "num_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how a table is run."""

    table: str
    folder: Path
    command: str
    device: torch.device
    console: Console
    is_small: bool = False  # models, for the quick look
    at_once: int = 1  # trainings, side by side on a GPU; what a stop loses
    should_stop_fn: Callable[[], bool] = lambda: False


def tune(rows: list[Row], data: ImageData, run: Run) -> list[Row]:
    """The rows with the learning rates that validation prefers, as written to tuning.json."""
    planned = [
        (dataclasses.replace(row, learning_rate=rate), seed)
        for seed in rows[0].tuning_seeds
        for row in rows
        for rate in row.learning_rates
    ]
    trials = figures_of("tuning", planned, data, run)
    chosen = [choose_rate(row, trials) for row in rows]
    report = {
        "what": "accuracy on validation pictures held out of each seed's training rows; the choice "
        "is by the mean of head and tail accuracy, because the test part is balanced",
        "num_steps": rows[0].tuning_steps,
        "chosen": chosen,
        "trials": trials,
    }
    write_json(run.folder / "tuning.json", report | about(run))
    for choice in chosen:
        name, rate = choice["name"], choice["learning_rate"]
        run.console.print(f"learning rate of {name}, chosen on validation: {rate:g}")
    return [
        dataclasses.replace(row, learning_rate=choice["learning_rate"])
        for row, choice in zip(rows, chosen, strict=True)
    ]


def choose_rate(row: Row, trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rate with the best mean over the tuning seeds; one that diverged has lost.

    Head and tail count the same, as in the test part, whatever validation has of each.
    """
    means = {}
    for rate in row.learning_rates:
        key = (row.num_hard_examples, row.is_even, rate)
        names = ("num_hard_examples", "is_even", "learning_rate")
        own = [trial for trial in trials if tuple(trial[name] for name in names) == key]
        means[rate] = float(np.mean([(t["head"] + t["tail"]) / 2 for t in own]))
    best = max(row.learning_rates, key=lambda rate: -1 if math.isnan(means[rate]) else means[rate])
    return {
        "name": row.name,
        "learning_rate": best,
        "is_at_edge": best in (row.learning_rates[0], row.learning_rates[-1]),
        "means": {f"{rate:g}": mean for rate, mean in means.items()},
    }


def run_table(rows: list[Row], data: ImageData, run: Run) -> dict[str, Any]:
    """Trains every row with every seed, evaluates on the test part, writes the result."""
    first, planned = rows[0], with_controls(rows)
    # A seed of every row before the next seed.
    found = figures_of("table", [(row, seed) for seed in first.seeds for row in planned], data, run)
    measured = [
        {
            "name": row.name,
            "num_hard_examples": row.num_hard_examples,
            "is_even": row.is_even,
            "learning_rate": row.learning_rate,
            "is_baseline": row in rows and row.is_sgd,
            "paper": (row.paper or None) if row in rows else None,
            "per_seed": found[place :: len(planned)],
        }
        for place, row in enumerate(planned)
    ]
    result = {
        "table": run.table,
        "num_steps": first.num_steps,
        "num_models": len(planned) * len(first.seeds),
        "num_training_pictures": len(training_rows(data.train_labels, first, first.seeds[0])),
        "settings": dataclasses.asdict(first),
        "rows": add_summaries(measured),
        **about(run),
    }
    write_json(run.folder / "result.json", result)
    title = (
        f"{run.table}, tail classes {', '.join(map(str, first.tail_classes))}, "
        f"{first.num_steps:,} steps, {len(first.seeds)} seeds: mean ± sd; paired"
    )
    run.console.print(format_table(result["rows"], title=title))
    return result


def with_controls(rows: list[Row]) -> list[Row]:
    """The rows of the paper, then SGD at the larger rates that a small k' amounts to."""
    controls = []
    for row in (row for row in rows if row.has_control):
        factor = row.batch_size / row.num_hard_examples
        controls.append(
            dataclasses.replace(
                row,
                name=f"SGD at the rate of {row.name} x {factor:g}",
                num_hard_examples=row.batch_size,
                learning_rate=row.learning_rate * factor,
            )
        )
    return [*rows, *controls]


def figures_of(
    kind: str, planned: Sequence[tuple[Row, int]], data: ImageData, run: Run
) -> list[dict[str, Any]]:
    """Accuracies of trainings (row, seed), from the folder if they are there; NaN where diverged.

    Args:
        kind: "tuning" is judged by pictures held out of training, "table" by the test part.
    """
    path = run.folder / "trainings.json"
    finished = read_json(path) if path.exists() else []
    if not isinstance(finished, list) or not all(isinstance(one, dict) for one in finished):
        raise UserError(f"{path} is damaged (it is no list of trainings); begin in another --out")
    keys = [_key(kind, row, seed) for row, seed in planned]
    missing = [
        (key, *job)
        for key, job in zip(keys, planned, strict=True)
        if not any(one.items() >= key.items() for one in finished)
    ]
    for start in range(0, len(missing), run.at_once):
        finished += _train_and_judge(kind, missing[start : start + run.at_once], data, run)
        write_json(path, finished)
    found = [next(one for one in finished if one.items() >= key.items()) for key in keys]
    return [{name: math.nan if value is None else value for name, value in one.items()}
            for one in found]  # fmt: skip


def _key(kind: str, row: Row, seed: int) -> dict[str, Any]:
    num_steps = row.tuning_steps if kind == "tuning" else row.num_steps
    values = kind, row.num_hard_examples, row.is_even, row.learning_rate, seed, num_steps
    return dict(zip(KEY, values, strict=True))


def _train_and_judge(
    kind: str, missing: Sequence[tuple[dict[str, Any], Row, int]], data: ImageData, run: Run
) -> list[dict[str, Any]]:
    """Trains these together; their keys with what is found, and the seconds all of them took."""
    labels, first = data.train_labels, missing[0][1]
    pictures = pictures_of(data.train_images, labels)
    jobs, judged = [], []
    for _, row, seed in missing:
        ids, judge = (
            training_rows(labels, row, seed),
            pictures_of(data.test_images, data.test_labels),
        )
        if kind == "tuning":
            ids, own = held_out(labels, ids, row, seed)
            judge = pictures_of(data.train_images[own], labels[own])
        if len(ids) < row.batch_size:
            raise UserError(f"{len(ids)} training pictures do not fill a batch of {row.batch_size}")
        jobs.append(Job(row, ids, seed))
        judged.append(judge)
    began = time.perf_counter()
    more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
    title = f"{kind}: {first.name}, rate {first.learning_rate:g}, seed {missing[0][2]}{more}"
    with count_bar(run.console, title) as advance:
        models = train_models(
            jobs, pictures, num_steps=missing[0][0]["num_steps"], device=run.device,
            is_small=run.is_small, should_stop_fn=run.should_stop_fn, on_step_fn=advance,
        )  # fmt: skip
    seconds = round(time.perf_counter() - began, 1)
    new = []
    for (key, row, _), model, judge in zip(missing, models, judged, strict=True):
        found: dict[str, Any] = dict(accuracies(predict(model, judge), judge.labels.numpy(), row))
        if diverged := has_diverged(model):
            found = dict.fromkeys(found, math.nan)
        new.append({**key, **found, "diverged": diverged, "seconds": seconds})
        words = ", ".join(f"{part} {found[part]:.4f}" for part in ("tail", "head"))
        run.console.print(
            f"{kind}: {row.name}, rate {row.learning_rate:g}, seed {key['seed']}: {words} "
            f"({seconds:.0f} s for {len(jobs)})"
        )
    return new


def about(run: Run) -> dict[str, Any]:
    """The machine, the versions and the command: what a figure needs to be believed."""
    on_gpu = run.device.type == "cuda"
    return {
        "command": run.command,
        "machine": torch.cuda.get_device_name(run.device)
        if on_gpu
        else platform.processor() or platform.machine(),
        "versions": {
            "evenhand": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
    }


# --- over seeds -----------------------------------------------------------------------------------


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
