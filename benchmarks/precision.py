"""Does the precision of tables and products cost accuracy? On `places`, at the demo's size.

    python benchmarks/precision.py --json precision.json
    python benchmarks/precision.py --data datasets/places-15000-16384 --seeds 1 2 3

Trains SNM and annealed S2M with the demo's settings in every precision that a GPU offers, and
prints recall@10 on the validation part: over all pairs, and over the worst 3 scripts. "to nearest"
is bfloat16 without the rounding by chance. "train_step" is the step in plain torch, float32.
"""

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from evenhand.build import build_training
from evenhand.cli.demo import PRESETS
from evenhand.config import Config, build_config, read_preset
from evenhand.data import Dataset, open_dataset
from evenhand.evaluation import score_table
from evenhand.runs import evaluate_model, open_data
from evenhand.training.gpu_step import GpuStep
from evenhand.training.step import Step, train_step

PRECISIONS = ("train_step", "float32", "mixed", "bfloat16", "bfloat16 to nearest")
GROUPS = {"all": ("all", "all"), "worst 3 scripts": ("script", "worst 3")}


def main() -> None:
    options = _options()
    console = Console(width=110)
    data = options.data and open_dataset(Path(options.data))
    rows = []
    for method, name in PRESETS.items():
        config = build_config(read_preset(name))
        data = data or open_data(config.data, console)
        for precision in options.precisions:
            for seed in options.seeds if precision != "train_step" else options.seeds[:1]:
                with console.status(f"{method}, {precision}, seed {seed}"):
                    rows.append(measured(config, data, method, precision, seed))
                    _write(rows, options)
    shown = Table("method", "precision", "seeds", *GROUPS, "seconds")
    for method in PRESETS:
        for precision in options.precisions:
            chosen = [r for r in rows if (r["method"], r["precision"]) == (method, precision)]
            cells = [_spread([row[group] for row in chosen]) for group in GROUPS]
            seconds = _spread([row["seconds"] for row in chosen], digits=2)
            shown.add_row(method, precision, str(len(chosen)), *cells, seconds)
    console.print(shown)


def measured(
    config: Config, dataset: Dataset, method: str, precision: str, seed: int
) -> dict[str, Any]:
    named = {"bfloat16 to nearest": "bfloat16", "train_step": "float32"}.get(precision, precision)
    settings = dataclasses.replace(config.training, seed=seed, precision=named)
    config = dataclasses.replace(config, training=settings)
    built = build_training(config, dataset, torch.device("cuda"))
    training, plan = built.training, built.plan
    began = time.perf_counter()
    step: Step = partial(train_step, training, plan)
    if precision != "train_step":
        step = built.choose_step().step
        assert isinstance(step, GpuStep)
        if precision == "bfloat16 to nearest":
            _to_nearest(step)
    for _ in range(plan.num_steps):
        step(plan.at_step(training.step, batch_size=training.feed.batch_size))
        training.step += 1
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    outcome = evaluate_model(training.model, dataset, "validation", config)
    scores = {
        (score.column, score.group): score.value
        for score in score_table(
            outcome,
            dataset,
            "validation",
            min_pairs=config.evaluation.min_pairs,
            num_resamples=0,
        )
        if score.metric == "recall@10"
    }
    return {
        "method": method,
        "precision": precision,
        "seed": seed,
        **{group: scores[key] for group, key in GROUPS.items()},
        "seconds": round(seconds, 3),
        "num_steps": plan.num_steps,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _to_nearest(step: GpuStep) -> None:
    step.feature_rows = dataclasses.replace(step.feature_rows, seed=None)
    step.step.rows = dataclasses.replace(step.step.rows, seed=None)


def _spread(values: list[float], digits: int = 4) -> str:
    return f"{np.mean(values):.{digits}f} ({np.ptp(values):.{digits}f})"


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="a prepared data set; default: places, prepared here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
