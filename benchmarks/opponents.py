"""What others do for rare labels, as a change of a run that is ready to train.

reweighted    SNM, the loss of a pair times n^-power, where its label has n training pairs
ldam          margins C / n^(1/4) (Cao et al. 2019): negatives count as that much nearer
adjusted      logit adjustment (Menon et al. 2021): tau log n is added to every label's score while
              training, and not in search
"""

import dataclasses

import torch
from torch import Tensor

from evenhand.build import Built
from evenhand.data import Dataset
from evenhand.training.feed import Batch
from evenhand.training.state import Risk


class Unchanged:
    """An optimiser that leaves its table as it is."""

    def step(self, *_: object, **__: object) -> None: ...


def changed(built: Built, dataset: Dataset, opponent: str, strength: float) -> Built:
    """A run of SNM as that opponent would have it; for the eager step."""
    training, plan = built.training, built.plan
    counts = torch.from_numpy(dataset.label_counts()).to(training.feed.device).clamp(min=1).float()
    if opponent == "reweighted":
        weights = counts**-strength
        weights *= counts.sum() / (weights * counts).sum()  # on average over the pairs 1
        training.risk = Risk(lambda losses, batch, _: weights[batch.label_ids] / len(losses))
    elif opponent == "ldam":
        margins, next_batch, loss_fn = (
            strength * counts**-0.25,
            training.feed.next_batch,
            plan.loss_fn,
        )
        of_batch: list[Tensor] = []

        def next_batch_and_margins() -> Batch:
            batch = next_batch()
            of_batch[:] = [margins[batch.label_ids].unsqueeze(1)]  # (B, 1)
            return batch

        training.feed.next_batch = next_batch_and_margins
        plan = dataclasses.replace(
            plan, loss_fn=lambda positive, negative: loss_fn(positive, negative + of_batch[0])
        )
    else:
        bias = strength * counts.log().unsqueeze(1)
        training.model.label_bias = torch.nn.Parameter(bias, requires_grad=False)
        training.optimizers.rows["biases"] = Unchanged()
    return built._replace(training=training, plan=plan)
