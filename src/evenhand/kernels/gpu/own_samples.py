"""Labels drawn for each example: their scores and gradients, and never a (B, M, D) tensor.

Slot m of example b holds place m of an order of all labels but b's positives; the order is b's
own, so nothing is stored of which labels were drawn. Scores are either picked from the product of
the batch with all labels, or, where there are many more labels than slots, computed from rows
that are read where they are needed.
"""

import triton
import triton.language as tl

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.gather import product, unit_rows, unit_vectors
from evenhand.kernels.gpu.losses import coefficient
from evenhand.kernels.gpu.permutation import permute, row_key
from evenhand.kernels.gpu.rows import through_unit
from evenhand.kernels.gpu.selection import is_selected
from evenhand.kernels.random import num_bits

TILE = 32  # label rows read at once


def score_each(step: Buffers) -> None:
    """(B, M) scores of the labels drawn for each example: picked from all, or read row by row."""
    table, num_positives = step.rows.table, step.num_positives
    if not step.scores_all:
        _score_rows[(step.batch_size, triton.cdiv(step.num_sampled, TILE))](
            table, step.queries, step.positive_ids, step.clock.key, step.scores, len(table),
            step.num_sampled, num_positives, step.width, BITS=num_bits(len(table)),
            IS_COSINE=step.is_cosine, TILE=TILE, WIDTH=triton.next_power_of_2(step.width),
        )  # fmt: skip
        return
    unit_vectors(table, scale=1.0, is_cosine=step.is_cosine, out=step.all_units)
    product(step.queries, step.all_units, out=step.all_scores)
    _pick_scores[(step.batch_size, triton.cdiv(step.num_sampled, 1024))](
        step.all_scores, step.positive_ids, step.clock.key, step.scores, len(table),
        step.num_sampled, num_positives, BITS=num_bits(len(table)), BLOCK=1024,
    )  # fmt: skip


def each_gradients(step: Buffers) -> None:
    """Gradients by the survivors' vectors, and the entries of those by the labels."""
    table, kept, loss, num_kept = step.rows.table, step.kept, step.loss, step.num_hard_labels
    block = triton.next_power_of_2(step.num_sampled)
    _list_entries[(step.batch_size,)](
        step.scores, step.label_ids, step.positive_ids, step.clock.key, kept.thresholds,
        kept.last_ties, kept.row_values, kept.positive_slopes, kept.weights, kept.survivors,
        kept.num_survivors, step.kept_slots, step.entry_ids, step.entry_sources,
        step.entry_values, len(table), step.num_sampled, num_kept, step.num_positives,
        BITS=num_bits(len(table)), KIND=loss.kind, MARGIN=loss.margin, POWER=loss.power,
        BLOCK=block, KEPT=triton.next_power_of_2(num_kept + 1),
        num_warps=4 if block <= 8192 else 8,
    )  # fmt: skip
    _sum_entries[(step.batch_size,)](
        table, step.vectors, kept.survivors, kept.num_survivors, step.entry_ids,
        step.entry_values, step.query_gradients, step.scale, num_kept + 1, step.width,
        IS_COSINE=step.is_cosine, WIDTH=triton.next_power_of_2(step.width), TILE=16, num_warps=4,
    )  # fmt: skip


@triton.jit
def labels_at(places, positive_ids, row, step_key, num_labels, num_positives, BITS: tl.constexpr):
    """The labels at these places of the order of a row, which is of all labels but its positives.

    The u-th label that is no positive is the least y with y = u + (positives up to y).
    """
    own = positive_ids + row * num_positives
    num_excluded = tl.zeros((), tl.int32)
    for place in range(num_positives):
        num_excluded += (tl.load(own + place) >= 0).to(tl.int32)
    key = row_key(step_key, row)
    counted = permute(places, key, num_labels - num_excluded, BITS)
    labels = counted
    is_moving = num_excluded > 0
    while is_moving:
        num_passed = tl.zeros_like(labels)
        for place in range(num_excluded):  # padding comes last
            num_passed += (tl.load(own + place) <= labels).to(tl.int64)
        is_moving = tl.max((counted + num_passed != labels).to(tl.int32)) > 0
        labels = counted + num_passed
    return labels


