"""From texts or features to labels: the one path of a query, and what a run keeps for it."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import FloatArray, IntArray, Rows, Strings
from evenhand.data.csr import MAX_IDS, check_offsets, check_rows, check_shape, check_spans
from evenhand.data.text import TEXTS, featurizer_from, normalize
from evenhand.data.weighting import unit_values
from evenhand.files import open_arrays, save_arrays
from evenhand.models import Retriever, as_tensors
from evenhand.search.exact import ExactIndex, SearchResult, VectorIndex, check_scores
from evenhand.search.hybrid import HybridIndex, HybridQueries

MOST_COPIED = 2**28  # numbers of a label table that is made vectors of once, not at every search

FORMAT_VERSION = 1
KINDS: dict[str, Any] = {  # of the fields that are written as JSON
    "name": str,
    "fingerprint": str,
    "num_features": int,
    "num_labels": int,
    "is_sparse": bool,
    "featurizer": dict | None,
}
DTYPES = {  # of the last part of an array's name
    "offsets": "int64",
    "ids": "int32",
    "values": "float32",
    "utf8": "uint8",
    "feature_weights": "float32",
    "label_counts": "int64",
    "label_coordinates": "float32",
}
Queries = Sequence[str] | Rows | FloatArray  # texts, sparse rows or dense (Q, F), as in the data


class QueryData(NamedTuple):
    """L labels, F features, N training queries; None: the settings do without."""

    name: str  # of the data set
    fingerprint: str
    num_features: int
    num_labels: int
    is_sparse: bool
    featurizer: dict[str, Any] | None = None  # how a text becomes features; None: it cannot
    label_names: Strings | None = None  # (L,)
    feature_weights: FloatArray | None = None  # (F,) for `unit_values`; None: values as they come
    label_counts: IntArray | None = None  # (L,) training pairs
    train_features: Rows | None = None  # (N,) weighted
    train_positives: Rows | None = None  # (N,)
    label_coordinates: FloatArray | None = None  # (L, 2) latitude, longitude: for maps


class Searcher:
    """A trained model and its index.

    Queries have the form of the data set's: texts where it was made of texts, and otherwise sparse
    rows or dense vectors of features, before any weighting.
    """

    def __init__(self, model: Retriever, index: VectorIndex | HybridIndex, data: QueryData) -> None:
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
        return self.vectors(self._features(queries))

    def search(self, queries: Queries, num_results: int = 10) -> SearchResult:
        """Labels of the highest score: ids (Q, R), best first, and their scores (Q, R)."""
        found = self.index.search(self.prepare(self._features(queries)), num_results)  # type: ignore[arg-type]
        check_scores(*found)
        return found

    def prepare(self, features: Rows | FloatArray | list[str]) -> Tensor | HybridQueries:
        """Queries as the index takes them, from what the encoder takes, weighted: Q of them."""
        vectors = self.vectors(features)
        if not isinstance(self.index, HybridIndex):
            return vectors
        assert isinstance(features, Rows)
        return self.index.prepare(vectors, features)

    @torch.no_grad()
    def vectors(self, features: Rows | FloatArray | list[str]) -> Tensor:
        """(Q, D) vectors of weighted features."""
        device = self.model.label_table.device
        return self.model.as_queries(self.encoder(as_tensors(features, device=device)))

    def _features(self, queries: Queries) -> Rows | FloatArray | list[str]:
        """What a model is trained on: features checked, and weighted as those of the data set."""
        data = self.data
        if data.featurizer == TEXTS:
            if isinstance(queries, Rows | np.ndarray):
                raise ValueError("queries must be texts, which the encoder of this model reads")
            return [normalize(text) for text in queries]
        if isinstance(queries, np.ndarray):
            if data.is_sparse or queries.shape[1:] != (data.num_features,):
                raise ValueError(f"queries must be {self._expected()}, got {queries.shape}")
            return np.ascontiguousarray(queries, dtype=np.float32)
        if not isinstance(queries, Rows):
            queries = featurizer_from(data.featurizer).featurize(queries)
        elif not data.is_sparse:
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


# --- what a run keeps of its data set -------------------------------------------------------------
# With it a run folder answers without the data set it was trained on. The file holds the names of
# the labels and where they are on a map, and if the settings need them, one number a label
# (training pairs) or a feature (its weight). Where training queries vote, it holds all of their
# features and labels, and is as large as the training part.


def save_query_data(path: Path, data: QueryData) -> None:
    """Writes a .safetensors file, all of it or nothing."""
    arrays: dict[str, NDArray[Any] | None] = {}
    for name, field in data._asdict().items():
        if isinstance(field, Rows):
            arrays |= {f"{name}.{key}": array for key, array in field._asdict().items()}
        elif isinstance(field, Strings):
            arrays |= {f"{name}.{key}": array for key, array in vars(field).items()}
        elif name not in KINDS:
            arrays[name] = field
    typed = {
        name: array.astype(DTYPES[name.rpartition(".")[2]], copy=False).ravel()
        for name, array in arrays.items()
        if array is not None
    }
    about = {name: getattr(data, name) for name in KINDS}
    save_arrays(path, typed, version=FORMAT_VERSION, **about)


def load_query_data(path: Path) -> QueryData:
    """Reads what `save_query_data` wrote; a file that compiled code could stumble over is refused.

    Raises:
        UserError: the file is damaged.
    """
    with open_arrays(path, DTYPES) as (arrays, about):
        if not isinstance(about, dict) or about.get("version") != FORMAT_VERSION:
            raise ValueError(f"its version must be {FORMAT_VERSION}")
        for name, kind in KINDS.items():
            if not isinstance(about.get(name), kind):
                raise ValueError(f"{name} must be {kind}, got {str(about.get(name))[:40]!r}")
        num_features, num_labels = about["num_features"], about["num_labels"]
        if not 1 <= min(num_features, num_labels) <= max(num_features, num_labels) <= MAX_IDS:
            raise ValueError(f"there must be 1 to {MAX_IDS} features, and as many labels")
        data = QueryData(
            **{name: about[name] for name in KINDS},
            feature_weights=arrays.get("feature_weights"),
            label_counts=arrays.get("label_counts"),
        )
        if "label_names.offsets" in arrays:
            names = Strings(arrays["label_names.offsets"], arrays["label_names.utf8"])
            check_spans("label_names", num_labels, names.offsets, names.utf8)
            check_offsets("label_names", names.offsets)
            data = data._replace(label_names=names)
        if "train_features.offsets" in arrays:
            features = _rows(arrays, "train_features", num_features, needs_values=True)
            positives = _rows(arrays, "train_positives", num_labels, num_rows=len(features))
            data = data._replace(train_features=features, train_positives=positives)
        for name, length in (("label_counts", num_labels), ("feature_weights", num_features)):
            if name in arrays:
                check_shape(name, arrays[name], (length,))
        if "label_coordinates" in arrays:
            check_shape("label_coordinates", arrays["label_coordinates"], (2 * num_labels,))
            pairs = arrays["label_coordinates"].reshape(num_labels, 2)  # (2L,) -> (L, 2)
            data = data._replace(label_coordinates=pairs)
        is_hashed = data.featurizer not in (None, TEXTS)
        if is_hashed and featurizer_from(data.featurizer).num_buckets > num_features:
            raise ValueError(f"the featurizer has more buckets than features, {num_features}")
        if data.label_counts is not None and data.label_counts.min() < 0:
            raise ValueError(f"label_counts must be at least 0, got {data.label_counts.min()}")
        return data


def _rows(arrays: dict[str, NDArray[Any]], name: str, limit: int, **wanted: Any) -> Rows:
    """Rows of ids below `limit`, by the names of their arrays."""
    values = arrays.get(f"{name}.values")
    rows = Rows(arrays[f"{name}.offsets"], arrays[f"{name}.ids"], values)
    check_rows(rows, limit, name, **wanted)
    return rows
