"""Time and memory of one training step on a CUDA device, beside the other ways to write it.

    python benchmarks/gpu.py                       13,330 and 10^6 labels, the shape of the docs
    python benchmarks/gpu.py --sweep               width 128, from 10^4 to 10^8 labels, as well
    python benchmarks/gpu.py --epoch               an epoch of the shape of AmazonCat-13K, as well
    python benchmarks/gpu.py --json speed.json

A step is: sample, score, mine, gradient of the queries and of the labels, update of the label
table. Tables, vectors and products are bfloat16, sums float32; Evenhand's table is rounded by
chance. Evenhand's update is row-wise Adagrad. The others update by plain SGD, which is the least
that they could do: a dense Adagrad would take them longer.

`milliseconds` is the median of 30 timings by CUDA events, each over several steps. "CUDA graph"
says that a way was recorded and replayed; ways with sparse gradients cannot be, and run as they
are written. `ratio_to_product` is the time over that of the bare score product of the same shape,
recorded, in the same run. `peak_bytes` is the most that was allocated while the way ran, its
table and all buffers included.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

from evenhand import UniformSampler, softmax_loss
from evenhand.data import Part, Rows
from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.gather import product
from evenhand.kernels.gpu.losses import kernel_loss
from evenhand.kernels.gpu.rows import RowTable
from evenhand.kernels.gpu.step import MiningStep
from evenhand.models import BagEncoder, Retriever
from evenhand.training.feed import PairFeed
from evenhand.training.gpu_step import GpuStep
from evenhand.training.optimizers import Optimizers, RowAdagrad
from evenhand.training.state import Plan, Scheduled, Training
from evenhand.training.step import HARDEST
from ways import SCALE, Shape

CUDA = torch.device("cuda")
PLANNED = 2**16  # steps for which a benchmark's clock has numbers
SWEEP_LABELS = (10**4, 10**5, 10**6, 10**7, 10**8)
MOST_SOFTMAX_LABELS = 10**6  # beyond, its scores alone take 80 GB
Step = Callable[[], object]


class Problem:
    """One batch and a table, drawn on the device from a fixed seed."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.vectors = torch.randn(shape.batch_size, shape.dim, device=CUDA)
        self.label_ids = torch.randint(shape.labels, (shape.batch_size,), device=CUDA)
        self.table = torch.empty(shape.labels, shape.dim, device=CUDA, dtype=torch.bfloat16)
        for start in range(0, shape.labels, 2**20):
            self.table[start : start + 2**20].normal_()

    def draw(self, *size: int) -> Tensor:
        """Label ids with repeats, the cheapest sample there is."""
        return torch.randint(self.shape.labels, size, device=CUDA)


# --- Evenhand and the floor -----------------------------------------------------------------------


def score_product(problem: Problem) -> Step:
    shape = problem.shape
    queries = F.normalize(problem.vectors).bfloat16()
    units = torch.randn(shape.sampled, shape.dim, device=CUDA).bfloat16()
    scores = torch.empty(shape.batch_size, shape.sampled, device=CUDA)
    return recorded(lambda: product(queries, units, out=scores))


def evenhand(
    problem: Problem, *, hard_examples: int | None = None, draws_for_each: bool = False
) -> Step:
    shape = problem.shape
    rows = RowTable(problem.table, torch.zeros(shape.labels, device=CUDA), seed=0)
    clock = Clock.planned(
        torch.full((PLANNED,), 0.01, device=CUDA),
        torch.full((PLANNED,), hard_examples or shape.hard_examples, device=CUDA),
        torch.randint(2**62, (PLANNED,), device=CUDA),
    )
    loss = kernel_loss(softmax_loss)
    assert loss is not None
    step = MiningStep(
        rows,
        clock,
        batch_size=shape.batch_size,
        num_positives=1,
        num_sampled_labels=shape.sampled,
        num_hard_labels=shape.hard_labels,
        loss=loss,
        scale=SCALE,
        draws_for_each=draws_for_each,
    )
    step.vectors.copy_(problem.vectors)
    step.label_ids.copy_(problem.label_ids)
    step.positive_ids.copy_(problem.label_ids.unsqueeze(1))

    def run() -> None:
        clock.tick()
        step.mine()
        step.update()
        step.join()

    return recorded(run)


