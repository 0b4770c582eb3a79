"""From texts or features to labels: the one path of a query through a trained model."""

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from evenhand.data import FloatArray, IntArray, Rows
from evenhand.data.text import featurizer_from
from evenhand.data.weighting import unit_values
from evenhand.models.encoders import as_tensors
from evenhand.models.retriever import Retriever
from evenhand.search.arrays import check_rows
from evenhand.search.exact import ExactIndex, SearchResult, check_scores
from evenhand.search.hybrid import HybridIndex, HybridQueries
from evenhand.search.serving_data import QueryData

MOST_COPIED = 2**28  # numbers of a label table that is made vectors of once, not at every search

Queries = Sequence[str] | Rows | FloatArray  # texts, sparse rows or dense (Q, F), as in the data


class Searcher:
    """A trained model and its index.

    Queries have the form of the data set's: texts where it was made of texts, and otherwise sparse
    rows or dense vectors of features, before any weighting.
    """

    def __init__(self, model: Retriever, index: ExactIndex | HybridIndex, data: QueryData) -> None:
        self.model, self.index, self.data = model, index, data
        self.encoder = model.encoder
        if model.label_table.dtype != torch.float32:
            self.encoder = copy.deepcopy(model.encoder).float()

    def label_names(self, label_ids: Iterable[int]) -> list[str]:
        """The names of labels, or their numbers where the data set has no names."""
        names = self.data.label_names
        return [f"label {label_id}" if names is None else names[label_id] for label_id in label_ids]

    def encode(self, queries: Queries) -> Tensor:
        """(Q, D) vectors, scale included: their product with the label vectors is the score."""
        return self._vectors(self._features(queries))

    def search(self, queries: Queries, num_results: int = 10) -> SearchResult:
        """Labels of the highest score: ids (Q, R), best first, and their scores (Q, R)."""
        found = self.index.search(self.prepare(self._features(queries)), num_results)  # type: ignore[arg-type]
        check_scores(*found)
        return found

    def prepare(self, features: Rows | FloatArray) -> Tensor | HybridQueries:
        """Queries as the index takes them, from weighted features: Q rows, or dense (Q, F)."""
        vectors = self._vectors(features)
        if isinstance(self.index, ExactIndex):
            return vectors
        assert isinstance(features, Rows)
        return self.index.prepare(vectors, features)

    @torch.no_grad()
    def _vectors(self, features: Rows | FloatArray) -> Tensor:
        device = self.model.label_table.device
        return self.model.as_queries(self.encoder(as_tensors(features, device=device)))

    def _features(self, queries: Queries) -> Rows | FloatArray:
        """What a model is trained on: features checked, and weighted as those of the data set."""
        data = self.data
        if isinstance(queries, np.ndarray):
            if data.is_sparse or queries.shape[1:] != (data.num_features,):
                raise ValueError(f"queries must be {self._expected()}, got {queries.shape}")
            return np.ascontiguousarray(queries, dtype=np.float32)
        if not isinstance(queries, Rows):
            return featurizer_from(data.featurizer).featurize(queries)
        if not data.is_sparse:
            raise ValueError(f"queries must be {self._expected()}, got sparse rows")
        weights = data.feature_weights
        check_rows(queries, data.num_features, "queries", needs_values=weights is not None)
        return queries if weights is None else queries.with_values(unit_values(queries, weights))

    def _expected(self) -> str:
        kind = "sparse rows of ids below" if self.data.is_sparse else "dense, of width"
        return f"{kind} {self.data.num_features}"


def label_index(
    model: Retriever, *, label_counts: IntArray | None = None, frequency_discount: float = 0.0
) -> ExactIndex:
    """The labels that a model holds by its scores, less a handicap of those that are frequent.

    Args:
        label_counts: (L,) their training pairs.
        frequency_discount: see `discount_biases`.
    """
    biases = discount_biases(model.biases(), label_counts, frequency_discount)
    if biases is not None:
        biases = biases.to(model.label_table.device)
    table = model.label_table.detach()
    if table.numel() <= MOST_COPIED:
        return ExactIndex(model.unit(table.float()), label_bias=biases)
    return ExactIndex(table, label_bias=biases, vectors_fn=lambda rows: model.unit(rows.float()))


def discount_biases(
    biases: Tensor | None, label_counts: IntArray | None, frequency_discount: float
) -> Tensor | None:
    """Biases (L,) less `frequency_discount` times log(1 + a label's training pairs)."""
    if not frequency_discount:
        return biases
    assert label_counts is not None
    counts = torch.from_numpy(np.ascontiguousarray(label_counts)).float()
    discounts = frequency_discount * torch.log1p(counts)  # (L,)
    return -discounts if biases is None else biases - discounts.to(biases.device)
