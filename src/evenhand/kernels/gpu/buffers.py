"""What the kernels of one step over a label table read and write: sizes, settings and tensors.

B examples, P positives each, M sampled labels, k kept ones, D dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.losses import KernelLoss
from evenhand.kernels.gpu.rows import RowTable


class Kept(NamedTuple):
    """What mining leaves of a batch, example by example."""

    losses: Tensor  # (B,)
    thresholds: Tensor  # (B,) a label is kept if its score is above,
    last_ties: Tensor  # (B,) int32: or equal, in a column no further right than this
    row_values: Tensor  # (B,) see `losses`
    positive_slopes: Tensor  # (B,) of the loss by the positive score
    weights: Tensor  # (B,) of the risk
    survivors: Tensor  # (B,) int32: the examples with a weight, ascending,
    num_survivors: Tensor  # (1,) int32: and how many there are


class Buffers:
    """Tensors of fixed sizes, because a recorded graph has fixed addresses."""

    def __init__(
        self,
        rows: RowTable,
        clock: Clock,
        *,
        batch_size: int,
        num_positives: int,
        num_sampled_labels: int,
        num_hard_labels: int,
        loss: KernelLoss,
        scale: float = 1.0,
        is_cosine: bool = True,
        draws_for_each: bool = False,
        precision: torch.dtype = torch.bfloat16,
    ) -> None:
        """
        Args:
            rows: the label table and its optimiser's state, changed in place.
            precision: of the vectors that are multiplied; sums are in float32.
        """
        num_labels, width = rows.table.shape
        self.rows, self.clock, self.loss = rows, clock, loss
        self.batch_size, self.width, self.num_positives = batch_size, width, num_positives
        self.num_sampled, self.num_hard_labels = num_sampled_labels, num_hard_labels
        self.scale, self.is_cosine, self.draws_for_each = scale, is_cosine, draws_for_each

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.table.device)

        # What the caller writes: the encoder's vectors, not normalised; labels; positives or -1.
        self.vectors = buffer(batch_size, width)
        self.label_ids = buffer(batch_size, dtype=torch.int64)
        self.positive_ids = buffer(batch_size, num_positives, dtype=torch.int64)
        # What the kernels hand on: unit queries times the scale, unit rows of the examples' labels,
        self.queries = buffer(batch_size, width, dtype=precision)
        self.positive_units = buffer(batch_size, width, dtype=precision)
        self.positive_scores = buffer(batch_size)
        # the slots of the sample that hold a positive of the example, and how many there are,
        self.positive_slots = buffer(batch_size, num_positives, dtype=torch.int32)
        self.num_slots = buffer(batch_size, dtype=torch.int32)
        # the column of each example's label among the M + B that the update goes over: its slot in
        # the sample, or M + the first example with it; their labels, -1 where another column has
        # the label; and 1 where a survivor has a coefficient.
        self.label_slots = buffer(batch_size, dtype=torch.int32)
        self.column_ids = buffer(num_sampled_labels + batch_size, dtype=torch.int64)
        self.touched = buffer(num_sampled_labels + batch_size, dtype=torch.int32)
        self.scores = buffer(batch_size, num_sampled_labels)
        losses, thresholds, row_values, slopes, weights = (buffer(batch_size) for _ in range(5))
        last_ties, survivors = (buffer(batch_size, dtype=torch.int32) for _ in range(2))
        self.kept = Kept(
            losses, thresholds, last_ties, row_values, slopes, weights, survivors,
            num_survivors=buffer(1, dtype=torch.int32),
        )  # fmt: skip
        self.stats = buffer(len(clock.keys), 2)  # the objective, the share without any loss
        self.query_gradients = buffer(batch_size, width)  # row i: the i-th survivor's
        if draws_for_each:
            # Label, example and coefficient of every kept label and positive; label -1: none.
            num_entries = batch_size * (1 + num_hard_labels)
            self.entry_ids = buffer(num_entries, dtype=torch.int64)
            self.entry_sources = buffer(num_entries, dtype=torch.int32)
            self.entry_values = buffer(num_entries)
            self.kept_slots = buffer(batch_size, num_hard_labels, dtype=torch.int32)
            self.no_slots = buffer(batch_size, dtype=torch.int32)  # positives are never drawn
            # A product runs many times faster than a gather: score every label, if not too many.
            self.scores_all = num_labels <= 8 * num_sampled_labels
            if self.scores_all:
                self.all_units = buffer(num_labels, width, dtype=precision)
                self.all_scores = buffer(batch_size, num_labels)
        else:
            self.units = buffer(num_sampled_labels, width, dtype=precision)
            # Of the survivors, one after another: d objective / d score by column, and queries.
            self.coefficients = buffer(batch_size, num_sampled_labels + batch_size, dtype=precision)
            self.survivor_queries = buffer(batch_size, width, dtype=precision)
            # Parts of the sample that the queries' gradient is summed over apart fill the device.
            self.partials = buffer(max(1, min(8, num_sampled_labels // 512)), batch_size, width)
            self.label_gradients = buffer(num_sampled_labels + batch_size, width)
