"""One step of many ranks on tables that are split between them; the mined batch is the global one.

Each rank has a share of the batch's examples and a shard of every table. For a step it fetches the
rows its share touches, and then the step is the one of `training.step`, on small tables that hold
these rows alone, with ids renumbered. Only two things are global: the k' hardest examples, for
which all ranks see all losses, and the gradients, which are brought to the owners of the rows.

So what a rank holds, sends and computes does not grow with the number of labels but for its shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from evenhand.distributed.exchange import RowExchange, places_among, sorted_distinct_ids
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import share_of
from evenhand.losses import LossFn
from evenhand.models.encoders import BagEncoder, Bags, Features, RowGradients
from evenhand.models.retriever import Retriever
from evenhand.sampling import InBatchSampler, LabelSample, LabelSampler, MixedSampler
from evenhand.training.loop import Plan, Training, pace_at
from evenhand.training.step import Batch, Gradients, gradients_of, mine


class SplitStep:
    """Takes the next step of a training whose tables are this rank's shards.

    Randomness is the same on all ranks: each draws the sample of the whole batch, and no id of it
    has to be sent.
    """

    def __init__(
        self,
        training: Training,
        plan: Plan,
        *,
        sampler: LabelSampler,
        loss_fn: LossFn,
        ranks: Ranks,
        num_labels: int,
        num_features: int,
        should_stop_fn: Callable[[], bool] = lambda: False,
    ) -> None:
        batch_size = training.feed.batch_size
        self.training, self.plan, self.ranks = training, plan, ranks
        self.sampler, self.loss_fn = sampler, loss_fn
        self.shares = [
            share_of(batch_size, rank, ranks.num_ranks) for rank in range(ranks.num_ranks)
        ]
        self.labels = RowExchange("labels", num_labels, ranks)
        self.features = RowExchange("features", num_features, ranks)
        self.small = _without_rows(training.model)  # the step's own tables, new ones each time
        self.should_stop_fn = should_stop_fn
        self.is_stop_asked = False  # of any rank, known to all after the same step
        self.stats = torch.zeros(2)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """(2,): the objective, and the share of examples without any loss; of the whole batch."""
        training, plan, model, small = self.training, self.plan, self.training.model, self.small
        learning_rate, num_hard_examples = pace_at(training, plan)
        batch = training.feed.next_batch()  # this rank's share
        sample = self._sample(batch)
        sampled = sample.ids[sample.ids >= 0]
        wanted, _ = sorted_distinct_ids(torch.cat([sampled, batch.label_ids]))  # (U,)
        request = self.labels.request(wanted)
        # Label rows travel while queries are encoded.
        label_rows_fn = self.labels.fetching(request, model.label_table)
        feature_ids, features = self._with_feature_rows(batch.features)
        raw_vectors = small.encoder(features)  # (b, D)
        query_vectors = small.as_queries(raw_vectors)
        small.label_table.data = label_rows_fn()  # (U, D)
        if small.label_bias is not None and model.label_bias is not None:
            small.label_bias.data = self.labels.fetched(request, model.label_bias)
        own_batch = batch._replace(
            features=features,
            label_ids=places_among(batch.label_ids, wanted),
            positive_ids=places_among(batch.positive_ids, wanted),
        )
        mined = mine(
            query_vectors,
            own_batch,
            small,
            sample._replace(ids=places_among(sample.ids, wanted)),
            num_hard_labels=plan.num_hard_labels,
            loss_fn=self.loss_fn,
            risk_fn=lambda losses: self._weights(losses, batch, num_hard_examples),
            is_log_q_corrected=plan.is_log_q_corrected,
        )
        found = gradients_of(mined, query_vectors, own_batch, small, raw_vectors=raw_vectors)
        gradients = self._brought(found, wanted, feature_ids)
        if plan.max_gradient_norm:
            gradients = self._clipped(gradients)
        training.optimizers.step(gradients, learning_rate=learning_rate)
        return self.stats

    def _sample(self, batch: Batch) -> LabelSample:
        """What one process would draw, and of samples for each example this rank's own."""
        plan, positive_ids = self.plan, batch.positive_ids
        if plan.draws_for_each or _looks_at_batch(self.sampler):
            positive_ids = self._all_positives(positive_ids)  # (B, P)
        draw_fn = self.sampler.sample_for_each if plan.draws_for_each else self.sampler.sample
        sample = draw_fn(positive_ids, plan.num_sampled_labels, generator=self.training.generator)
        if not plan.draws_for_each:
            return sample
        own = slice(*self.shares[self.ranks.rank])
        return LabelSample(sample.ids[own], sample.log_counts[own])

    def _all_positives(self, positive_ids: Tensor) -> Tensor:
        """(b, P) of each rank -> (B, P) of all, padded alike."""
        widths = torch.zeros(self.ranks.num_ranks, device=positive_ids.device)
        widths[self.ranks.rank] = positive_ids.shape[1]
        width = int(self.ranks.summed_(widths, what="counts").max())
        padding = (0, width - positive_ids.shape[1])
        padded = torch.nn.functional.pad(positive_ids, padding, value=-1)
        return self._gathered(padded, what="positives")

    def _with_feature_rows(self, features: Features) -> tuple[Tensor | None, Features]:
        """Fetches the rows of the features; (n,) their ids, and the bags in the small table's."""
        encoder = self.training.model.encoder
        if not isinstance(encoder, BagEncoder):
            return None, features
        assert isinstance(features, Bags)
        assert isinstance(self.small.encoder, BagEncoder)
        ids, places = sorted_distinct_ids(features.ids)
        request = self.features.request(ids)
        self.small.encoder.weight.data = self.features.fetched(request, encoder.weight)
        return ids, features._replace(ids=places)

    def _weights(self, losses: Tensor, batch: Batch, num_hard_examples: int) -> Tensor:
        """Weighs the examples of all ranks together; (b,) the weights of this rank's own."""
        unknown = torch.zeros_like(batch.label_ids)
        is_asked = torch.full_like(batch.label_ids, int(self.should_stop_fn()))
        told = (batch.pair_ids, batch.group_ids, is_asked)
        # One message of float64, which holds float32 and ids below 2**53 exactly.
        columns = [losses, *(unknown if ids is None else ids for ids in told)]
        all_columns = self._gathered(
            torch.stack([column.double() for column in columns], dim=1), what="losses"
        )  # (B, 4)
        all_losses = all_columns[:, 0].to(losses.dtype)
        pair_ids, group_ids, are_asked = all_columns[:, 1:].long().unbind(dim=1)
        whole = batch._replace(pair_ids=pair_ids, group_ids=group_ids)
        weights = self.training.risk.weigh_fn(all_losses, whole, num_hard_examples)  # (B,)
        self.is_stop_asked = bool(are_asked.any())
        objective = (weights * all_losses).sum()
        self.stats = torch.stack([objective, (all_losses <= 0).to(objective.dtype).mean()])
        return weights[slice(*self.shares[self.ranks.rank])]

    def _brought(
        self, found: Gradients, label_ids: Tensor, feature_ids: Tensor | None
    ) -> Gradients:
        """The gradients of this rank's own rows, from all ranks; dense ones are summed."""
        label_rows = self.labels.brought(_renumbered(found.label_rows, label_ids))
        bias_rows = feature_rows = None
        if found.bias_rows is not None:
            bias_rows = self.labels.brought(_renumbered(found.bias_rows, label_ids))
        if found.feature_rows is not None and feature_ids is not None:
            feature_rows = self.features.brought(_renumbered(found.feature_rows, feature_ids))
        for weight in self._dense_weights():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            self.ranks.summed_(weight.grad, what="dense gradients")
        return Gradients(label_rows, bias_rows, feature_rows)

    def _clipped(self, gradients: Gradients) -> Gradients:
        """As `loop.clipped`, by the length of what all ranks hold together."""
        rows = [row.values for row in gradients if row is not None]
        square = torch.stack([values.double().square().sum() for values in rows]).sum()
        self.ranks.summed_(square.unsqueeze(0), what="flags")
        dense = [weight.grad for weight in self._dense_weights() if weight.grad is not None]
        square = square + sum(values.double().square().sum() for values in dense)
        factor = (self.plan.max_gradient_norm / square.sqrt().clamp(min=1e-12)).clamp(max=1)
        for values in dense:
            values.mul_(factor)
        return Gradients(
            *(row and RowGradients(row.ids, row.values * factor) for row in gradients)  # type: ignore[arg-type]
        )

    def _dense_weights(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.training.model.parameters() if weight.requires_grad]

    def _gathered(self, rows: Tensor, *, what: str) -> Tensor:
        counts = [last - first for first, last in self.shares]
        return self.ranks.gathered(rows, counts=counts, what=what)


def _without_rows(model: Retriever) -> Retriever:
    """The same model with empty tables; a dense encoder is shared."""
    dim = model.label_table.shape[1]
    encoder = model.encoder
    if isinstance(encoder, BagEncoder):
        encoder = BagEncoder(0, dim)
    return Retriever(
        encoder,
        0,
        dim,
        is_cosine=model.is_cosine,
        scale=model.scale,
        has_label_bias=model.label_bias is not None,
    )


def _renumbered(rows: RowGradients, ids: Tensor) -> RowGradients:
    """From rows of a small table to those of the whole one."""
    return RowGradients(ids[rows.ids], rows.values)


def _looks_at_batch(sampler: LabelSampler) -> bool:
    """Whether a shared sample depends on the positives of the batch."""
    if isinstance(sampler, MixedSampler):
        return _looks_at_batch(sampler.first) or _looks_at_batch(sampler.second)  # type: ignore[arg-type]
    return isinstance(sampler, InBatchSampler)
