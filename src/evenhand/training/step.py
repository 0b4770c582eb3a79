"""One S2M step: score and mine without gradient, differentiate the survivors, update their rows.

There are three steps, and `choose_step` chooses: `train_step` of this file, which runs anywhere;
the same as a CUDA graph (`gpu_step`); and the one of many ranks (`rank_step`).

The objective's gradient is zero outside k' examples and the labels they kept. So autograd never
sees the (B, M) scores: it runs over the survivors' (k', k) kept scores, and the rest is two
products with the sparse coefficients C[b, t] = d objective / d score of label t for example b,
where t runs over the distinct labels with any gradient at all:

    gradient of the survivors' query vectors  C V        (k', T) (T, D)
    gradient of the touched label vectors     C' Q       (T, k') (k', D)

Examples of one query have the same scores. Where a batch says which they are (`query_rows`), a
query is encoded, scored and mined once for all of them, and C has one row for it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.distributed.ranks import Ranks, share_of
from evenhand.distributed.row_exchange import places_among, sorted_distinct_ids
from evenhand.encoding import count_examples, draw_seeds, take_examples
from evenhand.errors import UserError
from evenhand.kernels.rows import scores_of_each
from evenhand.kernels.selection import largest_of_blocks, mask_shared_
from evenhand.kernels.sparse import Lists, distinct_ids, matrix_of, product, transposed_product
from evenhand.losses import LossFn
from evenhand.mining import mask_positives
from evenhand.models import (
    Passes,
    Retriever,
    RowGradients,
    backward,
    encode,
    features_of,
    row_encoder,
    tower_rows,
)
from evenhand.objective import ScoreGradients, score_gradients
from evenhand.risk import RiskFn, mean_weights, top_weights
from evenhand.sampling import LabelSample, log_q_corrected
from evenhand.training.feed import Batch
from evenhand.training.optimizers import Gradients
from evenhand.training.state import Plan, Risk, Scheduled, Training

HARDEST = Risk(
    lambda losses, batch, count: top_weights(losses, num_hard_examples=count), kernel_kind="hardest"
)
MEAN = Risk(lambda losses, batch, count: mean_weights(losses), kernel_kind="mean")


class Step(Protocol):
    """Takes the next step of a training; the loop counts the steps."""

    def __call__(self, scheduled: Scheduled) -> Tensor:
        """(2,): the objective, and the share of examples without any loss."""


class ChosenStep(NamedTuple):
    """A step, what to say of it, and how to learn of a request to stop."""

    step: Step
    kind: str  # "eager", "CUDA graph" or "split over N ranks"
    reason: str | None  # why it is not the fastest of this device; None: it is
    should_stop_fn: Callable[[], bool]  # the same on all ranks after the same step

    def describe(self) -> str:
        """
        Example:
            >>> ChosenStep(print, "eager", "mining.whole_queries is true", bool).describe()
            'training step: eager (no CUDA graph: mining.whole_queries is true)'
        """
        reason = f" (no CUDA graph: {self.reason})" if self.reason else ""
        return f"training step: {self.kind}{reason}"


def choose_step(
    training: Training,
    plan: Plan,
    *,
    precision: str = "mixed",
    ranks: Ranks | None = None,
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> ChosenStep:
    """The fastest step that can do what the plan asks for.

    Args:
        precision: of products and tables, as in `training.precision`.
        ranks: those that train together on tables that are split.
        should_stop_fn: what this process was asked; of ranks, the step tells all of them.
    """
    if ranks is not None:
        from evenhand.training.rank_step import RankStep

        rank_step = RankStep(training, plan, ranks, should_stop_fn=should_stop_fn)
        kind = f"split over {ranks.num_ranks} ranks"
        return ChosenStep(rank_step, kind, None, lambda: rank_step.is_stop_asked)
    reason = None
    if training.feed.device.type == "cuda":
        products = torch.float32 if precision == "float32" else torch.bfloat16
        try:
            from evenhand.training.gpu_step import GpuStep, why_no_graph
        except ImportError:
            reason = "triton is not installed"
        else:
            reason = why_no_graph(training, plan, precision=products)
            if reason is None:
                step = GpuStep(training, plan, precision=products)
                return ChosenStep(step, "CUDA graph", None, should_stop_fn)
    if precision == "bfloat16":
        raise UserError(
            f"training.precision 'bfloat16' needs the CUDA graph of a GPU, and this run has none: "
            f"{reason or 'it does not run on a CUDA device'}; set it to 'mixed'"
        )
    return ChosenStep(partial(train_step, training, plan), "eager", reason, should_stop_fn)


@torch.no_grad()
def train_step(training: Training, plan: Plan, scheduled: Scheduled) -> Tensor:
    """The eager step: one operation after the other, on any device; see `Step`."""
    model, num_hard_examples = training.model, scheduled.num_hard_examples
    if training.labels is not None and training.step % plan.refresh_every == 0:
        refresh_labels(training)
    batch = training.feed.next_batch()
    draw_fn = plan.sampler.sample_for_each if plan.draws_for_each else plan.sampler.sample
    sample = draw_fn(batch.positive_ids, plan.num_sampled_labels, generator=training.generator)
    model.encoder.train()
    passes = passes_of(training, plan, batch)
    raw_vectors = encode(model.encoder, batch.features, passes)  # (B, D)
    query_vectors = model.as_queries(raw_vectors)
    mined = mine(
        query_vectors,
        batch,
        model,
        sample,
        num_hard_labels=plan.num_hard_labels,
        loss_fn=plan.loss_fn,
        risk_fn=lambda losses: training.risk.weights(losses, batch, num_hard_examples),
        is_log_q_corrected=plan.is_log_q_corrected,
    )
    if training.labels is None:
        final = mined
        gradients = gradients_of(
            mined, query_vectors, batch, model, raw_vectors=raw_vectors, passes=passes
        )
    else:
        vectors = query_vectors, raw_vectors, passes
        gradients, final = tower_gradients(training, plan, mined, *vectors, batch, sample)
    model.encoder.eval()  # it is in training mode within a step alone
    if plan.max_gradient_norm:
        gradients = clip(gradients, model, max_norm=plan.max_gradient_norm)
    training.optimizers.step(gradients, learning_rate=scheduled.learning_rate)
    objective = (final.weights * final.losses[final.survivors]).sum()
    return torch.stack([objective, (mined.losses <= 0).to(objective.dtype).mean()])


def passes_of(training: Training, plan: Plan, batch: Batch) -> Passes | None:
    """How the queries of a batch, or of a rank's share of it, are encoded; None: by rows.

    Seeds are drawn for the batch of all ranks, so that they do not depend on how it is shared.
    """
    if row_encoder(training.model.encoder) is not None:
        return None
    (rank, num_ranks), batch_size = training.feed.share, training.feed.batch_size
    seeds = draw_seeds(batch_size, training.generator)[share_of(batch_size, rank, num_ranks)[0] :]
    seeds = seeds[: count_examples(batch.features)]
    return Passes(seeds, chunk_size=plan.chunk_size or batch_size, is_mixed=plan.is_mixed)


@torch.no_grad()
def clip(
    gradients: Gradients, model: Retriever, *, max_norm: float, ranks: Ranks | None = None
) -> Gradients:
    """Scales the gradients down together where their common length exceeds `max_norm`.

    Args:
        ranks: those that hold the rows of the tables between them, and the dense weights each.
    """
    dense = [weight.grad for weight in model.parameters() if weight.grad is not None]
    squares = [row.values.double().square().sum() for row in gradients.values()]
    square = torch.stack(squares).sum()
    if ranks is not None:
        ranks.sum_(square.unsqueeze(0), what="flags")
    for values in dense:
        square = square + values.double().square().sum()
    factor = (max_norm / square.sqrt().clamp(min=1e-12)).clamp(max=1)
    for values in dense:
        values.mul_(factor)
    return {name: RowGradients(row.ids, row.values * factor) for name, row in gradients.items()}


class Mined(NamedTuple):
    """What mining leaves: who survives, and how the objective depends on which scores."""

    losses: Tensor  # (B,) of every example
    survivors: Tensor  # (k',) positions of the examples with a weight
    weights: Tensor  # (k',) of the survivors
    query_rows: Tensor  # (R,) of the query vectors with a gradient: the survivors, or fewer
    label_ids: Tensor  # (T,) distinct labels with a gradient
    coefficients: Lists | Tensor  # (R, T) d objective / d score
    kept: Tensor | None  # (U, k) places of the kept labels in the sample; None: all are kept


@torch.no_grad()
def mine(
    query_vectors: Tensor,
    batch: Batch,
    model: Retriever,
    sample: LabelSample,
    *,
    num_hard_labels: int,
    loss_fn: LossFn,
    risk_fn: RiskFn,
    is_log_q_corrected: bool = False,
) -> Mined:
    """Scores the sample, keeps each example's hardest labels, weighs the examples.

    Labels are mined by their raw scores; the log Q correction, which is for the softmax loss
    alone, comes after, or rare labels would look hard only for being rarely drawn.
    """
    scores_fn = _scores_of_each if sample.ids.dim() == 2 else _scores_of_shared
    scores_of = scores_fn(query_vectors, batch, model, sample)
    shape, kept = (len(query_vectors), sample.ids.shape[-1]), None
    if num_hard_labels >= shape[1]:
        kept_scores = scores_of(0, shape[0])  # (U, M): all are kept
    else:
        kept, kept_scores = largest_of_blocks(
            scores_of, shape, num_hard_labels, like=query_vectors
        )  # positions and scores, (U, k)
    own_vectors = _of_examples(query_vectors, batch)  # (B, D)
    positive_scores = _scores(own_vectors, model, batch.label_ids.unsqueeze(1)).squeeze(1)  # (B,)
    if is_log_q_corrected:
        log_counts = _kept(sample.log_counts, kept).expand_as(kept_scores)
        kept_scores = log_q_corrected(kept_scores, log_counts)
    found = score_gradients(
        positive_scores, _of_examples(kept_scores, batch), loss_fn=loss_fn, risk_fn=risk_fn
    )
    query_rows, positive_ids, positive, negative = _by_query(found, batch)
    coefficients: Lists | Tensor
    if kept is None and sample.ids.shape == (len(model.label_table),):
        # Nearly every label may have a coefficient: a dense (R, T) matrix.
        matrix = negative.new_zeros(len(negative), len(model.label_table))  # (R, L)
        matrix.index_add_(1, sample.ids.clamp(min=0), negative)  # an empty slot adds 0
        matrix.scatter_add_(1, positive_ids.clamp(min=0), positive)
        label_ids = (matrix != 0).any(dim=0).nonzero().squeeze(1)  # (R, L) -> (T,)
        coefficients = matrix.index_select(1, label_ids)
    else:
        kept_ids = _kept(sample.ids, kept).expand_as(kept_scores).index_select(0, query_rows)
        label_ids, coefficients = matrix_of(
            torch.cat([positive_ids, kept_ids], dim=1), torch.cat([positive, negative], dim=1)
        )  # of (R, P + k)
    survivors = found.survivors, found.weights
    return Mined(found.losses, *survivors, query_rows, label_ids, coefficients, kept)


def gradients_of(
    mined: Mined,
    query_vectors: Tensor,
    batch: Batch,
    model: Retriever,
    *,
    raw_vectors: Tensor | None = None,
    passes: Passes | None = None,
) -> Gradients:
    """Carries the coefficients to the rows of the tables that the survivors touch.

    Args:
        raw_vectors: as the encoder gave them; None: what has a gradient is encoded again.
        passes: how they were encoded; None: at once, without dropout.
    """
    features = batch.features
    if len(mined.query_rows) < len(query_vectors):  # they are in order: else nothing to take
        features = take_examples(features, mined.query_rows)
        passes = None if passes is None else passes.take(mined.query_rows)
        query_vectors = query_vectors.index_select(0, mined.query_rows)  # (R, D)
        if raw_vectors is not None:
            raw_vectors = raw_vectors.index_select(0, mined.query_rows)
    if raw_vectors is None:
        raw_vectors = encode(model.encoder, features, passes)  # (R, D)
    label_ids, coefficients, num_touched = mined.label_ids, mined.coefficients, len(mined.label_ids)
    vector_gradients = product(coefficients, model.label_vectors(label_ids))  # (R, T) (T, D)
    encoder_gradients = model.through_unit(model.scaled(vector_gradients), raw_vectors)
    by_vectors = transposed_product(coefficients, query_vectors, num_columns=num_touched)  # (T, D)
    by_rows = model.through_unit(by_vectors, model.label_table, label_ids)
    gradients = {"labels": RowGradients(label_ids, by_rows)}
    if model.label_bias is not None:
        ones = query_vectors.new_ones(len(mined.query_rows), 1)
        sums = transposed_product(coefficients, ones, num_columns=num_touched)  # (T, 1)
        gradients["biases"] = RowGradients(label_ids, sums)
    feature_rows = backward(model.encoder, features, encoder_gradients, passes)
    if feature_rows is not None:
        gradients["features"] = feature_rows
    return gradients


# --- labels that a tower reads --------------------------------------------------------------------
# They are mined by vectors from the last time that all were encoded, in `model.label_table`. What
# the survivors kept, and their positives, is encoded again, and the objective is that of these
# fresh vectors: its gradient is exact for what was mined, however old the table.


@torch.no_grad()
def refresh_labels(training: Training) -> None:
    """Encodes all labels, for mining and for search; without a tower, there is nothing to do."""
    model, labels = training.model, training.labels
    if labels is None:
        return
    assert model.tower is not None
    for first, rows in tower_rows(model.tower, labels, device=training.feed.device):
        span = slice(first, first + len(rows))
        offsets = 0 if model.label_offsets is None else model.label_offsets[span]
        model.label_table[span] = rows + offsets


@torch.no_grad()
def tower_gradients(
    training: Training,
    plan: Plan,
    mined: Mined,
    query_vectors: Tensor,
    raw_vectors: Tensor,
    passes: Passes | None,
    batch: Batch,
    sample: LabelSample,
) -> tuple[Gradients, Mined]:
    """The gradients by way of fresh label vectors, and the survivors' objective by these."""
    model, device, labels = training.model, training.feed.device, training.labels
    assert labels is not None
    assert model.tower is not None
    chosen = mined.survivors
    rows = chosen if batch.query_rows is None else batch.query_rows[chosen]  # (k',)

    def of_survivors(values: Tensor) -> Tensor:
        values = _kept(values, mined.kept)
        return values if values.dim() == 1 else values[rows]  # (M,) of all, or (k', k)

    kept_ids, label_ids = of_survivors(sample.ids), batch.label_ids[chosen]
    wanted, _ = sorted_distinct_ids(torch.cat([label_ids, kept_ids[kept_ids >= 0]]))  # (T,)
    features = features_of(labels, wanted.cpu().numpy(), device=device)
    own_passes = None
    if row_encoder(model.tower) is None:
        seeds, size = draw_seeds(len(wanted), training.generator), plan.chunk_size or len(wanted)
        own_passes = Passes(seeds, chunk_size=size, is_mixed=plan.is_mixed)
    model.tower.train()
    fresh = encode(model.tower, features, own_passes)  # (T, D)
    if model.label_offsets is not None:
        fresh = fresh + model.label_offsets[wanted]
    cosines = F.cosine_similarity(fresh, model.label_table[wanted])
    training.label_drift = float(1 - cosines.mean())
    small = Retriever(  # the same model, of these labels alone
        model.encoder,
        0,
        fresh.shape[1],
        is_cosine=model.is_cosine,
        scale=model.scale,
        has_label_bias=model.label_bias is not None,
    )
    small.label_table.data = fresh
    if small.label_bias is not None and model.label_bias is not None:
        small.label_bias.data = model.label_bias[wanted]
    model.encoder.train()
    survivors = Batch(
        take_examples(batch.features, rows),
        places_among(label_ids, wanted),
        places_among(batch.positive_ids[rows], wanted),
    )
    own_queries = query_vectors[rows]  # (k', D)
    final = mine(
        own_queries,
        survivors,
        small,
        LabelSample(places_among(kept_ids, wanted), of_survivors(sample.log_counts)),
        num_hard_labels=kept_ids.shape[-1],
        loss_fn=plan.loss_fn,
        risk_fn=lambda losses: mined.weights,
        is_log_q_corrected=plan.is_log_q_corrected,
    )
    found = gradients_of(
        final,
        own_queries,
        survivors,
        small,
        raw_vectors=raw_vectors[rows],
        passes=None if passes is None else passes.take(rows),
    )
    ids, values = found.pop("labels")
    gradients = {
        name: own if name == "features" else RowGradients(wanted[own.ids], own.values)
        for name, own in found.items()
    }
    own_passes = None if own_passes is None else own_passes.take(ids)
    by_rows = backward(model.tower, take_examples(features, ids), values, own_passes)
    model.tower.eval()
    if model.label_offsets is not None:
        gradients["label offsets"] = RowGradients(wanted[ids], values)
    if by_rows is not None and model.is_tower_shared:
        gradients["features"] = _sum_of(gradients["features"], by_rows)
    elif by_rows is not None:
        gradients["label features"] = by_rows
    return gradients, final


