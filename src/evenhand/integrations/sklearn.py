"""A scikit-learn estimator that trains as `evenhand train` does. Extra: evenhand[sklearn].

search = make_pipeline(TfidfVectorizer(), Retriever()).fit(texts, labels)
search.predict(["red shoes"])
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.build import build_training
from evenhand.data import Dataset, Part, Rows
from evenhand.defaults import fit_settings
from evenhand.errors import UserError
from evenhand.models import as_tensors
from evenhand.search import ExactIndex, label_index
from evenhand.training.loop import train

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise UserError("Retriever needs scikit-learn: pip install 'evenhand[sklearn]'") from error

ROWS = 4096  # queries that are encoded at once


class Retriever(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Finds the labels of queries: one label each, or several.

    X is (n, F), sparse or dense; y is (n,) labels, or an indicator (n, L), sparse or dense. Sparse
    rows should have a length of about 1, as `TfidfVectorizer` gives them, and dense columns a
    deviation of about 1.

    Attributes:
        classes_: (L,) labels, by which the columns of `decision_function` go.
        model_: the `evenhand.models.Retriever`.
        config_: all settings.
    """

    def __init__(
        self,
        method: str = "s2m-even",
        *,
        num_steps: int | None = None,
        learning_rate: float | None = None,
        embedding_dim: int | None = None,
        num_hard_labels: int | None = None,
        tail_fraction: float | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        cutoff: int = 1,
        random_state: Any = None,
    ) -> None:
        """
        Args:
            method: one of `evenhand.methods.METHODS`. What is None is chosen to fit the data.
            settings: any others by section, {"mining": {"batch_size": 64}}.
            cutoff: `score` is the recall among the first so many labels, and with an indicator
                `predict` gives each query so many. 1 is the accuracy where a query has one label.
            random_state: see scikit-learn.
        """
        self.method = method
        self.num_steps = num_steps
        self.learning_rate = learning_rate
        self.embedding_dim = embedding_dim
        self.num_hard_labels = num_hard_labels
        self.tail_fraction = tail_fraction
        self.settings = settings
        self.cutoff = cutoff
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "Retriever":  # noqa: N803
        """Trains, on a GPU if there is one; queries without a label are left out."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, multi_output=True)  # noqa: N806
        check_classification_targets(y)
        self.is_indicator_ = type_of_target(y).startswith("multilabel")
        if self.is_indicator_:
            positives = sp.csr_array(y)
            self.classes_ = np.arange(positives.shape[1])
        else:
            self.classes_, ids = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            ones = np.ones(len(ids), dtype=bool)
            shape = (len(ids), len(self.classes_))
            positives = sp.csr_array((ones, (np.arange(len(ids)), ids)), shape=shape)
        positives.eliminate_zeros()
        has_label = np.diff(positives.indptr) > 0
        num_labels = len(self.classes_)
        if num_labels < 2 or not has_label.any():
            raise ValueError(f"Retriever needs 2 classes or more in y, got {num_labels} class")
        positives = positives[has_label]
        rows = Rows(positives.indptr.astype(np.int64), positives.indices.astype(np.int32))
        parts = {"train": Part(_features(X[has_label]), rows)}
        dataset = Dataset("sklearn", X.shape[1], num_labels, parts)

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seed = int(check_random_state(self.random_state).randint(2**31))
        self.config_, _ = fit_settings(self._given(seed), dataset, device=device)
        built = build_training(self.config_, dataset, device)
        train(built.training, built.plan, built.choose_step().step)
        self.model_ = built.training.model.eval()
        return self

    def decision_function(self, X: Any) -> NDArray[np.float32]:  # noqa: N803
        """(n, L) scores; with two classes and no indicator (n,), above 0 for the second."""
        vectors = self._encode(X)
        scores = vectors @ self.model_.label_vectors().T
        biases = self.model_.biases()
        found: NDArray[np.float32] = (scores if biases is None else scores + biases).cpu().numpy()
        if len(self.classes_) == 2 and not self.is_indicator_:
            return found[:, 1] - found[:, 0]
        return found

    def search(self, X: Any, num_results: int = 10) -> tuple[NDArray[Any], NDArray[np.float32]]:  # noqa: N803
        """(n, R) the best labels of each query, and their scores; nothing of (n, L) is held."""
        vectors = self._encode(X)
        index: ExactIndex = label_index(self.model_)
        found = index.search(vectors, min(num_results, len(self.classes_)))
        return self.classes_[found.label_ids.cpu().numpy()], found.scores.cpu().numpy()

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """(n,) the best label of each query; of an indicator (n, L), `cutoff` labels each."""
        check_is_fitted(self)
        labels, _ = self.search(X, self.cutoff if self.is_indicator_ else 1)
        if not self.is_indicator_:
            return labels[:, 0]
        indicator = np.zeros((len(labels), len(self.classes_)), dtype=np.int64)
        np.put_along_axis(indicator, labels, 1, axis=1)
        return indicator

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:  # noqa: N803
        """The share of (query, label) pairs whose label is among the first `cutoff`."""
        labels, _ = self.search(X, self.cutoff)
        if self.is_indicator_:
            indicator = sp.csr_array(y)
            query_ids, right = indicator.nonzero()
        else:
            query_ids, right = np.arange(len(labels)), column_or_1d(y)
        is_found = (labels[query_ids] == np.asarray(right)[:, None]).any(axis=1)
        weights = None if sample_weight is None else np.asarray(sample_weight)[query_ids]
        return float(np.average(is_found, weights=weights))

    def _encode(self, X: Any) -> Tensor:  # noqa: N803
        """(n, D)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)  # noqa: N806
        device = self.model_.label_table.device
        blocks = [
            self.model_.query_vectors(as_tensors(_features(X[start : start + ROWS]), device=device))
            for start in range(0, X.shape[0], ROWS)
        ]
        return torch.cat(blocks)

    def _given(self, seed: int) -> dict[str, dict[str, Any]]:
        """The settings that are given; features are taken as they are, and the model is alone."""
        given: dict[str, dict[str, Any]] = {
            "data": {"weighting": "as-is"},
            "search": {"num_neighbours": 0},
            "ranker": {"num_mined_labels": 0},
            "training": {"seed": seed, "evaluate_every": 0, "num_steps": self.num_steps},
            "model": {"embedding_dim": self.embedding_dim},
            "mining": {
                "method": self.method,
                "num_hard_labels": self.num_hard_labels,
                "tail_fraction": self.tail_fraction,
            },
        }
        given["training"]["learning_rate"] = self.learning_rate
        for section, values in (self.settings or {}).items():
            given.setdefault(section, {}).update(values)
        return {
            section: {name: value for name, value in values.items() if value is not None}
            for section, values in given.items()
        }

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags


def _features(X: Any) -> Rows | NDArray[np.float32]:  # noqa: N803
    """Sparse rows, or a dense array that may be written to, as torch wants it."""
    if sp.issparse(X):
        X = X.tocsr()  # noqa: N806
        return Rows(X.indptr.astype(np.int64), X.indices.astype(np.int32), X.data)
    dense: NDArray[np.float32] = np.require(X, requirements=["C", "W"])
    return dense
