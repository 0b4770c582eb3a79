"""Products with a matrix of few entries: as fast as its entries are few, forwards and transposed.

A dense product over the survivors' (k', T) coefficients does 1 % useful work: an example keeps 64
of thousands of labels. Both products here are sums over lists, without a single atomic. Where every
label is kept, the matrix is given dense, and the products are dense ones.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.kernels import cpu_sparse
from evenhand.kernels.cpu import are_plain, check_ids


class Lists(NamedTuple):
    """A sparse matrix (R, C), a list of entries for each row; entries at one place add up."""

    starts: Tensor  # (R + 1,) int64, where each list starts, and where the last one ends
    columns: Tensor  # (n,) int64
    values: Tensor  # (n,)


def product(matrix: Lists | Tensor, vectors: Tensor) -> Tensor:
    """Matrix times vectors: (R, C) (C, D) -> (R, D).

    Example:
        >>> matrix = Lists(torch.tensor([0, 2, 2]), torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))
        >>> product(matrix, torch.tensor([[1.0], [10.0]]))
        tensor([[32.],
                [ 0.]])
    """
    if isinstance(matrix, Tensor):
        return matrix @ vectors
    return F.embedding_bag(
        matrix.columns,
        vectors,
        matrix.starts,
        mode="sum",
        per_sample_weights=matrix.values,
        include_last_offset=True,
    )


def transposed_product(matrix: Lists | Tensor, vectors: Tensor, *, num_columns: int) -> Tensor:
    """Transposed matrix times vectors: (R, C)' (R, D) -> (C, D).

    Example:
        >>> matrix = Lists(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([2.0, 3.0]))
        >>> transposed_product(matrix, torch.tensor([[1.0]]), num_columns=2)
        tensor([[2.],
                [3.]])
    """
    if isinstance(matrix, Tensor):
        return matrix.T @ vectors
    return product(transposed(matrix, num_columns=num_columns), vectors)


def transposed(matrix: Lists, *, num_columns: int) -> Lists:
    """The same matrix, a list for each column: (R, C) -> (C, R)."""
    starts, columns, values = matrix
    if not are_plain(*matrix):
        rows = torch.repeat_interleave(starts.diff())  # (n,)
        counts = torch.bincount(columns, minlength=num_columns)
        order = columns.argsort(stable=True)
        return Lists(F.pad(counts.cumsum(0), (1, 0)), rows[order], values[order])
    check_ids(columns, num_columns)
    new_starts = torch.zeros(num_columns + 2, dtype=torch.int64)
    new_columns, new_values = torch.empty_like(columns), torch.empty_like(values)
    cpu_sparse.transpose(
        starts.numpy(),
        columns.numpy(),
        values.numpy(),
        new_starts.numpy(),
        new_columns.numpy(),
        new_values.numpy(),
    )
    return Lists(new_starts[:-1], new_columns, new_values)


def entries_of(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of chosen lists, one list after another, and where each list then starts.

    Example:
        >>> entries_of(torch.tensor([0, 2, 5]), torch.tensor([1, 0]))
        (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    if are_plain(starts, rows):
        check_ids(rows, len(starts) - 1)
        new_starts = torch.zeros(len(rows) + 1, dtype=torch.int64)
        found = cpu_sparse.entries_of(starts.numpy(), rows.numpy(), new_starts.numpy())
        return torch.from_numpy(found), new_starts
    firsts = starts[rows]
    lengths = starts[rows + 1] - firsts
    new_starts = F.pad(lengths.cumsum(0), (1, 0))
    entries = torch.repeat_interleave(firsts - new_starts[:-1], lengths)
    return entries + torch.arange(len(entries), device=entries.device), new_starts


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


def matrix_of(ids: Tensor, coefficients: Tensor) -> tuple[Tensor, Lists]:
    """Coefficients (R, C) of ids (R, C) -> the distinct ids (T,) and an (R, T) matrix.

    Left out are ids whose coefficients are all 0, and ids below 0, which are none.

    Example:
        >>> ids, coefficients = torch.tensor([[7, 3], [7, 9]]), torch.tensor([[1.0, 0.0], [2, 3]])
        >>> distinct, matrix = matrix_of(ids, coefficients)
        >>> distinct, matrix.starts, matrix.columns, matrix.values
        (tensor([7, 9]), tensor([0, 1, 3]), tensor([0, 0, 1]), tensor([1., 2., 3.]))
    """
    ids, coefficients = ids.contiguous(), coefficients.contiguous()
    if not are_plain(ids, coefficients):
        is_entry = (coefficients != 0) & (ids >= 0)
        starts = F.pad(is_entry.sum(dim=1).cumsum(0), (1, 0))
        distinct, columns = distinct_ids(ids[is_entry])
        return distinct, Lists(starts, columns, coefficients[is_entry])
    starts = torch.zeros(len(ids) + 1, dtype=torch.int64)
    distinct, columns = torch.empty(2, ids.numel(), dtype=torch.int64)
    values = torch.empty(ids.numel())
    count = cpu_sparse.find_entries(
        ids.numpy(),
        coefficients.numpy(),
        starts.numpy(),
        distinct.numpy(),
        columns.numpy(),
        values.numpy(),
    )
    num_entries = int(starts[-1])
    return distinct[:count], Lists(starts, columns[:num_entries], values[:num_entries])