# --- the other ways -------------------------------------------------------------------------------


def gathered(problem: Problem) -> Step:
    """The obvious way: every example gathers the vectors of its own sample, (B, M, D)."""
    shape, table = problem.shape, problem.table.requires_grad_()
    queries = problem.vectors.bfloat16().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.batch_size, shape.sampled)
        units = F.normalize(queries, dim=1)
        negatives = F.normalize(F.embedding(ids, table), dim=2)  # (B, M, D)
        scores = SCALE * torch.einsum("bd,bmd->bm", units, negatives)
        positives = F.normalize(F.embedding(problem.label_ids, table), dim=1)
        _mined_loss(shape, SCALE * (units * positives).sum(1), scores).backward()
        _sgd(table)

    return step


def all_scored(problem: Problem) -> Step:
    """Every label is scored, and each example looks at its own sample of the scores."""
    shape, table = problem.shape, problem.table.requires_grad_()
    queries = problem.vectors.bfloat16().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.batch_size, shape.sampled)
        units = F.normalize(queries, dim=1)
        everything = SCALE * units @ F.normalize(table, dim=1).T  # (B, L)
        positives = everything.gather(1, problem.label_ids.unsqueeze(1))[:, 0]
        _mined_loss(shape, positives, everything.gather(1, ids)).backward()
        _sgd(table)

    return step


def shared(problem: Problem) -> Step:
    """One sample for the batch, autograd, sparse gradients of the table."""
    shape, table = problem.shape, problem.table.requires_grad_()
    queries = problem.vectors.bfloat16().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.sampled)
        units = F.normalize(queries, dim=1)
        negatives = F.normalize(F.embedding(ids, table, sparse=True), dim=1)
        positives = F.normalize(F.embedding(problem.label_ids, table, sparse=True), dim=1)
        scores = SCALE * units @ negatives.T
        scores = scores.masked_fill(ids == problem.label_ids.unsqueeze(1), -torch.inf)
        _mined_loss(shape, SCALE * (units * positives).sum(1), scores).backward()
        _sgd(table)

    return step


def mined_first(problem: Problem, *, is_graph: bool) -> Step:
    """What a good engineer writes in an hour: S2M mined without gradient, autograd over the rest.

    Gradients of the rows that were read are added where they belong: nothing is sparse, so that it
    can be recorded, and nothing is of the table's size.
    """
    shape, table, labels = problem.shape, problem.table, problem.label_ids
    queries = problem.vectors.bfloat16().requires_grad_()
    query_gradients = torch.zeros_like(queries)

    def step() -> None:
        ids = problem.draw(shape.sampled)
        with torch.no_grad():
            sampled, own = table.index_select(0, ids), table.index_select(0, labels)
            units = F.normalize(queries, dim=1)
            scores = SCALE * units @ F.normalize(sampled, dim=1).T  # (B, M)
            scores.masked_fill_(ids == labels.unsqueeze(1), -torch.inf)
            kept = scores.topk(shape.hard_labels, dim=1, sorted=False)  # (B, k)
            positive_scores = SCALE * (units * F.normalize(own, dim=1)).sum(1)
            losses = softmax_loss(positive_scores, kept.values)
            survivors = losses.topk(shape.hard_examples, sorted=False).indices  # (k',)
            columns, own = kept.indices[survivors], own[survivors]
        rows = [tensor.detach().requires_grad_() for tensor in (queries[survivors], sampled, own)]
        with torch.enable_grad():
            units, negatives, positives = (F.normalize(tensor, dim=1) for tensor in rows)
            scores = (SCALE * units @ negatives.T).gather(1, columns)  # (k', M) -> (k', k)
            loss = softmax_loss(SCALE * (units * positives).sum(1), scores).mean()
        by_query, by_sampled, by_own = torch.autograd.grad(loss, rows)
        with torch.no_grad():
            query_gradients.zero_().index_copy_(0, survivors, by_query)
            table.index_add_(0, ids, by_sampled, alpha=-0.01)
            table.index_add_(0, labels[survivors], by_own, alpha=-0.01)

    return recorded(step) if is_graph else step


