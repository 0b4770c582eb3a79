"""How long a step of table 2's ResNets takes on this GPU, and how much memory.

    python -m experiments.stacked_models_speed

Random pictures, whatever the models make of them. One line for each number of models, stem and way.
"""

import argparse
import sys
import time

import numpy as np
import torch

from experiments.image_models import ResNet
from experiments.stacked_models import (
    Member,
    Pictures,
    StackedTraining,
    _compiled,
    objective,
    update,
)

NUM_PICTURES, BATCH = 10_000, 64


def training_of(stem: str, num_models: int) -> StackedTraining:
    generator = np.random.default_rng(0)
    pixels = torch.from_numpy(generator.integers(0, 256, (NUM_PICTURES, 32, 32, 3), dtype=np.uint8))
    labels = torch.from_numpy(generator.integers(0, 10, NUM_PICTURES))
    members = [
        Member(1 + place % 2, 0.01, (1, 16, 32, 64)[place // 2 % 4]) for place in range(num_models)
    ]
    return StackedTraining(
        ResNet(stem=stem),
        Pictures(pixels, labels, shift=127.5, scale=63.75),
        members,
        dict.fromkeys((1, 2), np.arange(NUM_PICTURES)),
        batch_size=BATCH,
        momentum=0.9,
        weight_decay=0.0005,
        decay_steps=100_000,
        augments=True,
        device=torch.device("cuda"),
        precision=torch.bfloat16,
    )


def measure(stem: str, num_models: int, *, compiles: bool) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    training = training_of(stem, num_models)
    functions = _compiled(training.classifier) if compiles else (objective, update)
    _, seconds = training._recorded(lambda: training.train_step(*functions))
    ready = time.perf_counter() - start
    start = time.perf_counter()
    training.predictions(training.pictures.pixels)
    torch.cuda.synchronize()
    asked = time.perf_counter() - start
    used = torch.cuda.max_memory_reserved() / 2**30
    print(
        f"stem {stem:6} models {num_models:2} {'compiled' if compiles else 'plain':8} "
        f"{1000 * seconds:7.2f} ms a step ({1000 * seconds / num_models:.2f} a model), "
        f"ready after {ready:.0f} s, test of 10,000 in {asked:.1f} s, {used:.0f} GiB, "
        f"losses {[round(loss, 3) for loss in training.losses.tolist()[:8]]}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stems", nargs="+", default=["cifar", "small"])
    parser.add_argument("--models", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--compile", nargs="*", default=[], help="stems to compile as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    for stem in options.stems:
        for num_models in options.models:
            measure(stem, num_models, compiles=False)
    for stem in options.compile:
        for num_models in options.models[-1:]:
            measure(stem, num_models, compiles=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
