"""What a step costs one rank: bytes sent, operations, memory held.

Expected values, from the shape of the step and the laws of its ids alone. The number of labels
enters only through those laws (how often two draws meet) and through the shard that a rank holds.
Every rank is taken to be the mean one; how far the busiest is from it, `owed_rows` says.

Two things are assumed. Draws are independent, and so are survivors: each example of the batch is
one with probability k' / B, whichever rank and query it is of, and keeps any k of the M sampled
labels. Real examples agree about which labels are hard, so they touch fewer: `label_spread` says
how much they agree, and docs/scaling.md what it was in real runs.
"""

import dataclasses
import math
from typing import NamedTuple

from experiments.scaling_laws import Law, expected_distinct, thin

ID_BYTES = 8
STATE_BYTES = 4  # optimisers keep float32 or better
LOSS_BYTES = 32  # of an example: its loss, pair, group and wish to stop, as float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step of all ranks, with the uniform sampler."""

    num_ranks: int
    num_labels: int
    batch_size: int  # of all ranks together
    num_sampled_labels: int
    num_hard_labels: int
    num_hard_examples: int  # the batch size: every example counts, as in SNM
    dim: int
    positives: Law  # of the label that an example was drawn with
    features: Law | None = None  # of the bag of a query; None: a dense encoder
    num_features: int = 0
    dense_weights: int = 0  # of a dense encoder, replicated
    draws_for_each: bool = False
    positives_a_query: int = 1  # columns of the mask, which are sent with a sample for each
    has_label_bias: bool = False
    is_clipped: bool = False
    table_bytes: int = 4  # of a weight
    gradient_bytes: int = 4
    optimizer: str = "row-adagrad"
    active_share: float = 1.0  # of the kept labels, with a gradient: less for a loss with a margin
    pairs_a_query: float = 1.0  # that follow one another, with `mining.whole_queries`; mean
    label_spread: float = 0.0  # of the labels' chances to be kept: squared deviation over mean

    def __post_init__(self) -> None:
        for name in (
            "num_ranks", "num_labels", "batch_size", "num_hard_labels", "dim", "pairs_a_query"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        bounds = {
            "num_sampled_labels": (self.num_hard_labels, self.num_labels),
            "num_hard_examples": (1, self.batch_size),
        }
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} must be between {least} and {most}, got {getattr(self, name)}"
                )
        if self.optimizer not in ("row-adagrad", "row-adam"):
            raise ValueError(f"optimizer must be row-adagrad or row-adam, got {self.optimizer!r}")

    @property
    def share(self) -> float:
        """b, examples of a rank."""
        return self.batch_size / self.num_ranks

    @property
    def survival(self) -> float:
        """The probability that an example is among the k' hardest."""
        return self.num_hard_examples / self.batch_size

    @property
    def query_survival(self) -> float:
        """The probability that a query has a pair among them: it then mines and has gradients."""
        return _hit(1, self.survival, self.pairs_a_query)

    @property
    def features_a_query(self) -> float:
        return 0.0 if self.features is None else self.features.ids_a_draw


class Touched(NamedTuple):
    """Rows that a rank's share of the step touches: expected numbers of distinct ones."""

    labels: float  # U, looked up: the sample and the positives
    label_gradients: float  # T, of survivors: their positives and the labels that they kept
    features: float
    feature_gradients: float


def touched(shape: StepShape, *, num_examples: float | None = None) -> Touched:
    """For a rank's own share; with `num_examples` = the batch size, for all ranks together."""
    count = shape.share if num_examples is None else num_examples
    features = feature_gradients = 0.0
    if shape.features is not None:
        queries = count / shape.pairs_a_query
        features = expected_distinct(shape.features, queries)
        surviving_features = thin(shape.features, shape.query_survival)
        feature_gradients = expected_distinct(surviving_features, queries)
    sampled = float(shape.num_sampled_labels)
    if shape.draws_for_each:
        sampled = _hit(shape.num_labels, sampled / shape.num_labels, count)
    positives = expected_distinct(shape.positives, count)
    surviving = expected_distinct(thin(shape.positives, shape.survival), count)
    return Touched(
        _union(sampled, positives, shape.num_labels),
        _union(kept_labels(shape, num_examples=count), surviving, shape.num_labels),
        features,
        feature_gradients,
    )


def kept_labels(shape: StepShape, *, num_examples: float) -> float:
    """Distinct labels that the survivors of so many examples keep.

    A label's chance to be kept is the same for all labels, or follows a Gamma law with the spread
    of the shape: then a label is missed with probability (1 + spread * mean) ** (-1 / spread).
    """
    among = shape.num_labels if shape.draws_for_each else shape.num_sampled_labels
    kept_by_one = shape.query_survival * shape.active_share * shape.num_hard_labels / among
    queries, spread = num_examples / shape.pairs_a_query, shape.label_spread
    if not spread:
        return _hit(among, kept_by_one, queries)
    return -among * math.expm1(-math.log1p(spread * kept_by_one * queries) / spread)


