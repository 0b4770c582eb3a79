"""Scores of labels that were drawn for each example, in bounded memory."""

import torch
from torch import Tensor

from evenhand.kernels import cpu_rows
from evenhand.kernels.cpu import are_plain, check_ids
from evenhand.kernels.rows import SMALLEST_NORM, unit
from evenhand.kernels.threads import num_threads_for

GATHERED_NUMBERS = 2**24  # of label vectors held at once


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
        cpu_rows.score_rows(
            num_threads_for(sampled_ids.numel() * label_table.shape[1]),
            query_vectors.numpy(),
            label_table.numpy(),
            sampled_ids.numpy(),
            is_cosine,
            SMALLEST_NORM,
            scores.numpy(),
        )
        return scores
    rows_at_once = max(1, GATHERED_NUMBERS // (num_sampled * label_table.shape[1]))
    for start in range(0, batch_size, rows_at_once):
        rows = slice(start, start + rows_at_once)
        ids = sampled_ids[rows]  # (b, M)
        vectors = label_table.index_select(0, ids.flatten())  # (b * M, D)
        vectors = (unit(vectors) if is_cosine else vectors).view(*ids.shape, -1)
        scores[rows] = torch.bmm(vectors, query_vectors[rows].unsqueeze(-1)).squeeze(-1)  # (b, M)
    return scores
