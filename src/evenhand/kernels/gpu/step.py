"""One step over a label table as a fixed list of kernels on fixed buffers, ready to be recorded.

    draw and gather labels -> scores -> hardest labels, losses -> hardest examples
    -> gradients of the survivors' queries and of the touched labels -> their rows updated

Nothing waits for the host, no shape depends on data, and nothing of the table's size is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.entries import update_by_entries
from evenhand.kernels.gpu.gather import gather_positives, gather_sample, unit_queries
from evenhand.kernels.gpu.gradients import (
    label_gradients,
    num_splits,
    query_gradients,
    write_coefficients,
)
from evenhand.kernels.gpu.losses import KernelLoss
from evenhand.kernels.gpu.own_samples import (
    each_gradients,
    is_product_cheaper,
    pick_scores,
    score_rows,
    unit_table,
)
from evenhand.kernels.gpu.rows import RowTable, update_rows
from evenhand.kernels.gpu.selection import Kept, list_examples, select_examples, select_labels


class MiningStep:
    """Buffers of one step, and the kernels over them in order.

    Write `vectors`, `label_ids` and `positive_ids`, call `mine` (or `score`, then set
    `kept.weights`, then `list_examples`) and `update`, read `query_gradients`, and `join`.
    """

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
        device = rows.table.device
        self.rows, self.clock = rows, clock
        self.num_sampled, self.num_hard_labels = num_sampled_labels, num_hard_labels
        self.loss, self.scale, self.is_cosine = loss, scale, is_cosine
        self.draws_for_each = draws_for_each
        self.side_stream = torch.cuda.Stream(device) if rows.table.is_cuda else None
        self.is_forked = False

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # What the caller writes.
        self.vectors = buffer(batch_size, width)
        self.label_ids = buffer(batch_size, dtype=torch.int64)
        self.positive_ids = buffer(batch_size, num_positives, dtype=torch.int64)
        # What the kernels hand on.
        self.queries = buffer(batch_size, width, dtype=precision)
        self.positive_units = buffer(batch_size, width, dtype=precision)
        self.positive_scores = buffer(batch_size)
        self.positive_slots = buffer(batch_size, num_positives, dtype=torch.int32)
        self.num_slots = buffer(batch_size, dtype=torch.int32)
        self.label_slots = buffer(batch_size, dtype=torch.int32)
        self.scores = buffer(batch_size, num_sampled_labels)
        self.kept = Kept.empty(batch_size, device)
        self.stats = buffer(len(clock.keys), 2)
        self.query_gradients = buffer(batch_size, width)
        self.column_ids = buffer(num_sampled_labels + batch_size, dtype=torch.int64)
        self.touched = buffer(num_sampled_labels + batch_size, dtype=torch.int32)
        if draws_for_each:
            num_entries = batch_size * (1 + num_hard_labels)
            self.kept_slots = buffer(batch_size, num_hard_labels, dtype=torch.int32)
            self.entry_ids = buffer(num_entries, dtype=torch.int64)
            self.entry_sources = buffer(num_entries, dtype=torch.int32)
            self.entry_values = buffer(num_entries)
            self.no_slots = buffer(batch_size, dtype=torch.int32)
            if is_product_cheaper(num_labels, num_sampled_labels):
                self.all_units = buffer(num_labels, width, dtype=precision)
                self.all_scores = buffer(batch_size, num_labels)
        else:
            self.units = buffer(num_sampled_labels, width, dtype=precision)
            self.coefficients = buffer(batch_size, num_sampled_labels + batch_size, dtype=precision)
            self.survivor_queries = buffer(batch_size, width, dtype=precision)
            self.partials = buffer(num_splits(num_sampled_labels), batch_size, width)
            self.label_gradients = buffer(num_sampled_labels + batch_size, width)

    def score(self) -> None:
        """Draws and scores the labels, keeps the hardest, and leaves the losses in `kept`."""
        if self.draws_for_each:
            self._unit_queries()
            self._gather_positives()
            self._score_each()
            num_slots = self.no_slots  # positives are never drawn
        else:
            # The product waits for the sample and the queries, and runs beside the positives.
            with self.beside():
                gather_sample(
                    self.rows.table,
                    key=self.clock.key,
                    num_sampled=self.num_sampled,
                    out_ids=self.column_ids,
                    out_units=self.units,
                    out_touched=self.touched,
                    is_cosine=self.is_cosine,
                )
            self._unit_queries()
            self.join()
            with self.beside():
                self._gather_positives()
            product(self.queries, self.units, out=self.scores)
            self.join()
            num_slots = self.num_slots
        select_labels(
            self.scores,
            self.positive_slots,
            num_slots,
            self.positive_scores,
            num_hard_labels=self.num_hard_labels,
            loss=self.loss,
            out=self.kept,
        )

    def mine(self) -> None:
        self.score()
        select_examples(clock=self.clock, out=self.kept, out_stats=self.stats)

    def list_examples(self) -> None:
        """After `score`, instead of `mine`: takes `kept.weights` as they were set."""
        list_examples(clock=self.clock, out=self.kept, out_stats=self.stats)

    def update(self) -> None:
        """Leaves the survivors' gradients in `query_gradients`, and updates the label rows.

        The rows are being updated beside what follows, until `join`.
        """
        if self.draws_for_each:
            self._update_each()
            return
        write_coefficients(
            self.scores,
            self.queries,
            self.label_slots,
            kept=self.kept,
            loss=self.loss,
            out=self.coefficients,
            out_queries=self.survivor_queries,
            out_touched=self.touched,
        )
        with self.beside():
            label_gradients(
                self.coefficients,
                self.survivor_queries,
                kept=self.kept,
                out=self.label_gradients,
            )
            update_rows(
                self.rows,
                self.column_ids,
                self.label_gradients,
                learning_rate=self.clock.learning_rate,
                step_number=self.clock.step_number,
                is_cosine=self.is_cosine,
                touched=self.touched,
            )
        query_gradients(
            self.coefficients,
            self.units,
            self.positive_units,
            self.vectors,
            self.label_slots,
            kept=self.kept,
            scale=self.scale,
            is_cosine=self.is_cosine,
            partials=self.partials,
            out=self.query_gradients,
        )

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched here runs beside what follows; `join` waits for it."""
        if self.side_stream is None:
            yield
            return
        self.side_stream.wait_stream(torch.cuda.current_stream())
        self.is_forked = True
        with torch.cuda.stream(self.side_stream):
            yield

    def join(self) -> None:
        if self.side_stream is not None and self.is_forked:
            torch.cuda.current_stream().wait_stream(self.side_stream)
        self.is_forked = False

    def _unit_queries(self) -> None:
        unit_queries(self.vectors, scale=self.scale, is_cosine=self.is_cosine, out=self.queries)

    def _gather_positives(self) -> None:
        gather_positives(
            self.rows.table,
            self.vectors,
            self.label_ids,
            self.positive_ids,
            key=self.clock.key,
            num_sampled=self.num_sampled,
            scale=self.scale,
            is_cosine=self.is_cosine,
            out_units=self.positive_units,
            out_scores=self.positive_scores,
            out_slots=self.positive_slots,
            out_num_slots=self.num_slots,
            out_label_slots=self.label_slots,
            out_ids=self.column_ids[self.num_sampled :],
            out_touched=self.touched[self.num_sampled :],
        )

    def _score_each(self) -> None:
        table, key = self.rows.table, self.clock.key
        if not is_product_cheaper(len(table), self.num_sampled):
            score_rows(
                table,
                self.queries,
                self.positive_ids,
                key=key,
                is_cosine=self.is_cosine,
                out=self.scores,
            )
            return
        if self.is_cosine:
            unit_table(table, out=self.all_units)
        else:
            self.all_units.copy_(table)
        product(self.queries, self.all_units, out=self.all_scores)
        pick_scores(self.all_scores, self.positive_ids, key=key, out=self.scores)

    def _update_each(self) -> None:
        each_gradients(
            self.rows.table,
            self.scores,
            self.vectors,
            self.label_ids,
            self.positive_ids,
            key=self.clock.key,
            kept=self.kept,
            num_hard_labels=self.num_hard_labels,
            loss=self.loss,
            scale=self.scale,
            is_cosine=self.is_cosine,
            scratch=self.kept_slots,
            out=self.query_gradients,
            out_row_ids=self.entry_ids,
            out_sources=self.entry_sources,
            out_values=self.entry_values,
        )
        update_by_entries(
            self.rows,
            self.entry_ids,
            self.entry_sources,
            self.entry_values,
            self.queries,
            learning_rate=self.clock.learning_rate,
            step_number=self.clock.step_number,
            is_cosine=self.is_cosine,
        )


def product(queries: Tensor, units: Tensor, *, out: Tensor) -> None:
    """(B, D), (M, D) -> (B, M) in float32, whatever the vectors are in."""
    if queries.dtype == torch.float32:
        torch.mm(queries, units.T, out=out)
    else:
        torch.mm(queries, units.T, out_dtype=torch.float32, out=out)