@triton.jit
def _pick_scores(
    all_scores, positive_ids, key_at, out, num_labels, num_sampled, num_positives,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_slot = slots < num_sampled
    key = tl.load(key_at)
    labels = labels_at(
        slots.to(tl.int64) % num_sampled, positive_ids, row, key, num_labels, num_positives, BITS
    )
    scores = tl.load(all_scores + row * num_labels + labels, mask=is_slot, other=0.0)
    tl.store(out + row * num_sampled + slots, scores, mask=is_slot)


@triton.jit
def _score_rows(
    table, queries, positive_ids, key_at, out, num_labels, num_sampled, num_positives, width,
    BITS: tl.constexpr, IS_COSINE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_slot = slots < num_sampled
    key = tl.load(key_at)
    labels = labels_at(
        slots.to(tl.int64) % num_sampled, positive_ids, row, key, num_labels, num_positives, BITS
    )
    units = unit_rows(table, labels, is_slot, width, IS_COSINE, WIDTH)
    dims = tl.arange(0, WIDTH)
    query = tl.load(queries + row * width + dims, mask=dims < width, other=0.0).to(tl.float32)
    scores = tl.sum(units * query[None, :], axis=1)
    tl.store(out + row * num_sampled + slots, scores, mask=is_slot)


@triton.jit
def _list_entries(
    scores, label_ids, positive_ids, key_at, thresholds, last_ties, row_values, positive_slopes,
    weights, survivors, num_survivors, scratch, out_row_ids, out_sources, out_values, num_labels,
    num_sampled, num_hard_labels, num_positives, BITS: tl.constexpr, KIND: tl.constexpr,
    MARGIN: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The positive and the kept labels of each survivor, with their coefficients."""
    index = tl.program_id(0)
    places = tl.arange(0, KEPT)
    is_place = places < num_hard_labels + 1
    entries = index.to(tl.int64) * (num_hard_labels + 1)
    tl.store(out_row_ids + entries + places, tl.full((KEPT,), -1, tl.int64), mask=is_place)
    if index < tl.load(num_survivors):
        tl.debug_barrier()
        row = tl.load(survivors + index).to(tl.int64)
        row_value, weight = tl.load(row_values + row), tl.load(weights + row)
        row_scores = scores + row * num_sampled
        own_scratch = scratch + index.to(tl.int64) * num_hard_labels

        columns = tl.arange(0, BLOCK)
        is_slot = columns < num_sampled
        values = tl.load(row_scores + columns, mask=is_slot, other=-float("inf")).to(tl.float32)
        threshold, last_tie = tl.load(thresholds + row), tl.load(last_ties + row)
        is_kept = is_selected(values, columns, threshold, last_tie)
        ranks = tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        tl.store(own_scratch + ranks, columns, mask=is_kept & (ranks < num_hard_labels))
        num_kept = tl.minimum(tl.sum(is_kept.to(tl.int32)), num_hard_labels)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        # Entry 0 is the positive, the others are the kept labels.
        is_entry = (places >= 1) & (places <= num_kept)
        slots = tl.load(own_scratch + places - 1, mask=is_entry, other=0)
        kept_scores = tl.load(row_scores + slots, mask=is_entry, other=0.0).to(tl.float32)
        slopes = coefficient(kept_scores, row_value, KIND, MARGIN, POWER)
        slopes = tl.where(is_entry, slopes, 0.0)
        slopes = tl.where(places == 0, tl.load(positive_slopes + row), slopes) * weight
        labels = labels_at(
            slots.to(tl.int64), positive_ids, row, tl.load(key_at), num_labels, num_positives,
            BITS,
        )  # fmt: skip
        labels = tl.where(places == 0, tl.load(label_ids + row), labels)
        is_touching = (slopes != 0.0) & (is_entry | (places == 0))
        tl.store(out_row_ids + entries + places, tl.where(is_touching, labels, -1), mask=is_place)
        tl.store(out_sources + entries + places, row.to(tl.int32) + 0 * places, mask=is_place)
        tl.store(out_values + entries + places, slopes, mask=is_place)


@triton.jit
def _sum_entries(
    table, vectors, survivors, num_survivors, row_ids, values, out, scale, num_entries, width,
    IS_COSINE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient by each survivor's vector: the sum over its entries of value * unit row."""
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(num_survivors):
        row = tl.load(survivors + index).to(tl.int64)
        dims = tl.arange(0, WIDTH)
        is_dim = dims < width
        gradient = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, num_entries, TILE):
            places = start + tl.arange(0, TILE)
            entries = index * num_entries + places
            ids = tl.load(row_ids + entries, mask=places < num_entries, other=-1)
            coefficients = tl.load(values + entries, mask=ids >= 0, other=0.0)
            units = unit_rows(table, ids, ids >= 0, width, IS_COSINE, WIDTH)
            gradient += tl.sum(coefficients[:, None] * units, axis=0)
        gradient = gradient * scale
        if IS_COSINE:
            vector = tl.load(vectors + row * width + dims, mask=is_dim, other=0.0)
            gradient = through_unit(gradient, vector.to(tl.float32))
        tl.store(out + index * width + dims, gradient, mask=is_dim)
