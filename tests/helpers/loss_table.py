"""Every loss of the package beside its oracle: the rows of the tables that tests run over.

A new loss is one more row here, and is then tested by every test that says `every_loss`.
"""

from functools import partial
from typing import NamedTuple

import pytest

import oracles
from evenhand.losses import (
    averaged_loss,
    bowl_loss,
    contrastive_loss,
    crammer_singer_loss,
    exponential,
    hinge,
    logistic,
    softmax_loss,
    squared_hinge,
)


class Row(NamedTuple):
    loss_fn: object  # (B,), (B, k) -> (B,)
    oracle: object  # positive, negatives, num_hard_labels -> float


MARGIN_LOSSES = {
    "hinge": (hinge, oracles.hinge),
    "squared hinge": (squared_hinge, oracles.squared_hinge),
    "logistic": (logistic, oracles.logistic),
    "exponential": (exponential, oracles.exponential),
}
LOSSES = {}
for kind, loss_fn, oracle in [
    ("bowl", bowl_loss, oracles.bowl),
    ("crammer-singer", crammer_singer_loss, oracles.crammer_singer),
    ("averaged", averaged_loss, oracles.averaged),
]:
    for phi_name, (phi, phi_oracle) in MARGIN_LOSSES.items():
        LOSSES[f"{kind} {phi_name}"] = Row(partial(loss_fn, margin_loss=phi), oracle(phi_oracle))
LOSSES["softmax"] = Row(softmax_loss, oracles.softmax)
for power in (1, 2, 2.5):
    LOSSES[f"contrastive power {power}"] = Row(
        partial(contrastive_loss, margin=0.2, power=power), oracles.contrastive(0.2, power)
    )

every_loss = pytest.mark.parametrize("name", LOSSES)
every_margin_loss = pytest.mark.parametrize("name", MARGIN_LOSSES)
