"""Schedules and batches, computed on the device so that a recorded step needs no host.

A CUDA graph replays the same kernels with the same addresses. Learning rate, k', the key of the
sample and the place of the batch are therefore planned for all steps at once and lie on the device;
the first kernel of a step copies its own row of the plan to fixed places, and counts on. An epoch's
order is a keyed permutation of all pairs, as in `training.feed`: a batch is the next B of it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.permutation import permute
from evenhand.kernels.random import num_bits

ROWS = 16  # of a program


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
        """With every present value still 0."""

        def now(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(1, dtype=dtype, device=keys.device)

        plan = learning_rates.float(), hard_examples.int(), keys
        return Clock(*plan, now(), now(), now(torch.float32), now(torch.int32), now())

    def tick(self) -> None:
        _tick[(1,)](*self, num_warps=1)


class DevicePairs(NamedTuple):
    """All (query, positive) pairs of a training part, and the positives of every query."""

    query_ids: Tensor  # (N,) int64
    label_ids: Tensor  # (N,) int64
    positive_offsets: Tensor  # (Q + 1,) int64
    positive_ids: Tensor  # (N,) int64
    epoch_keys: Tensor  # (S,) int64: the key of the epoch that each step is in,
    positions: Tensor  # (S,) int64: and the pairs of it that came before


def draw_batch(
    pairs: DevicePairs, clock: Clock, *, masks_all_positives: bool, out_pairs: Tensor,
    out_queries: Tensor, out_labels: Tensor, out_positives: Tensor,
) -> None:  # fmt: skip
    """The pairs of this step: which they are (B,), their queries, labels and positives (B, P)."""
    batch_size, width = out_positives.shape
    num_pairs = len(pairs.query_ids)
    _draw_batch[(triton.cdiv(batch_size, ROWS),)](
        *pairs, clock.step, out_pairs, out_queries, out_labels, out_positives, num_pairs,
        batch_size, width, BITS=num_bits(num_pairs), MASKS_ALL=masks_all_positives, ROWS=ROWS,
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


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


@triton.jit
def _draw_batch(
    query_ids, label_ids, positive_offsets, positive_ids, epoch_keys, positions, step_at,
    out_pairs, out_queries, out_labels, out_positives, num_pairs, batch_size, width,
    BITS: tl.constexpr, MASKS_ALL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_at)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < batch_size
    places = (tl.load(positions + step) + rows) % num_pairs
    pairs = permute(places, tl.load(epoch_keys + step), num_pairs, BITS)
    queries = tl.load(query_ids + pairs, mask=is_row, other=0)
    labels = tl.load(label_ids + pairs, mask=is_row, other=0)
    tl.store(out_pairs + rows, pairs, mask=is_row)
    tl.store(out_queries + rows, queries, mask=is_row)
    tl.store(out_labels + rows, labels, mask=is_row)
    lanes = tl.arange(0, WIDTH)
    targets = rows[:, None] * width + lanes[None, :]
    is_target = is_row[:, None] & (lanes < width)[None, :]
    if MASKS_ALL:
        starts = tl.load(positive_offsets + queries, mask=is_row, other=0)
        ends = tl.load(positive_offsets + queries + 1, mask=is_row, other=0)
        sources = starts[:, None] + lanes[None, :]
        is_positive = is_target & (sources < ends[:, None])
        positives = tl.load(positive_ids + sources, mask=is_positive, other=-1)
        tl.store(out_positives + targets, positives, mask=is_target)
    else:
        tl.store(out_positives + targets, labels[:, None] + 0 * lanes[None, :], mask=is_target)