def full_softmax(problem: Problem, *, is_compiled: bool) -> Step:
    """Cross-entropy over all labels by the dot product."""
    table = problem.table.requires_grad_()
    queries = problem.vectors.bfloat16().requires_grad_()

    def loss_of(queries: Tensor, table: Tensor) -> Tensor:
        return F.cross_entropy(queries @ table.T, problem.label_ids)

    loss_fn = torch.compile(loss_of, dynamic=False) if is_compiled else loss_of
    gradient = torch.zeros_like(table)

    def step() -> None:
        found, queries.grad = torch.autograd.grad(loss_fn(queries, table), [table, queries])
        gradient.copy_(found)
        with torch.no_grad():
            table.add_(gradient, alpha=-0.01)

    return recorded(step)


def _mined_loss(shape: Shape, positive_scores: Tensor, scores: Tensor) -> Tensor:
    hardest = scores.topk(shape.hard_labels, dim=1).values  # (B, k)
    losses = softmax_loss(positive_scores, hardest)
    return losses.topk(shape.hard_examples).values.mean()


def _sgd(table: Tensor) -> None:
    with torch.no_grad():
        table.add_(table.grad, alpha=-0.01)
    table.grad = None


# --- an epoch -------------------------------------------------------------------------------------


def epoch_row(console: Console) -> dict[str, Any]:
    """Everything from arrays in memory to a trained model: upload, plan, record, train.

    A first run of the same shape compiles the kernels, as they are on any machine after a minute.
    """
    num_queries, num_pairs, num_features, num_labels, width = (
        1_186_239,
        5_980_000,
        203_882,
        13_330,
        512,
    )
    rng = np.random.default_rng(0)
    with console.status("making 84 million feature values"):
        lengths = rng.poisson(71, num_queries).clip(1)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Cubes of uniform numbers: some features and labels are in nearly every document.
        ids = (rng.random(offsets[-1], dtype=np.float32) ** 3 * num_features).astype(np.int32)
        values = rng.random(offsets[-1], dtype=np.float32)
        counts = 1 + np.bincount(
            rng.integers(0, num_queries, num_pairs - num_queries), minlength=num_queries
        )
        positives = (rng.random(num_pairs) ** 3 * num_labels).astype(np.int32)
        part = Part(
            Rows(offsets, ids, values),
            Rows(np.concatenate([[0], np.cumsum(counts)]), positives),
            {},
        )
    seconds, peak = [], 0
    for num_steps in (3, num_pairs // 2048):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step = _epoch_step(part, num_features, num_labels, width, num_steps)
        for _ in range(num_steps):
            step(Scheduled(0.01, 512))
            step.training.step += 1
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated()
    return {
        "name": "evenhand epoch, AmazonCat-13K's shape",
        "labels": num_labels,
        "milliseconds": round(1000 * seconds[1], 1),
        "milliseconds_a_step": round(1000 * seconds[1] / (num_pairs // 2048), 4),
        "milliseconds_first_compiled": round(1000 * seconds[0], 1),
        "pairs": num_pairs,
        "features": num_features,
        "features_a_document": 71,
        "peak_bytes": peak,
        "batch_size": 2048,
        "sampled": 4096,
        "hard_labels": 64,
        "hard_examples": 512,
        "dim": width,
    }


def _epoch_step(
    part: Part, num_features: int, num_labels: int, width: int, num_steps: int
) -> GpuStep:
    torch.manual_seed(0)
    model = Retriever(BagEncoder(1, width), 1, width, scale=SCALE).to(CUDA)
    encoder = model.encoder
    assert isinstance(encoder, BagEncoder)
    for weights, num_rows in ((encoder.weight, num_features), (model.label_table, num_labels)):
        weights.data = torch.randn(num_rows, width, device=CUDA).mul_(width**-0.5).bfloat16()
    optimizers = Optimizers(
        {"labels": RowAdagrad(model.label_table), "features": RowAdagrad(encoder.weight)}, None
    )
    feed = PairFeed(
        part,
        batch_size=2048,
        masks_all_positives=True,
        generator=torch.Generator().manual_seed(1),
        device=CUDA,
    )
    plan = Plan(
        sampler=UniformSampler(num_labels),
        loss_fn=softmax_loss,
        num_steps=num_steps,
        num_sampled_labels=4096,
        num_hard_labels=64,
        num_hard_examples=512,
        learning_rate=0.01,
    )
    generator = torch.Generator().manual_seed(2)
    training = Training(model, optimizers, feed, generator, HARDEST)
    return GpuStep(training, plan, precision=torch.bfloat16)


# --- timing ---------------------------------------------------------------------------------------


def recorded(step: Step) -> Step:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def median_milliseconds(step: Step, *, budget: float = 1.0, repeats: int = 30) -> float:
    """Of `repeats` timings within about `budget` seconds."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    at_once = max(1, min(20, int(budget / repeats / (time.perf_counter() - began))))
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(at_once):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / at_once)
    return statistics.median(times)


def measured(name: str, way: Callable[[Problem], Step], shape: Shape) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = way(Problem(shape))
    milliseconds = median_milliseconds(step)
    return {
        "name": name,
        "labels": shape.labels,
        "milliseconds": round(milliseconds, 4),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "batch_size": shape.batch_size,
        "sampled": shape.sampled,
        "hard_labels": shape.hard_labels,
        "hard_examples": shape.hard_examples,
        "dim": shape.dim,
    }


PRODUCT = "score product alone, CUDA graph"
OURS = "evenhand S2M step"
SOFTMAX = "full softmax, autograd, CUDA graph"
SHARED = "shared negatives, autograd, sparse SGD"
MINED_FIRST = "mined first, autograd over the survivors, SGD, CUDA graph"
WAYS: dict[str, Callable[[Problem], Step]] = {
    PRODUCT: score_product,
    OURS: evenhand,
    "evenhand SNM step, all examples": lambda problem: evenhand(
        problem, hard_examples=problem.shape.batch_size
    ),
    "evenhand S2M step, a sample for each example": partial(evenhand, draws_for_each=True),
    "obvious PyTorch: gather (B, M, D), autograd": gathered,
    "score all labels, gather the sampled, autograd": all_scored,
    SHARED: shared,
    "mined first, autograd over the survivors, SGD": partial(mined_first, is_graph=False),
    MINED_FIRST: partial(mined_first, is_graph=True),
    SOFTMAX: partial(full_softmax, is_compiled=False),
    "full softmax, compiled, CUDA graph": partial(full_softmax, is_compiled=True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; benchmarks/cpu.py does not")
    console = Console(width=120)
    rows: list[dict[str, Any]] = []
    shapes = [
        Shape(
            labels=labels,
            batch_size=options.batch_size,
            sampled=options.sampled,
            hard_labels=options.hard_labels,
            hard_examples=options.hard_examples,
            dim=options.dim,
        )
        for labels in options.labels
    ]
    for shape in shapes:
        rows += _round(console, shape, list(WAYS), options)
    if options.sweep:
        for labels in SWEEP_LABELS:
            shape = Shape(labels, 2048, 4096, 64, 512, 128)
            names = [PRODUCT, OURS, SHARED, MINED_FIRST]
            if labels <= MOST_SOFTMAX_LABELS:
                names.append(SOFTMAX)
            rows += _round(console, shape, names, options)
    if options.epoch:
        rows.append(epoch_row(console) | _machine())
        console.print(rows[-1])
        _write(rows, options)


def _round(
    console: Console, shape: Shape, names: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        with console.status(f"{name}, {shape.labels:,} labels"):
            try:
                rows.append(measured(name, WAYS[name], shape) | _machine())
            except torch.OutOfMemoryError:
                console.print(f"{name} does not fit the memory at {shape.labels:,} labels")
    floor = rows[0]["milliseconds"]
    shown = Table("step", "ms", "over the product", "GiB", title=shape.words())
    for row in rows:
        row["ratio_to_product"] = round(row["milliseconds"] / floor, 2)
        shown.add_row(
            row["name"],
            f"{row['milliseconds']:.3f}",
            f"{row['ratio_to_product']:.2f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        )
    console.print(shown)
    options.rows = [*getattr(options, "rows", []), *rows]
    _write(options.rows, options)
    return rows


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labels", type=int, nargs="+", default=[13_330, 10**6])
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--sampled", type=int, default=4096)
    parser.add_argument("--hard-labels", type=int, default=64)
    parser.add_argument("--hard-examples", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--sweep", action="store_true", help="also cost over the number of labels")
    parser.add_argument("--epoch", action="store_true", help="also an epoch")
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
