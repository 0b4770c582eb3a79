"""Classifiers of pictures in a plain training loop: momentum SGD on the hardest examples.

Everything random is drawn from one seed: the first weights, the batches, dropout, and how pictures
are moved. So models of one seed differ in nothing but what is compared.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

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

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
EDGE = 4  # points that a picture is moved by at most, each way
HELD_OUT_SHARE = 0.05  # of the training pictures, by even-handed mining: 3 of 60 in a rare class
STEPS_AT_ONCE = 100  # between questions whether to stop
WARM_UP_STEPS = 3  # before a step is recorded: kernels are chosen and momentum is allocated
NUM_COUNTS = 12  # values of k' below the whole batch, while it comes down


def build_model(row: Row, *, is_small: bool = False) -> nn.Module:
    """The model of the paper's row; a small one of its kind for the quick look."""
    if row.model != "lenet":
        blocks, width = ((1, 1), 8) if is_small else (BLOCKS[row.model], 64)
        return ResNet(row.stem, blocks, width, is_bottleneck=row.model == "resnet50")
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
    """A ResNet (He et al. 2016) with a stem for small pictures or large ones.

    "imagenet" (7 x 7 with stride 2, then pooling) is that of the article; "cifar" (3 x 3, no
    stride, no pooling) sees small pictures at 16 times the places and the cost, "small" (3 x 3 with
    stride 2, no pooling) at 4 times.
    """

    def __init__(
        self,
        stem: str,
        blocks: tuple[int, ...],
        width: int,
        *,
        is_bottleneck: bool = True,
        num_classes: int = NUM_CLASSES,
    ) -> None:
        size, stride = STEMS[stem]
        pool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        layers, inputs = [_convolution(3, width, size, stride), nn.ReLU(), pool], width
        widening = 4 if is_bottleneck else 1
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(inputs, inner, stride, is_bottleneck=is_bottleneck))
                inputs = widening * inner
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)]
        super().__init__(*layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Block(nn.Module):
    """Two convolutions of 3 x 3 around a shortcut; a bottleneck has three, the outer two 1 x 1."""

    def __init__(self, inputs: int, inner: int, stride: int, *, is_bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * inner if is_bottleneck else inner
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else _convolution(inputs, outputs, 1, stride)
        )
        if is_bottleneck:
            kinds = [(inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1)]
        else:
            kinds = [(inputs, inner, 3, stride), (inner, inner, 3, 1)]
        layers = [layer for kind in kinds for layer in (_convolution(*kind), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Job(NamedTuple):
    """A training: a row of a table, the pictures it learns from, and its seed."""

    row: Row
    ids: IntArray  # (N,)
    seed: int


def train_models(
    jobs: Sequence[Job],
    pictures: Pictures,
    *,
    num_steps: int,
    device: torch.device,
    is_small: bool = False,
    should_stop_fn: Callable[[], bool] = lambda: False,
    on_step_fn: Callable[[int, int], None] = lambda done, total: None,
) -> list[nn.Module]:
    """A model for each job after so many steps: side by side on a GPU, one by one on a CPU.

    Raises:
        StoppedError: the user asked to stop; unfinished trainings leave nothing.
    """
    is_on_gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = True  # the fastest kernels: shapes never change
    models: list[nn.Module] = []
    for group in [jobs] if is_on_gpu else [[job] for job in jobs]:
        with torch.random.fork_rng(devices=[device] if is_on_gpu else []):
            trainings = [Training(job, pictures, num_steps, device, is_small) for job in group]
            if is_on_gpu:
                torch.cuda.synchronize()  # their streams do not wait for this one
            for step in range(num_steps):
                if step % STEPS_AT_ONCE == 0:
                    on_step_fn(step, num_steps)
                    if should_stop_fn():
                        raise StoppedError("stopped; the same command trains what is missing")
                for training in trainings:
                    training.advance(step)
            if is_on_gpu:
                torch.cuda.synchronize()
            models += [training.model.eval() for training in trainings]
    on_step_fn(num_steps, num_steps)
    return models


class Training:
    """A model in training. On a GPU its step is a CUDA graph on a stream of its own.

    The step number, the learning rate and the order of the pictures are therefore tensors; only k'
    is not, and a step with another k' is recorded anew.
    """

    def __init__(
        self, job: Job, pictures: Pictures, num_steps: int, device: torch.device, is_small: bool
    ) -> None:
        row = self.row = job.row
        self.num_steps, self.pictures = num_steps, pictures
        torch.manual_seed(job.seed)
        self.model = build_model(row, is_small=is_small).to(device)
        if row.model != "lenet":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.order = _order(len(job.ids), row.batch_size, num_steps).to(device)  # (steps, B)
        shape = (num_steps, row.batch_size, 3) if row.augments else (num_steps, 0)
        self.draws = torch.rand(shape).to(device)
        self.pixels = pictures.pixels[job.ids].to(device)
        self.labels = pictures.labels[job.ids].to(device)
        self.weigh_fn = weights_fn(row, pictures.labels[job.ids], seed=job.seed, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step
        self.rates = torch.full((num_steps,), row.learning_rate, device=device)
        if row.schedule == "cosine":
            progress = torch.arange(num_steps, device=device) / num_steps
            self.rates *= 0.5 * (1 + (math.pi * progress).cos())
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), self.rates[0].clone(), row.momentum,
            weight_decay=row.weight_decay, fused=True,
        )  # fmt: skip
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0  # k' that the graph was recorded with

    def advance(self, step: int) -> None:
        count = count_at(self.row, step / self.num_steps)
        if self.stream is None:
            self._step(count)
            return
        with torch.cuda.stream(self.stream):
            if step < WARM_UP_STEPS:
                self._step(count)
                return
            if self.graph is None or count != self.count:
                self.stream.synchronize()  # the graph that is replaced may still run
                self.graph, self.count = torch.cuda.CUDAGraph(), count
                with torch.cuda.graph(
                    self.graph, stream=self.stream, capture_error_mode="thread_local"
                ):
                    self._step(count)
            self.graph.replay()

    def _step(self, count: int) -> None:
        row = self.row
        ids = self.order.index_select(0, self.at).squeeze(0)  # (B,)
        images = _seen(self.pixels[ids], self.pictures)
        if row.augments:
            images = move_and_mirror(images, self.draws.index_select(0, self.at).squeeze(0))
        with torch.autocast("cuda", torch.bfloat16, enabled=_is_halved(row, images.device)):
            scores = self.model(images).float()
        losses = F.cross_entropy(scores, self.labels[ids], reduction="none")  # (B,)
        weights = self.weigh_fn(losses.detach(), ids, count)  # (B,)
        self.optimizer.zero_grad()
        # A zero weight must not carry the infinite loss of an example that was not chosen.
        objective = (weights * losses.masked_fill(weights == 0, 0)).sum()
        objective.backward()  # type: ignore[no-untyped-call]
        self.optimizer.param_groups[0]["lr"].copy_(self.rates.index_select(0, self.at).squeeze(0))
        self.optimizer.step()
        self.at += 1


def _order(num_pictures: int, batch_size: int, num_steps: int) -> Tensor:
    """(num_steps, B): a permutation for each epoch, without its last partial batch."""
    per_epoch = num_pictures // batch_size
    epochs = [
        torch.randperm(num_pictures)[: per_epoch * batch_size]
        for _ in range(math.ceil(num_steps / per_epoch))
    ]
    return torch.cat(epochs).view(-1, batch_size)[:num_steps]


def count_at(row: Row, progress: float) -> int:
    """k' of a step; even-handed mining comes down from the whole batch in NUM_COUNTS steps."""
    if not row.is_even:
        return row.num_hard_examples
    progress = math.floor(progress * (NUM_COUNTS + 1)) / NUM_COUNTS
    return round(row.batch_size + progress * (row.num_hard_examples - row.batch_size))


def weights_fn(
    row: Row, labels: Tensor, *, seed: int, device: torch.device
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """How the row weighs a batch: (B,) losses, (B,) ids of the pictures, k' -> (B,)."""
    if not row.is_even:
        return lambda losses, ids, count: top_weights(losses, num_hard_examples=count)
    positives = Rows(np.arange(len(labels) + 1), labels.numpy())
    is_held_out = hold_out_queries(
        positives, num_labels=NUM_CLASSES, share=HELD_OUT_SHARE, seed=seed
    )
    bins = frequency_bins(positives, is_held_out, num_labels=NUM_CLASSES)
    mining = EvenMining(torch.from_numpy(bins.shape).to(device))
    bin_ids = torch.from_numpy(bins.pair_bins).to(device)
    sums = mining.sums.to(device)

    def weigh_evenly(losses: Tensor, ids: Tensor, count: int) -> Tensor:
        mining.load({"sums": sums})
        weights = mining(losses, bin_ids[ids], num_hard_examples=count)
        sums.copy_(mining.sums)  # in place: a graph that is replayed knows no other tensor
        return weights

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


def move_and_mirror(images: Tensor, draws: Tensor) -> Tensor:
    """(B, C, H, W): each moved by up to 4 points either way, and half of them mirrored.

    Args:
        draws: (B, 3) between 0 and 1: down, right, and below .5 if mirrored.
    """
    padded = F.pad(images, (EDGE,) * 4)
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
