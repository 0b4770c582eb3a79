"""Time of one training step beside the obvious ways to write it, as ratios in one run.

    python benchmarks/step.py                        the shape of the demonstration
    python benchmarks/step.py --batch-size 2048 --sampled 4096 --dim 512 --json step.json

Every way is given the same batch, table and sample; one step is sample, score, mine, gradient and
update of the label table. `ratio_to_product` is the time over that of the bare score product.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from evenhand import UniformSampler, contrastive_loss, mask_positives, s2m_loss, top_weights
from evenhand.models.encoders import MlpEncoder
from evenhand.models.retriever import Retriever
from evenhand.training.optimizers import RowAdam
from evenhand.training.step import Batch, gradients_of, mine

LOSS_FN = partial(contrastive_loss, margin=0.3, power=1.0)


def main() -> None:
    options = _options()
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(options.labels, options.dim, generator=generator)
    features = torch.randn(options.batch_size, options.dim, generator=generator)
    labels = torch.randint(options.labels, (options.batch_size,), generator=generator)
    sampler = UniformSampler(options.labels)
    ways: dict[str, Callable[[], Any]] = {
        "score product alone": _product(features, table, options),
        "evenhand, mine then differentiate": _evenhand(features, labels, table, sampler, options),
        "shared negatives, autograd, SparseAdam": _autograd(
            features, labels, table, sampler, options
        ),
        "full softmax, autograd, Adam": _full_softmax(features, labels, table),
    }
    seconds = {name: _median_seconds(way, options.repeats) for name, way in ways.items()}
    floor = seconds["score product alone"]
    rows = [
        {
            "name": name,
            "labels": options.labels,
            "milliseconds": round(1000 * value, 3),
            "ratio_to_product": round(value / floor, 2),
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        for name, value in seconds.items()
    ]
    shown = Table("step", "ms", "over the product", title=_title(options), title_justify="left")
    for row in rows:
        shown.add_row(row["name"], f"{row['milliseconds']:.1f}", f"{row['ratio_to_product']:.2f}")
    Console().print(shown)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


def _product(features: Tensor, table: Tensor, options: argparse.Namespace) -> Callable[[], Any]:
    sampled = table[: options.sampled].clone()
    return lambda: features @ sampled.T


def _evenhand(
    features: Tensor,
    labels: Tensor,
    table: Tensor,
    sampler: UniformSampler,
    options: argparse.Namespace,
) -> Callable[[], Any]:
    """Our step; the encoder is one linear layer that is not updated, as in the others."""
    model = Retriever(MlpEncoder(options.dim, options.dim), options.labels, options.dim)
    model.label_table.data = table.clone()
    optimizer = RowAdam(model.label_table)
    generator = torch.Generator().manual_seed(1)
    batch = Batch(features, labels, labels.unsqueeze(1))

    def step() -> None:
        sample = sampler.sample(batch.positive_ids, options.sampled, generator=generator)
        queries = F.normalize(features, dim=1)
        mined = mine(
            queries,
            batch,
            model,
            sample,
            num_hard_labels=options.hard_labels,
            loss_fn=LOSS_FN,
            risk_fn=partial(top_weights, num_hard_examples=options.hard_examples),
        )
        gradients = gradients_of(mined, queries, batch, model)
        optimizer.step(gradients.label_rows, learning_rate=0.01)

    return step


def _autograd(
    features: Tensor,
    labels: Tensor,
    table: Tensor,
    sampler: UniformSampler,
    options: argparse.Namespace,
) -> Callable[[], Any]:
    embedding = torch.nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    positives = labels.unsqueeze(1)
    queries = features.clone().requires_grad_()

    def step() -> None:
        ids = sampler.sample(positives, options.sampled, generator=generator).ids
        units = F.normalize(queries, dim=1)
        scores = mask_positives(units @ F.normalize(embedding(ids), dim=1).T, ids, positives)
        positive_scores = (units * F.normalize(embedding(labels), dim=1)).sum(1)
        loss = s2m_loss(
            positive_scores,
            scores,
            num_hard_labels=options.hard_labels,
            num_hard_examples=options.hard_examples,
            loss_fn=LOSS_FN,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _full_softmax(features: Tensor, labels: Tensor, table: Tensor) -> Callable[[], Any]:
    weights = torch.nn.Parameter(table.clone())
    optimizer = torch.optim.Adam([weights], lr=0.01)

    def step() -> None:
        loss = F.cross_entropy(features @ weights.T, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _median_seconds(way: Callable[[], Any], repeats: int) -> float:
    way()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        way()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _title(options: argparse.Namespace) -> str:
    return (
        f"batch {options.batch_size}, {options.sampled} of {options.labels:,} labels sampled, "
        f"k {options.hard_labels}, k' {options.hard_examples}, width {options.dim}, "
        f"{torch.get_num_threads()} threads"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--sampled", type=int, default=2048)
    parser.add_argument("--hard-labels", type=int, default=32)
    parser.add_argument("--hard-examples", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--labels", type=int, default=34_006)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
