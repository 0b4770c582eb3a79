"""Gradients of the surviving queries and of the touched labels, from what mining kept.

Whether a score was kept follows from its row's threshold, and its coefficient from its row's
value: so each survivor's coefficients C (k', M + B) are written in one pass over its scores, and
two matrix products do the rest:

    gradient of the survivors' query vectors  C V
    gradient of the touched label vectors     C' Q

C is sparse, but a matrix product over its zeros takes less time on a GPU than a gather of its
entries, takes as long however popular a label is, and adds in an order that never changes. How
many survivors there are is read on the device: annealing k' changes the work, not the kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.losses import coefficient
from evenhand.kernels.gpu.rows import row_block, through_unit
from evenhand.kernels.gpu.selection import is_selected

COEFFICIENTS = 2048  # of a survivor that one program writes
QUERY_TILE = {"ROWS": 64, "CHUNK": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}
LABEL_TILE = {"COLUMNS": 64, "CHUNK": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3}


def shared_memory(precision: torch.dtype) -> int:
    """Bytes of shared memory that a program of the products takes: tiles times stages."""
    size, chunk = precision.itemsize, 64 if precision == torch.float32 else QUERY_TILE["CHUNK"]
    rows, depth = QUERY_TILE["ROWS"], QUERY_TILE["DEPTH"]
    return size * depth * (rows + chunk) * QUERY_TILE["num_stages"]  # the labels' take no more


def write_coefficients(step: Buffers) -> None:
    """The survivors' coefficients by column and their queries, one after another."""
    kept, loss, num_columns = step.kept, step.loss, step.coefficients.shape[1]
    _write_coefficients[(step.batch_size, triton.cdiv(num_columns, COEFFICIENTS))](
        step.scores, step.queries, step.label_slots, kept.thresholds, kept.last_ties,
        kept.row_values, kept.positive_slopes, kept.weights, kept.survivors, kept.num_survivors,
        step.coefficients, step.survivor_queries, step.touched, step.num_sampled, num_columns,
        step.width, KIND=loss.kind, MARGIN=loss.margin, POWER=loss.power, BLOCK=COEFFICIENTS,
        WIDTH=row_block(step.width), num_warps=4,
    )  # fmt: skip


