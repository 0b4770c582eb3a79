"""What even-handed mining costs: its step beside that of annealed S2M, in one run.

    python benchmarks/even_step.py                 the shape of the demo on a CPU, of gpu.py on CUDA
    python benchmarks/even_step.py --out step.json

Both methods train from the same start on the same made-up documents, for as many steps, in which
k' shrinks from the whole batch. They take turns of `--block` steps, so that what else the machine
does falls on both. The ratio is the median over the turns; the first turn, which compiles, is left
out. The examples that are held out to measure the gap are in the batches, so their cost is in the
step's.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.build import Built, build_training
from evenhand.config import build_config
from evenhand.data import Dataset, Part, Rows
from evenhand.files import write_json
from places import SIZES, device_name

METHODS = ("s2m-annealed", "s2m-even")
CPU_SHAPE = {"labels": 34_006, "queries": 200_000, "features": 2**14, "words": 30} | {
    "model": SIZES["demo"]["model"],
    "mining": SIZES["demo"]["mining"],
    "loss": {"name": "contrastive", "power": 1.0},
    "precision": "mixed",
}
CUDA_SHAPE = {"labels": 13_330, "queries": 200_000, "features": 203_882, "words": 71} | {
    "model": {"embedding_dim": 512, "scale": 20.0},
    "mining": {"batch_size": 2048, "num_sampled_labels": 4096, "num_hard_labels": 64,
               "num_hard_examples": 512},
    "loss": {"name": "softmax"},
    "precision": "bfloat16",
}  # fmt: skip


def documents(shape: dict[str, Any]) -> Dataset:
    """Words and labels drawn by cubes of uniform numbers: some are frequent, most are rare."""
    rng = np.random.default_rng(0)
    num_queries, num_words = shape["queries"], shape["words"]
    words = rng.random(num_queries * num_words, dtype=np.float32) ** 3 * shape["features"]
    labels = rng.random(num_queries) ** 3 * shape["labels"]
    part = Part(
        Rows(np.arange(num_queries + 1) * num_words, words.astype(np.int32)),
        Rows(np.arange(num_queries + 1), labels.astype(np.int32)),
        {},
    )
    return Dataset("documents", shape["features"], shape["labels"], {"train": part})


def take_steps(built: Built, step: Any, count: int) -> float:
    """Milliseconds a step."""
    training, device = built.training, built.training.feed.device
    began = time.perf_counter()
    for _ in range(count):
        step(built.plan.at_step(training.step, batch_size=training.feed.batch_size))
        training.step += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, help="steps of a turn; 20 on a CPU, 200 on CUDA")
    parser.add_argument("--out", help="JSON file to write the figures to")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, block = (CUDA_SHAPE, 200) if device.type == "cuda" else (CPU_SHAPE, 20)
    block = options.block or block
    dataset, runs = documents(shape), []
    for method in METHODS:
        settings = {key: shape[key] for key in ("model", "loss")}
        settings["mining"] = shape["mining"] | {"method": method}
        settings["training"] = {
            "num_steps": block * (options.turns + 1), "precision": shape["precision"],
        }  # fmt: skip
        built = build_training(build_config(settings), dataset, device)
        chosen = built.choose_step()
        print(f"{method}: {chosen.describe()}")
        runs.append((built, chosen.step))
    turns = [[take_steps(*run, block) for run in runs] for _ in range(options.turns + 1)][1:]
    annealed, even = ([turn[place] for turn in turns] for place in (0, 1))
    found = {
        "milliseconds": {
            method: round(statistics.median(times), 4)
            for method, times in zip(METHODS, (annealed, even), strict=True)
        },
        "ratio": round(statistics.median(e / a for a, e in turns), 3),
        "ratio_of_sums": round(sum(even) / sum(annealed), 3),
    }
    print(found)
    if options.out:
        about = {
            "command": "python benchmarks/even_step.py", "device": device_name(),
            "num_threads": torch.get_num_threads(), "steps_of_a_turn": block, "shape": shape,
        }  # fmt: skip
        write_json(Path(options.out), about | found | {"turns": turns})


if __name__ == "__main__":
    main()
