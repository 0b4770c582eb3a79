"""Even-handed mining on the device: who counts, and the gaps by which the next step ranks.

The oracle is `risk.EvenMining`, whose sums these kernels add to.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.selection import (
    EXAMPLES_OF_WARP,
    is_selected,
    kth_largest,
    list_kept,
)


class EvenBuffers(NamedTuple):
    """What the kernels of even-handed mining share."""

    pair_bins: Tensor  # (N_pairs,) int32: twice the bin, plus 1 if held out
    batch_bins: Tensor  # (B,) int32, of the step's examples
    shape: Tensor  # (G,) float64
    sums: Tensor  # (2, 2, G) float64, those of the risk itself
    gaps: Tensor  # (G,) float32
    # Constants of the risk.
    scale: float
    gap_weight: float
    mined_share: float
    multiplier: int  # spreads the easy examples that count over the batch
    prior_count: float
    decay: float  # of the sums, a step


def select_even_examples(step: Buffers, even: EvenBuffers, pair_ids: Tensor) -> None:
    """As `selection.select_examples`, with the weights of `risk.even_weights`."""
    kept, block = step.kept, triton.next_power_of_2(step.batch_size)
    _select_even[(1,)](
        kept.losses, pair_ids, even.pair_bins, even.gaps, step.clock.step,
        step.clock.num_hard_examples, even.batch_bins, kept.weights, kept.survivors,
        kept.num_survivors, step.stats, step.batch_size, GAP_WEIGHT=even.gap_weight,
        MINED_SHARE=even.mined_share, MULTIPLIER=even.multiplier, BLOCK=block,
        num_warps=min(16, max(1, block // EXAMPLES_OF_WARP)),
    )  # fmt: skip


def measure_gaps(step: Buffers, even: EvenBuffers) -> None:
    """Adds the losses of this step to the sums, and makes the gaps of the next."""
    block, num_bins = triton.next_power_of_2(step.batch_size), len(even.gaps)
    _add_to_bins[(num_bins,)](
        step.kept.losses, even.batch_bins, even.sums, step.batch_size, num_bins,
        DECAY=even.decay, BLOCK=block, num_warps=min(16, max(1, block // EXAMPLES_OF_WARP)),
    )  # fmt: skip
    _find_gaps[(1,)](
        even.sums, even.shape, even.gaps, num_bins, SCALE=even.scale,
        PRIOR=even.prior_count, BLOCK=triton.next_power_of_2(num_bins), num_warps=1,
    )  # fmt: skip


@triton.jit
def _select_even(
    losses, pair_ids, pair_bins, gaps, step_at, count_at, out_bins, out_weights, out_survivors,
    out_num_survivors, out_stats, batch_size, GAP_WEIGHT: tl.constexpr,
    MINED_SHARE: tl.constexpr, MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    is_row = rows < batch_size
    step = tl.load(step_at)
    pairs = tl.load(pair_ids + rows, mask=is_row, other=0)
    bins = tl.load(pair_bins + pairs, mask=is_row, other=1)
    tl.store(out_bins + rows, bins, mask=is_row)
    values = tl.load(losses + rows, mask=is_row, other=-float("inf"))
    is_bad = values != values
    num_bad = tl.sum(is_bad.to(tl.int32))
    values = tl.where(is_bad, -float("inf"), values)

    is_left = is_row & (bins % 2 == 0)
    is_left = is_left | (is_row & (tl.sum(is_left.to(tl.int32)) == 0))
    num_left = tl.sum(is_left.to(tl.int32))
    count = tl.minimum(tl.load(count_at), num_left)
    gap = tl.load(gaps + bins // 2, mask=is_row, other=0.0)
    keys = tl.where(is_left, values + GAP_WEIGHT * gap, -float("inf"))
    is_good = keys > -float("inf")
    lowest = tl.min(tl.where(is_good, keys, float("inf")))
    num_good = tl.sum(is_good.to(tl.int32))
    threshold, last_tie = kth_largest(
        keys, rows, tl.minimum(count, num_good), num_good, lowest, tl.max(keys), BLOCK
    )
    is_hard = is_selected(keys, rows, threshold, last_tie)
    part = (1.0 - MINED_SHARE) * count.to(tl.float64)
    easy_share = part / (MINED_SHARE * num_left.to(tl.float64) + part)
    places = ((rows + 1).to(tl.int64) * MULTIPLIER) & 0xFFFFFFFF
    is_kept = is_good & (is_hard | (places.to(tl.float64) < easy_share * 4294967296.0))
    num_kept = tl.sum(is_kept.to(tl.int32))
    weights = tl.where(is_kept, 1.0 / tl.maximum(num_kept, 1).to(tl.float32), 0.0)
    tl.store(out_weights + rows, weights, mask=is_row)
    list_kept(
        values, weights, is_kept, num_bad, step, out_survivors, out_num_survivors, out_stats,
        batch_size, rows,
    )  # fmt: skip


@triton.jit
def _add_to_bins(
    losses, bins_at, sums, batch_size, num_bins, DECAY: tl.constexpr, BLOCK: tl.constexpr
):
    own = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    is_row = rows < batch_size
    bins = tl.load(bins_at + rows, mask=is_row, other=-1)
    values = tl.load(losses + rows, mask=is_row, other=0.0).to(tl.float64)
    for kind in tl.static_range(2):  # trained, held out
        is_own = bins == 2 * own + kind
        counts = sums + kind * 2 * num_bins + own
        totals = counts + num_bins
        tl.store(counts, tl.load(counts) * DECAY + tl.sum(is_own.to(tl.float64)))
        tl.store(totals, tl.load(totals) * DECAY + tl.sum(tl.where(is_own, values, 0.0)))


@triton.jit
def _find_gaps(
    sums, shape_at, out_gaps, num_bins, SCALE: tl.constexpr, PRIOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    bins = tl.arange(0, BLOCK)
    is_bin = bins < num_bins
    num_trained = tl.load(sums + bins, mask=is_bin, other=0.0)
    trained = tl.load(sums + num_bins + bins, mask=is_bin, other=0.0)
    num_held_out = tl.load(sums + 2 * num_bins + bins, mask=is_bin, other=0.0)
    held_out = tl.load(sums + 3 * num_bins + bins, mask=is_bin, other=0.0)
    shape = tl.load(shape_at + bins, mask=is_bin, other=0.0)
    means = trained / tl.maximum(num_trained, 1e-9)
    counts = tl.where(num_trained > 0.0, num_held_out, 0.0)
    excess = tl.where(num_trained > 0.0, held_out - num_held_out * means, 0.0)
    squares = tl.sum(counts * shape * shape)
    fitted = tl.sum(excess * shape) / tl.where(squares > 0.0, squares, 1.0)
    scale = tl.where(squares > 0.0, fitted, SCALE)
    gaps = (excess + scale * shape * PRIOR) / (counts + PRIOR)
    tl.store(out_gaps + bins, gaps.to(tl.float32), mask=is_bin)