def query_gradients(step: Buffers) -> None:
    """Gradients by the encoder's vectors of the survivors: row i is the i-th survivor's."""
    kept, width, num_parts = step.kept, step.width, len(step.partials)
    most = 64 if step.units.dtype == torch.float32 else QUERY_TILE["CHUNK"]
    rows, chunk = QUERY_TILE["ROWS"], min(most, row_block(width))
    grid = triton.cdiv(step.batch_size, rows), triton.cdiv(width, chunk), num_parts
    _query_products[grid](
        step.coefficients, step.units, kept.num_survivors, step.partials, step.batch_size,
        step.num_sampled, step.coefficients.shape[1], width, PRECISION=_precision_of(step.units),
        PART=triton.cdiv(step.num_sampled, num_parts), **QUERY_TILE | {"CHUNK": chunk},
    )  # fmt: skip
    _query_gradients[(step.batch_size,)](
        step.partials, step.positive_units, step.vectors, step.label_slots, kept.positive_slopes,
        kept.weights, kept.survivors, kept.num_survivors, step.query_gradients, step.scale,
        step.batch_size, step.num_sampled, width, IS_COSINE=step.is_cosine, SPLITS=num_parts,
        WIDTH=row_block(width), num_warps=max(1, row_block(width) // 128),
    )  # fmt: skip


def label_gradients(step: Buffers) -> None:
    """Gradients by the units of the M sampled labels and of the B labels of the batch."""
    queries, width, out = step.survivor_queries, step.width, step.label_gradients
    tile = LABEL_TILE | {"CHUNK": min(LABEL_TILE["CHUNK"], row_block(width))}
    if queries.dtype == torch.float32:  # twice the bytes, and each product in three parts
        tile |= {"CHUNK": min(64, row_block(width)), "num_stages": 2}
    grid = triton.cdiv(len(out), tile["COLUMNS"]), triton.cdiv(width, tile["CHUNK"])
    _label_products[grid](
        step.coefficients, queries, step.kept.num_survivors, out, len(out), width,
        PRECISION=_precision_of(queries), **tile,
    )  # fmt: skip


def _precision_of(vectors: Tensor) -> str:
    """How a product of float32 numbers is made; of others there is one way."""
    return "tf32x3" if vectors.dtype == torch.float32 else "tf32"


@triton.jit
def _write_coefficients(
    scores, queries, label_slots, thresholds, last_ties, row_values, positive_slopes, weights,
    survivors, num_survivors, out, out_queries, out_touched, num_sampled, num_columns, width,
    KIND: tl.constexpr, MARGIN: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(num_survivors):
        row = tl.load(survivors + index).to(tl.int64)
        threshold, last_tie = tl.load(thresholds + row), tl.load(last_ties + row)
        row_value, weight = tl.load(row_values + row), tl.load(weights + row)
        own_slope, own_slot = tl.load(positive_slopes + row), tl.load(label_slots + row)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(
            scores + row * num_sampled + columns, mask=columns < num_sampled, other=-float("inf")
        ).to(tl.float32)
        is_kept = is_selected(values, columns, threshold, last_tie)
        safe = tl.where(is_kept, values, 0.0)
        slopes = tl.where(is_kept, coefficient(safe, row_value, KIND, MARGIN, POWER), 0.0)
        slopes = tl.where(columns == own_slot, own_slope, slopes) * weight
        tl.store(
            out + index * num_columns + columns,
            slopes.to(out.dtype.element_ty),
            mask=columns < num_columns,
        )
        tl.store(out_touched + columns, columns * 0 + 1, mask=slopes != 0.0)
        if tl.program_id(1) == 0:
            dims = tl.arange(0, WIDTH)
            query = tl.load(queries + row * width + dims, mask=dims < width)
            tl.store(out_queries + index * width + dims, query, mask=dims < width)


@triton.jit
def _query_products(
    coefficients, units, num_survivors, partials, batch_size, num_sampled, num_columns, width,
    PRECISION: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    count = tl.load(num_survivors)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < count:
        dims = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        part = tl.program_id(2)
        first, end = part * PART, tl.minimum((part + 1) * PART, num_sampled)
        is_row, is_dim = (rows < count)[:, None], (dims < width)[None, :]
        left = coefficients + rows[:, None].to(tl.int64) * num_columns
        sums = tl.zeros((ROWS, CHUNK), tl.float32)
        for start in range(first, end, DEPTH):
            columns = start + tl.arange(0, DEPTH)
            is_column = columns < end
            slopes = tl.load(
                left + columns[None, :], mask=is_row & is_column[None, :], other=0.0
            )  # (ROWS, DEPTH)
            labels = tl.load(
                units + columns[:, None] * width + dims[None, :],
                mask=is_column[:, None] & is_dim,
                other=0.0,
            )  # (DEPTH, CHUNK)
            sums = tl.dot(slopes, labels, sums, input_precision=PRECISION)
        places = (part.to(tl.int64) * batch_size + rows[:, None]) * width + dims[None, :]
        tl.store(partials + places, sums, mask=is_row & is_dim)


@triton.jit
def _query_gradients(
    partials, positive_units, vectors, label_slots, positive_slopes, weights, survivors,
    num_survivors, out, scale, batch_size, num_sampled, width, IS_COSINE: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    if index < tl.load(num_survivors):
        row = tl.load(survivors + index).to(tl.int64)
        dims = tl.arange(0, WIDTH)
        is_dim = dims < width
        # A label that is in the sample as well has its coefficient there, and its unit too.
        is_apart = tl.load(label_slots + row) >= num_sampled
        slope = tl.load(positive_slopes + row) * tl.load(weights + row)
        slope = tl.where(is_apart, slope, 0.0)
        unit = tl.load(positive_units + row * width + dims, mask=is_dim, other=0.0)
        gradient = slope * unit.to(tl.float32)
        for part in tl.static_range(SPLITS):
            places = (part * batch_size + index) * width + dims
            gradient += tl.load(partials + places, mask=is_dim, other=0.0)
        gradient = gradient * scale
        if IS_COSINE:
            vector = tl.load(vectors + row * width + dims, mask=is_dim, other=0.0)
            gradient = through_unit(gradient, vector.to(tl.float32))
        tl.store(out + index * width + dims, gradient, mask=is_dim)


@triton.jit
def _label_products(
    coefficients, queries, num_survivors, out, num_columns, width,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dims = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_column, is_dim = columns < num_columns, dims < width
    count = tl.load(num_survivors)
    sums = tl.zeros((COLUMNS, CHUNK), tl.float32)
    for start in range(0, count, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        is_row = (rows < count)[:, None]
        slopes = tl.load(
            coefficients + rows[:, None].to(tl.int64) * num_columns + columns[None, :],
            mask=is_row & is_column[None, :],
            other=0.0,
        )  # (DEPTH, COLUMNS)
        tile = tl.load(
            queries + rows[:, None].to(tl.int64) * width + dims[None, :],
            mask=is_row & is_dim[None, :],
            other=0.0,
        )  # (DEPTH, CHUNK)
        sums = tl.dot(tl.trans(slopes), tile, sums, input_precision=PRECISION)
    places = columns[:, None].to(tl.int64) * width + dims[None, :]
    tl.store(out + places, sums, mask=is_column[:, None] & is_dim[None, :])
