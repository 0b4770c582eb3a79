"""Votes of the most similar training queries for their labels.

A model of few dimensions knows what queries have in common, and forgets single ones. Its nearest
training queries remember: where they agree on a label, the label rises, however rare it is.

Similarity is the product of the sparse features, the cosine where rows have length 1. A label's
votes are the sum of the shares of the neighbours that have it; a neighbour's share is its
similarity to the power `power`, over the sum of all neighbours'.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import IntArray, Rows, take_rows
from evenhand.kernels.jit import jit


class Votes(NamedTuple):
    label_ids: Tensor  # (Q, C) distinct labels of the neighbours, in order; -1 where fewer
    values: Tensor  # (Q, C)

    def of(self, label_ids: Tensor) -> Tensor:
        """The votes of chosen labels, 0 where there are none: (Q, R) -> (Q, R)."""
        last = torch.iinfo(self.label_ids.dtype).max  # no label has it
        ordered, order = self.label_ids.masked_fill(self.label_ids < 0, last).sort(dim=1)
        positions = torch.searchsorted(ordered, label_ids.contiguous())
        positions = positions.clamp(max=ordered.shape[1] - 1)
        found = self.values.gather(1, order).gather(1, positions)
        return found * (ordered.gather(1, positions) == label_ids)


class Neighbours:
    """The training queries and their labels, to be asked for the nearest of other queries."""

    def __init__(
        self,
        features: Rows,
        positives: Rows,
        *,
        num_features: int,
        num_neighbours: int,
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
        assert features.values is not None
        self.positives = positives
        self.num_rows = len(features)
        self.num_neighbours = num_neighbours
        self.power = power
        # The same entries listed by feature: which rows have it, and with what value.
        order = np.argsort(features.ids, kind="stable")
        row_ids = np.repeat(np.arange(len(features), dtype=np.int32), features.lengths())
        counts = np.bincount(features.ids, minlength=num_features)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.lists = (offsets, row_ids[order], np.ascontiguousarray(features.values[order]))

    def nearest(self, features: Rows) -> tuple[IntArray, NDArray[np.float32]]:
        """The most similar training queries and how similar they are: (Q, k), (Q, k)."""
        if features.values is None:
            raise ValueError("features must have values")
        shape = len(features), self.num_neighbours
        ids, similarities = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        sums = np.zeros(self.num_rows, dtype=np.float32)
        _most_similar(*features, *self.lists, sums, ids, similarities)  # type: ignore[arg-type]
        return ids, similarities

    def votes(self, features: Rows) -> Votes:
        """What the nearest training queries of Q queries say."""
        return count_votes(*self.nearest(features), self.positives, power=self.power)


def count_votes(
    neighbours: IntArray, similarities: NDArray[np.float32], positives: Rows, *, power: float
) -> Votes:
    """The votes of each query's neighbours.

    Args:
        neighbours, similarities: (Q, k), as `Neighbours.nearest` returns them.
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
    return Votes(torch.from_numpy(label_ids), torch.from_numpy(votes))


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
