"""Rows of a data set as the features that an encoder takes: numpy to torch."""

from typing import Any

import numpy as np
import torch

from evenhand.data.dataset import Part, Rows, take_rows
from evenhand.data.weighting import unit_values
from evenhand.models.encoders import Bags, Features


def features_of(part: Part, query_ids: np.ndarray[Any, Any], *, device: torch.device) -> Features:
    """The features of chosen queries as tensors."""
    if not isinstance(part.features, Rows):
        return torch.from_numpy(np.ascontiguousarray(part.features[query_ids])).to(device)
    rows = take_rows(part.features, query_ids)
    if part.feature_weights is not None:
        rows = Rows(rows.offsets, rows.ids, unit_values(rows, part.feature_weights))
    return bags_of(rows, device=device)


def bags_of(rows: Rows, *, device: torch.device) -> Bags:
    """CSR rows in numpy as bags in torch."""
    offsets, ids, values = rows.to_torch(device)
    return Bags(ids, offsets, values)
