"""Products of a sparse matrix, and of its transpose, with dense vectors.

A dense product over the survivors' (k', T) coefficients does 1 % useful work: an example keeps 64
of thousands of labels. Both products here are sums over lists, without a single atomic. Where every
label is kept, the matrix is given dense, and the products are dense ones.

The compiled twins are by hand because torch sorts to find distinct ids and columns, where counting
and a hash table take one pass. The table has at least twice as many places as ids; where an id's
place is taken by another id, the next is tried.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from evenhand.kernels.jit import are_plain, check_ids, jit
from evenhand.kernels.random import GOLDEN64

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Places = NDArray[np.int32]


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
        matrix.columns, vectors, matrix.starts,
        mode="sum", per_sample_weights=matrix.values, include_last_offset=True,
    )  # fmt: skip


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
    turned = Lists(new_starts, torch.empty_like(columns), torch.empty_like(values))
    _transpose(*(own.numpy() for own in (*matrix, *turned)))
    return turned._replace(starts=new_starts[:-1])


def entries_of(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of chosen lists, one list after another, and where each list then starts.

    Example:
        >>> entries_of(torch.tensor([0, 2, 5]), torch.tensor([1, 0]))
        (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    if are_plain(starts, rows):
        check_ids(rows, len(starts) - 1)
        new_starts = torch.zeros(len(rows) + 1, dtype=torch.int64)
        found = _entries_of(starts.numpy(), rows.numpy(), new_starts.numpy())
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
    count = _find_distinct(ids.numpy(), distinct.numpy(), places.numpy())
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
    tensors = ids, coefficients, starts, distinct, columns, values
    count = _find_entries(*(tensor.numpy() for tensor in tensors))
    num_entries = int(starts[-1])
    return distinct[:count], Lists(starts, columns[:num_entries], values[:num_entries])


# --- compiled -------------------------------------------------------------------------------------


@jit
def _find_distinct(ids: Ids, distinct: Ids, places: Ids) -> int:
    """Fills `distinct` with the ids as they first occur, and where each id stands there."""
    table = empty_table(len(ids))
    count = 0
    for entry in range(len(ids)):
        place = place_of(ids[entry], table, distinct)
        if table[place] < 0:
            table[place] = count
            distinct[count] = ids[entry]
            count += 1
        places[entry] = table[place]
    return count


@jit
def _find_entries(
    ids: Ids, coefficients: Floats, starts: Ids, distinct: Ids, columns: Ids, values: Floats
) -> int:
    """Lists the coefficients (R, C) that are not 0, of ids that are not below 0, by distinct id."""
    table = empty_table(ids.size)
    count, num_entries = 0, 0
    for row in range(len(ids)):
        for column in range(ids.shape[1]):
            value = coefficients[row, column]
            if value == 0 or ids[row, column] < 0:
                continue
            place = place_of(ids[row, column], table, distinct)
            if table[place] < 0:
                table[place] = count
                distinct[count] = ids[row, column]
                count += 1
            columns[num_entries], values[num_entries] = table[place], value
            num_entries += 1
        starts[row + 1] = num_entries
    return count


@jit
def _transpose(
    starts: Ids, columns: Ids, values: Floats, new_starts: Ids, new_columns: Ids, new_values: Floats
) -> None:
    """Counts the entries of each column, then puts every entry at its place.

    `new_starts` is 0, and has a place for each column and two more.
    """
    for entry in range(len(columns)):
        new_starts[columns[entry] + 2] += 1
    for column in range(2, len(new_starts)):
        new_starts[column] += new_starts[column - 1]
    for row in range(len(starts) - 1):
        for entry in range(starts[row], starts[row + 1]):
            place = new_starts[columns[entry] + 1]
            new_columns[place], new_values[place] = row, values[entry]
            new_starts[columns[entry] + 1] = place + 1


@jit
def _entries_of(starts: Ids, rows: Ids, new_starts: Ids) -> Ids:
    """Where the entries of chosen rows stand, one row after another; fills where each starts."""
    for place in range(len(rows)):
        length = starts[rows[place] + 1] - starts[rows[place]]
        new_starts[place + 1] = new_starts[place] + length
    entries = np.empty(new_starts[-1], np.int64)
    for place in range(len(rows)):
        shift = starts[rows[place]] - new_starts[place]
        for entry in range(new_starts[place], new_starts[place + 1]):
            entries[entry] = entry + shift
    return entries


@jit
def empty_table(num_ids: int) -> Places:
    """A hash table for so many ids, all places -1."""
    size = 2
    while size < 2 * num_ids:
        size *= 2
    return np.full(size, -1, np.int32)


@jit
def place_of(key: int, table: Places, ids: Ids) -> Any:
    """Where the table holds the index of this id among `ids`, or -1 and room for it."""
    # Fibonacci hashing.
    place = np.int64((np.uint64(key) * GOLDEN64) >> np.uint64(32)) & (len(table) - 1)
    while table[place] >= 0 and ids[table[place]] != key:
        place = (place + 1) & (len(table) - 1)
    return place
