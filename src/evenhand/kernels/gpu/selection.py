"""The hardest labels of each row, and the hardest examples of a batch, without sorting either.

The k-th largest of a row is found by halving the interval between its smallest and its largest
score until exactly k scores are above: about ten passes over a row that stays in registers. Two
scores that no number lies between are a tie; then the first columns are kept. What is left of a
row is its loss and three numbers that say what was kept (see `gradients`), no list.
"""

import os

import triton
import triton.language as tl

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.losses import row_loss

LABELS_OF_WARP, EXAMPLES_OF_WARP = 1024, 512  # compared by one warp
LARGEST_ROW = 32768  # columns that the registers of one program hold
SHARPNESS = tl.constexpr(2.0**100)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def select_labels(step: Buffers) -> None:
    """Keeps each row's hardest labels: its loss, and what is needed to find the kept ones again.

    In `step.scores` the slots of positives are overwritten with -inf.
    """
    kept, loss, block = step.kept, step.loss, triton.next_power_of_2(step.num_sampled)
    num_slots = step.no_slots if step.draws_for_each else step.num_slots
    _select_labels[(step.batch_size,)](
        step.scores, step.positive_slots, num_slots, step.positive_scores, kept.losses,
        kept.thresholds, kept.last_ties, kept.row_values, kept.positive_slopes, step.num_sampled,
        step.num_positives, step.num_hard_labels, KIND=loss.kind, MARGIN=loss.margin,
        POWER=loss.power, BLOCK=block, num_warps=min(16, max(1, block // LABELS_OF_WARP)),
    )  # fmt: skip


def select_examples(step: Buffers) -> None:
    """Weighs the k' largest losses 1/k' each, lists those examples and writes the statistics."""
    kept, block = step.kept, triton.next_power_of_2(step.batch_size)
    _select_examples[(1,)](
        kept.losses, step.clock.step, step.clock.num_hard_examples, kept.weights, kept.survivors,
        kept.num_survivors, step.stats, step.batch_size, BLOCK=block,
        num_warps=min(16, max(1, block // EXAMPLES_OF_WARP)),
    )  # fmt: skip


def list_examples(step: Buffers) -> None:
    """As `select_examples`, for `weights` that another risk has given."""
    kept, block = step.kept, triton.next_power_of_2(step.batch_size)
    _list_examples[(1,)](
        kept.losses, kept.weights, step.clock.step, kept.survivors, kept.num_survivors, step.stats,
        step.batch_size, BLOCK=block, num_warps=min(16, max(1, block // EXAMPLES_OF_WARP)),
    )  # fmt: skip


@triton.jit
def _select_labels(
    scores, positive_slots, num_slots, positive_scores, out_losses, out_thresholds,
    out_last_ties,
    out_row_values, out_positive_slopes, num_sampled, num_positives, num_hard_labels,
    KIND: tl.constexpr, MARGIN: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    row_scores = scores + row.to(tl.int64) * num_sampled
    is_slot = columns < num_sampled
    values = tl.load(row_scores + columns, mask=is_slot, other=float("inf")).to(tl.float32)
    lowest = tl.min(values)
    values = tl.where(is_slot, values, -float("inf"))
    num_masked = tl.load(num_slots + row)
    for place in range(num_masked):
        slot = tl.load(positive_slots + row * num_positives + place)
        values = tl.where(columns == slot, -float("inf"), values)
        # Later kernels read the row again, and must not find the positive there.
        tl.store(row_scores + slot, -float("inf"))

    num_labels = num_sampled - num_masked
    count = tl.minimum(num_hard_labels, num_labels)
    highest = tl.max(values)
    threshold, last_tie = kth_largest(values, columns, count, num_labels, lowest, highest, BLOCK)
    kept = tl.where(values > threshold, values, -float("inf"))
    if last_tie >= 0:
        kept = tl.where((values == threshold) & (columns <= last_tie), values, kept)
    positive_score = tl.load(positive_scores + row)
    loss, row_value, positive_slope = row_loss(
        positive_score, kept, highest, count, KIND, MARGIN, POWER
    )
    # A vector that is no number makes its scores so, and must be seen; a maximum would hide them.
    num_bad = tl.sum((values != values).to(tl.int32)) + (positive_score != positive_score)
    tl.store(out_losses + row, tl.where(num_bad > 0, float("nan"), loss))
    tl.store(out_thresholds + row, threshold)
    tl.store(out_last_ties + row, last_tie)
    tl.store(out_row_values + row, row_value)
    tl.store(out_positive_slopes + row, positive_slope)


@triton.jit
def _select_examples(
    losses, step_at, count_at, out_weights, out_survivors, out_num_survivors, out_stats,
    batch_size, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    is_row = rows < batch_size
    step = tl.load(step_at)
    count = tl.load(count_at)
    values = tl.load(losses + rows, mask=is_row, other=-float("inf"))
    is_bad = values != values
    num_bad = tl.sum(is_bad.to(tl.int32))
    values = tl.where(is_bad, -float("inf"), values)
    is_good = values > -float("inf")
    lowest = tl.min(tl.where(is_good, values, float("inf")))
    num_good = tl.sum(is_good.to(tl.int32))
    count = tl.minimum(count, num_good)
    highest = tl.max(values)
    threshold, last_tie = kth_largest(values, rows, count, num_good, lowest, highest, BLOCK)
    is_kept = is_selected(values, rows, threshold, last_tie)
    weights = tl.where(is_kept, 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0)
    tl.store(out_weights + rows, weights, mask=is_row)
    list_kept(
        values, weights, is_kept, num_bad, step, out_survivors, out_num_survivors, out_stats,
        batch_size, rows,
    )  # fmt: skip


@triton.jit
def _list_examples(
    losses, weights_at, step_at, out_survivors, out_num_survivors, out_stats, batch_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    is_row = rows < batch_size
    values = tl.load(losses + rows, mask=is_row, other=-float("inf"))
    weights = tl.load(weights_at + rows, mask=is_row, other=0.0)
    num_bad = tl.sum(((values != values) | (weights != weights)).to(tl.int32))
    list_kept(
        values, weights, weights != 0.0, num_bad, tl.load(step_at), out_survivors,
        out_num_survivors, out_stats, batch_size, rows,
    )  # fmt: skip


@triton.jit
def list_kept(
    values, weights, is_kept, num_bad, step, out_survivors, out_num_survivors, out_stats,
    batch_size, rows,
):  # fmt: skip
    """Lists the examples with a weight, and writes the statistics of the step."""
    kept = is_kept.to(tl.int32)
    tl.store(out_survivors + tl.cumsum(kept, axis=0) - 1, rows, mask=is_kept)
    tl.store(out_num_survivors, tl.sum(kept))
    objective = tl.sum(weights * tl.where(is_kept, values, 0.0))
    num_zero = tl.sum(((values <= 0.0) & (rows < batch_size)).to(tl.int32)).to(tl.float32)
    tl.store(out_stats + 2 * step, tl.where(num_bad > 0, float("nan"), objective))
    tl.store(out_stats + 2 * step + 1, num_zero / batch_size)


@triton.jit
def is_selected(values, columns, threshold, last_tie):
    """Above the threshold, or equal to it and no further right than the last tie."""
    return (values > threshold) | ((values == threshold) & (columns <= last_tie))


@triton.jit
def kth_largest(values, columns, count, num_values, lowest, highest, BLOCK: tl.constexpr):
    """A threshold and a last tie that select `count` of the `num_values` that are not -inf.

    Args:
        lowest, highest: the ends of what is not -inf.
    """
    low = lowest - 1e-6 * tl.abs(lowest) - 1e-12  # all are above it, and
    high = highest  # none is above this
    threshold = low
    is_open = num_values > count
    is_tied = is_open
    while is_open:
        middle = 0.5 * low + 0.5 * high
        is_between = (middle > low) & (middle < high)
        is_near = (high - low < 1e-9) | (high > 1e8) | (low < -1e8)
        num_above = _num_above(values, middle, is_near)
        is_enough = is_between & (num_above >= count)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_between & (num_above < count), middle, high)
        threshold = middle
        is_tied = (num_above != count) | (is_between == 0)
        is_open = is_between & is_tied
    last_tie = tl.full((), -1, tl.int32)
    if is_tied:  # no number lies between: `high` is the k-th largest, and others equal it
        threshold = high
        num_free = count - tl.sum((values > high).to(tl.int32))
        left = tl.full((), 0, tl.int32)
        right = tl.full((), BLOCK - 1, tl.int32)
        while left < right:
            middle_column = (left + right) // 2
            num_ties = tl.sum(((values == high) & (columns <= middle_column)).to(tl.int32))
            right = tl.where(num_ties >= num_free, middle_column, right)
            left = tl.where(num_ties >= num_free, left, middle_column + 1)
        last_tie = left
    return threshold, last_tie


@triton.jit
def _num_above(values, threshold, is_near):
    """How many values are above the threshold: the innermost pass of a step.

    A comparison runs at half the rate of a multiplication. The difference times 2**100, cut to
    the interval from 0 to 1, is 0 or 1 as well, and exact: a power of two rounds nothing. Only
    differences below 1e-30 are lost, which is why near ties are compared; so are scores above 1e8.
    """
    if is_near:
        num_above = tl.sum((values > threshold).to(tl.int32))
    else:
        num_above = tl.sum(_is_above(values, threshold)).to(tl.int32)
    return num_above


@triton.jit
def _is_above(values, threshold):
    if INTERPRETED:
        return tl.minimum(tl.maximum(values * SHARPNESS - threshold * SHARPNESS, 0.0), 1.0)
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, 0f71800000, $2;",  # 2**100
        "=f,f,f",
        [values, tl.zeros_like(values) - threshold * SHARPNESS],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
