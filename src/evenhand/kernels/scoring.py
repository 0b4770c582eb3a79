"""Scores of labels that were drawn for each example, in bounded memory."""

from collections.abc import Callable

import torch
from torch import Tensor

GATHERED_NUMBERS = 2**24  # of label vectors held at once


def scores_of_each(
    query_vectors: Tensor,
    label_table: Tensor,
    sampled_ids: Tensor,
    *,
    unit_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """Scores of labels drawn for each example: (B, D), (L, D), (B, M) ids >= 0 -> (B, M).

    Either every label is scored once and the sampled scores are picked, or, where that is the
    larger work, label vectors are gathered for a few examples at a time; never (B, M, D).

    Args:
        unit_fn: what is done to rows of the table before they are scored, such as normalising.
    """
    batch_size, num_sampled = sampled_ids.shape
    if len(label_table) <= 8 * num_sampled:  # a product runs many times faster than a gather
        return (query_vectors @ unit_fn(label_table).T).gather(1, sampled_ids)  # (B, L) -> (B, M)
    rows_at_once = max(1, GATHERED_NUMBERS // (num_sampled * label_table.shape[1]))
    scores = query_vectors.new_empty(batch_size, num_sampled)
    for start in range(0, batch_size, rows_at_once):
        rows = slice(start, start + rows_at_once)
        ids = sampled_ids[rows]  # (b, M)
        vectors = unit_fn(label_table.index_select(0, ids.flatten())).view(*ids.shape, -1)
        scores[rows] = torch.bmm(vectors, query_vectors[rows].unsqueeze(-1)).squeeze(-1)  # (b, M)
    return scores
