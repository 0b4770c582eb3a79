"""Votes of the most similar training queries, added to what another index scores.

A model of few dimensions knows what queries have in common, and forgets single ones. Its nearest
training queries remember: where they agree on a label, the label rises, however rare it is.

    score'(label) = score(label) + weight * sum of shares of the neighbours that have the label

A neighbour's share is its similarity to the power `power`, over the sum of all neighbours'.
Similarity is the product of the sparse features, the cosine where rows have length 1. The result
is exact: a label that no neighbour has keeps its score, so the best labels are among the best of
the other index and the labels of the neighbours.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import IntArray, Rows, take_rows
from evenhand.kernels.jit import jit
from evenhand.search.exact import ExactIndex, SearchResult


class VotedQueries(NamedTuple):
    """Queries as the model's vectors, and what their neighbours say."""

    vectors: Tensor  # (Q, D)
    label_ids: Tensor  # (Q, C) distinct labels of the neighbours, in order; -1 where fewer
    votes: Tensor  # (Q, C)

    @property
    def device(self) -> torch.device:
        return self.vectors.device

    def __len__(self) -> int:  # queries, not fields of the tuple
        return len(self.vectors)


class NeighbourIndex:
    """The index of a model, and the training queries beside it."""

    def __init__(
        self,
        index: ExactIndex,
        features: Rows,
        positives: Rows,
        *,
        num_features: int,
        num_neighbours: int,
        weight: float,
        power: float,
    ) -> None:
        """
        Args:
            features: (N,) of the training queries, with values.
            positives: (N,) their labels.
        """
        if not 1 <= num_neighbours <= len(features):
            raise ValueError(
                f"num_neighbours must be between 1 and {len(features)} (the training queries), "
                f"got {num_neighbours}"
            )
        self.index = index
        self.positives = positives
        self.num_rows = len(features)
        self.num_neighbours = num_neighbours
        self.weight = weight
        self.power = power
        self.lists = _by_feature(features, num_features)

    def __len__(self) -> int:
        return len(self.index)

    @torch.no_grad()
    def asked(self, vectors: Tensor, features: Rows) -> VotedQueries:
        """The queries with their neighbours' votes: (Q, D) and (Q,) rows."""
        label_ids, votes = neighbour_votes(
            *self.neighbours(features), self.positives, power=self.power
        )
        return VotedQueries(vectors, label_ids.to(vectors.device), votes.to(vectors.device))

    @torch.no_grad()
    def search(self, queries: VotedQueries, num_results: int) -> SearchResult:
        """The labels of the highest score, votes included: (Q, R), R = min(num_results, L)."""
        found = self.index.search(queries.vectors, num_results)
        scores = self.index.scores_of(queries.vectors, queries.label_ids)
        scores = scores + self.weight * queries.votes  # (Q, C), -inf where there is no label
        # A label that is in both lists counts once, with its votes.
        is_voted = lookup(found.label_ids, queries.label_ids, torch.ones_like(queries.votes))
        rest = found.scores.masked_fill(is_voted > 0, -torch.inf)
        ids = torch.cat([found.label_ids, queries.label_ids], dim=1)
        scores, order = torch.cat([rest, scores], dim=1).sort(dim=1, descending=True, stable=True)
        count = found.label_ids.shape[1]
        return SearchResult(ids.gather(1, order[:, :count]), scores[:, :count])

    @torch.no_grad()
    def scores_of(self, queries: VotedQueries, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels, votes included: (Q, P), -inf where the id is -1."""
        scores = self.index.scores_of(queries.vectors, label_ids)
        return scores + self.weight * lookup(label_ids, queries.label_ids, queries.votes)

    def neighbours(self, features: Rows) -> tuple[IntArray, NDArray[np.float32]]:
        """The most similar training queries and how similar they are: (Q, k), (Q, k)."""
        assert features.values is not None
        shape = len(features), self.num_neighbours
        ids, similarities = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        lists, sums = self.lists, np.zeros(self.num_rows, dtype=np.float32)
        assert lists.values is not None
        _most_similar(*features, *lists, sums, ids, similarities)  # type: ignore[arg-type]
        return ids, similarities


def neighbour_votes(
    neighbours: IntArray, similarities: NDArray[np.float32], positives: Rows, *, power: float
) -> tuple[Tensor, Tensor]:
    """Distinct labels of each query's neighbours and their votes: (Q, C), (Q, C).

    Args:
        neighbours, similarities: (Q, k), as `NeighbourIndex.neighbours` returns them.
        positives: (N,) labels of the training queries.
    """
    shares = similarities.astype(np.float64) ** power
    shares[similarities <= 0] = 0  # an empty slot, also where the power is 0
    totals = shares.sum(axis=1, keepdims=True)
    shares = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
    labels = take_rows(positives, neighbours.ravel())  # (Q * k,) rows
    lengths = labels.lengths()
    queries = np.repeat(np.arange(neighbours.size) // max(1, neighbours.shape[1]), lengths)
    num_labels = int(labels.ids.max(initial=0)) + 1
    pairs, places = np.unique(queries * num_labels + labels.ids, return_inverse=True)
    sums = np.bincount(places, weights=np.repeat(shares.ravel(), lengths), minlength=len(pairs))
    rows, ids = np.divmod(pairs, num_labels)  # both in order
    counts = np.bincount(rows, minlength=len(neighbours))
    columns = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(neighbours), max(1, int(counts.max(initial=1)))
    label_ids, votes = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    label_ids[rows, columns] = ids
    votes[rows, columns] = sums
    return torch.from_numpy(label_ids), torch.from_numpy(votes)


def _by_feature(rows: Rows, num_features: int) -> Rows:
    """The same entries, listed by feature: which rows have it, and with what value."""
    assert rows.values is not None
    order = np.argsort(rows.ids, kind="stable")
    row_ids = np.repeat(np.arange(len(rows), dtype=np.int32), rows.lengths())
    counts = np.bincount(rows.ids, minlength=num_features)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Rows(offsets, row_ids[order], np.ascontiguousarray(rows.values[order]))


def lookup(wanted: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """The value of each wanted id, 0 where a row does not hold it: (Q, R), (Q, C) -> (Q, R)."""
    last = torch.iinfo(ids.dtype).max  # no label has it
    ordered, order = ids.masked_fill(ids < 0, last).sort(dim=1)
    positions = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=ids.shape[1] - 1)
    found = values.gather(1, order).gather(1, positions)
    return found * (ordered.gather(1, positions) == wanted)


@jit
def _most_similar(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
    list_offsets: NDArray[np.int64],
    list_rows: NDArray[np.int32],
    list_values: NDArray[np.float32],
    sums: NDArray[np.float32],
    best_rows: NDArray[np.int64],
    best_values: NDArray[np.float32],
) -> None:
    """Fills (Q, k) rows and similarities, most similar first; `sums` (N,) starts and ends as 0."""
    count = best_rows.shape[1]
    for query in range(len(offsets) - 1):
        for entry in range(offsets[query], offsets[query + 1]):
            value = values[entry]
            for place in range(list_offsets[ids[entry]], list_offsets[ids[entry] + 1]):
                sums[list_rows[place]] += value * list_values[place]
        least = np.float32(0)  # a row without a feature in common is no neighbour
        for row in range(len(sums)):
            total = sums[row]
            sums[row] = 0
            if total <= least:
                continue
            slot = count - 1  # sorted insertion: few rows get here
            while slot > 0 and best_values[query, slot - 1] < total:
                best_values[query, slot] = best_values[query, slot - 1]
                best_rows[query, slot] = best_rows[query, slot - 1]
                slot -= 1
            best_values[query, slot] = total
            best_rows[query, slot] = row
            least = best_values[query, count - 1]
