"""Images of which some classes are rare: SGD, the k' largest losses, and even-handed mining.

    python -m experiments.rare_classes mnist --data downloads --minutes 30
    python -m experiments.rare_classes cifar10 --data downloads --steps 12000 --seeds 1 2 3

LeNet on MNIST or ResNet-18 on CIFAR-10, the odd classes cut 100 : 1, in a plain training loop: the
methods differ in the line that weighs the losses of a batch. The learning rate of each method is
chosen on pictures held out of training, with equal trials and other seeds. Every finished training
is kept in the results, so the same command continues where it stopped.
"""

import argparse
import dataclasses
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from evenhand.data import Rows
from evenhand.data.held_out import frequency_bins, hold_out_queries
from evenhand.files import read_json, write_json
from evenhand.risk import EvenMining, mean_weights, top_weights
from experiments.image_data import ImageData, load_cifar10, load_mnist
from experiments.imbalanced_images import accuracies, held_out, pictures_of, training_rows
from experiments.seed_statistics import add_summaries, format_table
from experiments.table2_rows import Row, table_rows

METHODS = ("SGD", "average top-k'", "even-handed")
RATES = {"mnist": (0.01, 0.02, 0.04), "cifar10": (0.05, 0.1, 0.2)}
BATCH_SIZES = {"mnist": 64, "cifar10": 128}
HELD_OUT_SHARE = 0.05  # of the training pictures; of a rare class that is 3 of 60
TUNING_SEED = 101


