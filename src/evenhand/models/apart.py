"""ResNets one beside another: each model's own convolutions, on a CUDA stream of its own.

A ResNet on pictures of 32 points is large enough for the library's convolutions, which the batched
products of `models.images` are no match for. One of them alone leaves much of a GPU idle in its
last stages, where the pictures are small; on streams of their own, several fill it.

All kernels of a model are one row of numbers, and the rest is another, so that rounding them to
bfloat16, gathering their gradients and taking a step are a few launches instead of hundreds.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.models.images import ALIGNMENT, EPSILON, ResNet, Weights

ScoresFn = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart:
    """A `Classifier` (see `models.images`): the same ResNets, the same first weights."""

    resnet: ResNet
    is_compiled: bool = False

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Kernels as (outputs, height, width, inputs), what convolutions of pictures with their
        channels last want; the rest as all scales, all biases, the last layer.
        """
        weights = self.resnet.init(generator)
        names = [name for name, *_ in self.resnet.convolutions()]
        kernels = [weights[f"{name}.weight"].T.flatten() for name in names]
        rest = [weights[f"{name}.{part}"] for part in ("scale", "bias") for name in names]
        rest += [weights["classes.weight"].flatten(), weights["classes.bias"]]
        rows = {"kernels": torch.cat(kernels), "rest": torch.cat(rest)}
        return {name: F.pad(row, (0, -len(row) % ALIGNMENT)) for name, row in rows.items()}

    def running(self) -> Tensor:
        return self.resnet.running()

    def compiled(self) -> "Apart":
        return dataclasses.replace(self, is_compiled=True)

    def scores(
        self, weights: Weights, images: Tensor, running: Tensor | None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores_fn = scores_function(self.resnet, is_compiled=self.is_compiled)
        kernels = weights["kernels"].to(images.dtype).unbind(0)
        rest, pictures = weights["rest"].unbind(0), images.unbind(0)
        given = [None] * len(images) if running is None else running.unbind(0)
        found = []
        with _beside(images.device, len(images)) as streams:
            for place, stream in enumerate(streams):
                with stream:
                    found.append(
                        scores_fn(kernels[place], rest[place], pictures[place], given[place])
                    )
        scores, statistics = zip(*found, strict=True)
        return torch.stack(scores), torch.stack(statistics)


@functools.cache
def scores_function(resnet: ResNet, *, is_compiled: bool) -> ScoresFn:
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

    return torch.compile(scores, dynamic=False) if is_compiled else scores


@contextlib.contextmanager
def _beside(
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
