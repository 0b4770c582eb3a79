"""The contract of every index: queries in, label ids and scores out, best first."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from evenhand.errors import UserError


class SearchResult(NamedTuple):
    label_ids: Tensor  # (Q, R) int64, best first; of equal scores the lower id first
    scores: Tensor  # (Q, R)


class Index(Protocol):
    """Queries are vectors (Q, D), or what the index makes of them (`HybridIndex.prepare`)."""

    def search(self, queries: Any, num_results: int) -> tuple[Tensor, Tensor]:
        """Label ids (Q, R), best first, -1 where fewer were found, and their scores (Q, R)."""

    def scores_of(self, queries: Any, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels: (Q, P) -> (Q, P), -inf where the id is -1."""


def check_scores(label_ids: Tensor, scores: Tensor) -> None:
    """Refuses scores that are no numbers, by which nothing can be ordered: (Q, R), (Q, R)."""
    if not bool((scores.isfinite() | (label_ids < 0)).all()):
        raise UserError(
            "a score is infinite or no number: the model's weights, or the feature values of a "
            "query, are too large to be multiplied; train anew with a lower "
            "training.learning_rate or with smaller feature values, and see that no weight in "
            "[search] or [ranker] is huge"
        )
