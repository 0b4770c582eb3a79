"""What of a run is large, for the moment when it does not fit."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from evenhand.config import Config
from evenhand.data import Dataset, Rows
from evenhand.errors import UserError
from evenhand.faults import gibibytes, is_out_of_memory, out_of_memory

NUM_NAMED = 2  # of the largest parts
FLOAT = 4  # bytes
LEAST_SHARE = 0.1  # of the largest, to be named beside it


class Large(NamedTuple):
    what: str
    rows: int
    columns: int
    copies: int  # with what an optimiser remembers of each number
    remedy: str

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * self.copies * FLOAT

    def __str__(self) -> str:
        more = ", with the optimiser's" if self.copies > 1 else ""
        return f"{self.what} ({self.rows:,} x {self.columns:,}, {gibibytes(self.num_bytes)}{more})"


def large_parts(config: Config, dataset: Dataset) -> list[Large]:
    """The tables and the scores of a step, the largest first."""
    width, mining = config.model.embedding_dim, config.mining
    copies = 2 if config.training.optimizer == "row-adam" else 1  # Adagrad: a number a row
    of_width = "model.embedding_dim"
    parts = [Large("the label vectors", dataset.num_labels, width, copies, of_width)]
    if isinstance(dataset.parts["train"].features, Rows):
        parts.append(Large("the feature vectors", dataset.num_features, width, copies, of_width))
    columns, remedy = dataset.num_labels, "mining.batch_size (or take a method that samples labels)"
    if mining.draws_labels:
        columns, remedy = mining.num_sampled_labels, "mining.batch_size, mining.num_sampled_labels"
    parts.append(Large("the scores of a step", mining.batch_size, columns, 1, remedy))
    if mining.draws_labels and mining.for_each_example:
        columns *= width
        remedy = "mining.batch_size, mining.num_sampled_labels, mining.for_each_example"
        parts.append(Large("the vectors of all samples", mining.batch_size, columns, 1, remedy))
    return sorted(parts, key=lambda part: part.num_bytes, reverse=True)


@contextlib.contextmanager
def naming_the_largest(config: Config, dataset: Dataset) -> Iterator[None]:
    """Training that runs out of memory says what of it is large, and which settings make it so."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        parts = large_parts(config, dataset)[:NUM_NAMED]
        parts = [part for part in parts if part.num_bytes > LEAST_SHARE * parts[0].num_bytes]
        largest = f"the largest of this run: {', '.join(map(str, parts))}"
        remedies = ", ".join(dict.fromkeys(part.remedy for part in parts))
        remedy = (
            f"a new run with a lower {remedies} needs less; any checkpoint is kept, and --resume "
            f"continues from it where there is more"
        )
        raise UserError(out_of_memory(error, largest=largest, remedy=remedy)) from error
