"""Feature weighting: rows scaled to length 1, with or without tf-idf.

- `unit`: every row is divided by its Euclidean length, so that long documents do not shout;
- `tf-idf`: before that, every value is multiplied by 1 + log((1 + N) / (1 + n_f)), where n_f of the
  N training rows have the feature. Weights come from the training part alone.

- `standard`: for dense features; every column less its mean, over its deviation. The encoder does
  it, so the data stay as they are.

What a weighting is not for is refused, because a setting without effect misleads: features without
values (a plain mean, as in `places`) have none.
"""

import dataclasses

import numpy as np
from scipy.sparse.linalg import norm

from evenhand.data.csr import FloatArray, Rows, count_ids
from evenhand.data.dataset import Dataset
from evenhand.errors import UserError

WEIGHTINGS = ("as-is", "unit", "tf-idf", "standard")
MOST_ROWS = 100_000  # that means and deviations of columns are taken from


def weight_features(dataset: Dataset, weighting: str) -> Dataset:
    """The data set with its feature values weighted; the ids, and the file, stay as they are."""
    if weighting == "standard" and dataset.is_sparse:
        raise UserError(
            f'data.weighting = "standard" is for dense features, and those of {dataset.name} are '
            f'sparse; set it to "unit"'
        )
    if weighting in ("as-is", "standard"):
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


def column_spread(vectors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The mean and the deviation of every column, (F,) each; 1 for a column that is constant."""
    rows = np.asarray(vectors[:MOST_ROWS], dtype=np.float64)
    deviations = rows.std(axis=0)
    return rows.mean(axis=0), np.where(deviations > 0, deviations, 1)


def feature_weights(train: Rows | FloatArray, num_features: int, weighting: str) -> FloatArray:
    """What the values of each feature are multiplied by: (F,). By "unit", 1."""
    if weighting == "unit":
        return np.ones(num_features, dtype=np.float32)
    assert isinstance(train, Rows)
    counts = np.zeros(num_features, dtype=np.int64)
    for block in train.blocks():
        counts += count_ids(block.to_merged(num_features).indices, num_features)
    return (1 + np.log((1 + len(train)) / (1 + counts))).astype(np.float32)


def unit_values(rows: Rows, of_feature: FloatArray) -> FloatArray:
    """Values times the weight of their feature, over the length of their row: (nnz,).

    The values of an id that stands in a row more than once add up before the length is taken.
    """
    units = np.empty(len(rows.ids), dtype=np.float32)
    end = 0
    for block in rows.blocks():
        assert block.values is not None
        values = block.values.astype(np.float64) * of_feature[block.ids]  # float32 may overflow
        weighted = Rows(block.offsets, block.ids, values).to_merged(len(of_feature))
        lengths = norm(weighted, axis=1)
        inverse = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        start, end = end, end + len(values)
        units[start:end] = values * np.repeat(inverse, block.lengths())
    return units
