"""Segment sum and optimiser step, for gradients that arrive as unordered (row, value, vector).

Some rows have one entry and some have thousands. Sorted by row, the entries are cut at the
borders between rows and at every `PIECE`-th place, so that no program sums more than a piece. A
row within one block of `PIECE` places is stepped at once. A longer one leaves the sums of its
later blocks in a buffer of one row for each block, and a second kernel adds them up: in the order
of the places, so the same bits on every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.rows import (
    RowTable,
    apply_row,
    load_row,
    row_block,
    step_scales,
    through_unit,
)

PIECE = 32  # places of a block
# Programs take every so-manieth place, so that empty places cost a look and no program of their
# own. Odd: places at the beginning of a block, where a piece always begins, go to all alike.
NUM_PROGRAMS = 8191


def update_by_entries(
    rows: RowTable, row_ids: Tensor, sources: Tensor, values: Tensor, vectors: Tensor, *,
    learning_rate: Tensor, step_number: Tensor, is_cosine: bool = False,
) -> None:  # fmt: skip
    """One step on every row that has entries; its gradient is the sum of value * vectors[source].

    Args:
        row_ids: (N,) int32 or int64, in any order; -1: no entry.
        sources: (N,) int32 rows of `vectors`.
        values: (N,) float32.
        vectors: (B, D) float32 or bfloat16.
        learning_rate: (1,) float32 on the device.
        step_number: (1,) integer on the device, counted from 1.
        is_cosine: the gradients are by the unit rows, not by the rows themselves.
    """
    if not len(row_ids):
        return
    if len(rows.table) < 2**31:
        row_ids = row_ids.to(torch.int32)  # half the digits to sort by
    # Descending, so that empty entries come last and a program ends at the first it meets.
    keys, order = torch.sort(row_ids, descending=True, stable=True)
    num_entries, width = len(keys), vectors.shape[1]
    num_blocks = triton.cdiv(num_entries, PIECE)
    block = row_block(width)
    partials = torch.empty(num_blocks, width, device=vectors.device)
    arguments = (
        *rows.tensors(), keys, order, sources, values, vectors, partials, learning_rate,
        step_number, num_entries, width,
    )  # fmt: skip
    constants = rows.constants() | {
        "IS_COSINE": is_cosine, "BLOCK": block, "PIECE": PIECE, "num_warps": rows.num_warps,
        "TILE": min(PIECE, 1024 * rows.num_warps // block),  # 32 weights a thread
    }  # fmt: skip
    num_programs = min(num_entries, NUM_PROGRAMS)
    _step_short_rows[(num_programs,)](*arguments, num_programs=num_programs, **constants)
    if num_blocks > 1:
        _step_long_rows[(num_blocks,)](*arguments, **constants)


@triton.jit
def _step_short_rows(
    table, momentum, moments, keys, order, sources, values, vectors, partials, learning_rate_at,
    step_number_at, num_entries, width, num_programs, seed, IS_COSINE: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, FIRST_BETA: tl.constexpr,
    SECOND_BETA: tl.constexpr, IS_ADAM: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK)
    is_dim = dims < width
    step_number = tl.load(step_number_at)
    rate, moment_scale = step_scales(
        tl.load(learning_rate_at), step_number, FIRST_BETA, SECOND_BETA, IS_ADAM
    )
    place = tl.program_id(0)
    while place < num_entries:
        key = tl.load(keys + place)
        before = tl.load(keys + place - 1, mask=place > 0, other=-1)
        if (key >= 0) & ((before != key) | (place % PIECE == 0)):
            end = tl.minimum((place // PIECE + 1) * PIECE, num_entries)
            after = tl.load(keys + end, mask=end < num_entries, other=-1)
            # The first piece of a row that goes on in the next block is left to `_step_long_rows`.
            if (before == key) | (after != key):
                count = _run_length(keys, place, end, key, PIECE)
                gradient = _sum(
                    order, sources, values, vectors, place, count, dims, is_dim, width, TILE
                )
                if before == key:
                    partial = (place // PIECE).to(tl.int64) * width
                    tl.store(partials + partial + dims, gradient, mask=is_dim)
                else:
                    _step(
                        table, momentum, moments, key, gradient, dims, is_dim, width, rate,
                        moment_scale, step_number, seed, IS_COSINE, FIRST_BETA, SECOND_BETA,
                        IS_ADAM, IS_STOCHASTIC,
                    )  # fmt: skip
        place = tl.where(key >= 0, place + num_programs, num_entries)


@triton.jit
def _step_long_rows(
    table, momentum, moments, keys, order, sources, values, vectors, partials, learning_rate_at,
    step_number_at, num_entries, width, seed, IS_COSINE: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, TILE: tl.constexpr, FIRST_BETA: tl.constexpr,
    SECOND_BETA: tl.constexpr, IS_ADAM: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """At most one row begins in a block and goes on in the next: that of the last place."""
    start = tl.program_id(0) * PIECE
    end = start + PIECE
    has_next = end < num_entries
    key = tl.load(keys + end - 1, mask=has_next, other=-1)
    after = tl.load(keys + end, mask=has_next, other=-1)
    before = tl.load(keys + start - 1, mask=has_next & (start > 0), other=-1)
    if (key >= 0) & (after == key) & (before != key):
        dims = tl.arange(0, BLOCK)
        is_dim = dims < width
        count = _run_length(keys, start, end, key, PIECE)
        gradient = _sum(
            order, sources, values, vectors, end - count, count, dims, is_dim, width, TILE
        )
        blocks = tl.program_id(0) + 1 + tl.arange(0, TILE)
        num_found = TILE
        while num_found == TILE:
            places = blocks * PIECE
            heads = tl.load(keys + places, mask=places < num_entries, other=-1)
            is_found = heads == key
            tile = tl.load(
                partials + blocks[:, None].to(tl.int64) * width + dims[None, :],
                mask=is_found[:, None] & is_dim[None, :],
                other=0.0,
            )  # (TILE, BLOCK)
            gradient += tl.sum(tile, axis=0)
            num_found = tl.sum(is_found.to(tl.int32), axis=0)
            blocks += TILE
        step_number = tl.load(step_number_at)
        rate, moment_scale = step_scales(
            tl.load(learning_rate_at), step_number, FIRST_BETA, SECOND_BETA, IS_ADAM
        )
        _step(
            table, momentum, moments, key, gradient, dims, is_dim, width, rate, moment_scale,
            step_number, seed, IS_COSINE, FIRST_BETA, SECOND_BETA, IS_ADAM, IS_STOCHASTIC,
        )  # fmt: skip


@triton.jit
def _run_length(keys, start, end, key, PIECE: tl.constexpr):
    """How many of the places from start to end, at most a block, have this key."""
    places = start + tl.arange(0, PIECE)
    found = tl.load(keys + places, mask=places < end, other=-1)
    return tl.sum((found == key).to(tl.int32), axis=0)


@triton.jit
def _sum(
    order, sources, values, vectors, start, count, dims, is_dim, width, TILE: tl.constexpr
):  # fmt: skip
    """The sum of `count` entries from sorted place `start`; most rows have one and are done."""
    entry = tl.load(order + start)
    source = tl.load(sources + entry).to(tl.int64)
    vector = tl.load(vectors + source * width + dims, mask=is_dim, other=0.0).to(tl.float32)
    total = vector * tl.load(values + entry).to(tl.float32)
    for first in range(1, count, TILE):
        places = first + tl.arange(0, TILE)
        is_place = places < count
        entries = tl.load(order + start + places, mask=is_place, other=0)
        factors = tl.load(values + entries, mask=is_place, other=0.0).to(tl.float32)
        tile_sources = tl.load(sources + entries, mask=is_place, other=0).to(tl.int64)
        tile = tl.load(
            vectors + tile_sources[:, None] * width + dims[None, :],
            mask=is_place[:, None] & is_dim[None, :],
            other=0.0,
        ).to(tl.float32)  # (TILE, BLOCK)
        total += tl.sum(tile * factors[:, None], axis=0)
    return total


@triton.jit
def _step(
    table, momentum, moments, row_id, gradient, dims, is_dim, width, rate, moment_scale,
    step_number, seed, IS_COSINE: tl.constexpr, FIRST_BETA: tl.constexpr,
    SECOND_BETA: tl.constexpr, IS_ADAM: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    row = load_row(table, row_id, dims, is_dim, width)
    if IS_COSINE:
        gradient = through_unit(gradient, row)
    apply_row(
        table, momentum, moments, row_id, row, gradient, dims, is_dim, width, rate, moment_scale,
        step_number, seed, FIRST_BETA, SECOND_BETA, IS_ADAM, IS_STOCHASTIC,
    )  # fmt: skip
