"""Rows of a table read, normalised, scored and updated in one pass each: numba twins of torch.

A sum over a row is a loop over its columns: to iterate over the row itself is 15 times slower.
"""

import math

import numpy as np
from numpy.typing import NDArray

from evenhand.kernels.jit import jit, jit_sums
from evenhand.kernels.prefetch import fetch_later_row
from evenhand.kernels.threads import in_parts

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

HUGE = 1e15  # the length of a row from which products with it may overflow


@jit
def unit_rows(num_threads: int, table: Floats, ids: Ids, smallest: float, units: Floats) -> None:
    in_parts(_unit_rows, len(ids), num_threads, (table, ids, smallest, units))


@jit_sums
def _unit_rows(
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


@jit
def through_unit_rows(
    num_threads: int, gradients: Floats, table: Floats, ids: Ids, smallest: float, results: Floats
) -> None:
    in_parts(_through_unit_rows, len(ids), num_threads, (gradients, table, ids, smallest, results))


@jit_sums
def _through_unit_rows(
    first: int,
    last: int,
    gradients: Floats,
    table: Floats,
    ids: Ids,
    smallest: float,
    results: Floats,
) -> None:
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        gradient, row, result = gradients[place], table[ids[place]], results[place]
        norm = _norm(row, smallest)
        product = _dot(gradient, row) if norm < HUGE else _wide_dot(gradient, row)
        factor, along = np.float32(1 / norm), np.float32(product / norm / norm)
        for column in range(len(row)):
            result[column] = factor * (gradient[column] - along * row[column])


@jit
def score_rows(
    num_threads: int,
    queries: Floats,
    table: Floats,
    ids: Ids,
    is_cosine: bool,
    smallest: float,
    scores: Floats,
) -> None:
    """scores[b, m] of the query b and the row ids[b, m]."""
    arguments = queries, table, ids, is_cosine, smallest, scores
    in_parts(_score_rows, len(ids), num_threads, arguments)


@jit_sums
def _score_rows(
    first: int,
    last: int,
    queries: Floats,
    table: Floats,
    ids: Ids,
    is_cosine: bool,
    smallest: float,
    scores: Floats,
) -> None:
    ids_of_all = ids.reshape(ids.size)
    for example in range(first, last):
        for place in range(ids.shape[1]):
            fetch_later_row(table, ids_of_all, example * ids.shape[1] + place)
            row = table[ids[example, place]]
            norm = _norm(row, smallest) if is_cosine else 1.0
            product = (
                _dot(queries[example], row) if norm < HUGE else _wide_dot(queries[example], row)
            )
            scores[example, place] = product / norm


@jit
def adagrad(
    num_threads: int,
    table: Floats,
    sums: Floats,
    ids: Ids,
    gradients: Floats,
    learning_rate: float,
    epsilon: float,
) -> None:
    arguments = table, sums, ids, gradients, learning_rate, epsilon
    in_parts(_adagrad, len(ids), num_threads, arguments)


@jit_sums
def _adagrad(
    first: int,
    last: int,
    table: Floats,
    sums: Floats,
    ids: Ids,
    gradients: Floats,
    learning_rate: float,
    epsilon: float,
) -> None:
    for place in range(first, last):
        fetch_later_row(table, ids, place)
        gradient, row = gradients[place], table[ids[place]]
        total = sums[ids[place]] + _dot(gradient, gradient) / len(row)
        sums[ids[place]] = total
        factor = np.float32(learning_rate / (math.sqrt(total) + epsilon))
        for column in range(len(row)):
            row[column] -= factor * gradient[column]


@jit
def adam(
    num_threads: int,
    table: Floats,
    momentum: Floats,
    second_moments: Floats,
    ids: Ids,
    gradients: Floats,
    numbers: tuple[float, float, float, float, float],
) -> None:
    arguments = table, momentum, second_moments, ids, gradients, numbers
    in_parts(_adam, len(ids), num_threads, arguments)


@jit_sums
def _adam(
    first: int,
    last: int,
    table: Floats,
    momentum: Floats,
    second_moments: Floats,
    ids: Ids,
    gradients: Floats,
    numbers: tuple[float, float, float, float, float],
) -> None:
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
