"""Classifiers of images, many at once: LeNet and ResNet-50 with a leading axis of models.

One LeNet is far too small for a GPU. Here every weight has a leading axis M, one entry a model,
and a layer is one batched matrix product over it, so a hundred models take one pass. Pictures are
(M, B, height, width, channels); rows of a product are pictures x places, columns are channels.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.models.noise import uniform

Weights = Mapping[str, Tensor]
EPSILON = 1e-5  # added to a variance, as everywhere
STEMS = {"imagenet": (7, 2), "cifar": (3, 1), "small": (3, 2)}  # kernel size, stride
ALIGNMENT = 8  # bfloat16 numbers in 16 bytes: rows of another length make a product slow


class Classifier(Protocol):
    """A model as functions: one model's start, and the scores of many models."""

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One model's weights."""

    def running(self) -> Tensor:
        """(2, C): the means and variances that one model keeps beside its weights."""

    def scores(
        self, weights: Weights, images: Tensor, running: Tensor | None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(M, B, H, W, C) -> scores (M, B, classes), and the batch's statistics (M, 2, C).

        Args:
            running: (M, 2, C), used in the place of the batch's own statistics, as a test must.
            keys: (M,), what a training step draws dropout with; a test drops nothing.
        """


# --- LeNet ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeNet:
    """Convolution 5 x 5, pooling 2 x 2, both again, a hidden layer, the classes; ReLU between.

    A convolution and the pooling after it are one product: the window of a pooled pixel is 6 x 6,
    that is 3 x 3 blocks of 2 x 2, and holds the four convolutions whose largest is taken. That is
    1.44 times the multiplications on a third of the memory, and memory is what takes the time.
    """

    num_classes: int = 10
    channels: tuple[int, int] = (20, 50)
    hidden: int = 500
    padding: int = 0  # zeros around a picture before a convolution; 2 keeps its size
    dropout: float = 0.0  # share of the hidden layer that a training step leaves out
    in_channels: int = 1
    size: int = 28

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Uniform within 1 / sqrt(fan-in), the default of torch.nn."""
        first, second = self.channels
        side = self.size
        for _ in self.channels:
            side = side // 2 + self.padding - 2  # of the picture after a convolution and pooling
        shapes = {
            "conv1": ((first, self.in_channels, 5, 5), 25 * self.in_channels),
            "conv2": ((second, first, 5, 5), 25 * first),
            "hidden": ((side * side * second, self.hidden), side * side * second),
            "classes": ((self.hidden, self.num_classes), self.hidden),
        }
        weights = {}
        for name, (shape, fan_in) in shapes.items():
            outputs = shape[0] if name.startswith("conv") else shape[1]
            weights[f"{name}.weight"] = _uniform(shape, 1 / math.sqrt(fan_in), generator)
            weights[f"{name}.bias"] = _uniform((outputs,), 1 / math.sqrt(fan_in), generator)
        return weights

    def running(self) -> Tensor:
        return torch.zeros(2, 0)

    def scores(
        self, weights: Weights, images: Tensor, running: Tensor | None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = images
        for name in ("conv1", "conv2"):
            if self.padding:
                x = F.pad(x, (0, 0, *[self.padding] * 4))
            x = _pooled_convolution(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
        x = x.flatten(2)  # (M, B, height * width * channels)
        x = torch.relu(_product(x, weights["hidden.weight"]) + _row(weights["hidden.bias"], x))
        if self.dropout and keys is not None:
            drawn = uniform(keys, x.shape[1] * x.shape[2]).view(x.shape)
            x = x * (drawn >= self.dropout) / (1 - self.dropout)
        scores = _product(x, weights["classes.weight"]) + _row(weights["classes.bias"], x)
        dtype = weights["classes.weight"].dtype
        return scores.to(dtype), scores.new_zeros(len(images), 2, 0, dtype=dtype)


def _pooled_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ReLU of the 2 x 2 maximum of a 5 x 5 convolution: (M, B, 2h, 2w, C) -> (M, B, h-2, w-2, O).

    The largest of four is taken before the bias and the ReLU, which do not change which it is.
    """
    num_models, num_images, height, width, channels = x.shape
    blocks = x.view(num_models, num_images, height // 2, 2, width // 2, 2, channels)
    blocks = blocks.transpose(3, 4).flatten(4)  # (M, B, h, w, 2 * 2 * C)
    rows, height, width = _patches(blocks, size=3, stride=1)  # (M, B * (h-2) * (w-2), 36 C)
    four = _product(rows, _block_kernel(weight))  # (M, rows, 4 * O)
    four = four.view(*rows.shape[:2], 4, -1)
    best = torch.relu(four.amax(2) + _row(bias, x))
    return best.view(num_models, num_images, height, width, -1)


def _block_kernel(weight: Tensor) -> Tensor:
    """(M, O, C, 5, 5) -> (M, 36 C, 4 O): the kernel at its four places in a 6 x 6 window."""
    num_models, outputs, channels = weight.shape[:3]
    places = [F.pad(weight, (x, 1 - x, y, 1 - y)) for y in (0, 1) for x in (0, 1)]
    kernel = torch.stack(places, 1)  # (M, 4, O, C, 6, 6)
    kernel = kernel.view(num_models, 4, outputs, channels, 3, 2, 3, 2)
    kernel = kernel.permute(0, 4, 6, 5, 7, 3, 1, 2)  # (M, 3, 3, 2, 2, C, 4, O)
    return kernel.reshape(num_models, 36 * channels, 4 * outputs)


# --- ResNet ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet:
    """ResNet with bottleneck blocks (He et al. 2016); its defaults are ResNet-50.

    The stem "imagenet" (7 x 7 with stride 2, then pooling with stride 2) is that of the article;
    "cifar" (3 x 3, no stride, no pooling) sees small pictures at 16 times the places and the cost,
    "small" (3 x 3 with stride 2, no pooling) at 4 times.
    """

    num_classes: int = 10
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    stem: str = "imagenet"
    in_channels: int = 3

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal with the fan-out's variance for convolutions; uniform for the last layer."""
        weights = {}
        for name, size, inputs, outputs, _ in self.convolutions():
            deviation = math.sqrt(2 / (outputs * size * size))
            shape = (size * size * inputs, outputs)
            weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * deviation
            weights[f"{name}.scale"] = torch.ones(outputs)
            weights[f"{name}.bias"] = torch.zeros(outputs)
        inputs = 4 * self.width * 2 ** (len(self.blocks) - 1)
        limit = 1 / math.sqrt(inputs)
        weights["classes.weight"] = _uniform((inputs, self.num_classes), limit, generator)
        weights["classes.bias"] = _uniform((self.num_classes,), limit, generator)
        return weights

    def running(self) -> Tensor:
        total = sum(outputs for _, _, _, outputs, _ in self.convolutions())
        return torch.stack([torch.zeros(total), torch.ones(total)])

    def scores(
        self, weights: Weights, images: Tensor, running: Tensor | None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        layers = _Layers(weights, {name: rest for name, *rest in self.convolutions()}, running)
        x = torch.relu(layers(images, "stem"))
        if self.stem == "imagenet":
            x = _max_pool(x)
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                name = f"stage{stage}.{block}"
                out = torch.relu(layers(x, f"{name}.reduce"))
                out = torch.relu(layers(out, f"{name}.spatial"))
                out = layers(out, f"{name}.expand")
                shortcut = layers(x, f"{name}.shortcut") if block == 0 else x
                x = torch.relu(out + shortcut)
        x = x.mean((2, 3))  # (M, B, channels)
        scores = _product(x, weights["classes.weight"]) + _row(weights["classes.bias"], x)
        return scores.to(weights["classes.weight"].dtype), layers.statistics()

    def convolutions(self) -> Iterator[tuple[str, int, int, int, int]]:
        """(name, kernel size, input channels, output channels, stride), in order of use."""
        size, stride = STEMS[self.stem]
        yield "stem", size, self.in_channels, self.width, stride
        inputs = self.width
        for stage, count in enumerate(self.blocks):
            inner = self.width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"stage{stage}.{block}"
                yield f"{name}.reduce", 1, inputs, inner, 1
                yield f"{name}.spatial", 3, inner, inner, stride
                yield f"{name}.expand", 1, inner, 4 * inner, 1
                if block == 0:
                    yield f"{name}.shortcut", 1, inputs, 4 * inner, stride
                inputs = 4 * inner


class _Layers:
    """Convolutions with batch normalisation; notes the statistics, or takes the given ones."""

    def __init__(
        self, weights: Weights, shapes: Mapping[str, list[Any]], running: Tensor | None
    ) -> None:
        self.weights, self.shapes = weights, shapes
        self.seen: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        if running is not None:
            widths = [outputs for _, _, outputs, _ in shapes.values()]
            parts = torch.split(running, widths, dim=2)
            self.given = dict(zip(shapes, parts, strict=True))

    def __call__(self, x: Tensor, name: str) -> Tensor:
        size, _, _, stride = self.shapes[name]
        if size == 1:
            x = x[:, :, ::stride, ::stride]
            height, width = x.shape[2:4]
            rows = x.flatten(1, 3)  # (M, B * height * width, C)
        else:
            edge = size // 2
            padded = F.pad(x, (0, 0, edge, edge, edge, edge))
            rows, height, width = _patches(padded, size=size, stride=stride)
        out = self._normalized(_product(rows, self.weights[f"{name}.weight"]), name)
        return out.view(*x.shape[:2], height, width, -1)

    def _normalized(self, rows: Tensor, name: str) -> Tensor:
        """(M, R, C), each model's channels to mean 0 and variance 1, then scaled and shifted."""
        scale, bias = self.weights[f"{name}.scale"], self.weights[f"{name}.bias"]
        wide = rows.to(scale.dtype)
        if self.given:
            mean, variance = self.given[name].unbind(1)  # (M, C)
        else:
            variance, mean = torch.var_mean(wide, dim=1, correction=0)
            unbiased = variance * (rows.shape[1] / max(1, rows.shape[1] - 1))
            self.seen[name] = torch.stack([mean, unbiased], 1).detach()
        factor = scale * torch.rsqrt(variance + EPSILON)  # (M, C)
        out = wide * factor.unsqueeze(1) + (bias - mean * factor).unsqueeze(1)
        return out.to(rows.dtype)

    def statistics(self) -> Tensor:
        """(M, 2, all channels), in the order of `running`."""
        if self.given:
            return torch.cat(list(self.given.values()), 2)
        return torch.cat([self.seen[name] for name in self.shapes], 2)


# --- shared ---------------------------------------------------------------------------------------


class _Patches(torch.autograd.Function):
    """Windows of a picture as rows. One copy forward; the windows are added back one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int) -> Tensor:
        ctx.shape, ctx.size, ctx.stride = x.shape, size, stride
        windows = x.unfold(2, size, stride).unfold(3, size, stride)  # (M, B, h, w, C, size, size)
        return windows.permute(0, 1, 2, 3, 5, 6, 4).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        height, width = gradient.shape[2:4]
        shape = ctx.shape
        # First along x, then along y: fewer additions than window by window.
        lines = gradient.new_zeros(*shape[:2], height, ctx.size, shape[3], shape[4])
        for x in range(ctx.size):
            columns = slice(x, x + ctx.stride * (width - 1) + 1, ctx.stride)
            lines[:, :, :, :, columns] += gradient[:, :, :, :, :, x].transpose(3, 4)
        total = gradient.new_zeros(shape)  # (M, B, H, W, C)
        for y in range(ctx.size):
            rows = slice(y, y + ctx.stride * (height - 1) + 1, ctx.stride)
            total[:, :, rows] += lines[:, :, :, y]
        return total, None, None


def _patches(x: Tensor, *, size: int, stride: int) -> tuple[Tensor, int, int]:
    """(M, B, H, W, C) -> (M, B * h * w, size * size * C), h, w."""
    windows = _Patches.apply(x, size, stride)  # type: ignore[no-untyped-call]
    height, width = windows.shape[2:4]
    return windows.flatten(4).flatten(1, 3), height, width


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """(M, R, K) x (M, K, O), in the precision of the rows."""
    weight = weight.to(rows.dtype)
    missing = -rows.shape[2] % ALIGNMENT
    if missing and rows.dtype == torch.bfloat16:
        rows, weight = F.pad(rows, (0, missing)), F.pad(weight, (0, 0, 0, missing))
    return torch.bmm(rows, weight)


def _max_pool(x: Tensor) -> Tensor:
    """3 x 3 with stride 2: (M, B, H, W, C) -> (M, B, H / 2, W / 2, C)."""
    flat = x.flatten(0, 1).permute(0, 3, 1, 2)  # (M * B, C, H, W), channels last in memory
    pooled = F.max_pool2d(flat, kernel_size=3, stride=2, padding=1)
    pooled = pooled.permute(0, 2, 3, 1)  # (M * B, H / 2, W / 2, C)
    return pooled.reshape(*x.shape[:2], *pooled.shape[1:])


def _row(bias: Tensor, like: Tensor) -> Tensor:
    """(M, O) -> (M, 1, O)"""
    return bias.to(like.dtype).unsqueeze(1)


def _uniform(shape: tuple[int, ...], limit: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * limit
