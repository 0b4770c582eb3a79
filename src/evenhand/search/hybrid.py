"""Adds up a model's scores, the votes of similar training queries and a linear re-ranker.

    score'(label) = score(label) + vote_weight * votes(label) + ranker_weight * ranker(label)

Each of the two additions may be missing. With votes alone the result is exact: a label without a
vote keeps its score, so the best labels are among the best of the model and those with votes. With
a ranker only candidates, the first labels by the other two, are looked at: what is not among them
is not found. Results that are asked for beyond the number of candidates make more candidates.

The first labels by the model may come from any `VectorIndex`; what is added to them is the same.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.data import Rows
from evenhand.search.exact import ExactIndex, SearchResult, VectorIndex
from evenhand.search.neighbours import Neighbours, Votes
from evenhand.search.reranker import LinearRanker


class HybridQueries(NamedTuple):
    """Queries with all that is known of them."""

    vectors: Tensor  # (Q, D)
    features: Rows  # (Q,)
    votes: Votes | None  # of their neighbours

    @property
    def device(self) -> torch.device:
        return self.vectors.device

    def __len__(self) -> int:  # queries, not fields of the tuple
        return len(self.vectors)


class HybridIndex:
    """Answers as an `ExactIndex` does, to queries that have features beside their vectors."""

    def __init__(
        self,
        exact: ExactIndex,
        *,
        neighbours: Neighbours | None = None,
        vote_weight: float = 0.0,
        ranker: LinearRanker | None = None,
        ranker_weight: float = 0.0,
        num_candidates: int = 1,
        candidates: VectorIndex | None = None,
    ) -> None:
        """
        Args:
            vote_weight: what the votes of all neighbours together add to a score.
            ranker_weight: what a score of 1 of the ranker adds.
            num_candidates: of the ranker.
            candidates: finds the first labels by the model; None: `exact` does.
        """
        if ranker is not None and len(ranker) != len(exact):
            raise ValueError(f"the ranker is of {len(ranker)} labels, the index of {len(exact)}")
        if num_candidates < 1:
            raise ValueError(f"num_candidates must be at least 1, got {num_candidates}")
        self.exact = exact
        self.candidates = exact if candidates is None else candidates
        self.name = f"{self.candidates.name}, and what the run adds to its scores"
        self.neighbours, self.vote_weight = neighbours, vote_weight
        self.ranker, self.ranker_weight = ranker, ranker_weight
        self.num_candidates = num_candidates

    def __len__(self) -> int:
        return len(self.exact)

    def prepare(self, vectors: Tensor, features: Rows) -> HybridQueries:
        """Queries as `search` and `scores_of` take them: (Q, D) and (Q,) rows."""
        votes = None
        if self.neighbours is not None:
            votes = Votes(*(part.to(vectors.device) for part in self.neighbours.votes(features)))
        return HybridQueries(vectors, features, votes)

    @torch.no_grad()
    def search(self, queries: HybridQueries, num_results: int) -> SearchResult:
        """The labels of the highest score: (Q, R), R = min(num_results, L)."""
        if num_results < 1:
            raise ValueError(f"num_results must be at least 1, got {num_results}")
        count = num_results if self.ranker is None else max(num_results, self.num_candidates)
        found = self.candidates.search(queries.vectors, count)  # (Q, C)
        if queries.votes is not None:
            found = self._with_votes(found, queries.vectors, queries.votes)
        if self.ranker is not None:
            scores = found.scores + self._ranker_scores(queries.features, found.label_ids)
            found = _best_first(found.label_ids, scores)
        return SearchResult(found.label_ids[:, :num_results], found.scores[:, :num_results])

    @torch.no_grad()
    def scores_of(self, queries: HybridQueries, label_ids: Tensor) -> Tensor:
        """Scores that chosen labels have, or would have as candidates: (Q, P), -inf for id -1."""
        scores = self.exact.scores_of(queries.vectors, label_ids)
        if queries.votes is not None:
            scores += self.vote_weight * queries.votes.of(label_ids)
        if self.ranker is not None:
            scores += self._ranker_scores(queries.features, label_ids)
        return scores

    def _with_votes(self, found: SearchResult, vectors: Tensor, votes: Votes) -> SearchResult:
        """The best of what the model found and of the labels that have votes: (Q, C)."""
        scores = self.exact.scores_of(vectors, votes.label_ids)
        scores += self.vote_weight * votes.values  # -inf where there is no label
        # A label that is in both lists counts once, with its votes.
        is_voted = Votes(votes.label_ids, torch.ones_like(votes.values)).of(found.label_ids) > 0
        scores = torch.cat([found.scores.masked_fill(is_voted, -torch.inf), scores], dim=1)
        best = _best_first(torch.cat([found.label_ids, votes.label_ids], dim=1), scores)
        count = found.label_ids.shape[1]
        return SearchResult(best.label_ids[:, :count], best.scores[:, :count])

    def _ranker_scores(self, features: Rows, label_ids: Tensor) -> Tensor:
        assert self.ranker is not None
        scores = self.ranker.scores(features, np.asarray(label_ids.cpu()))
        return self.ranker_weight * torch.from_numpy(scores).to(label_ids.device)  # (Q, C)


def _best_first(label_ids: Tensor, scores: Tensor) -> SearchResult:
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return SearchResult(label_ids.gather(1, order), scores)
