"""Classifiers of images, many at once: LeNet and ResNet-50 with a leading axis of models.

One LeNet is far too small for a GPU. Here every weight has a leading axis M, one entry a model,
and a layer of LeNet is one batched matrix product over it, so a hundred models take one pass.
Pictures are (M, B, height, width, channels); rows of a product are pictures x places, columns are
channels.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.counter_random import uniform

Weights = Mapping[str, Tensor]
ScoresFn = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
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
    1.44 times the multiplications on a third of the memory, and memory is what takes the time. By
    `torch.func.vmap` over `F.conv2d`, a step of 70 models takes 2.1 times as long on an H200 (7.4
    for 3.6 ms), and 3.3 times where both are compiled (6.0 for 1.8 ms).
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
    """ResNets with bottleneck blocks (He et al. 2016), each on a CUDA stream; default: ResNet-50.

    The stem "imagenet" (7 x 7 with stride 2, then pooling with stride 2) is that of the article;
    "cifar" (3 x 3, no stride, no pooling) sees small pictures at 16 times the places and the cost,
    "small" (3 x 3 with stride 2, no pooling) at 4 times.

    A ResNet on pictures of 32 points is large enough for the convolutions of cuDNN, which are
    faster than batched products. One model alone leaves much of a GPU idle in its last stages,
    where the pictures are small; on streams of their own, several fill it.

    All kernels of a model are one row of numbers, and the rest is another, so that rounding them
    to bfloat16, gathering their gradients and taking a step are a few launches instead of hundreds.
    """

    num_classes: int = 10
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    stem: str = "imagenet"
    in_channels: int = 3
    is_compiled: bool = False

    def layer_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
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

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Kernels as (outputs, height, width, inputs), the layout for pictures with their channels
        last; the rest as all scales, all biases, the last layer.
        """
        weights = self.layer_weights(generator)
        names = [name for name, *_ in self.convolutions()]
        kernels = [weights[f"{name}.weight"].T.flatten() for name in names]
        rest = [weights[f"{name}.{part}"] for part in ("scale", "bias") for name in names]
        rest += [weights["classes.weight"].flatten(), weights["classes.bias"]]
        rows = {"kernels": torch.cat(kernels), "rest": torch.cat(rest)}
        return {name: F.pad(row, (0, -len(row) % ALIGNMENT)) for name, row in rows.items()}

    def running(self) -> Tensor:
        total = sum(outputs for _, _, _, outputs, _ in self.convolutions())
        return torch.stack([torch.zeros(total), torch.ones(total)])

    def scores(
        self, weights: Weights, images: Tensor, running: Tensor | None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores_fn = _resnet_scores(self)
        kernels = weights["kernels"].to(images.dtype).unbind(0)
        rest, pictures = weights["rest"].unbind(0), images.unbind(0)
        given = [None] * len(images) if running is None else running.unbind(0)
        found = []
        with _streams_of_models(images.device, len(images)) as streams:
            for place, stream in enumerate(streams):
                with stream:
                    found.append(
                        scores_fn(kernels[place], rest[place], pictures[place], given[place])
                    )
        scores, statistics = zip(*found, strict=True)
        return torch.stack(scores), torch.stack(statistics)

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


@functools.cache
def _resnet_scores(resnet: ResNet) -> ScoresFn:
    """One model: (kernels, rest, (B, H, W, C), running) -> scores (B, classes), statistics (2, C).

    The last layer and all statistics are in the precision of `rest`, whatever the pictures are in.
    """
    plan = {name: tuple(shape) for name, *shape in resnet.convolutions()}
    sizes = [size * size * inputs * outputs for size, inputs, outputs, _ in plan.values()]
    widths = [outputs for _, _, outputs, _ in plan.values()]
    num_kernels, num_channels = sum(sizes), sum(widths)
    blocks, stem, num_classes = resnet.blocks, resnet.stem, resnet.num_classes

    def scores(
        kernels: Tensor, rest: Tensor, images: Tensor, running: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        *parts, _ = torch.split(kernels, [*sizes, len(kernels) - num_kernels])
        kernel_of = dict(zip(plan, parts, strict=True))
        scales, biases, last = rest.tensor_split([num_channels, 2 * num_channels])
        scale_of = dict(zip(plan, torch.split(scales, widths), strict=True))
        bias_of = dict(zip(plan, torch.split(biases, widths), strict=True))
        if running is None and torch.compiler.is_compiling():
            noted = [rest.new_zeros(2, width) for width in widths]  # a view written to costs copies
        else:
            whole = rest.new_zeros(2, num_channels) if running is None else running
            noted = list(torch.split(whole, widths, dim=1))
        statistics_of = dict(zip(plan, noted, strict=True))

        def layer(x: Tensor, name: str) -> Tensor:
            size, inputs, outputs, stride = plan[name]
            kernel = kernel_of[name].view(outputs, size, size, inputs).permute(0, 3, 1, 2)
            x = F.conv2d(x, kernel, stride=stride, padding=size // 2)
            mean, variance = statistics_of[name].unbind(0)
            # At momentum 1 the statistics that it keeps are those of this batch.
            return F.batch_norm(
                x, mean, variance, scale_of[name], bias_of[name],
                training=running is None, momentum=1.0, eps=EPSILON,
            )  # fmt: skip

        x = layer(images.permute(0, 3, 1, 2), "stem").relu_()
        if stem == "imagenet":
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for stage, count in enumerate(blocks):
            for block in range(count):
                name = f"stage{stage}.{block}"
                out = layer(x, f"{name}.reduce").relu_()
                out = layer(out, f"{name}.spatial").relu_()
                out = layer(out, f"{name}.expand")
                x = (out + (layer(x, f"{name}.shortcut") if block == 0 else x)).relu_()
        features = x.mean((2, 3), dtype=rest.dtype)  # (B, channels)
        num_weights = features.shape[1] * num_classes
        weight, bias, _ = last.tensor_split([num_weights, num_weights + num_classes])
        found = features @ weight.view(-1, num_classes) + bias
        return found, torch.cat(noted, 1).detach()

    return torch.compile(scores, dynamic=False) if resnet.is_compiled else scores


@contextlib.contextmanager
def _streams_of_models(
    device: torch.device, count: int
) -> Iterator[Sequence[contextlib.AbstractContextManager[Any]]]:
    """A stream for each model, all waited for at the end; on a CPU one comes after another."""
    if device.type != "cuda":
        yield [contextlib.nullcontext()] * count
        return
    here, streams = torch.cuda.current_stream(device), _streams(device, count)
    for stream in streams:
        stream.wait_stream(here)
    yield [torch.cuda.stream(stream) for stream in streams]
    for stream in streams:
        here.wait_stream(stream)


@functools.cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


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


def _row(bias: Tensor, like: Tensor) -> Tensor:
    """(M, O) -> (M, 1, O)"""
    return bias.to(like.dtype).unsqueeze(1)


def _uniform(shape: tuple[int, ...], limit: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator) - 1) * limit