def _sum_of(first: RowGradients, second: RowGradients) -> RowGradients:
    """The sum of two gradients of one table."""
    ids, places = distinct_ids(torch.cat([first.ids, second.ids]))
    values = first.values.new_zeros(len(ids), first.values.shape[1])
    values.index_add_(0, places, torch.cat([first.values, second.values]))
    return RowGradients(ids, values)


# --- scores ---------------------------------------------------------------------------------------


def _scores_of_shared(
    query_vectors: Tensor, batch: Batch, model: Retriever, sample: LabelSample
) -> Callable[[int, int], Tensor]:
    """For some rows of (B, M): scores, -inf for positives and empty slots; one sample for all."""
    ids = sample.ids.clamp(min=0)
    label_vectors, biases = model.label_vectors(ids), model.biases(ids)  # (M, D), (M,)

    def scores_of(first: int, last: int) -> Tensor:
        scores = query_vectors[first:last] @ label_vectors.T  # (b, D) (D, M) -> (b, M)
        if biases is not None:
            scores += biases
        return mask_shared_(scores, sample.ids, batch.positive_ids[first:last])

    return scores_of


def _scores_of_each(
    query_vectors: Tensor, batch: Batch, model: Retriever, sample: LabelSample
) -> Callable[[int, int], Tensor]:
    """The same, where every example has a sample of its own."""

    def scores_of(first: int, last: int) -> Tensor:
        sampled_ids = sample.ids[first:last]  # (b, M)
        scores = _scores(query_vectors[first:last], model, sampled_ids.clamp(min=0))
        return mask_positives(scores, sampled_ids, batch.positive_ids[first:last])

    return scores_of


