"""What indexes outside of the model hold: label vectors whose plain product is the whole score.

A label's bias is one more dimension of its vector, and every query has a 1 there:

    (query, 1) . (label, bias) = query . label + bias

So any store that knows the inner product gives the model's scores. Under the cosine the vectors
have length 1 and there is no bias: the inner product is the cosine, times the model's scale.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import FloatArray, Groups, IntArray, Strings, memberships
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


# --- for databases --------------------------------------------------------------------------------


class StoredLabels(NamedTuple):
    """Rows of a database: what it finds labels by, and what they can be filtered by."""

    label_ids: IntArray  # (n,)
    vectors: FloatArray  # (n, stored_dim)
    names: list[str]
    metadata: list[dict[str, list[str]]]  # of each label: its groups in every column


def stored_labels(
    exact: ExactIndex,
    names: Strings | None = None,
    groups: Mapping[str, Groups] | None = None,
    block_rows: int = 2**12,
) -> Iterator[StoredLabels]:
    """All labels of a model in order, a block at a time."""
    start = 0
    for vectors in stored_blocks(exact, block_rows):
        label_ids = np.arange(start, start + len(vectors))
        metadata: list[dict[str, list[str]]] = [{} for _ in label_ids]
        for column, of_labels in (groups or {}).items():
            own = of_labels._replace(ids=of_labels.ids[label_ids])
            for place, group_id in zip(*memberships(own), strict=True):
                metadata[place].setdefault(column, []).append(own.names[group_id])
        shown = [f"label {row}" if names is None else names[row] for row in label_ids.tolist()]
        yield StoredLabels(label_ids, vectors, shown, metadata)
        start += len(vectors)


Where = Mapping[str, Sequence[str]]  # column -> the groups of which a label must be in one


def storable(text: str) -> str:
    """Without what a database cannot hold: NUL, and half a surrogate pair."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def storable_groups(metadata: Where) -> dict[str, list[str]]:
    return {storable(column): [*map(storable, own)] for column, own in metadata.items()}


def filled(
    rows: Sequence[Sequence[tuple[int, float]]], num_results: int, device: torch.device
) -> SearchResult:
    """Labels and scores found for each query, as (Q, num_results), with -1 where there are less."""
    label_ids = np.full((len(rows), num_results), -1, dtype=np.int64)
    scores = np.full((len(rows), num_results), -np.inf, dtype=np.float32)
    for query, found in enumerate(rows):
        for place, (label_id, score) in enumerate(found):
            label_ids[query, place], scores[query, place] = label_id, score
    return ranked(label_ids, scores, device)


def stopped_half_way(what: str, reason: str) -> UserError:
    """For a load that did not end: what searchers see is what they saw before."""
    return UserError(
        f"the load into {what} stopped half-way ({reason}); searchers see what was there before, "
        f"and the same command begins anew"
    )


def of_another_model(what: str) -> UserError:
    return UserError(
        f"{what} holds the vectors of another model; load this one: evenhand index push RUN --to "
        f"ADDRESS"
    )
