"""Products with a matrix of few entries: as fast as its entries are few, forwards and transposed.

A dense product over the survivors' (k', T) coefficients does 1 % useful work: an example keeps 64
of thousands of labels. Both products here are sums over bags, without a single atomic. Where every
label is kept, the matrix is given dense, and the products are dense ones.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.kernels import cpu_sparse
from evenhand.kernels.cpu import are_plain, check_ids


class Entries(NamedTuple):
    """A sparse matrix, entry by entry, sorted by row; entries at one place add up."""

    rows: Tensor  # (n,) int64
    columns: Tensor  # (n,) int64
    values: Tensor  # (n,)


def product(entries: Entries | Tensor, vectors: Tensor, *, num_rows: int) -> Tensor:
    """Matrix times vectors: (R, C) (C, D) -> (R, D).

    Example:
        >>> entries = Entries(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))
        >>> product(entries, torch.tensor([[1.0], [10.0]]), num_rows=2)
        tensor([[32.],
                [ 0.]])
    """
    if isinstance(entries, Tensor):
        return entries @ vectors
    starts = _starts(entries.rows, num_rows)
    return _bag_sums(entries.columns, entries.values, starts, vectors)


def transposed_product(entries: Entries | Tensor, vectors: Tensor, *, num_columns: int) -> Tensor:
    """Transposed matrix times vectors: (R, C)' (R, D) -> (C, D).

    Example:
        >>> entries = Entries(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))
        >>> transposed_product(entries, torch.tensor([[1.0]]), num_columns=2)
        tensor([[2.],
                [3.]])
    """
    if isinstance(entries, Tensor):
        return entries.T @ vectors
    return _bag_sums(*_by_column(entries, num_columns), vectors)


def distinct_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Every id once (T,), and where each of the ids (n,) stands among them (n,).

    Example:
        >>> distinct, places = distinct_ids(torch.tensor([7, 3, 7]))
        >>> distinct[places]
        tensor([7, 3, 7])
    """
    if not are_plain(ids):
        return torch.unique(ids, return_inverse=True)  # type: ignore[no-any-return]
    distinct, places = torch.empty_like(ids), torch.empty_like(ids)
    count = cpu_sparse.find_distinct(ids.numpy(), distinct.numpy(), places.numpy())
    return distinct[:count], places


def _by_column(entries: Entries, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and values (n,) in the order of the columns, and where each column starts (C + 1,)."""
    rows, columns, values = entries
    if not are_plain(rows, columns, values):
        columns, order = columns.sort(stable=True)
        return rows[order], values[order], _starts(columns, num_columns)
    check_ids(columns, num_columns)
    starts, results = columns.new_zeros(num_columns + 2), (rows.clone(), values.clone())
    arrays = (tensor.numpy() for tensor in (*entries, starts, *results))
    cpu_sparse.order_by_column(*arrays)
    return *results, starts[:-1]


def _starts(sorted_bags: Tensor, num_bags: int) -> Tensor:
    """Where each bag starts among the entries, and where the last one ends: (C + 1,)."""
    return F.pad(torch.bincount(sorted_bags, minlength=num_bags).cumsum(0), (1, 0))


def _bag_sums(ids: Tensor, values: Tensor, starts: Tensor, vectors: Tensor) -> Tensor:
    return F.embedding_bag(
        ids, vectors, starts, mode="sum", per_sample_weights=values, include_last_offset=True
    )