def lenet() -> nn.Module:
    """The paper's: 20 and 50 channels, 500 hidden units."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """ResNet-18 with the stem for pictures of 32 x 32 points."""
    from torchvision.models import resnet18  # type: ignore[import-not-found]

    model: Any = resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model  # type: ignore[no-any-return]


def weights_fn(
    method: str, labels: NDArray[np.int64], row: Row, num_steps: int, seed: int
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """(B,) losses, (B,) places among the training pictures, the step -> (B,) weights."""
    if method == "SGD":
        return lambda losses, places, step: mean_weights(losses)
    if method == "average top-k'":
        return lambda losses, places, step: top_weights(
            losses, num_hard_examples=row.num_hard_examples
        )
    positives = Rows(np.arange(len(labels) + 1), labels)
    is_held_out = hold_out_queries(positives, num_labels=10, share=HELD_OUT_SHARE, seed=seed)
    bins = frequency_bins(positives, is_held_out, num_labels=10)
    mining, pair_bins = EvenMining(torch.from_numpy(bins.shape)), torch.from_numpy(bins.pair_bins)

    def weigh_evenly(losses: Tensor, places: Tensor, step: int) -> Tensor:
        # k' shrinks in a line from the whole batch.
        left = row.num_hard_examples - row.batch_size
        count = round(row.batch_size + step / num_steps * left)
        own_bins = pair_bins.to(losses.device)[places]
        return mining(losses, own_bins, num_hard_examples=count)

    return weigh_evenly


def train(
    method: str, data: ImageData, rows: NDArray[np.int64], row: Row, num_steps: int, seed: int
) -> nn.Module:
    """A model after so many steps of momentum SGD, its rate falling to 0 as a cosine does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # layers draw their first weights from the global generator
        model = (lenet() if row.data == "mnist" else resnet18()).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pixels, targets = _inputs(data.train_images[rows], data.train_labels[rows], device)
    weigh_fn = weights_fn(method, data.train_labels[rows], row, num_steps, seed)
    decayed = row.weight_decay if row.data == "mnist" else 5e-4
    optimizer = torch.optim.SGD(
        model.parameters(), row.learning_rate, momentum=row.momentum, weight_decay=decayed
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(num_steps):
        if len(order) < row.batch_size:  # the next epoch; the last partial batch is left out
            order = torch.randperm(len(rows), generator=generator)
        places, order = order[: row.batch_size].to(device), order[row.batch_size :]
        images = pixels[places]
        if row.data == "cifar10":
            images = _moved(images, generator)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            losses = F.cross_entropy(model(images).float(), targets[places], reduction="none")
        objective = (weigh_fn(losses.detach(), places, step) * losses).sum()
        for group in optimizer.param_groups:
            group["lr"] = row.learning_rate * (1 + math.cos(math.pi * step / num_steps)) / 2
        optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def _inputs(
    images: NDArray[np.uint8], labels: NDArray[np.int64], device: torch.device
) -> tuple[Tensor, Tensor]:
    pictures = pictures_of(images, labels)
    pixels = (pictures.pixels.to(device).float() - pictures.shift) / pictures.scale
    return pixels.permute(0, 3, 1, 2), pictures.labels.to(device)  # (N, C, H, W), channels last


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures moved by up to 4 points and mirrored at random, an eighth of the batch alike."""
    moved = F.pad(images, (4, 4, 4, 4))
    size, parts = images.shape[-1], []
    for part in moved.chunk(8):
        down, right, mirrored = torch.randint(0, 9, (3,), generator=generator).tolist()
        part = part[..., down : down + size, right : right + size]
        parts.append(part.flip(3) if mirrored % 2 else part)
    return torch.cat(parts)


@torch.no_grad()
def predictions(model: nn.Module, images: NDArray[np.uint8]) -> NDArray[np.int64]:
    device = next(model.parameters()).device
    pixels, _ = _inputs(images, np.zeros(len(images), dtype=np.int64), device)
    return torch.cat([model(part).argmax(1).cpu() for part in torch.split(pixels, 1000)]).numpy()


def measure(
    method: str, data: ImageData, row: Row, num_steps: int, seed: int, *, is_tuning: bool
) -> dict[str, Any]:
    """Accuracies of one training: on pictures held out of training to tune, else on the test."""
    began, rows = time.monotonic(), training_rows(data.train_labels, row, seed)
    images, labels = data.test_images, data.test_labels
    if is_tuning:
        rows, own = held_out(data.train_labels, rows, row, seed)
        images, labels = data.train_images[own], data.train_labels[own]
    found = accuracies(
        predictions(train(method, data, rows, row, num_steps, seed), images), labels, row
    )
    return found | {"seed": seed, "diverged": False, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=tuple(RATES))
    parser.add_argument("--data", type=Path, required=True, help="folder of the images")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tuning-steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--out", type=Path, help="results (benchmarks/results/rare-classes-DATA.json)"
    )
    options = parser.parse_args()
    path = options.out or Path(f"benchmarks/results/rare-classes-{options.table}.json")
    console = Console()
    data = (load_mnist if options.table == "mnist" else load_cifar10)(options.data)
    size = BATCH_SIZES[options.table]
    row = dataclasses.replace(
        next(row for row in table_rows("table2-mnist-odd") if row.num_hard_examples == 16),
        data=options.table,
        batch_size=size,
        num_hard_examples=size // 4,
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    result: dict[str, Any] = read_json(path) if path.exists() else {"trials": [], "runs": []}
    result |= {"device": device or platform.machine(), "torch": torch.__version__}
    result |= {"steps": options.steps, "tuning_steps": options.tuning_steps}

    def found(kind: str, method: str, rate: float, seed: int) -> dict[str, Any]:
        """The training, from the results if it is there."""
        key = {"method": method, "learning_rate": rate, "seed": seed}
        for old in result[kind]:
            if old.items() >= key.items():
                return dict(old)
        own, steps = dataclasses.replace(row, learning_rate=rate), options.steps
        steps = options.tuning_steps if kind == "trials" else steps
        new = key | measure(method, data, own, steps, seed, is_tuning=kind == "trials")
        result[kind].append(new)
        write_json(path, result)
        console.print(f"{kind}: {new}")
        return new

    def score(method: str, rate: float) -> float:
        trial = found("trials", method, rate, TUNING_SEED)
        return float(trial["head"] + trial["tail"])  # alike, as in the test part

    rates = RATES[options.table]
    chosen = {method: max(rates, key=lambda rate: score(method, rate)) for method in METHODS}
    result["chosen"] = chosen
    for seed in options.seeds:  # a seed of every method before the next seed
        for method in METHODS:
            found("runs", method, chosen[method], seed)
    rows = []
    for method in METHODS:
        runs = [found("runs", method, chosen[method], seed) for seed in options.seeds]
        is_baseline = method == "SGD"
        rows.append({"name": method, "learning_rate": chosen[method], "is_baseline": is_baseline,
                     "paper": None, "per_seed": runs})  # fmt: skip
    result["rows"] = add_summaries(rows)
    write_json(path, result)
    console.print(format_table(rows, title=f"{options.table}, {options.steps:,} steps"))


if __name__ == "__main__":
    main()
