"""Gathers the normalised vectors of the sampled labels and of the batch's positives.

Touched rows alone are normalised. The sample needs no list of what was drawn: place m of a keyed
order of all labels is slot m, and the inverse order tells the slot of any label. So a positive's
slot costs a few integer operations, and a label is never twice among the slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.permutation import permute, places_of
from evenhand.kernels.gpu.rows import SMALLEST_NORM
from evenhand.kernels.random import num_bits

ROWS = 2  # of a program


def gather_sample(step: Buffers) -> None:
    """Draws M distinct labels by the key: their ids and their (unit) rows; no column is touched."""
    table = step.rows.table
    _gather_sample[(triton.cdiv(step.num_sampled, ROWS),)](
        table, step.clock.key, step.column_ids, step.units, step.touched, len(table),
        step.num_sampled, step.width, BITS=num_bits(len(table)), IS_COSINE=step.is_cosine,
        ROWS=ROWS, BLOCK=triton.next_power_of_2(step.width), num_warps=1,
    )  # fmt: skip


def unit_vectors(vectors: Tensor, *, scale: float, is_cosine: bool, out: Tensor) -> None:
    """(n, D) -> unit vectors times the scale."""
    num_rows, width = vectors.shape
    _unit_vectors[(triton.cdiv(num_rows, ROWS),)](
        vectors, out, scale, num_rows, width, IS_COSINE=is_cosine, ROWS=ROWS,
        BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def gather_positives(step: Buffers) -> None:
    """The batch's own labels: their rows and scores, and where the positives lie."""
    table, num_sampled = step.rows.table, step.num_sampled
    _gather_positives[(triton.cdiv(step.batch_size, ROWS),)](
        table, step.vectors, step.label_ids, step.positive_ids, step.clock.key,
        step.positive_units, step.positive_scores, step.positive_slots, step.num_slots,
        step.label_slots, step.column_ids[num_sampled:], step.touched[num_sampled:], step.scale,
        len(table), num_sampled, step.batch_size, step.num_positives, step.width,
        BITS=num_bits(len(table)), IS_COSINE=step.is_cosine, ROWS=ROWS,
        BLOCK=triton.next_power_of_2(step.width), CHUNK=1024,
        POSITIVES=triton.next_power_of_2(step.num_positives), num_warps=1,
    )  # fmt: skip


def product(queries: Tensor, units: Tensor, *, out: Tensor) -> None:
    """(B, D), (M, D) -> (B, M) in float32, whatever the vectors are in."""
    if queries.dtype == torch.float32:
        torch.mm(queries, units.T, out=out)
    else:
        torch.mm(queries, units.T, out_dtype=torch.float32, out=out)


@triton.jit
def _gather_sample(
    table, key_at, out_ids, out_units, out_touched, num_labels, num_sampled, width,
    BITS: tl.constexpr, IS_COSINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_slot = slots < num_sampled
    key = tl.load(key_at)
    ids = permute(slots.to(tl.int64), key, num_labels, BITS)
    units = unit_rows(table, ids, is_slot, width, IS_COSINE, BLOCK)
    columns = tl.arange(0, BLOCK)
    places = slots.to(tl.int64)[:, None] * width + columns[None, :]
    is_inside = is_slot[:, None] & (columns < width)[None, :]
    tl.store(out_units + places, units.to(out_units.dtype.element_ty), mask=is_inside)
    tl.store(out_ids + slots, ids, mask=is_slot)
    tl.store(out_touched + slots, slots * 0, mask=is_slot)


@triton.jit
def _unit_vectors(
    vectors, out, scale, num_rows, width, IS_COSINE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = tl.arange(0, BLOCK)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    is_inside = is_row[:, None] & (columns < width)[None, :]
    units = unit_rows(vectors, rows.to(tl.int64), is_row, width, IS_COSINE, BLOCK)
    tl.store(out + places, (units * scale).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _gather_positives(
    table, vectors, label_ids, positive_ids, key_at, out_units, out_scores,
    out_slots, out_num_slots, out_label_slots, out_ids, out_touched, scale, num_labels,
    num_sampled, batch_size, num_positives, width, BITS: tl.constexpr,
    IS_COSINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    POSITIVES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < batch_size
    key = tl.load(key_at)
    labels = tl.load(label_ids + rows, mask=is_row, other=0)
    columns = tl.arange(0, BLOCK)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    is_inside = is_row[:, None] & (columns < width)[None, :]

    queries = unit_rows(vectors, rows.to(tl.int64), is_row, width, IS_COSINE, BLOCK)
    queries = queries * scale
    units = unit_rows(table, labels, is_row, width, IS_COSINE, BLOCK)
    tl.store(out_units + places, units.to(out_units.dtype.element_ty), mask=is_inside)
    tl.store(out_scores + rows, tl.sum(queries * units, axis=1), mask=is_row)

    lanes = tl.arange(0, POSITIVES)
    listed = rows[:, None] * num_positives + lanes[None, :]
    is_listed = is_row[:, None] & (lanes < num_positives)[None, :]
    positives = tl.load(positive_ids + listed, mask=is_listed, other=-1)  # (ROWS, POSITIVES)
    slots = places_of(positives, key, num_labels, BITS)
    is_drawn = (positives >= 0) & (slots < num_sampled)
    counts = tl.cumsum(is_drawn.to(tl.int32), axis=1)
    targets = rows[:, None] * num_positives + counts - 1
    tl.store(out_slots + targets, slots.to(tl.int32), mask=is_drawn)
    tl.store(out_num_slots + rows, tl.sum(is_drawn.to(tl.int32), axis=1), mask=is_row)

    first = tl.full((ROWS,), 2147483647, tl.int32)  # the first example with the same label
    for start in range(0, batch_size, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_labels = tl.load(label_ids + others, mask=others < batch_size, other=-1)
        is_same = labels[:, None] == other_labels[None, :]
        first = tl.minimum(first, tl.min(tl.where(is_same, others[None, :], 2147483647), axis=1))
    own_slots = places_of(labels, key, num_labels, BITS)
    is_sampled = own_slots < num_sampled
    label_slots = tl.where(is_sampled, own_slots.to(tl.int32), num_sampled + first)
    tl.store(out_label_slots + rows, label_slots, mask=is_row)
    has_column = (first == rows) & (is_sampled == 0)
    tl.store(out_ids + rows, tl.where(has_column, labels, -1), mask=is_row)
    tl.store(out_touched + rows, rows * 0, mask=is_row)


@triton.jit
def unit_rows(table, ids, is_row, width, IS_COSINE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a table as float32, of length 1 under the cosine; a zero row stays zero."""
    columns = tl.arange(0, BLOCK)
    places = ids[:, None] * width + columns[None, :]
    is_inside = is_row[:, None] & (columns < width)[None, :]
    rows = tl.load(table + places, mask=is_inside, other=0.0).to(tl.float32)
    if IS_COSINE:
        norms = tl.sqrt(tl.sum(rows * rows, axis=1))
        rows = rows / tl.where(norms <= SMALLEST_NORM, float("inf"), norms)[:, None]
    return rows
