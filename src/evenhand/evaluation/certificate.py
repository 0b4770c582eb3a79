"""What a run promises about subpopulations nobody named, from its outcome on the test part."""

from typing import NamedTuple

import numpy as np

from evenhand.data import Dataset, IntArray
from evenhand.errors import UserError
from evenhand.evaluation.groups import DoubleArray, check_belongs
from evenhand.evaluation.outcome import Outcome, pair_losses
from evenhand.theory.subpopulation_bounds import (
    CAP,
    TAIL_FRACTIONS,
    Certificate,
    certificate,
    loss_weights,
)

RECIPROCAL_RANK = "reciprocal rank"
# What is drawn independently, and what a subpopulation is made of.
UNITS = {
    "queries": "queries are drawn independently, and a subpopulation is any set of queries",
    "labels": "labels are drawn independently, each with all of its queries, and a subpopulation "
    "is any set of (query, label) pairs",
    "whole labels": "labels are drawn independently, each with all of its queries, and a "
    "subpopulation is any set of labels, each with all of its queries",
}


class Sample(NamedTuple):
    """The losses that a certificate is about."""

    losses: DoubleArray  # (N,) between 0 and 1
    cluster_ids: IntArray | None  # (N,); None: all independent
    weights: DoubleArray  # (N,) how much each counts
    ids: IntArray  # (N,) the queries they belong to, or the pairs where units are labels


def certify(
    outcome: Outcome,
    dataset: Dataset,
    part_name: str = "test",
    *,
    loss: str = RECIPROCAL_RANK,
    units: str = "queries",
    cap: float = CAP,
    delta: float = 0.05,
    tail_fractions: tuple[float, ...] = TAIL_FRACTIONS,
) -> Certificate:
    """Bounds the expected loss of every subpopulation of every size, all at once.

    It is a certificate on the test part alone: see `is_certifiable`.

    Args:
        loss: 'reciprocal rank': 1 - 1 / rank of the best placed positive, 1 if none was found; or
            'miss@10' (any number of results): the share of the positives not among the first 10.
        units: a key of `UNITS`. By labels, a loss is that of one (query, label) pair.
        cap: the most pairs that a label counts for, where units are labels.
    """
    if part_name == "train":
        raise UserError(
            "the model was fitted to the train part: nothing can be certified there; evaluate the "
            "run on the test part"
        )
    check_belongs(outcome, dataset.parts[part_name], part_name)
    sample = loss_sample(outcome, loss=loss, units=units, cap=cap)
    return certificate(
        sample.losses,
        delta=delta,
        cluster_ids=sample.cluster_ids,
        cap=cap,
        tail_fractions=tail_fractions,
    )


def is_certifiable(part_name: str) -> bool:
    """Whether nothing was chosen on a part: settings and checkpoints are on 'validation'."""
    return part_name == "test"


def loss_sample(outcome: Outcome, *, loss: str, units: str, cap: float = CAP) -> Sample:
    """The losses of a run by query, by (query, label) pair, or of a pair's whole label.

    Queries without a positive have no loss and are left out.
    """
    if units not in UNITS:
        raise ValueError(f"units must be one of {', '.join(UNITS)}, got {units!r}")
    cutoff = None if loss == RECIPROCAL_RANK else _cutoff(loss, outcome.num_results)
    losses = pair_losses(outcome, cutoff)
    if not len(losses):
        raise UserError("the part holds no (query, label) pair: there is nothing to certify")
    if units == "queries":
        return _query_sample(outcome.query_ids, losses, loss)
    _, label_ids = np.unique(outcome.label_ids, return_inverse=True)
    if units == "whole labels":  # the pairs of a label stand or fall together: all have its mean
        sums = np.bincount(label_ids, weights=losses)
        losses = np.minimum(sums / np.bincount(label_ids), 1)[label_ids]
    weights = loss_weights(label_ids, cap)
    return Sample(losses, label_ids, weights, np.arange(len(losses)))


def _query_sample(query_ids: IntArray, losses_of_pairs: DoubleArray, loss: str) -> Sample:
    ids, positions = np.unique(query_ids, return_inverse=True)
    if loss == RECIPROCAL_RANK:
        losses = np.ones(len(ids))
        np.minimum.at(losses, positions, losses_of_pairs)
    else:
        losses = np.bincount(positions, weights=losses_of_pairs) / np.bincount(positions)
    return Sample(losses, None, np.ones(len(ids)), ids)


def _cutoff(loss: str, num_results: int) -> int:
    """10 of 'miss@10'."""
    kind, _, cutoff = loss.partition("@")
    if kind != "miss" or not cutoff.isdecimal():
        raise UserError(
            f"unknown loss {loss!r}; known: {RECIPROCAL_RANK!r}, and 'miss@10' with any number of "
            f"results up to {num_results}"
        )
    if not 1 <= int(cutoff) <= num_results:
        raise UserError(
            f"{loss!r} must look at 1 to {num_results} results (what the evaluation kept); "
            f"evaluate the run again with more results"
        )
    return int(cutoff)
