"""What a step costs one rank: bytes sent, operations, memory held.

Expected values, from the shape of the step and the laws of its ids alone. The number of labels
enters only through those laws (how often two draws meet) and through the shard that a rank holds.
Every rank is taken to be the mean one; how far the busiest is from it, `owed_rows` says.

Two things are assumed. Draws are independent, and so are survivors: each example of the batch is
one with probability k' / B, whichever rank it is of, and keeps any k of the M sampled labels. Real
examples agree about which labels are hard, so they touch fewer: docs/scaling.md says how many.
"""

import dataclasses
import math
from typing import NamedTuple

from experiments.scaling_laws import Law, expected_distinct, thin

ID_BYTES = 8
STATE_BYTES = 4  # of a row under row-wise Adagrad
GRADIENT_BYTES = 4  # of a weight, whatever the table is kept in
LOSS_BYTES = 24  # of an example: its loss, group and wish to stop, as float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step of all ranks, with labels drawn uniformly for the batch, and bags of features."""

    num_ranks: int
    num_labels: int
    num_features: int
    batch_size: int  # of all ranks together
    num_sampled_labels: int
    num_hard_labels: int
    num_hard_examples: int  # the batch size: every example counts, as in SNM
    dim: int
    positives: Law  # of the label that an example was drawn with
    features: Law  # of the bag of a query
    table_bytes: int = 4  # of a weight

    @property
    def share(self) -> float:
        """b, examples of a rank."""
        return self.batch_size / self.num_ranks

    @property
    def survival(self) -> float:
        """The probability that an example is among the k' hardest."""
        return self.num_hard_examples / self.batch_size


class Touched(NamedTuple):
    """Rows that a rank's share of the step touches: expected numbers of distinct ones."""

    labels: float  # U, looked up: the sample and the positives
    label_gradients: float  # T, of survivors: their positives and the labels that they kept
    features: float
    feature_gradients: float


def touched(shape: StepShape, *, num_examples: float | None = None) -> Touched:
    """For a rank's own share; with `num_examples` = the batch size, for all ranks together."""
    count = shape.share if num_examples is None else num_examples
    kept_by_one = shape.survival * shape.num_hard_labels / shape.num_sampled_labels
    kept = _hit(shape.num_sampled_labels, kept_by_one, count)
    positives = expected_distinct(shape.positives, count)
    surviving = expected_distinct(thin(shape.positives, shape.survival), count)
    return Touched(
        _union(shape.num_sampled_labels, positives, shape.num_labels),
        _union(kept, surviving, shape.num_labels),
        expected_distinct(shape.features, count),
        expected_distinct(thin(shape.features, shape.survival), count),
    )


def kept_label_bounds(shape: StepShape) -> tuple[float, float]:
    """The fewest and the most labels that a rank's survivors keep: all the same, or all others."""
    kept, survivors = shape.num_hard_labels, shape.survival * shape.share
    is_any = _hit(1, shape.survival, shape.share)  # the probability of a survivor
    return is_any * kept, min(float(shape.num_sampled_labels), survivors * kept)


def bytes_sent(shape: StepShape) -> dict[str, float]:
    """To other ranks, by a rank in a step; by the names under which `Ranks.sent` counts them."""
    ranks, found = shape.num_ranks, touched(shape)
    others = (ranks - 1) / ranks  # of all rows: held by another rank
    most_examples = math.ceil(shape.batch_size / ranks)  # a gathered message has one length
    row, gradient = shape.dim * shape.table_bytes, shape.dim * GRADIENT_BYTES
    return {
        "labels: ids": others * found.labels * ID_BYTES,
        "labels: rows": others * found.labels * row,
        "labels: ids of gradients": others * found.label_gradients * ID_BYTES,
        "labels: gradients": others * found.label_gradients * gradient,
        "features: ids": others * found.features * ID_BYTES,
        "features: rows": others * found.features * row,
        "features: ids of gradients": others * found.feature_gradients * ID_BYTES,
        "features: gradients": others * found.feature_gradients * gradient,
        "losses": (ranks - 1) * most_examples * LOSS_BYTES,
        "counts": (ranks - 1) * 4 * ID_BYTES,  # of the rows of four exchanges
    }


def flops(shape: StepShape) -> dict[str, float]:
    """Of a rank in a step; an addition and a multiplication are two."""
    found, everywhere = touched(shape), touched(shape, num_examples=shape.batch_size)
    share, dim, encode = shape.share, shape.dim, 2 * shape.features.ids_a_draw * shape.dim
    survivors = shape.survival * share
    owned_gradients = (
        found.label_gradients + found.feature_gradients
    )  # rows added up by their owner
    updated = (everywhere.label_gradients + everywhere.feature_gradients) / shape.num_ranks
    return {
        "encode": share * encode,
        "scores": 2 * share * (shape.num_sampled_labels + 1) * dim,
        "gradients": survivors * (4 * (1 + shape.num_hard_labels) * dim + encode),
        "sums of gradients": owned_gradients * dim,
        "updates": updated * dim * 6,
    }


def memory_held(shape: StepShape) -> dict[str, float]:
    """Bytes of a rank: what grows with the tables, and what with the step alone."""
    found = touched(shape)
    rows = sum(-(-count // shape.num_ranks) for count in (shape.num_labels, shape.num_features))
    row, gradient = shape.dim * shape.table_bytes, shape.dim * GRADIENT_BYTES
    tables, states = float(rows * row), float(rows * STATE_BYTES)
    return {
        "tables": tables,
        "optimiser": states,
        "rows of a step": 2 * (found.labels + found.features) * row,  # laid out and received
        "scores": shape.share * shape.num_sampled_labels * 4,
        "gradients of a step": 3 * (found.label_gradients + found.feature_gradients) * gradient,
        "checkpoint staging": tables + states,  # a copy, while training goes on
    }


def owed_rows(shape: StepShape, law_of_range: Law, *, range_rows: float) -> float:
    """Label rows that all ranks, itself included, request from the owner of a range in a step.

    With ids in order of frequency, `law_of_range` is `zipf_law(..., rows=range)`: the first range
    holds all frequent labels. With ids in random order every owner serves `touched` rows.
    """
    sampled = shape.num_sampled_labels * range_rows / shape.num_labels
    positives = expected_distinct(law_of_range, shape.share)
    return shape.num_ranks * _union(sampled, positives, range_rows)


def _hit(num_ids: float, probability: float, num_draws: float) -> float:
    """Of ids that each draw holds with this probability: how many are in any draw."""
    if probability >= 1:
        return num_ids
    return -num_ids * math.expm1(num_draws * math.log1p(-probability))


def _union(first: float, second: float, num_ids: float) -> float:
    """The size of a union of independent sets, the first without a preference."""
    return first + second * (1 - first / num_ids)
