"""Products with a matrix of few entries: as fast as its entries are few, forwards and transposed.

A dense product over the survivors' (k', T) coefficients does 1 % useful work: an example keeps 64
of thousands of labels. Both products here are sums over bags, without a single atomic. Where every
label is kept, the matrix is given dense, and the products are dense ones.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
    return _bag_sums(entries.columns, entries.values, entries.rows, vectors, num_bags=num_rows)


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
    columns, order = entries.columns.sort(stable=True)
    return _bag_sums(
        entries.rows[order], entries.values[order], columns, vectors, num_bags=num_columns
    )


def _bag_sums(
    ids: Tensor, values: Tensor, sorted_bags: Tensor, vectors: Tensor, *, num_bags: int
) -> Tensor:
    offsets = F.pad(torch.bincount(sorted_bags, minlength=num_bags).cumsum(0), (1, 0))
    return F.embedding_bag(
        ids, vectors, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )
