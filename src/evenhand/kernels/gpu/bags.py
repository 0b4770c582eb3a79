"""Bags of sparse features of a data set on the device: forward to vectors, backward to entries.

The data set is CSR: offsets (N + 1,) int64, ids (nnz,) int32, values (nnz,) float32 or float16,
or None where a bag is the plain mean of its features. A batch is a list of document numbers;
nothing of it is copied before it is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST_BLOCK = 256  # columns of a program: a warp reads 512 bytes of a bfloat16 row at once
LARGEST_TILE = 32  # features of a bag that are read together
TILE_WEIGHTS = 4096
LANES = 128  # entries that a program writes together
SURVIVORS = 1024  # that one pass of the prefix sum takes


def bag_vectors(
    weight: Tensor, offsets: Tensor, ids: Tensor, values: Tensor | None, documents: Tensor, *,
    out: Tensor,
) -> None:  # fmt: skip
    """The sum of value * weight[id] over a document's bag, or the mean; 0 for an empty bag.

    Args:
        weight: (F, D) float32 or bfloat16.
        documents: (B,) int64.
        out: (B, D) float32.
    """
    width = weight.shape[1]
    block = max(16, min(WIDEST_BLOCK, triton.next_power_of_2(width)))
    tile = min(LARGEST_TILE, TILE_WEIGHTS // block)
    _bag_vectors[len(documents), triton.cdiv(width, block)](
        weight, offsets, ids, ids if values is None else values, documents, out, width,
        HAS_VALUES=values is not None, TILE=tile, BLOCK=block,
        num_warps=max(1, tile * block // 1024),
    )  # fmt: skip


def entry_capacity(lengths: Tensor, num_pairs: Tensor, batch_size: int) -> int:
    """Entries of the largest batch that there can be: the buffers of `bag_entries` hold them all.

    A batch is of different (document, label) pairs, so a document is in it at most as often as it
    has pairs. Largest is therefore the batch that takes the longest document that often, then the
    next, until it is full.

    Args:
        lengths: (N,) int64, entries of each document.
        num_pairs: (N,) int64, training pairs of each document.
        batch_size: pairs of a batch that may have a gradient.

    Example:
        >>> entry_capacity(torch.tensor([3, 0, 2]), torch.tensor([2, 5, 1]), 4)
        8
    """
    lengths, order = lengths.sort(descending=True)
    num_pairs = num_pairs[order]
    num_before = num_pairs.cumsum(0) - num_pairs
    num_taken = (batch_size - num_before).clamp(min=0).minimum(num_pairs)
    return int((lengths * num_taken).sum())


def bag_entries(
    offsets: Tensor, ids: Tensor, values: Tensor | None, documents: Tensor, survivors: Tensor,
    num_survivors: Tensor, *, out_row_ids: Tensor, out_sources: Tensor, out_values: Tensor,
) -> None:  # fmt: skip
    """The features of the surviving documents, one after another, for `update_by_entries`.

    Entries that found no place would be gradients lost in silence. It cannot happen with buffers of
    `entry_capacity`; should it happen with others, every value becomes NaN, which no run survives.

    Args:
        documents: (B,) int64.
        survivors: (B,) int32 places in `documents`, of which the first `num_survivors` count.
        num_survivors: (1,) int32 on the device.
        out_row_ids: (N,) int32 or int64, -1 where there is no entry; see `entry_capacity`.
        out_sources: (N,) int32, which of the survivors: the row of a (k', D) gradient.
        out_values: (N,) float32.
    """
    ends = torch.empty(len(survivors), dtype=torch.int32, device=survivors.device)
    _entry_ends[(1,)](
        offsets, documents, survivors, num_survivors, ends, len(survivors), BLOCK=SURVIVORS,
        num_warps=8,
    )  # fmt: skip
    _bag_entries[(len(survivors),)](
        offsets, ids, ids if values is None else values, documents, survivors, num_survivors,
        ends, out_row_ids, out_sources, out_values, len(survivors), len(out_row_ids),
        HAS_VALUES=values is not None, BLOCK=LANES, num_warps=2,
    )  # fmt: skip


@triton.jit
def _bag_vectors(
    weight, offsets, ids, values, documents, out, width, HAS_VALUES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < width
    document = tl.load(documents + place)
    start = tl.load(offsets + document)
    length = (tl.load(offsets + document + 1) - start).to(tl.int32)
    totals = tl.zeros((TILE, BLOCK), tl.float32)
    for first in range(0, length, TILE):
        steps = first + tl.arange(0, TILE)
        is_entry = steps < length
        features = tl.load(ids + start + steps, mask=is_entry, other=0).to(tl.int64)
        tile = tl.load(
            weight + features[:, None] * width + dims[None, :],
            mask=is_entry[:, None] & is_dim[None, :],
            other=0.0,
        ).to(tl.float32)  # (TILE, BLOCK)
        if HAS_VALUES:
            factors = tl.load(values + start + steps, mask=is_entry, other=0.0).to(tl.float32)
            tile = tile * factors[:, None]
        totals += tile
    vector = tl.sum(totals, axis=0)
    if not HAS_VALUES:
        vector = vector / tl.maximum(length, 1).to(tl.float32)
    tl.store(out + place * width + dims, vector, mask=is_dim)


@triton.jit
def _entry_ends(
    offsets, documents, survivors, num_survivors, ends, batch_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Where the entries of each survivor end; those of who does not survive take no place."""
    count = tl.load(num_survivors)
    total = count * 0
    for first in range(0, batch_size, BLOCK):
        indices = first + tl.arange(0, BLOCK)
        is_survivor = indices < count
        places = tl.load(survivors + indices, mask=is_survivor, other=0)
        rows = tl.load(documents + places, mask=is_survivor, other=0)
        starts = tl.load(offsets + rows, mask=is_survivor, other=0)
        stops = tl.load(offsets + rows + 1, mask=is_survivor, other=0)
        lengths = (stops - starts).to(tl.int32)
        sums = total + tl.cumsum(lengths, axis=0)
        tl.store(ends + indices, sums, mask=indices < batch_size)
        total += tl.sum(lengths, axis=0)


@triton.jit
def _bag_entries(
    offsets, ids, values, documents, survivors, num_survivors, ends, out_row_ids, out_sources,
    out_values, batch_size, capacity, HAS_VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_entries = tl.load(ends + batch_size - 1)
    lost = tl.where(num_entries > capacity, float("nan"), 0.0)
    if index < tl.load(num_survivors):
        document = tl.load(documents + tl.load(survivors + index))
        start = tl.load(offsets + document)
        length = (tl.load(offsets + document + 1) - start).to(tl.int32)
        target = tl.load(ends + index) - length
        share = 1.0 / tl.maximum(length, 1).to(tl.float32)
        for first in range(0, length, BLOCK):
            steps = first + lanes
            places = target + steps
            is_entry = (steps < length) & (places < capacity)
            features = tl.load(ids + start + steps, mask=is_entry, other=0)
            tl.store(out_row_ids + places, features, mask=is_entry)
            tl.store(out_sources + places, lanes * 0 + index, mask=is_entry)
            if HAS_VALUES:
                factors = tl.load(values + start + steps, mask=is_entry, other=0.0)
                tl.store(out_values + places, factors.to(tl.float32) + lost, mask=is_entry)
            else:
                tl.store(out_values + places, lanes * 0.0 + share + lost, mask=is_entry)
    for first in range(num_entries + index * BLOCK, capacity, batch_size * BLOCK):
        places = first + lanes
        tl.store(out_row_ids + places, lanes * 0 - 1, mask=places < capacity)
