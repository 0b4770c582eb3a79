"""Rows of a data set as the features that an encoder takes: numpy to torch."""

from typing import Any

import numpy as np
import torch

from evenhand.data import FloatArray, Part, Rows, take_rows
from evenhand.data.weighting import unit_values
from evenhand.models.encoders import Bags, Features


def features_of(part: Part, query_ids: np.ndarray[Any, Any], *, device: torch.device) -> Features:
    """The features of chosen queries as tensors."""
    return as_tensors(chosen_features(part, query_ids), device=device)


def chosen_features(part: Part, query_ids: np.ndarray[Any, Any]) -> Rows | FloatArray:
    """The features of chosen queries, weighted if the part says so: rows, or dense (B, F)."""
    if not isinstance(part.features, Rows):
        return np.ascontiguousarray(part.features[query_ids])
    rows = take_rows(part.features, query_ids)
    if part.feature_weights is not None:
        rows = Rows(rows.offsets, rows.ids, unit_values(rows, part.feature_weights))
    return rows


def as_tensors(features: Rows | FloatArray, *, device: torch.device) -> Features:
    """Rows as bags, or a dense array as a tensor, on a device."""
    if not isinstance(features, Rows):
        return torch.from_numpy(features).to(device)
    return bags_of(features, device=device)


def bags_of(rows: Rows, *, device: torch.device) -> Bags:
    """CSR rows in numpy as bags in torch."""
    offsets, ids, values = rows.to_torch(device)
    return Bags(ids, offsets, values)
