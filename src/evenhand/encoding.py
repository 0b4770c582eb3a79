"""Two passes over a batch: encode all of it without gradient, then the survivors with it.

A deep encoder's time is spent in its backward pass, and after mining most examples and labels have
no gradient at all. So a batch is encoded without one, in chunks; the loss is computed and mined;
and only the rows that got a gradient are encoded again, in chunks, to carry it to the weights:

    queries = two_pass(encoder, features, chunk_size=64)   # (B, D)
    loss = s2m_loss(...)                                   # any function of the vectors
    loss.backward()

It is the gradient of the same loss, in the memory of one chunk: a batch of any size may be mined
as a whole, which is what gradient accumulation cannot do.

Both passes must compute the same vectors, and a survivor stands in another chunk the second time.
So dropout is drawn for each example from a seed of its own (`SeededDropout`), not from a generator
that knows the chunk. Statistics over a batch, as in batch normalisation, cannot be had this way.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from evenhand.kernels.random import FIRST32, GOLDEN32, SECOND32, WORD, mix32


def two_pass(
    encoder: nn.Module, features: Any, *, chunk_size: int, seeds: Tensor | None = None
) -> Tensor:
    """The vectors of a batch (B, D); `backward` encodes those with a gradient once more.

    Weights of the encoder get their gradients as from one pass. The features get none.

    Args:
        encoder: maps the features of b examples to (b, D), examples in the first dimension.
        features: of B examples: a tensor, a list, a mapping or tuple of these, or an object with
            `num_examples` and `take(positions)`.
        chunk_size: examples that are encoded at once; it decides memory, not results.
        seeds: (B,) int64 of the examples' dropout; None: from torch's default generator.

    Example:
        >>> encoder = nn.Linear(2, 1)
        >>> two_pass(encoder, torch.ones(3, 2), chunk_size=2)[1].sum().backward()
        >>> encoder.weight.grad
        tensor([[1., 1.]])
    """
    if seeds is None:
        seeds = draw_seeds(count_examples(features))
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    vectors: Tensor = _TwoPass.apply(encoder, features, chunk_size, seeds, *weights)  # type: ignore[no-untyped-call]
    return vectors


def draw_seeds(num_examples: int, generator: torch.Generator | None = None) -> Tensor:
    """(B,) seeds for the dropout of a batch, from a generator of the CPU."""
    return torch.randint(2**62, (num_examples,), generator=generator)


@torch.no_grad()
def encode_in_chunks(
    encoder: nn.Module, features: Any, *, chunk_size: int, seeds: Tensor
) -> Tensor:
    """The first pass: the vectors of all examples, (B, D), without gradient."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    parts = [
        _encode(encoder, take_examples(features, own), seeds[own.to(seeds.device)])
        for own in _chunks(torch.arange(len(seeds)), chunk_size)
    ]
    return torch.cat(parts)


