"""The training step over many ranks with sharded tables; the mined batch is the global one.

Each rank has a share of the batch's examples and a shard of every table. For a step it fetches the
rows its share touches, and then the step is the one of `training.step`, on small tables that hold
these rows alone, with ids renumbered. Only two things are global: the k' hardest examples, for
which all ranks see all losses, and the gradients, which are sent to the owners of the rows.

So what a rank holds, sends and computes does not grow with the number of labels but for its shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from evenhand.distributed.ranks import Ranks, share_of, share_sizes
from evenhand.distributed.row_exchange import (
    RowExchange,
    fetch_rows,
    places_among,
    sorted_distinct_ids,
)
from evenhand.models import Retriever, RowGradients, encode, row_encoder
from evenhand.sampling import InBatchSampler, LabelSample, LabelSampler, MixedSampler
from evenhand.training.feed import Batch
from evenhand.training.optimizers import Gradients
from evenhand.training.state import Plan, Scheduled, Training
from evenhand.training.step import clip, gradients_of, mine, passes_of


class RankStep:
    """Takes the next step of a training whose tables are this rank's shards.

    Randomness is the same on all ranks: each draws the sample of the whole batch, and no id of it
    has to be sent.
    """

    def __init__(
        self,
        training: Training,
        plan: Plan,
        ranks: Ranks,
        *,
        should_stop_fn: Callable[[], bool] = lambda: False,
    ) -> None:
        batch_size = training.feed.batch_size
        self.training, self.plan, self.ranks = training, plan, ranks
        self.counts = share_sizes(batch_size, ranks.num_ranks)
        self.own = slice(*share_of(batch_size, ranks.rank, ranks.num_ranks))
        self.exchanges = {
            name: RowExchange(name, num_rows, ranks)
            for name, (_, num_rows) in training.row_ranges.items()
        }
        # The same model with empty tables, which get new rows each time; a dense encoder is shared.
        model, by_rows = training.model, row_encoder(training.model.encoder)
        self.small = Retriever(
            model.encoder if by_rows is None else by_rows.with_rows(by_rows.weight[:0]),
            num_labels=0,
            embedding_dim=model.label_table.shape[1],
            is_cosine=model.is_cosine,
            scale=model.scale,
            has_label_bias=model.label_bias is not None,
        )
        self.should_stop_fn = should_stop_fn
        self.is_stop_asked = False  # of any rank, known to all after the same step
        self.stats = torch.zeros(2)

    @torch.no_grad()
    def __call__(self, scheduled: Scheduled) -> Tensor:
        """(2,): the objective, and the share of examples without any loss; of the whole batch."""
        training, plan, model, small = self.training, self.plan, self.training.model, self.small
        labels = self.exchanges["labels"]
        batch = training.feed.next_batch()  # this rank's share
        sample = self._sample(batch)
        sampled = sample.ids[sample.ids >= 0]
        wanted, _ = sorted_distinct_ids(torch.cat([sampled, batch.label_ids]))  # (U,)
        request = labels.request(wanted)
        # Label rows travel while queries are encoded.
        label_rows_fn = labels.start_fetch(request, model.label_table)
        encoder, feature_ids, features = row_encoder(model.encoder), None, batch.features
        if encoder is not None:
            exchange = self.exchanges["features"]
            feature_ids, rows, features = fetch_rows(exchange, encoder, features)
            small.encoder.weight.data = rows
        small.encoder.train()
        passes = passes_of(training, plan, batch)
        raw_vectors = encode(small.encoder, features, passes)  # (b, D)
        query_vectors = small.as_queries(raw_vectors)
        small.label_table.data = label_rows_fn()  # (U, D)
        if small.label_bias is not None and model.label_bias is not None:
            small.label_bias.data = labels.start_fetch(request, model.label_bias)()
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
            loss_fn=plan.loss_fn,
            risk_fn=lambda losses: self._weights(losses, batch, scheduled.num_hard_examples),
            is_log_q_corrected=plan.is_log_q_corrected,
        )
        found = gradients_of(
            mined, query_vectors, own_batch, small, raw_vectors=raw_vectors, passes=passes
        )
        small.encoder.eval()
        gradients: Gradients = {}  # by this rank's own rows of the whole tables
        for name, touched in found.items():
            ids, exchange = wanted, labels
            if feature_ids is not None and name == "features":
                ids, exchange = feature_ids, self.exchanges["features"]
            own = RowGradients(ids[touched.ids], touched.values)
            gradients[name] = exchange.sum_gradients(own)
        for weight in model.parameters():
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                self.ranks.sum_(weight.grad, what="dense gradients")
        if plan.max_gradient_norm:
            gradients = clip(gradients, model, max_norm=plan.max_gradient_norm, ranks=self.ranks)
        training.optimizers.step(gradients, learning_rate=scheduled.learning_rate)
        return self.stats

    def _sample(self, batch: Batch) -> LabelSample:
        """What one process would draw, and of samples for each example this rank's own."""
        plan, positive_ids = self.plan, batch.positive_ids
        if plan.draws_for_each or _looks_at_batch(plan.sampler):
            widths = torch.zeros(self.ranks.num_ranks, device=positive_ids.device)
            widths[self.ranks.rank] = positive_ids.shape[1]
            width = int(self.ranks.sum_(widths, what="counts").max())
            padding = (0, width - positive_ids.shape[1])
            padded = torch.nn.functional.pad(positive_ids, padding, value=-1)
            positive_ids = self._gather(padded, what="positives")  # (b, P) -> (B, P)
        draw_fn = plan.sampler.sample_for_each if plan.draws_for_each else plan.sampler.sample
        sample = draw_fn(positive_ids, plan.num_sampled_labels, generator=self.training.generator)
        if not plan.draws_for_each:
            return sample
        return LabelSample(sample.ids[self.own], sample.log_counts[self.own])

    def _weights(self, losses: Tensor, batch: Batch, num_hard_examples: int) -> Tensor:
        """Weighs the examples of all ranks together; (b,) the weights of this rank's own."""
        unknown = torch.zeros_like(batch.label_ids)
        is_asked = torch.full_like(batch.label_ids, int(self.should_stop_fn()))
        group_ids = unknown if batch.group_ids is None else batch.group_ids
        # One message of float64, which holds float32 and ids below 2**53 exactly.
        columns = torch.stack([losses.double(), group_ids.double(), is_asked.double()], dim=1)
        all_columns = self._gather(columns, what="losses")  # (B, 3)
        all_losses = all_columns[:, 0].to(losses.dtype)
        group_ids, are_asked = all_columns[:, 1:].long().unbind(dim=1)
        whole = batch._replace(group_ids=group_ids)
        weights = self.training.risk.weights(all_losses, whole, num_hard_examples)  # (B,)
        self.is_stop_asked = bool(are_asked.any())
        objective = (weights * all_losses).sum()
        self.stats = torch.stack([objective, (all_losses <= 0).to(objective.dtype).mean()])
        return weights[self.own]

    def _gather(self, rows: Tensor, *, what: str) -> Tensor:
        return self.ranks.gather(rows, counts=self.counts, what=what)


def _looks_at_batch(sampler: LabelSampler) -> bool:
    """Whether a shared sample depends on the positives of the batch."""
    if isinstance(sampler, MixedSampler):
        return _looks_at_batch(sampler.first) or _looks_at_batch(sampler.second)
    return isinstance(sampler, InBatchSampler)
