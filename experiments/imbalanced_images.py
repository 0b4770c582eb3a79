"""Pictures of table 2: which training rows a seed keeps, what is held out, a generated fixture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.image_data import ImageData, load_cifar10, load_mnist
from experiments.table2_rows import Row

IntArray = NDArray[np.int64]


class Pictures(NamedTuple):
    """Pictures and classes; what a model sees is (pixel - shift) / scale."""

    pixels: Tensor  # (N, height, width, channels) uint8
    labels: Tensor  # (N,) int64
    shift: float = 0.0
    scale: float = 255.0


def load_images(row: Row, folder: Path) -> ImageData:
    return {"mnist": load_mnist, "cifar10": load_cifar10}[row.data](folder)


def pictures_of(images: NDArray[np.uint8], labels: IntArray) -> Pictures:
    """MNIST as 0 to 1; the colours of CIFAR-10 as -2 to 2, about mean 0 and deviation 1."""
    pixels = torch.from_numpy(np.ascontiguousarray(images))
    targets = torch.from_numpy(labels.astype(np.int64))
    if pixels.dim() == 3:
        return Pictures(pixels.unsqueeze(3), targets)  # (N, H, W, 1)
    return Pictures(pixels.permute(0, 2, 3, 1).contiguous(), targets, shift=127.5, scale=63.75)


def training_rows(labels: IntArray, row: Row, seed: int) -> IntArray:
    """All rows of the head, and the seed's own draw of a share of every tail class."""
    generator = np.random.default_rng([seed, 2])
    kept = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if label in row.tail_classes:
            count = max(1, round(row.tail_share * len(rows)))
            rows = np.sort(generator.permutation(rows)[:count])
        kept.append(rows)
    return np.sort(np.concatenate(kept))


def held_out(labels: IntArray, rows: IntArray, row: Row, seed: int) -> tuple[IntArray, IntArray]:
    """Of a seed's training rows, those to train on and those to validate on, class by class.

    What was cut from the tail stays cut: the validation part has as few of it as training could
    spare, and is therefore weighed (see `balanced`).
    """
    generator = np.random.default_rng([seed, 3])
    validation = []
    for label in np.unique(labels[rows]):
        of_class = rows[labels[rows] == label]
        count = max(1, round(row.validation_share * len(of_class)))
        validation.append(generator.permutation(of_class)[:count])
    chosen = np.sort(np.concatenate(validation))
    return np.setdiff1d(rows, chosen), chosen


def accuracies(predicted: IntArray, labels: IntArray, row: Row) -> dict[str, float]:
    """Shares of right answers among head classes, tail classes and all pictures."""
    right = predicted == labels
    is_tail = np.isin(labels, row.tail_classes)
    return {
        "head": float(right[~is_tail].mean()),
        "tail": float(right[is_tail].mean()),
        "full": float(right.mean()),
    }


def fixture(row: Row, *, per_class: int = 80, seed: int = 0) -> ImageData:
    """Small noisy pictures, a pattern for each of ten classes: for a quick look, without files."""
    shape = (28, 28) if row.data == "mnist" else (3, 32, 32)
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 256, (10, *shape))

    def side(count: int) -> tuple[NDArray[np.uint8], IntArray]:
        labels = np.repeat(np.arange(10), count)
        noise = generator.integers(0, 256, (len(labels), *shape))
        return ((patterns[labels] + noise) // 2).astype(np.uint8), labels

    return ImageData(*side(per_class), *side(10))
