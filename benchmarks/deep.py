"""What two passes save: a step with a deep encoder, its survivors differentiated or all of it.

    python benchmarks/deep.py --out benchmarks/results/deep-cpu.json
    python benchmarks/deep.py --layers 6 --width 384 --length 64 --batch 4096 --chunk 1024 \
        --device cuda --out benchmarks/results/deep-gpu.json        # autocast to bfloat16 there

In turns, the time of each the median over the rounds: the whole batch in one pass; gradient
caching, which is two passes over all of it in chunks; the cached loss of sentence-transformers,
whose labels are those of the batch, looked up in the same table; and two passes with k' survivors.
Attention has no dropout of its own, for a GPU's fused kernels draw masks that cannot be repeated.
On a CPU the time is that of the process, so that other programs on the machine hardly count. By
arithmetic a backward pass costs two forward passes, so the bounds are 3 / (1 + 3 k' / B).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn

from evenhand import UniformSampler, mask_positives, s2m_loss, two_pass
from machine import processor


class Encoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(
            width,
            width // 64,
            4 * width,
            dropout=options.dropout,
            batch_first=True,
            norm_first=True,
        )
        layer.self_attn.dropout = 0.0
        self.layers = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.tokens(tokens)).mean(1)


class Columns(nn.Module):
    """For sentence-transformers: reads the column of queries, looks up the column of labels."""

    def __init__(self, encoder: Encoder, table: Tensor) -> None:
        super().__init__()
        self.encoder, self.table = encoder, table

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = features["input_ids"]  # (b, T) tokens, or (b, 1) labels
        vectors = self.table[ids[:, 0]] if ids.shape[1] == 1 else self.encoder(ids)
        return features | {"sentence_embedding": vectors.float()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    device, batch = torch.device(options.device), options.batch
    encoder, table = Encoder(options).to(device), torch.randn(options.labels, options.width)
    table = nn.Parameter(table.to(device))
    tokens = torch.randint(1000, (batch, options.length), device=device)
    labels = torch.randint(options.labels, (batch,), device=device)
    ids = UniformSampler(options.labels).sample(
        labels.unsqueeze(1).cpu(), options.sampled, generator=torch.Generator()
    ).ids.to(device)  # fmt: skip
    columns = [{"input_ids": tokens}, {"input_ids": labels.unsqueeze(1)}]
    cached = CachedMultipleNegativesRankingLoss(
        SentenceTransformer(modules=[Columns(encoder, table)], device=options.device),
        mini_batch_size=options.chunk,
    )
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def step_of_peer() -> None:
        with mixed:  # the second pass of its encoder is inside `backward`
            cached(columns, labels).backward()

    def step(num_hard_examples: int, chunk_size: int) -> None:
        with mixed:
            if chunk_size:
                queries = two_pass(encoder, tokens, chunk_size=chunk_size)
            else:
                queries = encoder(tokens)
        queries = nn.functional.normalize(queries.float())
        rows = nn.functional.normalize(table)
        scores = mask_positives(20 * queries @ rows[ids].T, ids, labels.unsqueeze(1))
        positive = 20 * (queries * rows[labels]).sum(1)
        s2m_loss(
            positive, scores, num_hard_labels=16, num_hard_examples=num_hard_examples
        ).backward()

    ways: dict[str, Callable[[], None]] = {
        "one pass": lambda: step(batch // 8, 0),
        "gradient caching": lambda: step(batch, options.chunk),
        "sentence-transformers, cached": step_of_peer,
        "two passes, k' = B/8": lambda: step(batch // 8, options.chunk),
        "two passes, k' = B/16": lambda: step(batch // 16, options.chunk),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    for _ in range(options.rounds + 1):  # the first is a warm-up
        for name, way in ways.items():
            encoder.zero_grad()
            table.grad = None
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began, cpu_began = time.perf_counter(), time.process_time()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated()
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)
    own_seconds = seconds if peaks else cpu_seconds
    medians = {name: statistics.median(own[1:]) for name, own in own_seconds.items()}
    return {
        "command": "python benchmarks/deep.py " + " ".join(sys.argv[1:]),
        "machine": {
            "device": torch.cuda.get_device_name() if peaks else processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "sentence-transformers": sentence_transformers.__version__,
        },
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "median_seconds": medians,
        "times_as_fast_as_one_pass": {
            name: round(medians["one pass"] / own, 2) for name, own in medians.items()
        },
        "bounds": {f"B/{part}": round(3 / (1 + 3 / part), 2) for part in (8, 16)},
        "peak_bytes": peaks,  # on a GPU
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "layers": 4, "width": 256, "length": 32, "batch": 256, "chunk": 32, "labels": 20_000,
        "sampled": 1024, "rounds": 5,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options)
    print(json.dumps(results["times_as_fast_as_one_pass"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
