"""Batches of (query, positive) pairs, shuffled anew every epoch, from a place that can be saved."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data.dataset import IntArray, Part, Rows, padded_rows, pairs_of, taken_rows
from evenhand.models.encoders import Bags, Features
from evenhand.training.step import Batch


class PairFeed:
    """Draws batches without replacement; the last partial batch of an epoch is dropped."""

    def __init__(
        self,
        part: Part,
        *,
        batch_size: int,
        masks_all_positives: bool,
        generator: torch.Generator,
        device: torch.device,
        pair_groups: IntArray | None = None,
    ) -> None:
        """
        Args:
            pair_groups: (N_pairs,) from 0, for the risks of known memberships.
        """
        self.part = part
        self.pairs = pairs_of(part.positives)
        if not 1 <= batch_size <= len(self.pairs.query_ids):
            raise ValueError(
                f"batch_size must be between 1 and {len(self.pairs.query_ids)} "
                f"(the number of training pairs), got {batch_size}"
            )
        self.batch_size = batch_size
        self.masks_all_positives = masks_all_positives
        self.generator = generator
        self.device = device
        self.pair_groups = None if pair_groups is None else pair_groups.astype(np.int64)
        self._begin_epoch()

    def next_batch(self) -> Batch:
        if self.position + self.batch_size > len(self.order):
            self._begin_epoch()
        pair_ids = self.order[self.position : self.position + self.batch_size].numpy()
        self.position += self.batch_size
        query_ids, label_ids = self.pairs.query_ids[pair_ids], self.pairs.label_ids[pair_ids]
        positives = torch.from_numpy(label_ids).unsqueeze(1)  # (B, 1), the paper's mask
        if self.masks_all_positives:
            positives = torch.from_numpy(self._all_positives(query_ids, label_ids))  # (B, P)
        return Batch(
            features=features_of(self.part, query_ids, device=self.device),
            label_ids=torch.from_numpy(label_ids).to(self.device),
            positive_ids=positives.to(self.device),
            pair_ids=torch.from_numpy(pair_ids).to(self.device),
            group_ids=self._groups_of(pair_ids),
        )

    def _groups_of(self, pair_ids: IntArray) -> Tensor | None:
        if self.pair_groups is None:
            return None
        return torch.from_numpy(self.pair_groups[pair_ids]).to(self.device)

    def _all_positives(
        self, query_ids: NDArray[np.int64], label_ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """(B, P) every positive of each query; the drawn one first, as in-batch sampling needs."""
        positives = padded_rows(self.part.positives, query_ids)
        is_drawn = positives == label_ids[:, None]  # (B, P)
        positives = np.where(is_drawn, positives[:, :1], positives)
        positives[:, 0] = label_ids
        return positives

    def _begin_epoch(self) -> None:
        # An epoch's order follows from the generator as it stood at its start, so that is kept.
        self.epoch_state = self.generator.get_state()
        self.order: Tensor = torch.randperm(len(self.pairs.query_ids), generator=self.generator)
        self.position = 0

    def state(self) -> dict[str, Tensor]:
        return {"epoch_state": self.epoch_state, "position": torch.tensor(self.position)}

    def load(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["epoch_state"])
        self._begin_epoch()
        self.position = int(state["position"])


def features_of(part: Part, query_ids: np.ndarray[Any, Any], *, device: torch.device) -> Features:
    """The features of chosen queries as tensors."""
    if not isinstance(part.features, Rows):
        return torch.from_numpy(np.ascontiguousarray(part.features[query_ids])).to(device)
    return bags_of(taken_rows(part.features, query_ids), device=device)


def bags_of(rows: Rows, *, device: torch.device) -> Bags:
    """CSR rows in numpy as bags in torch."""
    values = None if rows.values is None else torch.from_numpy(rows.values).to(device)
    return Bags(
        torch.from_numpy(np.asarray(rows.ids, dtype=np.int64)).to(device),
        torch.from_numpy(np.asarray(rows.offsets, dtype=np.int64)).to(device),
        values,
    )
