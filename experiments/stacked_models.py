"""Trains many small classifiers as one stack: one step is one step of each of them.

Every model has a seed, a learning rate and a k'. The seed gives its training rows, its first
weights and the order of its batches, so models of one seed differ in nothing but what is compared.
Models never touch each other: one that diverges becomes NaN alone and is reported as diverged.
A step asks nothing of the host; on a CUDA device it is recorded once and replayed.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from evenhand.errors import UserError
from evenhand.risk import top_weights
from evenhand.training.checkpoint import Checkpoint
from experiments.augmentation import shift_and_mirror
from experiments.counter_random import keys
from experiments.image_models import Classifier, ResNet

IntArray = NDArray[np.int64]
StepFn = Callable[[], None]
STATISTICS_RATE = 0.1  # of the running means and variances, the default of torch.nn
WARM_UP, TIMED = 3, 20  # steps before a recording, and to see which way is faster
WORTH_COMPILING = 90.0  # seconds that a training must still take; compiling takes about 60
DROPOUT, AUGMENTATION = 1, 2  # what is drawn, of a seed and a step
BLOCK = 2**13  # pictures x models looked at at once in a test


class Member(NamedTuple):
    """One of the models that are trained together."""

    seed: int
    learning_rate: float
    num_hard_examples: int  # k'; the batch size is SGD


class Pictures(NamedTuple):
    """Pictures and classes; what a model sees is (pixel - shift) / scale."""

    pixels: Tensor  # (N, height, width, channels) uint8
    labels: Tensor  # (N,) int64
    shift: float = 0.0
    scale: float = 255.0


class StackedTraining:
    """The stacked weights of all members, and the loop that trains them."""

    def __init__(
        self,
        classifier: Classifier,
        pictures: Pictures,
        members: Sequence[Member],
        rows_of_seed: Mapping[int, IntArray],
        *,
        batch_size: int,
        momentum: float,
        weight_decay: float = 0.0,
        decay_steps: int = 0,
        augments: bool = False,
        device: torch.device,
        precision: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            rows_of_seed: of the pictures, those that a seed trains on; as many for each.
            decay_steps: learning rates fall to 0 over so many steps, as a cosine does; 0: never.
            augments: whether pictures are moved and mirrored, alike for all models of a seed.
            precision: of products; weights and their sums are of `state_dtype`.
        """
        self.classifier, self.members, self.batch_size = classifier, list(members), batch_size
        self.momentum, self.weight_decay = momentum, weight_decay
        self.decay_steps, self.augments = decay_steps, augments
        self.device, self.precision = device, precision
        self.pictures = Pictures(
            pictures.pixels.to(device), pictures.labels.to(device), pictures.shift, pictures.scale
        )
        self.seeds = sorted({member.seed for member in members})
        self.rows = np.stack([rows_of_seed[seed] for seed in self.seeds])  # (S, rows)
        self.batches_per_epoch = self.rows.shape[1] // batch_size
        if self.batches_per_epoch == 0:
            raise UserError(
                f"{self.rows.shape[1]} training pictures do not fill a batch of {batch_size}"
            )
        for member in members:
            if not 1 <= member.num_hard_examples <= batch_size:
                raise UserError(
                    f"num_hard_examples must be between 1 and the batch size {batch_size}, "
                    f"got {member.num_hard_examples}"
                )
        starts = {seed: classifier.init(torch.Generator().manual_seed(seed)) for seed in self.seeds}
        self.weights = {
            name: torch.stack([starts[member.seed][name] for member in members]).to(
                device, state_dtype
            )
            for name in starts[self.seeds[0]]
        }  # each (M, ...)
        self.velocity = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        running = classifier.running().to(device, state_dtype)
        self.running = running.expand(len(members), -1, -1).clone()  # (M, 2, C)
        self.losses = torch.zeros(len(members), device=device, dtype=state_dtype)  # of the batch
        self.step = 0
        self.seed_places = torch.tensor(
            [self.seeds.index(member.seed) for member in members], device=device
        )
        self.seed_numbers = torch.tensor(self.seeds, device=device)  # (S,)
        self.rates = torch.tensor(
            [member.learning_rate for member in members], device=device, dtype=state_dtype
        )
        counts = [member.num_hard_examples for member in members]
        self.models_of_count = {
            count: torch.tensor([place for place, own in enumerate(counts) if own == count]).to(
                device
            )
            for count in sorted(set(counts))
        }
        places = self.batches_per_epoch * batch_size
        self.order = torch.zeros(len(self.seeds), places, dtype=torch.int64, device=device)
        self.place = torch.zeros((), dtype=torch.int64, device=device)  # of the batch in the epoch
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # the step, on the device
        self.offsets = torch.arange(batch_size, device=device)
        self.ordered_epoch = -1

    # --- the step ---------------------------------------------------------------------------------

    def train_step(self, objective_fn: "ObjectiveFn", update_fn: "UpdateFn") -> None:
        """One batch for every model: losses, their k' largest, gradient, momentum SGD."""
        ids = self.order.index_select(1, self.place * self.batch_size + self.offsets)  # (S, B)
        images = self._seen(self._pixels(ids)).index_select(0, self.seed_places)
        labels = self.pictures.labels.index_select(0, ids.flatten()).view(ids.shape)
        labels = labels.index_select(0, self.seed_places)  # (M, B)
        leaves = {name: value.detach().requires_grad_() for name, value in self.weights.items()}
        objective, losses, statistics = objective_fn(
            self.classifier, leaves, images, labels, self.models_of_count,
            self._keys(DROPOUT).index_select(0, self.seed_places),
        )  # fmt: skip
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        with torch.no_grad():
            update_fn(
                list(self.weights.values()), list(self.velocity.values()), gradients,
                self.rates * self._decay(), self.momentum, self.weight_decay,
            )  # fmt: skip
            self.running.lerp_(statistics, STATISTICS_RATE)
            self.losses.copy_(losses.mean(1))
            self.place.add_(1)
            self.clock.add_(1)

    def train(
        self,
        num_steps: int,
        *,
        compiles: bool = True,
        on_step_fn: Callable[[int], None] = lambda step: None,
        should_stop_fn: Callable[[], bool] = lambda: False,
        every_fn: Callable[[], None] = lambda: None,
        every: int = 0,
    ) -> str:
        """Trains up to step `num_steps`; says in which way (plain, recorded, compiled).

        Args:
            compiles: whether compiled code is tried on a CUDA device; the faster way is taken.
            on_step_fn: is told the step, a few times an epoch.
            should_stop_fn: is asked as often whether to stop early.
            every_fn: is called after each `every` steps (0: never), to save or to evaluate.
        """
        way, step_fn = self._fastest(num_steps, compiles=compiles)
        pause = max(1, min(100, self.batches_per_epoch // 4))
        while self.step < num_steps and not should_stop_fn():
            target = min(num_steps, (self.step // pause + 1) * pause)
            if every:
                target = min(target, (self.step // every + 1) * every)
            self._advance(step_fn, target - self.step)
            on_step_fn(self.step)
            if every and self.step % every == 0:
                every_fn()
        return way

    def _advance(self, step_fn: StepFn, count: int) -> None:
        for _ in range(count):
            if self.step // self.batches_per_epoch != self.ordered_epoch:
                self._order_epoch(self.step // self.batches_per_epoch)
            step_fn()
            self.step += 1

    def _order_epoch(self, epoch: int) -> None:
        """Every seed's own order of its rows, a function of the seed and the epoch alone."""
        num_rows, places = self.rows.shape[1], self.order.shape[1]
        orders = [
            rows[np.random.default_rng([seed, epoch]).permutation(num_rows)[:places]]
            for seed, rows in zip(self.seeds, self.rows, strict=True)
        ]
        self.order.copy_(torch.from_numpy(np.stack(orders)))
        self.place.fill_(self.step % self.batches_per_epoch)
        self.clock.fill_(self.step)
        self.ordered_epoch = epoch

    def _pixels(self, ids: Tensor) -> Tensor:
        """(S, B) -> (S, B, H, W, C): what the seeds look at in this step."""
        if self.augments:
            return shift_and_mirror(self.pictures.pixels, ids, self._keys(AUGMENTATION))
        pixels = self.pictures.pixels.index_select(0, ids.flatten())
        return pixels.view(*ids.shape, *pixels.shape[1:])

    def _keys(self, purpose: int) -> Tensor:
        return keys(self.seed_numbers, self.clock, purpose=purpose)  # (S,)

    def _decay(self) -> Tensor | float:
        """What is left of the learning rates at this step."""
        if not self.decay_steps:
            return 1.0
        share = (self.clock.to(self.rates.dtype) / self.decay_steps).clamp(max=1)
        return 0.5 * (1 + torch.cos(torch.pi * share))

    def _seen(self, pixels: Tensor) -> Tensor:
        return ((pixels.to(self.precision) - self.pictures.shift) / self.pictures.scale).to(
            self.precision
        )

    # --- ways to run a step -----------------------------------------------------------------------

    def _fastest(self, num_steps: int, *, compiles: bool) -> tuple[str, StepFn]:
        """The step as it is on a CPU; on a GPU recorded, from compiled code where that is faster.

        The steps that find it out are steps of the training like any other.
        """

        def plain() -> None:
            self.train_step(objective, update)

        if self.device.type != "cuda" or num_steps - self.step < 4 * (WARM_UP + TIMED):
            return "plain", plain
        recorded, seconds = self._recorded(plain)
        ways = [(seconds, "recorded", recorded)]
        if compiles and seconds * (num_steps - self.step) > WORTH_COMPILING:

            def compiled() -> None:
                self.train_step(*_compiled(self.classifier))

            try:
                graph, each = self._recorded(compiled)
                ways.append((each, "compiled and recorded", graph))
            except Exception as error:  # whatever a compiler may raise: there is another way
                ways = [(seconds, f"recorded (not compiled: {type(error).__name__})", recorded)]
        seconds, way, step_fn = min(ways, key=lambda item: item[0])
        times = ", ".join(f"{name} {1000 * took:.2f} ms" for took, name, _ in ways)
        return f"{way} ({times} a step)", step_fn

    def _recorded(self, step_fn: StepFn) -> tuple[StepFn, float]:
        """A CUDA graph of the step, and the seconds that one replay takes."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True  # the ways of a convolution are tried once, for all
        try:
            with torch.cuda.stream(stream):
                self._advance(step_fn, WARM_UP)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph):
                step_fn()
        finally:
            torch.backends.cudnn.benchmark = before
        self._advance(graph.replay, WARM_UP)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        self._advance(graph.replay, TIMED)
        torch.cuda.synchronize(self.device)
        return graph.replay, (time.perf_counter() - start) / TIMED

    # --- what comes of it -------------------------------------------------------------------------

    @torch.no_grad()
    def predictions(self, pixels: Tensor) -> Tensor:
        """The class that every model gives every picture: (N, H, W, C) -> (M, N), on the CPU."""
        block = max(1, BLOCK // len(self.members))
        found = []
        for part in torch.split(pixels, block):
            images = self._seen(part.to(self.device)).expand(len(self.members), -1, -1, -1, -1)
            scores, _ = self.classifier.scores(self.weights, images, self.running)
            found.append(scores.argmax(2).cpu())  # (M, block)
        return torch.cat(found, 1)

    def diverged(self) -> list[bool]:
        """Whether a model's weights are no longer numbers, for each."""
        parts = [*self.weights.values(), self.running]
        finite = torch.stack([part.flatten(1).isfinite().all(1) for part in parts])  # (parts, M)
        return (~finite.all(0)).tolist()

    def checkpoint(self) -> Checkpoint:
        tensors = {f"weights.{name}": value for name, value in self.weights.items()}
        tensors |= {f"velocity.{name}": value for name, value in self.velocity.items()}
        members = [list(member) for member in self.members]
        return Checkpoint(tensors | {"running": self.running}, {"step": self.step, "of": members})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues exactly where the checkpoint was taken."""
        if checkpoint.state.get("of") != [list(member) for member in self.members]:
            raise UserError(
                "the checkpoint is of other seeds, learning rates or k': give another folder"
            )
        for name, value in checkpoint.tensors.items():
            kind, _, rest = name.partition(".")
            own = self.running if kind == "running" else getattr(self, kind)[rest]
            own.copy_(value)
        self.step = checkpoint.state["step"]
        self.ordered_epoch = -1


# --- the mathematics of a step --------------------------------------------------------------------


def objective(
    classifier: Classifier, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor,
    models_of_count: Mapping[int, Tensor], keys: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum over models of the average of its k' largest losses; losses (M, B); statistics."""
    scores, statistics = classifier.scores(weights, images, None, keys)  # (M, B, classes)
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)  # (M, B)
    chosen = hardest_weights(losses.detach(), models_of_count)
    # A zero weight must not carry the infinite loss of an example that was not chosen.
    kept = losses.masked_fill(chosen == 0, 0)
    return (chosen * kept).sum(), losses.detach(), statistics


def hardest_weights(losses: Tensor, models_of_count: Mapping[int, Tensor]) -> Tensor:
    """`evenhand.risk.top_weights` of every model's losses: (M, B) -> (M, B).

    Args:
        models_of_count: for each k', the models (rows of the losses) that have it.
    """
    weights = torch.zeros_like(losses)
    for count, models in models_of_count.items():
        weights_fn = torch.func.vmap(functools.partial(top_weights, num_hard_examples=count))
        weights = weights.index_copy(0, models, weights_fn(losses.index_select(0, models)))
    return weights


def update(
    weights: Sequence[Tensor], velocity: Sequence[Tensor], gradients: Sequence[Tensor],
    rates: Tensor, momentum: float, weight_decay: float,
) -> None:  # fmt: skip
    """Momentum SGD as in torch.optim.SGD, in place, each model at its own learning rate (M,)."""
    for value, speed, gradient in zip(weights, velocity, gradients, strict=True):
        speed.mul_(momentum).add_(gradient)
        if weight_decay:
            speed.add_(value, alpha=weight_decay)
        value.addcmul_(rates.view(-1, *[1] * (value.dim() - 1)), speed, value=-1)


def _compiled(classifier: Classifier) -> "tuple[ObjectiveFn, UpdateFn]":
    if isinstance(classifier, ResNet):  # one model's code, compiled once, is that of all
        own = dataclasses.replace(classifier, is_compiled=True)
        return lambda _, *rest: objective(own, *rest), _compiled_together()[1]
    return _compiled_together()


@functools.cache
def _compiled_together() -> "tuple[ObjectiveFn, UpdateFn]":
    """Once for all trainings: one of the same shapes, as after tuning, compiles nothing again."""
    return torch.compile(objective, dynamic=False), torch.compile(update, dynamic=False)


ObjectiveFn = Callable[
    [Classifier, Mapping[str, Tensor], Tensor, Tensor, Mapping[int, Tensor], Tensor | None],
    tuple[Tensor, Tensor, Tensor],
]
UpdateFn = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Tensor, float, float], None
]
