"""Classifiers of pictures in a plain training loop: momentum SGD on the hardest examples.

Everything random is drawn from one seed: the first weights, the batches, dropout, and how pictures
are moved. So models of one seed differ in nothing but what is compared.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand.data import Rows
from evenhand.data.held_out import frequency_bins, hold_out_queries
from evenhand.errors import StoppedError
from evenhand.risk import EvenMining, top_weights
from experiments.imbalanced_images import IntArray, Pictures
from experiments.table2_rows import NUM_CLASSES, STEMS, Row

EDGE = 4  # points that a picture is moved by at most, each way
HELD_OUT_SHARE = 0.05  # of the training pictures, by even-handed mining: 3 of 60 in a rare class
STEPS_AT_ONCE = 100  # between questions whether to stop


def build_model(row: Row, *, is_small: bool = False) -> nn.Module:
    """The model of the paper's row; a small one of its kind for the quick look."""
    if row.model == "resnet50":
        blocks, width = ((1, 1), 8) if is_small else ((3, 4, 6, 3), 64)
        return ResNet(row.stem, blocks, width)
    first, second, hidden = (4, 8, 16) if is_small else row.widths or (20, 50, 500)
    channels, side = (1, 28) if row.data == "mnist" else (3, 32)
    for _ in range(2):
        side = (side + 2 * row.padding - 4) // 2  # of the picture after a convolution and pooling
    return nn.Sequential(
        nn.Conv2d(channels, first, 5, padding=row.padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=row.padding), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(side * side * second, hidden), nn.ReLU(), nn.Dropout(row.dropout),
        nn.Linear(hidden, NUM_CLASSES),
    )  # fmt: skip


class ResNet(nn.Sequential):
    """A ResNet with bottleneck blocks (He et al. 2016) and a stem for small pictures or large ones.

    "imagenet" (7 x 7 with stride 2, then pooling) is that of the article; "cifar" (3 x 3, no
    stride, no pooling) sees small pictures at 16 times the places and the cost, "small" (3 x 3 with
    stride 2, no pooling) at 4 times.
    """

    def __init__(
        self, stem: str, blocks: tuple[int, ...], width: int, num_classes: int = NUM_CLASSES
    ) -> None:
        size, stride = STEMS[stem]
        pool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        layers, inputs = [_convolution(3, width, size, stride), nn.ReLU(), pool], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(inputs, width * 2**stage, stride))
                inputs = 4 * width * 2**stage
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)]
        super().__init__(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        self.shortcut = (
            nn.Identity()
            if inputs == 4 * inner and stride == 1
            else _convolution(inputs, 4 * inner, 1, stride)
        )
        self.layers = nn.Sequential(
            _convolution(inputs, inner, 1, 1), nn.ReLU(),
            _convolution(inner, inner, 3, stride), nn.ReLU(),
            _convolution(inner, 4 * inner, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def train_model(
    row: Row,
    pictures: Pictures,
    rows: IntArray,
    *,
    num_steps: int,
    seed: int,
    device: torch.device,
    is_small: bool = False,
    should_stop_fn: Callable[[], bool] = lambda: False,
    on_step_fn: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    """The model of a row after so many steps over these rows of the pictures.

    Raises:
        StoppedError: the user asked to stop; an unfinished training leaves nothing.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build_model(row, is_small=is_small).to(device)
        optimizer = torch.optim.SGD(
            model.parameters(), row.learning_rate, row.momentum, weight_decay=row.weight_decay
        )
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        pixels, labels = pictures.pixels[rows].to(device), pictures.labels[rows].to(device)
        weigh_fn = weights_fn(row, pictures.labels[rows], num_steps=num_steps, seed=seed)
        order = torch.empty(0, dtype=torch.int64)
        for step in range(num_steps):
            if step % STEPS_AT_ONCE == 0:
                on_step_fn(step, num_steps)
                if should_stop_fn():
                    raise StoppedError("stopped; the same command trains what is missing")
            if len(order) < row.batch_size:  # the next epoch; a last partial batch is left out
                order = torch.randperm(len(rows))
            ids, order = order[: row.batch_size].to(device), order[row.batch_size :]
            images = _seen(pixels[ids], pictures)
            if row.augments:
                images = move_and_mirror(images)
            with torch.autocast("cuda", torch.bfloat16, enabled=_is_halved(row, device)):
                scores = model(images).float()
            losses = F.cross_entropy(scores, labels[ids], reduction="none")  # (B,)
            weights = weigh_fn(losses.detach(), ids, step)  # (B,)
            optimizer.zero_grad()
            # A zero weight must not carry the infinite loss of an example that was not chosen.
            objective = (weights * losses.masked_fill(weights == 0, 0)).sum()
            objective.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if row.schedule == "cosine":
                decay.step()
    on_step_fn(num_steps, num_steps)
    return model.eval()


def weights_fn(
    row: Row, labels: Tensor, *, num_steps: int, seed: int
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """How the row weighs a batch: (B,) losses, (B,) ids of the pictures, the step -> (B,)."""
    count = row.num_hard_examples
    if not row.is_even:
        return lambda losses, ids, step: top_weights(losses, num_hard_examples=count)
    positives = Rows(np.arange(len(labels) + 1), labels.numpy())
    is_held_out = hold_out_queries(
        positives, num_labels=NUM_CLASSES, share=HELD_OUT_SHARE, seed=seed
    )
    bins = frequency_bins(positives, is_held_out, num_labels=NUM_CLASSES)
    mining, bin_ids = EvenMining(torch.from_numpy(bins.shape)), torch.from_numpy(bins.pair_bins)

    def weigh_evenly(losses: Tensor, ids: Tensor, step: int) -> Tensor:
        k = round(row.batch_size + step / num_steps * (count - row.batch_size))
        return mining(losses, bin_ids.to(losses.device)[ids], num_hard_examples=k)

    return weigh_evenly


@torch.no_grad()
def predict(model: nn.Module, pictures: Pictures) -> IntArray:
    """The class of every picture: (N,)."""
    device = next(model.parameters()).device
    parts = torch.split(pictures.pixels, 1000)
    found = [model(_seen(part.to(device), pictures)).argmax(1).cpu() for part in parts]
    return torch.cat(found).numpy()


def has_diverged(model: nn.Module) -> bool:
    """Whether its weights are no longer numbers."""
    return not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def move_and_mirror(images: Tensor) -> Tensor:
    """(B, C, H, W): each moved by up to 4 points either way, and half of them mirrored."""
    padded = F.pad(images, (EDGE,) * 4)
    draws = torch.rand(len(images), 3).to(images.device)
    down, right = (draws[:, :2] * (2 * EDGE + 1)).long().unsqueeze(2).unbind(1)  # (B, 1) each
    rows = down + torch.arange(images.shape[2], device=images.device)  # (B, H)
    columns = right + torch.arange(images.shape[3], device=images.device)  # (B, W)
    columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
    places = torch.arange(len(images), device=images.device)[:, None, None]
    moved = padded[places, :, rows.unsqueeze(2), columns.unsqueeze(1)]  # (B, H, W, C)
    return moved.permute(0, 3, 1, 2)


def _is_halved(row: Row, device: torch.device) -> bool:
    return row.precision == "bfloat16" and device.type == "cuda"


def _seen(pixels: Tensor, pictures: Pictures) -> Tensor:
    """(B, H, W, C) bytes -> (B, C, H, W), as a model sees them."""
    return ((pixels.float() - pictures.shift) / pictures.scale).permute(0, 3, 1, 2)
