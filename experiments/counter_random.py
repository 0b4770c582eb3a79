"""Random numbers as a function of a key and a place: the same on every device, for any batch.

A generator's numbers depend on how many were asked for before. These do not, so a model draws the
same ones whether it is trained alone or among a hundred, from the start or from a checkpoint, and
a recorded CUDA graph draws new ones at each replay, because the step is a tensor.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FACTOR = 0x45D9F3B  # below 2**27, so that no product with a word leaves 63 bits
OFFSET = 0x3C6EF372  # zero would be mixed to zero
FRACTION = 2**-24  # of the 24 upper bits, what float32 holds exactly


def mix_bits(values: Tensor) -> Tensor:
    """Spreads every bit of 32 over the word, one to one; int64 in and out."""
    for _ in range(2):
        values = ((values ^ (values >> 16)) * FACTOR) & WORD
    return values ^ (values >> 16)


def keys(seeds: Tensor, step: Tensor, *, purpose: int) -> Tensor:
    """A key for each seed, of a step and of what it is drawn for: (M,), () -> (M,)."""
    of_seed = mix_bits((seeds + OFFSET) & WORD)
    return mix_bits(mix_bits(of_seed ^ (step & WORD)) ^ (purpose * OFFSET & WORD))


def uniform(keys: Tensor, count: int) -> Tensor:
    """(M,) -> (M, count) float32 in [0, 1): `count` numbers of each key."""
    places = mix_bits(torch.arange(count, device=keys.device) + OFFSET)
    words = mix_bits(keys.unsqueeze(1) ^ places)  # (M, count)
    return (words >> 8).float() * FRACTION
