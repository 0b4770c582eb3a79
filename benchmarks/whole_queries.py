"""What `mining.whole_queries` saves: pairs trained a second, with and without, in one run.

    python benchmarks/whole_queries.py                        generated queries of 1 to 20 labels
    python benchmarks/whole_queries.py --data DATA/debian-deps --json whole.json

Both ways train the same model with batches of as many pairs, in turns of a few steps each, on all
cores. A query of the generated data has 40 of 30,000 features, and labels of 25,000 by a Zipf law.
--data takes the folder of a data set in the Extreme Classification format instead.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from evenhand.build import Built, build_training
from evenhand.config import build_config
from evenhand.data import Dataset, Part, Rows, load_extreme
from evenhand.data.weighting import weight_features
from evenhand.training.step import train_step

NUM_QUERIES, NUM_FEATURES, NUM_LABELS = 20_000, 30_000, 25_000
LABELS_A_QUERY = (1, 2, 5, 20)
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"weighting": "unit"},
    "model": {"embedding_dim": 256, "similarity": "dot", "label_bias": True, "scale": 3.0},
    "loss": {"name": "softmax", "log_q": True},
    "mining": {
        "method": "s2m",
        "num_sampled_labels": 4096,
        "num_hard_labels": 128,
        "sampler": "frequency",
        "sampler_power": 0.4,
    },
}
STEPS_A_TURN = 3


def main() -> None:
    options = _options()
    console = Console()
    if options.data:
        folder = Path(options.data)
        paths = [next(folder.glob(f"{part}.txt*")) for part in ("train", "test")]
        datasets = [load_extreme(*paths, name=folder.name)]
    else:
        datasets = [_generated(count) for count in LABELS_A_QUERY]
    rows = [_compared(dataset, options, console) for dataset in datasets]
    table = Table("data", "labels a query", "pairs/s", "whole queries", "times as many")
    for row in rows:
        table.add_row(
            row["data"],
            f"{row['labels_a_query']:.1f}",
            f"{row['pairs_a_second']['by pairs']:,.0f}",
            f"{row['pairs_a_second']['whole queries']:,.0f}",
            f"{row['ratio']:.2f}",
        )
    console.print(table)
    if options.json:
        about = {
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "batch_size": options.batch_size,
        }
        Path(options.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _compared(dataset: Dataset, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    ways = {"by pairs": False, "whole queries": True}
    built = {name: _built(dataset, is_whole, options) for name, is_whole in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for own in built.values():
        _train(own, 2)  # compile, and meet the first batches
    for _ in track(range(options.turns), description=dataset.name, console=console):
        for name, own in built.items():
            began = time.perf_counter()
            _train(own, STEPS_A_TURN)
            seconds[name].append((time.perf_counter() - began) / STEPS_A_TURN)
    for own in built.values():
        own.training.feed.close()
    times = {name: statistics.median(own) for name, own in seconds.items()}
    part = dataset.parts["train"]
    return {
        "data": dataset.name,
        "labels_a_query": len(part.positives.ids) / len(part),
        "milliseconds_a_step": {name: round(1000 * own, 2) for name, own in times.items()},
        "pairs_a_second": {name: options.batch_size / own for name, own in times.items()},
        "ratio": times["by pairs"] / times["whole queries"],
    }


def _built(dataset: Dataset, is_whole: bool, options: argparse.Namespace) -> Built:
    mining = {
        **SETTINGS["mining"],
        "batch_size": options.batch_size,
        "num_hard_examples": options.batch_size // 2,
        "whole_queries": is_whole,
    }
    config = build_config({**SETTINGS, "mining": mining})
    return build_training(config, weight_features(dataset, "unit"), torch.device("cpu"))


def _train(built: Built, num_steps: int) -> None:
    training, plan = built.training, built.plan
    for _ in range(num_steps):
        scheduled = plan.at_step(training.step, batch_size=training.feed.batch_size)
        train_step(training, plan, scheduled)


def _generated(labels_a_query: int) -> Dataset:
    generator = np.random.default_rng(0)
    shares = 1 / np.arange(1, NUM_LABELS + 1)
    ends = np.cumsum(shares) / shares.sum()
    labels = np.searchsorted(ends, generator.random((NUM_QUERIES, labels_a_query)))
    labels = [np.unique(row) for row in labels]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in labels])])
    features = generator.integers(NUM_FEATURES, size=NUM_QUERIES * 40).astype(np.int32)
    values = generator.random(len(features)).astype(np.float32)
    return Dataset(
        name=f"{labels_a_query} drawn",
        parts={
            "train": Part(
                Rows(np.arange(NUM_QUERIES + 1) * 40, features, values),
                Rows(offsets, np.concatenate(labels).astype(np.int32)),
            )
        },
        num_features=NUM_FEATURES,
        num_labels=NUM_LABELS,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time with and without whole queries.")
    parser.add_argument("--data", help="folder with train.txt and test.txt, plain or compressed")
    parser.add_argument("--batch-size", type=int, default=4096, help="pairs (%(default)s)")
    parser.add_argument("--turns", type=int, default=15, help="of each way (%(default)s)")
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