def kept_label_bounds(shape: StepShape, *, num_examples: float) -> tuple[float, float]:
    """The fewest and the most they can keep: all the same labels, or all different ones."""
    survivors = shape.query_survival * num_examples / shape.pairs_a_query
    kept = shape.num_hard_labels
    among = shape.num_labels if shape.draws_for_each else shape.num_sampled_labels
    is_any = _hit(1, shape.survival, num_examples)  # the probability of a survivor
    return is_any * kept, min(float(among), survivors * kept)


def bytes_sent(shape: StepShape) -> dict[str, float]:
    """To other ranks, by a rank in a step; by the names under which `Ranks.sent` counts them."""
    ranks, found = shape.num_ranks, touched(shape)
    others = (ranks - 1) / ranks  # of all rows: held by another rank
    most_examples = math.ceil(shape.batch_size / ranks)  # a gathered message has one length
    row = shape.dim * shape.table_bytes
    gradient = shape.dim * shape.gradient_bytes
    bias, exchanges = (shape.has_label_bias, 2 + shape.has_label_bias)
    sent = {
        "labels: ids": others * found.labels * ID_BYTES,
        "labels: rows": others * found.labels * (row + 4 * bias),
        "labels: ids of gradients": others * found.label_gradients * ID_BYTES * (1 + bias),
        "labels: gradients": others * found.label_gradients * (gradient + 4 * bias),
    }
    if shape.features is not None:
        exchanges += 2
        sent |= {
            "features: ids": others * found.features * ID_BYTES,
            "features: rows": others * found.features * row,
            "features: ids of gradients": others * found.feature_gradients * ID_BYTES,
            "features: gradients": others * found.feature_gradients * gradient,
        }
    else:
        sent["dense gradients"] = others * 2 * shape.dense_weights * 4
    sent["losses"] = (ranks - 1) * most_examples * LOSS_BYTES
    sent["counts"] = (ranks - 1) * exchanges * ID_BYTES
    if shape.draws_for_each:
        sent["positives"] = (ranks - 1) * most_examples * shape.positives_a_query * ID_BYTES
        sent["counts"] += 2 * (ranks - 1) * 4
    if shape.is_clipped:
        sent["flags"] = others * 2 * 8
    return sent


def flops(shape: StepShape) -> dict[str, float]:
    """Of a rank in a step; an addition and a multiplication are two."""
    found, everywhere = touched(shape), touched(shape, num_examples=shape.batch_size)
    share, dim, ranks = shape.share, shape.dim, shape.num_ranks
    queries = share / shape.pairs_a_query
    survivors = shape.query_survival * queries
    entries = shape.survival * share + survivors * shape.num_hard_labels  # of the coefficients
    brought = found.label_gradients + found.feature_gradients  # rows added up by their owner
    updated = (everywhere.label_gradients + everywhere.feature_gradients) / ranks
    # A dense encoder is run forwards once, and over the survivors backwards.
    dense = 2 * shape.dense_weights
    return {
        "encode": queries * (2 * shape.features_a_query * dim + dense),
        "scores": 2 * (queries * shape.num_sampled_labels + share) * dim,
        "gradients": 4 * entries * dim + survivors * (2 * shape.features_a_query * dim + 3 * dense),
        "sums of gradients": brought * dim,
        "updates": updated * dim * (10 if shape.optimizer == "row-adam" else 6),
    }


def memory_held(shape: StepShape) -> dict[str, float]:
    """Bytes of a rank: what grows with the tables, and what with the step alone."""
    found = touched(shape)
    rows = -(-shape.num_labels // shape.num_ranks)
    if shape.features is not None:
        rows += -(-shape.num_features // shape.num_ranks)
    row, gradient = shape.dim * shape.table_bytes, shape.dim * shape.gradient_bytes
    state = STATE_BYTES * (1 + (shape.dim if shape.optimizer == "row-adam" else 0))
    tables, states = float(rows * row), float(rows * state)
    dense = 4.0 * shape.dense_weights
    return {
        "tables": tables,
        "optimiser": states,
        "dense encoder": 4 * dense,  # weights, gradient, two moments
        "rows of a step": 2 * (found.labels + found.features) * row,  # laid out and received
        "scores": shape.share / shape.pairs_a_query * shape.num_sampled_labels * 4,
        "gradients of a step": 3 * (found.label_gradients + found.feature_gradients) * gradient,
        "checkpoint staging": tables + states + 3 * dense,  # a copy, while training goes on
    }


def owed_rows(shape: StepShape, law_of_range: Law, *, range_rows: float) -> float:
    """Label rows that the owner of a range is asked for in a step, by all ranks, itself included.

    With ids in order of frequency, `law_of_range` is `zipf_law(..., rows=range)`: the first range
    holds all frequent labels. With ids in random order every owner is asked for `touched` rows.
    """
    sampled = shape.num_sampled_labels * range_rows / shape.num_labels
    if shape.draws_for_each:
        sampled = _hit(range_rows, shape.num_sampled_labels / shape.num_labels, shape.share)
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
