"""What changes from step to step, on the device: so that one recorded step serves them all.

A recorded graph replays the same kernels with the same addresses. Learning rate, k' and the key
of the sample are therefore planned for all steps at once and lie on the device; the first kernel
of a step copies its own row of the plan to fixed places, and counts on.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Clock(NamedTuple):
    """The plan (S,) and the present of it (1,)."""

    learning_rates: Tensor  # (S,) float32
    hard_examples: Tensor  # (S,) int32, k'
    keys: Tensor  # (S,) int64, of the label samples
    step_number: Tensor  # (1,) int64, of the step that is under way, from 1; 0 before the first
    step: Tensor  # (1,) int64, the same from 0
    learning_rate: Tensor  # (1,) float32
    num_hard_examples: Tensor  # (1,) int32
    key: Tensor  # (1,) int64

    @staticmethod
    def planned(learning_rates: Tensor, hard_examples: Tensor, keys: Tensor) -> "Clock":
        device = learning_rates.device
        step_number, step, key = torch.zeros(3, 1, dtype=torch.int64, device=device)
        return Clock(
            learning_rates.float(),
            hard_examples.int(),
            keys,
            step_number=step_number,
            step=step,
            learning_rate=torch.zeros(1, device=device),
            num_hard_examples=torch.zeros(1, dtype=torch.int32, device=device),
            key=key,
        )

    def tick(self) -> None:
        _tick[(1,)](*self, num_warps=1)


@triton.jit
def _tick(
    learning_rates, hard_examples, keys, step_number, step, learning_rate, num_hard_examples, key
):
    now = tl.load(step_number)  # the number of the last step is the next one, counted from 0
    tl.store(step, now)
    tl.store(learning_rate, tl.load(learning_rates + now))
    tl.store(num_hard_examples, tl.load(hard_examples + now))
    tl.store(key, tl.load(keys + now))
    tl.store(step_number, now + 1)
