"""What indexes outside of the model hold: label vectors whose plain product is the whole score.

A label's bias is one more dimension of its vector, and every query has a 1 there:

    (query, 1) . (label, bias) = query . label + bias

So any store that knows the inner product gives the model's scores. Under the cosine the vectors
have length 1 and there is no bias: the inner product is the cosine, times the model's scale.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import FloatArray, IntArray
from evenhand.errors import UserError
from evenhand.search.exact import ExactIndex, SearchResult, check_queries

BLOCK_ROWS = 2**16  # of labels, made at once


def stored_dim(exact: ExactIndex) -> int:
    """The width of the vectors that are stored: one more than the model's where it has biases."""
    return int(exact.label_vectors.shape[1]) + (exact.label_bias is not None)


def stored_blocks(exact: ExactIndex, block_rows: int = BLOCK_ROWS) -> Iterator[FloatArray]:
    """The vectors (b, stored_dim) of all labels in order, a block at a time."""
    for start in range(0, len(exact), block_rows):
        rows = slice(start, start + block_rows)
        vectors = exact.vectors_fn(exact.label_vectors[rows].detach()).float()  # (b, D)
        if exact.label_bias is not None:
            vectors = torch.cat([vectors, exact.label_bias[rows].detach().unsqueeze(1)], dim=1)
        if not bool(vectors.isfinite().all()):
            raise UserError(
                f"the vector of a label from {start} to {start + len(vectors) - 1} is infinite or "
                f"no number; train anew with a lower training.learning_rate"
            )
        yield np.ascontiguousarray(vectors.cpu().numpy(), dtype=np.float32)


def stored_queries(queries: Tensor, num_results: int, *, dim: int, has_bias: bool) -> FloatArray:
    """Queries (Q, D) as they are compared with stored vectors: (Q, dim)."""
    check_queries(queries, dim - has_bias, num_results)
    vectors = queries.detach().float().cpu()
    if has_bias:
        vectors = torch.cat([vectors, vectors.new_ones(len(vectors), 1)], dim=1)
    return np.ascontiguousarray(vectors.numpy())


def ranked(label_ids: IntArray, scores: NDArray[np.float32], device: torch.device) -> SearchResult:
    """What a store found (Q, R) in the order of the contract: best first, of equals by id."""
    scores[label_ids < 0] = -np.inf
    order = np.lexsort((label_ids, -scores), axis=1)  # (Q, R)
    ids, best = (torch.from_numpy(part).to(device) for part in (label_ids, scores))
    places = torch.from_numpy(order).to(device)
    return SearchResult(ids.gather(1, places), best.gather(1, places))
