"""Feature weighting: rows scaled to length 1, with or without tf-idf.

- `unit`: every row is divided by its Euclidean length, so that long documents do not shout;
- `tf-idf`: before that, every value is multiplied by 1 + log((1 + N) / (1 + n_f)), where n_f of the
  N training rows have the feature. Weights come from the training part alone.

Features without values (a plain mean, as in `places`) and dense features are left alone: they are
refused, because a setting without effect misleads.
"""

import dataclasses
from typing import Any

import numpy as np

from evenhand.data.csr import FloatArray, Rows, count_ids
from evenhand.data.dataset import Dataset
from evenhand.errors import UserError

WEIGHTINGS = ("as-is", "unit", "tf-idf")


def weight_features(dataset: Dataset, weighting: str) -> Dataset:
    """The data set with its feature values weighted; the ids, and the file, stay as they are."""
    if weighting == "as-is":
        return dataset
    for name, part in dataset.parts.items():
        if not isinstance(part.features, Rows) or part.features.values is None:
            raise UserError(
                f'data.weighting = "{weighting}" is for sparse features with values, and the '
                f'{name} part of {dataset.name} has none; set it to "as-is"'
            )
    train = dataset.parts["train"].features
    of_feature = feature_weights(train, dataset.num_features, weighting)
    parts = {}
    for name, part in dataset.parts.items():
        assert isinstance(part.features, Rows)
        if dataset.is_read_in_blocks:  # weighted as a batch is read: nothing of its size is held
            parts[name] = dataclasses.replace(part, feature_weights=of_feature)
        else:
            features = part.features.with_values(unit_values(part.features, of_feature))
            parts[name] = dataclasses.replace(part, features=features)
    return dataclasses.replace(dataset, parts=parts)


def feature_weights(train: Any, num_features: int, weighting: str) -> FloatArray:
    """What the values of each feature are multiplied by: (F,), from the sparse training rows.

    By tf-idf, 1 + log((1 + N) / (1 + n_f)); by "unit", 1.
    """
    if weighting == "unit":
        return np.ones(num_features, dtype=np.float32)
    counts = count_ids(train.ids, num_features)
    return (1 + np.log((1 + len(train)) / (1 + counts))).astype(np.float32)


def unit_values(rows: Rows, of_feature: FloatArray) -> FloatArray:
    """Values times the weight of their feature, over the length of their row: (nnz,)."""
    assert rows.values is not None
    values = rows.values.astype(np.float64) * of_feature[rows.ids]  # a float32 may overflow
    lengths, is_filled = np.zeros(len(rows)), rows.lengths() > 0
    if len(values):
        # Row by row: of differences of one long sum a small row after a large one would be lost.
        lengths[is_filled] = np.sqrt(np.add.reduceat(values**2, rows.offsets[:-1][is_filled]))
    inverse = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    units: FloatArray = (values * np.repeat(inverse, rows.lengths())).astype(np.float32)
    return units