def survivors_in_chunks(
    encoder: nn.Module, features: Any, vector_gradients: Tensor, *, chunk_size: int, seeds: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The second pass: vectors with a graph, and their gradients, chunk by chunk: (b, D) each.

    Rows of `vector_gradients` (B, D) that are 0 throughout are left out.
    """
    survivors = (vector_gradients != 0).any(dim=1).nonzero().squeeze(1).cpu()  # NaN survives
    for own in _chunks(survivors, chunk_size):
        with torch.enable_grad():
            vectors = _encode(encoder, take_examples(features, own), seeds[own.to(seeds.device)])
        yield vectors, vector_gradients[own.to(vector_gradients.device)]


class _TwoPass(torch.autograd.Function):
    """Weights are inputs, so that their gradients arrive once, as from any other operation."""

    @staticmethod
    def forward(
        ctx: Any,
        encoder: nn.Module,
        features: Any,
        chunk_size: int,
        seeds: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        vectors = encode_in_chunks(encoder, features, chunk_size=chunk_size, seeds=seeds)
        ctx.encoder, ctx.features, ctx.chunk_size, ctx.seeds = encoder, features, chunk_size, seeds
        ctx.save_for_backward(*weights)  # refuses weights that were changed in between
        device = vectors.device.type
        ctx.precision = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vector_gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        sums: list[Tensor | None] = [None] * len(weights)
        chunks = survivors_in_chunks(
            ctx.encoder,
            ctx.features,
            vector_gradients,
            chunk_size=ctx.chunk_size,
            seeds=ctx.seeds,
        )
        while True:
            with torch.autocast(**ctx.precision):
                chunk = next(chunks, None)
            if chunk is None:
                return None, None, None, None, *sums
            vectors, gradients = chunk
            found = torch.autograd.grad(vectors, weights, gradients, allow_unused=True)
            for index, own in enumerate(found):
                before = sums[index]
                sums[index] = own if before is None else before if own is None else before.add_(own)


# --- features of any form -------------------------------------------------------------------------


def count_examples(features: Any) -> int:
    """B: of a tensor, a list, a mapping or tuple of these, or an object with `num_examples`."""
    if hasattr(features, "num_examples"):
        return int(features.num_examples)
    if isinstance(features, Mapping):
        return count_examples(next(iter(features.values())))
    return count_examples(features[0]) if isinstance(features, tuple) else len(features)


def take_examples(features: Any, positions: Tensor) -> Any:
    """The features of chosen examples, in that order: positions (n,) on the CPU or beside them.

    Example:
        >>> take_examples({"texts": ["a", "b"], "lengths": torch.tensor([3, 4])}, torch.tensor([1]))
        {'texts': ['b'], 'lengths': tensor([4])}
    """
    if hasattr(features, "num_examples"):
        return features.take(positions)
    if isinstance(features, Mapping):
        return {name: take_examples(own, positions) for name, own in features.items()}
    if isinstance(features, tuple):
        return tuple(take_examples(own, positions) for own in features)
    if isinstance(features, Tensor):
        return features.index_select(0, positions.to(features.device))
    return [features[position] for position in positions.tolist()]


# --- dropout that belongs to an example -----------------------------------------------------------

ODD = (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0x9E3779B1)  # one for each dimension
SEEDED = torch.Tag.nondeterministic_seeded  # of operations that draw random numbers


class SeededDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws every dropout mask inside as a function of (example's seed, which dropout, place).

    A mask does not depend on the chunk an example stands in, nor on how far the chunk is padded.
    The first dimension of what is dropped must be that of the examples, or a multiple of it, as
    with the heads of attention.
    """

    def __init__(self, seeds: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds, self.num_drawn = seeds, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if SEEDED not in function.tags:
            return function(*args, **kwargs)
        arguments = function._schema.arguments  # those that have their default may be left out
        named = {own.name: own.default_value for own in arguments}
        named |= {own.name: value for own, value in zip(arguments, args, strict=False)} | kwargs
        if function is torch.ops.aten.bernoulli_.float:
            return named["self"].copy_(self._draw(named["self"], named["p"]))
        if function is torch.ops.aten.native_dropout.default:
            inputs, share = named["input"], named["p"]
            if not named["train"]:
                return function(*args, **kwargs)
            kept = self._draw(inputs, 1 - share)
            return inputs * kept * (1 / (1 - share) if share < 1 else 0.0), kept
        if named.get("dropout_p", 1) == 0:
            return function(*args, **kwargs)  # attention without dropout
        raise ValueError(
            f"the encoder draws random numbers by {function}, and two passes can repeat those of "
            f"dropout alone; of a fused attention on a GPU, set its dropout to 0 or choose the "
            f"plain one (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
        )

    def _draw(self, like: Tensor, share: float) -> Tensor:
        """True with this probability, in the shape of `like`: (n * b, ...)."""
        num_examples = len(self.seeds)
        if like.dim() == 0 or like.shape[0] % num_examples:
            raise ValueError(
                f"dropout of a tensor of shape {tuple(like.shape)} cannot be told apart by the "
                f"{num_examples} examples of a chunk: the first dimension must be theirs"
            )
        self.num_drawn += 1
        keys = mix32(self.seeds.to(like.device) & WORD) ^ mix32(self.seeds.to(like.device) >> 32)
        keys = mix32(keys ^ (self.num_drawn * GOLDEN32 & WORD))  # (b,)
        sizes = (like.shape[0] // num_examples, *like.shape[1:])
        places = torch.zeros((), dtype=torch.int32, device=like.device)
        for dimension, size in enumerate(sizes):
            steps = torch.arange(size, device=like.device) * ODD[dimension % len(ODD)]
            shape = [1] * dimension + [size] + [1] * (len(sizes) - dimension - 1)
            places = places + _as_int32(steps).view(shape)  # wraps, as is meant
        # mix32 on words of 32 bits, in place: these are as many numbers as the activations are.
        words = _as_int32(keys).view(-1, *[1] * len(sizes)) ^ places
        for shift, factor in ((16, FIRST32), (15, SECOND32)):
            words ^= (words >> shift).bitwise_and_((1 << (32 - shift)) - 1)
            words *= factor - 2**32 if factor >= 2**31 else factor
        if share <= 0 or share >= 1:
            return torch.full_like(like, share >= 1, dtype=torch.bool)
        return (words < round(share * 2**32) - 2**31).view(like.shape)


# Encoders that drew random numbers in training mode.
_draws_numbers: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _encode(encoder: nn.Module, features: Any, seeds: Tensor) -> Tensor:
    """One chunk. `SeededDropout` slows every operation, so it is for encoders with dropout alone.

    One that is not known to draw random numbers runs without it, and once more if it did draw.
    """
    vectors: Tensor
    if not encoder.training:
        vectors = encoder(features)
        return vectors
    if not _draws_numbers.get(encoder, False):
        weight = next(encoder.parameters(), seeds)
        generators = [torch.random, torch.get_device_module(weight.device)]
        generators = [own for own in generators if hasattr(own, "get_rng_state")]
        before = [own.get_rng_state() for own in generators]
        vectors = encoder(features)
        if all(map(torch.equal, before, (own.get_rng_state() for own in generators))):
            return vectors
        for own, state in zip(generators, before, strict=True):
            own.set_rng_state(state)
        _draws_numbers[encoder] = True
    with SeededDropout(seeds):
        vectors = encoder(features)
    return vectors


def _chunks(positions: Tensor, size: int) -> Iterator[Tensor]:
    return (positions[start : start + size] for start in range(0, len(positions), size))


def _as_int32(words: Tensor) -> Tensor:
    """Words below 2 ** 32 as the same bits with a sign."""
    return ((words & WORD) - ((words & 2**31) << 1)).to(torch.int32)
