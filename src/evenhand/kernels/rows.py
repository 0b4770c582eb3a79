"""Operations on rows of a table: normalisation and its backward, scores, sparse optimiser updates.

Each function is a few operations of torch, for every device and as the oracle of the tests. Its
twin for the CPU is by hand because one pass over a row in the cache replaces several over memory.
A sum over a row is a loop over its columns: to iterate over the row itself is 15 times slower.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.jit import (
    are_plain,
    check_ids,
    fetch_later_row,
    in_parts,
    jit,
    jit_sums,
    num_threads_for,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

SMALLEST_NORM = 1e-12  # a vector that is not longer counts as zero
EPSILON = 1e-8
GATHERED_NUMBERS = 2**24  # of label vectors held at once
HUGE = 1e15  # the length of a row from which products with it may overflow


def unit(vectors: Tensor, ids: Tensor | None = None) -> Tensor:
    """Vectors of length 1: (n, D) -> (n, D), or of some rows of a table: (R, D), (n,) -> (n, D).

    A zero vector, or one not longer than `SMALLEST_NORM`, has no direction: its unit vector is
    zero, so it scores 0, and no gradient passes through it. To divide it by a tiny number instead,
    as `torch.nn.functional.normalize` does, would make a gradient of 1e12 times the one that came.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    if not _are_plain_rows(vectors, ids):
        return _units_and_norms(vectors if ids is None else vectors.index_select(0, ids))[0]
    ids = _checked_ids(vectors, ids)
    units = torch.empty(len(ids), vectors.shape[1])
    arguments = vectors.numpy(), ids.numpy(), SMALLEST_NORM, units.numpy()
    _unit_rows_compiled(num_threads_for(units.numel()), len(ids), arguments)
    return units


def through_unit(gradients: Tensor, vectors: Tensor, ids: Tensor | None = None) -> Tensor:
    """Gradients by vectors from gradients by their `unit` vectors: (n, D), (n, D) -> (n, D).

    Or by some rows of a table: (n, D), (R, D), (n,) -> (n, D). That by a zero vector is zero.

    Example:
        >>> through_unit(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([[0.0000, 0.5000]])
    """
    if not _are_plain_rows(vectors, ids, gradients):
        units, norms = _units_and_norms(vectors if ids is None else vectors.index_select(0, ids))
        along = (gradients * units).sum(dim=-1, keepdim=True)  # only the part across changes units
        return (gradients - along * units) / norms
    ids = _checked_ids(vectors, ids)
    results = torch.empty_like(gradients)
    arrays = gradients.numpy(), vectors.numpy(), ids.numpy()
    arguments = *arrays, SMALLEST_NORM, results.numpy()
    _through_unit_rows_compiled(num_threads_for(results.numel()), len(ids), arguments)
    return results


def _are_plain_rows(vectors: Tensor, ids: Tensor | None, *others: Tensor) -> bool:
    """Whether these rows, or those of these ids, are for the compiled twin."""
    return vectors.dim() == 2 and are_plain(vectors, *others, *(() if ids is None else (ids,)))


def _checked_ids(vectors: Tensor, ids: Tensor | None) -> Tensor:
    """Ids that are rows of the table; those of all rows for None."""
    if ids is None:
        return torch.arange(len(vectors))
    check_ids(ids, len(vectors))
    return ids


