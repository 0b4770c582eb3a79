"""Is the shuffle of data larger than memory random enough? Measured on data sorted by label.

    python benchmarks/shuffling.py --json shuffling.json
    python benchmarks/shuffling.py --train train.txt.xz --seeds 0 1 2 3 4     and training as well

Rows sorted by their label are stored by random keys and read in pools of blocks, as `evenhand data
stream` and training do it. Of every batch of an epoch the histogram of labels is compared with that
of all pairs: sum over labels of (count - expected)^2 / expected, over its mean for a batch that is
drawn without replacement, so that 1 is a perfect shuffle. `met again` is how often two examples of
a batch are in one batch in the next epoch too, over what it would be by chance.

With `--train`, models are trained on a text by both orders, on the same rows and with the same
settings, and compared on the validation part. Its blocks are made so small that there are many.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from evenhand.config import build_config
from evenhand.data import Dataset
from evenhand.data.stream import row_keys, stream_extreme
from evenhand.evaluation import score_table
from evenhand.runs import begin_run, evaluate_model, load_model, train_run
from evenhand.training.feed import PairOrder

NUM_ROWS, NUM_LABELS, BATCH_SIZE, BLOCK_PAIRS = 400_000, 200, 512, 1024
TRAINING_BLOCK_PAIRS = 32  # so that a pool is 2,048 pairs, and there are some
SHOWN = ("recall@10", "precision@1")

IntArray = NDArray[np.int64]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    console = Console()
    figures: dict[str, Any] = {"batches": batch_figures(options.pairs_a_row)}
    table = Table("order", "variance of a batch's labels", "met again")
    for row in figures["batches"]:
        table.add_row(row["order"], f"{row['variance']:.3f}", f"{row['met_again']:.2f}")
    console.print(table)
    if options.train:
        figures["training"] = training_figures(Path(options.train), options, console)
        table = Table("order", *(f"{metric}, mean and deviation over seeds" for metric in SHOWN))
        for name, values in figures["training"].items():
            cells = [f"{np.mean(v):.4f} ± {np.std(v, ddof=1):.4f}" for v in values.values()]
            table.add_row(name, *cells)
        console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


# --- batches ------------------------------------------------------------------------------------


def batch_figures(pairs_a_row: int) -> list[dict[str, Any]]:
    """Rows sorted by label, `pairs_a_row` pairs each, in three orders over two epochs."""
    labels = np.sort(np.random.default_rng(0).integers(NUM_LABELS, size=NUM_ROWS))
    stored = np.argsort(row_keys(np.arange(NUM_ROWS), 0))
    pair_labels = np.repeat(labels, pairs_a_row)
    stored_pairs = (stored[:, None] * pairs_a_row + np.arange(pairs_a_row)).ravel()
    size = len(pair_labels)
    generator = np.random.default_rng(1)
    in_blocks = PairOrder(size, BLOCK_PAIRS)
    keys = torch.randint(2**63 - 1, (2, 1, 1), generator=torch.Generator().manual_seed(0))
    epochs = {
        "as sorted": [np.arange(size)] * 2,
        "blocks of rows as sorted": [_read(0, size, key, in_blocks) for key in keys],
        "stored by keys, read in blocks": [
            stored_pairs[_read(0, size, key, in_blocks)] for key in keys
        ],
        "perfect": [generator.permutation(size) for _ in range(2)],
    }
    return [
        {
            "order": name,
            "pairs_a_row": pairs_a_row,
            "num_pools": in_blocks.num_pools,
            "variance": variance_of_batches(pair_labels[first]),
            "met_again": met_again(first, second),
        }
        for name, (first, second) in epochs.items()
    ]


def _read(first: int, last: int, key: torch.Tensor, order: PairOrder) -> IntArray:
    return order.pairs_at(first, last, key).numpy()


def variance_of_batches(labels: IntArray) -> float:
    """The chi-square of a batch's labels, over its mean for draws without replacement."""
    shares = np.bincount(labels, minlength=NUM_LABELS) / len(labels)
    batches = labels[: len(labels) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
    expected = BATCH_SIZE * shares
    statistics = [
        ((np.bincount(batch, minlength=NUM_LABELS) - expected) ** 2 / expected).sum()
        for batch in batches
    ]
    mean = (NUM_LABELS - 1) * (len(labels) - BATCH_SIZE) / (len(labels) - 1)
    return float(np.mean(statistics) / mean)


def met_again(first: IntArray, second: IntArray) -> float:
    """Pairs of examples in one batch in both epochs, over the expected number of them."""
    num_batches = len(first) // BATCH_SIZE
    batch_of = np.empty(len(first), dtype=np.int64)
    batch_of[second] = np.arange(len(second)) // BATCH_SIZE
    meetings = 0
    for batch in first[: num_batches * BATCH_SIZE].reshape(-1, BATCH_SIZE):
        counts = np.bincount(batch_of[batch])
        meetings += int((counts * (counts - 1) // 2).sum())
    pairs_in_batch = BATCH_SIZE * (BATCH_SIZE - 1) / 2
    return meetings / (num_batches * pairs_in_batch * (BATCH_SIZE - 1) / (len(first) - 1))


# --- training -----------------------------------------------------------------------------------


def training_figures(
    path: Path, options: argparse.Namespace, console: Console
) -> dict[str, dict[str, list[float]]]:
    """Order -> metric -> its values on the validation part, one a seed."""
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = stream_extreme(path, folder / "data", name="sorted")
        for order, block_pairs in (("in blocks", TRAINING_BLOCK_PAIRS), ("perfect", 0)):
            train_part = dataclasses.replace(dataset.parts["train"], block_pairs=block_pairs)
            ordered = dataclasses.replace(dataset, parts={**dataset.parts, "train": train_part})
            figures[order] = {metric: [] for metric in SHOWN}
            for seed in options.seeds:
                scores = _trained(folder / f"{order}-{seed}", ordered, seed, options, console)
                for metric in SHOWN:
                    figures[order][metric].append(scores[metric])
    return figures


def _trained(
    folder: Path, dataset: Dataset, seed: int, options: argparse.Namespace, console: Console
) -> dict[str, float]:
    config = build_config(
        {
            "data": {"dataset": "sorted"},
            "model": {"embedding_dim": 64},
            "mining": {
                "method": "s2m",
                "batch_size": 256,
                "num_sampled_labels": 128,
                "num_hard_labels": 32,
                "num_hard_examples": 128,
            },
            "training": {"num_steps": options.steps, "seed": seed, "checkpoint_every": 0},
        }
    )
    device = torch.device("cpu")
    begin_run(folder, config, dataset, device=device)
    train_run(folder, config, dataset, device=device, console=console)
    model = load_model(folder, dataset, device=device)
    outcome = evaluate_model(model, dataset, "validation", config)
    scores = score_table(outcome, dataset, "validation", min_pairs={}, num_resamples=0)
    return {score.metric: score.value for score in scores if score.column == "all"}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the shuffle of streamed data.")
    parser.add_argument("--pairs-a-row", type=int, default=1, help="labels of a row (%(default)s)")
    parser.add_argument("--train", help="a text to train on, by both orders")
    parser.add_argument("--steps", type=int, default=400, help="of training (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
