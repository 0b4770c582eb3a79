"""Candidates of another index, put in order by their scores and a linear ranker's together.

    score'(label) = score(label) + weight * ranker's score(label), for the candidates

Only the candidates, the first labels of the other index, are looked at: what is not among them is
not found. Results that are asked for beyond the number of candidates make more candidates.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.data.dataset import Rows
from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.neighbours import NeighbourIndex, VotedQueries
from evenhand.search.ranker import LinearRanker


class RankedQueries(NamedTuple):
    """Queries as the other index takes them, and their features, which the ranker takes."""

    queries: Tensor | VotedQueries
    features: Rows  # (Q,)

    @property
    def device(self) -> torch.device:
        return self.queries.device

    def __len__(self) -> int:  # queries, not fields of the tuple
        return len(self.queries)


class RankedIndex:
    """The index of a model, with or without the training queries beside it, and a ranker."""

    def __init__(
        self,
        index: ExactIndex | NeighbourIndex,
        ranker: LinearRanker,
        *,
        weight: float,
        num_candidates: int,
    ) -> None:
        if len(ranker) != len(index):
            raise ValueError(f"the ranker is of {len(ranker)} labels, the index of {len(index)}")
        if num_candidates < 1:
            raise ValueError(f"num_candidates must be at least 1, got {num_candidates}")
        self.index = index
        self._index: Any = index  # it takes the queries that its own `asked` gives
        self.ranker = ranker
        self.weight = weight
        self.num_candidates = num_candidates

    def __len__(self) -> int:
        return len(self.index)

    def asked(self, vectors: Tensor, features: Rows) -> RankedQueries:
        """The queries with all that is known of them: (Q, D) and (Q,) rows."""
        if isinstance(self.index, ExactIndex):
            return RankedQueries(vectors, features)
        return RankedQueries(self.index.asked(vectors, features), features)

    @torch.no_grad()
    def search(self, queries: RankedQueries, num_results: int) -> SearchResult:
        """The candidates of the highest score: (Q, R), R = min(num_results, L)."""
        if num_results < 1:
            raise ValueError(f"num_results must be at least 1, got {num_results}")
        count = max(num_results, self.num_candidates)
        found = self._index.search(queries.queries, count)  # (Q, C)
        scores = found.scores + self._added(queries, found.label_ids)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        ids = found.label_ids.gather(1, order)
        return SearchResult(ids[:, :num_results], scores[:, :num_results])

    @torch.no_grad()
    def scores_of(self, queries: RankedQueries, label_ids: Tensor) -> Tensor:
        """Scores that chosen labels have, or would have as candidates: (Q, P), -inf for id -1."""
        scores: Tensor = self._index.scores_of(queries.queries, label_ids)
        return scores + self._added(queries, label_ids)

    def _added(self, queries: RankedQueries, label_ids: Tensor) -> Tensor:
        scores = self.ranker.scores(queries.features, np.asarray(label_ids.cpu()))
        return self.weight * torch.from_numpy(scores).to(label_ids.device)  # (Q, C)