def _units_and_norms(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of length 1 and what divides them, infinite for a zero vector: (n, D), (n, 1).

    Vectors so long that their squares overflow are first divided by their largest number.
    """
    peaks = vectors.detach().abs().amax(dim=-1, keepdim=True)  # (n, 1)
    scales = torch.where(peaks > torch.finfo(vectors.dtype).max ** 0.4, peaks, 1)
    vectors = vectors / scales
    norms: Tensor = vectors.norm(dim=-1, keepdim=True)
    norms = norms.masked_fill(norms <= SMALLEST_NORM, torch.inf)
    return vectors / norms, norms * scales


def scores_of_each(
    query_vectors: Tensor, label_table: Tensor, sampled_ids: Tensor, *, is_cosine: bool
) -> Tensor:
    """Scores of labels drawn for each example: (B, D), (L, D), (B, M) ids >= 0 -> (B, M).

    Either every label is scored once and the sampled scores are picked, or, where that is the
    larger work, each example reads the rows of its own labels; never is there a (B, M, D).

    Args:
        is_cosine: rows of the table are scored as vectors of length 1.

    Example:
        >>> queries, table = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> scores_of_each(queries, table, torch.tensor([[1, 0]]), is_cosine=True)
        tensor([[2.0000, 2.2000]])
    """
    batch_size, num_sampled = sampled_ids.shape
    if len(label_table) <= 8 * num_sampled:  # a product runs many times faster than a gather
        vectors = unit(label_table) if is_cosine else label_table
        return (query_vectors @ vectors.T).gather(1, sampled_ids)  # (B, L) -> (B, M)
    scores = query_vectors.new_empty(batch_size, num_sampled)
    if are_plain(query_vectors, label_table, sampled_ids):
        check_ids(sampled_ids, len(label_table))
        num_threads = num_threads_for(sampled_ids.numel() * label_table.shape[1])
        arrays = query_vectors.numpy(), label_table.numpy(), sampled_ids.numpy()
        arguments = *arrays, is_cosine, SMALLEST_NORM, scores.numpy()
        _score_rows_compiled(num_threads, batch_size, arguments)
        return scores
    rows_at_once = max(1, GATHERED_NUMBERS // (num_sampled * label_table.shape[1]))
    for start in range(0, batch_size, rows_at_once):
        rows = slice(start, start + rows_at_once)
        ids = sampled_ids[rows]  # (b, M)
        vectors = label_table.index_select(0, ids.flatten())  # (b * M, D)
        vectors = (unit(vectors) if is_cosine else vectors).view(*ids.shape, -1)
        scores[rows] = torch.bmm(vectors, query_vectors[rows].unsqueeze(-1)).squeeze(-1)  # (b, M)
    return scores


def adagrad_(
    table: Tensor, sums: Tensor, ids: Tensor, gradients: Tensor, *, learning_rate: float
) -> None:
    """Adagrad on distinct rows of a table and their sums of squares, in place: (R, D), (R,)."""
    if are_plain(table, sums, ids, gradients):
        check_ids(ids, len(table))
        arrays = table.numpy(), sums.numpy(), ids.numpy(), gradients.numpy()
        arguments = *arrays, learning_rate, EPSILON
        _adagrad_compiled(num_threads_for(gradients.numel()), len(ids), arguments)
        return
    totals = sums.index_select(0, ids) + gradients.square().mean(dim=1)  # (T,)
    sums.index_copy_(0, ids, totals)
    updates = gradients / (totals.sqrt() + EPSILON).unsqueeze(1)
    _subtract(table, ids, updates.mul_(learning_rate))


def adam_(
    table: Tensor, momentum: Tensor, second_moments: Tensor, ids: Tensor, gradients: Tensor,
    *, betas: tuple[float, float], learning_rate: float, step: int,
) -> None:  # fmt: skip
    """Adam on distinct rows, in place: (R, D), (R, D), one second moment for each row (R,).

    Args:
        step: from 1; both moments begin at 0 and are corrected for that.
    """
    first, second = betas
    rate, correction = learning_rate / (1 - first**step), 1 - second**step
    if are_plain(table, momentum, second_moments, ids, gradients):
        check_ids(ids, len(table))
        arrays = (table, momentum, second_moments, ids, gradients)
        numbers = first, second, rate, correction, EPSILON
        arguments = *(array.numpy() for array in arrays), numbers
        _adam_compiled(num_threads_for(gradients.numel()), len(ids), arguments)
        return
    paces = momentum.index_select(0, ids).mul_(first).add_(gradients, alpha=1 - first)
    squares = gradients.square().mean(dim=1)  # (T, D) -> (T,)
    moments = second_moments.index_select(0, ids).mul_(second).add_(squares, alpha=1 - second)
    momentum.index_copy_(0, ids, paces)
    second_moments.index_copy_(0, ids, moments)
    scales = (moments / correction).sqrt_().add_(EPSILON)
    _subtract(table, ids, paces.div_(scales.unsqueeze(1)).mul_(rate))


def _subtract(table: Tensor, ids: Tensor, updates: Tensor) -> None:
    """Rows are distinct, so reading and writing them back does; index_add takes longer."""
    table.index_copy_(0, ids, table.index_select(0, ids).sub_(updates))


# --- compiled -------------------------------------------------------------------------------------


@jit_sums
def _unit_rows_part(
    first: int, last: int, table: Floats, ids: Ids, smallest: float, units: Floats
) -> None:
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        row, result = table[ids[place]], units[place]
        norm = _norm(row, smallest)
        factor = np.float32(1 / norm)
        if HUGE < norm < math.inf:  # the factor would have few digits left
            for column in range(len(row)):
                result[column] = row[column] / norm
        else:
            for column in range(len(row)):
                result[column] = factor * row[column]


@jit_sums
def _through_unit_rows_part(
    first: int, last: int, gradients: Floats, table: Floats, ids: Ids, smallest: float,
    results: Floats,
) -> None:  # fmt: skip
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        gradient, row, result = gradients[place], table[ids[place]], results[place]
        norm = _norm(row, smallest)
        product = _dot(gradient, row) if norm < HUGE else _wide_dot(gradient, row)
        factor, along = np.float32(1 / norm), np.float32(product / norm / norm)
        for column in range(len(row)):
            result[column] = factor * (gradient[column] - along * row[column])


@jit_sums
def _score_rows_part(
    first: int, last: int, queries: Floats, table: Floats, ids: Ids, is_cosine: bool,
    smallest: float, scores: Floats,
) -> None:  # fmt: skip
    ids_of_all = ids.reshape(ids.size)
    for example in range(first, last):
        for place in range(ids.shape[1]):
            fetch_later_row(table, ids_of_all, example * ids.shape[1] + place)
            query, row = queries[example], table[ids[example, place]]
            norm = _norm(row, smallest) if is_cosine else 1.0
            product = _dot(query, row) if norm < HUGE else _wide_dot(query, row)
            scores[example, place] = product / norm


@jit_sums
def _adagrad_part(
    first: int, last: int, table: Floats, sums: Floats, ids: Ids, gradients: Floats,
    learning_rate: float, epsilon: float,
) -> None:  # fmt: skip
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        gradient, row = gradients[place], table[ids[place]]
        total = sums[ids[place]] + _dot(gradient, gradient) / len(row)
        sums[ids[place]] = total
        factor = np.float32(learning_rate / (math.sqrt(total) + epsilon))
        for column in range(len(row)):
            row[column] -= factor * gradient[column]


@jit_sums
def _adam_part(
    first: int, last: int, table: Floats, momentum: Floats, second_moments: Floats, ids: Ids,
    gradients: Floats, numbers: tuple[float, float, float, float, float],
) -> None:  # fmt: skip
    beta, second_beta, rate, correction, epsilon = numbers
    old_share, new_share = np.float32(beta), np.float32(1 - beta)
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        fetch_later_row(momentum, ids, place)
        gradient, row, pace = gradients[place], table[ids[place]], momentum[ids[place]]
        square = _dot(gradient, gradient) / len(row)
        moment = second_beta * second_moments[ids[place]] + (1 - second_beta) * square
        second_moments[ids[place]] = moment
        factor = np.float32(rate / (math.sqrt(moment / correction) + epsilon))
        for column in range(len(row)):
            pace[column] = old_share * pace[column] + new_share * gradient[column]
            row[column] -= factor * pace[column]


# A kernel on so many threads, each for a part of the rows: a function for each kernel, as machine
# code that takes a kernel as an argument is not kept on disk.


@jit
def _unit_rows_compiled(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_unit_rows_part, num_rows, num_threads, arguments)


@jit
def _through_unit_rows_compiled(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_through_unit_rows_part, num_rows, num_threads, arguments)


@jit
def _score_rows_compiled(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_score_rows_part, num_rows, num_threads, arguments)


@jit
def _adagrad_compiled(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_adagrad_part, num_rows, num_threads, arguments)


@jit
def _adam_compiled(num_threads: int, num_rows: int, arguments: Any) -> None:
    in_parts(_adam_part, num_rows, num_threads, arguments)


@jit_sums
def _norm(row: Floats, smallest: float) -> float:
    """The length of a row; infinite for a zero row, so that what is divided by it is 0."""
    square = float(_dot(row, row))
    if square == math.inf:
        square = _wide_dot(row, row)
    norm = math.sqrt(square)
    return math.inf if norm <= smallest else norm  # NaN stays NaN


@jit_sums
def _dot(row: Floats, other: Floats) -> np.float32:
    total = np.float32(0)
    for column in range(len(row)):
        total += row[column] * other[column]
    return total


@jit_sums
def _wide_dot(row: Floats, other: Floats) -> float:
    """As `_dot`, where float32 would overflow."""
    total = 0.0
    for column in range(len(row)):
        total += np.float64(row[column]) * np.float64(other[column])
    return total
