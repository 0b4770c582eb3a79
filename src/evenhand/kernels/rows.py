"""Rows of a table: made of length 1, the way back from that, and updated by an optimiser.

On a CPU each is one pass over the rows in the cache (`kernels.cpu_rows`); elsewhere it is a few
operations of torch, which are also what the other is tested against.
"""

import torch
from torch import Tensor

from evenhand.kernels import cpu_rows
from evenhand.kernels.cpu import are_plain, check_ids
from evenhand.kernels.threads import num_threads_for

SMALLEST_NORM = 1e-12  # a vector that is not longer counts as zero
EPSILON = 1e-8


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1: (n, D) -> (n, D).

    A zero vector, or one not longer than `SMALLEST_NORM`, has no direction: its unit vector is
    zero, so it scores 0, and no gradient passes through it. To divide it by a tiny number instead,
    as `torch.nn.functional.normalize` does, would make a gradient of 1e12 times the one that came.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    if vectors.dim() == 2 and are_plain(vectors):
        return _unit_rows(vectors, torch.arange(len(vectors)))
    return _units_and_norms(vectors)[0]


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


def unit_rows(table: Tensor, ids: Tensor) -> Tensor:
    """`unit` of some rows: (R, D), (n,) ids -> (n, D).

    Example:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]]), torch.tensor([2, 0]))
        tensor([[0.0000, 1.0000],
                [0.6000, 0.8000]])
    """
    if not are_plain(table, ids):
        return unit(table.index_select(0, ids))
    check_ids(ids, len(table))
    return _unit_rows(table, ids)


def _unit_rows(table: Tensor, ids: Tensor) -> Tensor:
    units = torch.empty(len(ids), table.shape[1])
    cpu_rows.unit_rows(
        num_threads_for(units.numel()), table.numpy(), ids.numpy(), SMALLEST_NORM, units.numpy()
    )
    return units


def through_unit(gradients: Tensor, vectors: Tensor) -> Tensor:
    """Gradients by vectors from gradients by their `unit` vectors: (n, D), (n, D) -> (n, D).

    The gradient by a zero vector is zero.

    Example:
        >>> through_unit(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([[0.0000, 0.5000]])
    """
    if vectors.dim() == 2 and are_plain(gradients, vectors):
        return _through_unit_rows(gradients, vectors, torch.arange(len(vectors)))
    units, norms = _units_and_norms(vectors)
    along = (gradients * units).sum(dim=-1, keepdim=True)  # only the part across changes units
    return (gradients - along * units) / norms


def through_unit_rows(gradients: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`through_unit` for some rows of a table: (n, D), (R, D), (n,) -> (n, D).

    Example:
        >>> table, ids = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1])
        >>> through_unit_rows(torch.tensor([[1.0, 1.0]]), table, ids)
        tensor([[0.0000, 0.5000]])
    """
    if not are_plain(gradients, table, ids):
        return through_unit(gradients, table.index_select(0, ids))
    check_ids(ids, len(table))
    return _through_unit_rows(gradients, table, ids)


def _through_unit_rows(gradients: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    results = torch.empty_like(gradients)
    cpu_rows.through_unit_rows(
        num_threads_for(results.numel()),
        gradients.numpy(),
        table.numpy(),
        ids.numpy(),
        SMALLEST_NORM,
        results.numpy(),
    )
    return results


def adagrad_(
    table: Tensor, sums: Tensor, ids: Tensor, gradients: Tensor, *, learning_rate: float
) -> None:
    """Adagrad on distinct rows of a table and their sums of squares, in place: (R, D), (R,)."""
    if are_plain(table, sums, ids, gradients):
        check_ids(ids, len(table))
        cpu_rows.adagrad(
            num_threads_for(gradients.numel()),
            table.numpy(),
            sums.numpy(),
            ids.numpy(),
            gradients.numpy(),
            learning_rate,
            EPSILON,
        )
        return
    totals = sums.index_select(0, ids) + gradients.square().mean(dim=1)  # (T,)
    sums.index_copy_(0, ids, totals)
    updates = gradients / (totals.sqrt() + EPSILON).unsqueeze(1)
    _subtract(table, ids, updates.mul_(learning_rate))


def adam_(
    table: Tensor,
    momentum: Tensor,
    second_moments: Tensor,
    ids: Tensor,
    gradients: Tensor,
    *,
    betas: tuple[float, float],
    learning_rate: float,
    step: int,
) -> None:
    """Adam on distinct rows, in place: (R, D), (R, D), one second moment for each row (R,).

    Args:
        step: from 1; both moments begin at 0 and are corrected for that.
    """
    first, second = betas
    rate, correction = learning_rate / (1 - first**step), 1 - second**step
    if are_plain(table, momentum, second_moments, ids, gradients):
        check_ids(ids, len(table))
        cpu_rows.adam(
            num_threads_for(gradients.numel()),
            table.numpy(),
            momentum.numpy(),
            second_moments.numpy(),
            ids.numpy(),
            gradients.numpy(),
            (first, second, rate, correction, EPSILON),
        )
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
