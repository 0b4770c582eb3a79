"""One step over a label table as a fixed list of kernels on fixed buffers, ready to be recorded.

    draw and gather labels -> scores -> hardest labels, losses -> hardest examples
    -> gradients of the survivors' queries and of the touched labels -> their rows updated

Nothing waits for the host, no shape depends on data, and nothing of the table's size is read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from evenhand.kernels.gpu.buffers import Buffers
from evenhand.kernels.gpu.even import EvenBuffers, measure_gaps, select_even_examples
from evenhand.kernels.gpu.gather import gather_positives, gather_sample, product, unit_vectors
from evenhand.kernels.gpu.gradients import label_gradients, query_gradients, write_coefficients
from evenhand.kernels.gpu.own_samples import each_gradients, score_each
from evenhand.kernels.gpu.rows import update_rows
from evenhand.kernels.gpu.segment_update import update_by_entries
from evenhand.kernels.gpu.selection import list_examples, select_examples, select_labels


class MiningStep(Buffers):
    """The buffers of one step, and the kernels over them in order.

    Write `vectors`, `label_ids` and `positive_ids`, call `mine` (or `score`, then set
    `kept.weights`, then `list_examples`) and `update`, read `query_gradients`, and `join`.
    """

    is_forked = False  # something was launched beside, and not yet joined

    def score(self) -> None:
        """Draws and scores the labels, keeps the hardest, and leaves the losses in `kept`."""
        if self.draws_for_each:
            self._unit_queries()
            gather_positives(self)
            score_each(self)
        else:
            # The product waits for the sample and the queries, and runs beside the positives.
            with self.beside():
                gather_sample(self)
            self._unit_queries()
            self.join()
            with self.beside():
                gather_positives(self)
            product(self.queries, self.units, out=self.scores)
            self.join()
        select_labels(self)

    def mine(self) -> None:
        """`score`, and the hardest examples."""
        self.score()
        select_examples(self)

    def mine_evenly(self, even: EvenBuffers, pair_ids: Tensor) -> None:
        """`score`, and even-handed mining; the gaps are measured beside what follows."""
        self.score()
        select_even_examples(self, even, pair_ids)
        if self._gap_stream is None:
            measure_gaps(self, even)
            return
        self._gap_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._gap_stream):
            measure_gaps(self, even)

    def join_gaps(self) -> None:
        """Waits for the gaps, before anything writes the losses again."""
        if self._gap_stream is not None:
            torch.cuda.current_stream().wait_stream(self._gap_stream)

    def list_examples(self) -> None:
        """After `score`, instead of `mine`: takes `kept.weights` as they were set."""
        list_examples(self)

    def update(self) -> None:
        """Leaves the survivors' gradients in `query_gradients`, and updates the label rows.

        The rows are being updated beside what follows, until `join`.
        """
        now: dict[str, Any] = {
            "learning_rate": self.clock.learning_rate,
            "step_number": self.clock.step_number,
            "is_cosine": self.is_cosine,
        }
        if self.draws_for_each:
            each_gradients(self)
            entries = self.entry_ids, self.entry_sources, self.entry_values
            update_by_entries(self.rows, *entries, self.queries, **now)
            return
        write_coefficients(self)
        with self.beside():
            label_gradients(self)
            update_rows(
                self.rows, self.column_ids, self.label_gradients, touched=self.touched, **now
            )
        query_gradients(self)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched here runs beside what follows; `join` waits for it."""
        if self._side_stream is None:
            yield
            return
        self._side_stream.wait_stream(torch.cuda.current_stream())
        self.is_forked = True
        with torch.cuda.stream(self._side_stream):
            yield

    def join(self) -> None:
        """Waits for what was launched beside."""
        if self._side_stream is not None and self.is_forked:
            torch.cuda.current_stream().wait_stream(self._side_stream)
        self.is_forked = False

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream | None:
        return self._new_stream()

    @cached_property
    def _gap_stream(self) -> torch.cuda.Stream | None:
        return self._new_stream()

    def _new_stream(self) -> torch.cuda.Stream | None:
        table = self.rows.table
        return torch.cuda.Stream(table.device) if table.is_cuda else None

    def _unit_queries(self) -> None:
        unit_vectors(self.vectors, scale=self.scale, is_cosine=self.is_cosine, out=self.queries)
