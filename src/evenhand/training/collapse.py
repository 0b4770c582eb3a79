"""Notices a deep encoder that collapses: all vectors alike, and the loss of one that knows nothing.

The hardest examples of an encoder that is still random have a larger loss than they would have if
all vectors were equal. So pulling everything together lowers their loss, at once and for all of
them, and that is where gradient descent goes; docs/deep.md has the measurements and the remedy.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from evenhand.models import row_encoder
from evenhand.objective import collapsed_loss
from evenhand.training.state import Plan, Training

NUM_PROBES = 64  # training queries whose vectors are compared
ALIKE = 0.97  # mean cosine
RATHER_ALIKE = 0.9  # where the loss is that of a collapsed model as well
NEAR = 0.02  # of the loss to that of a collapsed model, as a part of it
LOOKS = 4  # in a row, before it is called a collapse


class CollapseWatch:
    """Looks whenever the loop logs. Tables of rows, one for each feature, do not collapse."""

    def __init__(self, training: Training, plan: Plan) -> None:
        self.training, self.num_alike, self.has_warned = training, 0, False
        model, self.features = training.model, None
        if row_encoder(model.encoder) is None:
            self.features = training.feed.queries(NUM_PROBES)
            score = model.scale if model.is_cosine else 0.0
            self.collapsed = collapsed_loss(plan.loss_fn, plan.num_hard_labels, score=score)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """The mean cosine of two queries, for the log."""
        if self.features is None:
            return {}
        vectors: Tensor = normalize(self.training.model.encoder(self.features).double())
        count = len(vectors)
        return {"query_cosine": float((vectors.sum(0).square().sum() - count) / (count**2 - count))}

    def warning(self, figures: dict[str, float]) -> str | None:
        """What to say of the figures of a log line; once, and only after several that are bad."""
        if self.features is None or self.has_warned:
            return None
        cosine, loss = figures["query_cosine"], figures["loss"]
        is_flat = abs(loss - self.collapsed) <= NEAR * self.collapsed
        is_alike = cosine >= ALIKE or (is_flat and cosine >= RATHER_ALIKE)
        self.num_alike = self.num_alike + 1 if is_alike else 0
        self.has_warned = self.num_alike == LOOKS
        if not self.has_warned:
            return None
        return (
            f"the encoder has collapsed: at step {self.training.step} two queries have a mean "
            f"cosine of {cosine:.3f}, and the loss is {loss:.3f} (a model that tells no labels "
            f"apart has {self.collapsed:.3f}); begin anew with mining.loss_ceiling = 0.7, so that "
            f"no more is mined than it can learn, or with a larger mining.num_hard_examples"
        )