def _of_examples(rows: Tensor, batch: Batch) -> Tensor:
    """Those of the queries, for each example: (U, n) -> (B, n)."""
    return rows if batch.query_rows is None else rows.index_select(0, batch.query_rows)


def _by_query(found: ScoreGradients, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Survivors of one query in one row: each its positive, and all of them the same negatives.

    Returns:
        The rows of R queries (R,), their positives (R, P) padded with -1, and the derivatives of
        the objective by the scores of these (R, P) and of the kept labels (R, k).
    """
    survivors, label_ids = found.survivors, batch.label_ids.index_select(0, found.survivors)
    if batch.query_rows is None:
        return survivors, label_ids.unsqueeze(1), found.positive.unsqueeze(1), found.negative
    query_rows, places, counts = torch.unique_consecutive(
        batch.query_rows.index_select(0, survivors), return_inverse=True, return_counts=True
    )  # (R,), (k',), (R,)
    first = counts.cumsum(0) - counts
    slots = torch.arange(len(places), device=places.device) - first[places]  # (k',)
    shape = len(counts), int(counts.max()) if len(counts) else 0
    positive_ids, positive = label_ids.new_full(shape, -1), found.positive.new_zeros(shape)
    positive_ids[places, slots], positive[places, slots] = label_ids, found.positive
    negative = found.negative.new_zeros(len(counts), found.negative.shape[1])
    negative.index_add_(0, places, found.negative)
    return query_rows, positive_ids, positive, negative


def _scores(query_vectors: Tensor, model: Retriever, label_ids: Tensor) -> Tensor:
    """(B, M) scores of labels given for each example."""
    scores = scores_of_each(query_vectors, model.label_table, label_ids, is_cosine=model.is_cosine)
    return scores if model.label_bias is None else scores + model.label_bias[label_ids, 0]


def _kept(values: Tensor, kept: Tensor | None) -> Tensor:
    """Values of the kept slots: shared (M,) or for each example (B, M) -> (B, k)."""
    if kept is None:
        return values
    return values[kept] if values.dim() == 1 else values.gather(1, kept)
