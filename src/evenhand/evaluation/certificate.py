"""What a run promises about subpopulations nobody named, from its outcome on the test part."""

import numpy as np

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.evaluation.groups import DoubleArray, check_belongs
from evenhand.evaluation.outcome import Outcome, pair_losses
from evenhand.theory.subpopulation_bounds import Certificate, certificate

RECIPROCAL_RANK = "reciprocal rank"


def certify(
    outcome: Outcome,
    dataset: Dataset,
    part_name: str = "test",
    *,
    loss: str = RECIPROCAL_RANK,
    delta: float = 0.05,
) -> Certificate:
    """Bounds the expected loss of every subpopulation of queries of every size, all at once.

    It is a certificate on the test part alone: see `is_certifiable`.

    Args:
        loss: 'reciprocal rank': 1 - 1 / rank of the best placed positive, 1 if none was found; or
            'miss@10' (any number of results): the share of the positives not among the first 10.
    """
    if part_name == "train":
        raise UserError(
            "the model was fitted to the train part: nothing can be certified there; evaluate the "
            "run on the test part"
        )
    check_belongs(outcome, dataset.parts[part_name], part_name)
    return certificate(query_losses(outcome, loss), delta=delta)


def is_certifiable(part_name: str) -> bool:
    """Whether nothing was chosen on a part: settings and checkpoints are on 'validation'."""
    return part_name == "test"


def query_losses(outcome: Outcome, loss: str) -> DoubleArray:
    """The loss of each query with a positive, in order; see `certify` for the kinds."""
    cutoff = None
    if loss != RECIPROCAL_RANK:
        kind, _, number = loss.partition("@")
        if kind != "miss" or not number.isdecimal():
            raise UserError(
                f"unknown loss {loss!r}; known: {RECIPROCAL_RANK!r}, and 'miss@10' with any number "
                f"of results up to {outcome.num_results}"
            )
        cutoff = int(number)
        if not 1 <= cutoff <= outcome.num_results:
            raise UserError(
                f"{loss!r} must look at 1 to {outcome.num_results} results (what the evaluation "
                f"kept); evaluate the run again with more results"
            )
    losses = pair_losses(outcome, cutoff)
    if not len(losses):
        raise UserError("the part holds no (query, label) pair: there is nothing to certify")
    queries, places = np.unique(outcome.query_ids, return_inverse=True)
    if cutoff is not None:
        return np.bincount(places, weights=losses) / np.bincount(places)
    best = np.ones(len(queries))  # that of the best placed positive
    np.minimum.at(best, places, losses)
    return best
