"""One S2M step: score and mine without gradient, differentiate the survivors, update their rows.

The objective's gradient is zero outside k' examples and the labels they kept. So autograd never
sees the (B, M) scores: it runs over the survivors' (k', k) kept scores, and the rest is two
products with the sparse coefficients C[b, t] = d objective / d score of label t for example b,
where t runs over the distinct labels with any gradient at all:

    gradient of the survivors' query vectors  C V        (k', T) (T, D)
    gradient of the touched label vectors     C' Q       (T, k') (k', D)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from evenhand.kernels.scoring import scores_of_each
from evenhand.kernels.selection import largest_of_blocks, mask_shared_
from evenhand.kernels.sparse import Lists, matrix_of, product, transposed_product
from evenhand.losses import LossFn
from evenhand.mining import mask_positives
from evenhand.models.encoders import Features, RowGradients, taken_features
from evenhand.models.retriever import Retriever
from evenhand.objective import ScoreGradients, score_gradients
from evenhand.risk import RiskFn
from evenhand.sampling import LabelSample, log_q_corrected


class Batch(NamedTuple):
    features: Features
    label_ids: Tensor  # (B,) the positive each example was drawn with
    positive_ids: Tensor  # (B, P) labels that may not be its negatives, padded with -1
    pair_ids: Tensor | None = None  # (B,) which of all training pairs each example is
    group_ids: Tensor | None = None  # (B,) for the risks of known memberships alone


class Mined(NamedTuple):
    """What mining leaves: who survives, and how the objective depends on which scores."""

    losses: Tensor  # (B,) of every example
    survivors: Tensor  # (k',) positions of the examples with a weight
    weights: Tensor  # (k',) of the survivors
    label_ids: Tensor  # (T,) distinct labels with a gradient
    coefficients: Lists | Tensor  # (k', T) d objective / d score


class Gradients(NamedTuple):
    label_rows: RowGradients
    bias_rows: RowGradients | None
    feature_rows: RowGradients | None  # None: the encoder's dense weights hold theirs in .grad


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
    kept, kept_scores = _hardest_of(query_vectors, batch, model, sample, num_hard_labels)  # (B, k)
    positive_scores = _positive_scores(query_vectors, batch, model)  # (B,)
    if is_log_q_corrected:
        log_counts = _kept(sample.log_counts, kept).expand_as(kept_scores)
        kept_scores = log_q_corrected(kept_scores, log_counts)
    found = score_gradients(positive_scores, kept_scores, loss_fn=loss_fn, risk_fn=risk_fn)
    survivors, num_labels = found.survivors, len(model.label_table)
    positive_ids = batch.label_ids.index_select(0, survivors)
    if kept is None and sample.ids.shape == (num_labels,):
        by_label = _by_every_label(sample.ids, positive_ids, found, num_labels)
        return Mined(found.losses, survivors, found.weights, *by_label)
    kept_ids = _kept(sample.ids, kept).expand_as(kept_scores)
    kept_ids = kept_ids.index_select(0, survivors)  # (k', k)
    label_ids = torch.cat([positive_ids.unsqueeze(1), kept_ids], dim=1)  # (k', 1 + k), and like it:
    coefficients = torch.cat([found.positive.unsqueeze(1), found.negative], dim=1)
    return Mined(found.losses, survivors, found.weights, *matrix_of(label_ids, coefficients))


def gradients_of(
    mined: Mined,
    query_vectors: Tensor,
    batch: Batch,
    model: Retriever,
    *,
    raw_vectors: Tensor | None = None,
) -> Gradients:
    """Carries the coefficients to the rows of the tables that the survivors touch.

    Args:
        raw_vectors: (B, D) as the encoder gave them; None: the survivors are encoded again.
    """
    features = batch.features
    if len(mined.survivors) < len(mined.losses):  # survivors are in order: else nothing to take
        features = taken_features(features, mined.survivors)
        query_vectors = query_vectors.index_select(0, mined.survivors)  # (k', D)
        if raw_vectors is not None:
            raw_vectors = raw_vectors.index_select(0, mined.survivors)
    if raw_vectors is None:
        raw_vectors = model.encoder(features).detach()  # (k', D)
    vector_gradients = product(
        mined.coefficients, model.label_vectors(mined.label_ids)
    )  # (k', T) (T, D) -> (k', D)
    encoder_gradients = model.through_unit(model.scaled(vector_gradients), raw_vectors)
    feature_rows = model.encoder.accumulate(features, encoder_gradients)
    label_gradients = transposed_product(
        mined.coefficients, query_vectors, num_columns=len(mined.label_ids)
    )  # (T, k') (k', D) -> (T, D)
    label_rows = RowGradients(
        mined.label_ids, model.through_label_vectors(label_gradients, mined.label_ids)
    )
    bias_rows = None
    if model.label_bias is not None:
        ones = query_vectors.new_ones(len(mined.survivors), 1)
        bias_gradients = transposed_product(
            mined.coefficients, ones, num_columns=len(mined.label_ids)
        )  # (T, 1)
        bias_rows = RowGradients(mined.label_ids, bias_gradients)
    return Gradients(label_rows, bias_rows, feature_rows)


def _hardest_of(
    query_vectors: Tensor,
    batch: Batch,
    model: Retriever,
    sample: LabelSample,
    num_hard_labels: int,
) -> tuple[Tensor | None, Tensor]:
    """Positions of the labels to keep, None for all of them, and their scores: (B, k) each."""
    scores_fn = _scores_of_each if sample.ids.dim() == 2 else _scores_of_shared
    scores_of = scores_fn(query_vectors, batch, model, sample)
    shape = len(query_vectors), sample.ids.shape[-1]
    if num_hard_labels >= shape[1]:
        return None, scores_of(0, shape[0])
    return largest_of_blocks(scores_of, shape, num_hard_labels, like=query_vectors)


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


def _positive_scores(query_vectors: Tensor, batch: Batch, model: Retriever) -> Tensor:
    return _scores(query_vectors, model, batch.label_ids.unsqueeze(1)).squeeze(1)  # (B, 1) -> (B,)


def _scores(query_vectors: Tensor, model: Retriever, label_ids: Tensor) -> Tensor:
    """(B, M) scores of labels given for each example."""
    scores = scores_of_each(query_vectors, model.label_table, label_ids, is_cosine=model.is_cosine)
    return scores if model.label_bias is None else scores + model.label_bias[label_ids, 0]


def _kept(values: Tensor, kept: Tensor | None) -> Tensor:
    """Values of the kept slots: shared (M,) or for each example (B, M) -> (B, k)."""
    if kept is None:
        return values
    return values[kept] if values.dim() == 1 else values.gather(1, kept)


def _by_every_label(
    sampled_ids: Tensor, positive_ids: Tensor, gradients: ScoreGradients, num_labels: int
) -> tuple[Tensor, Tensor]:
    """As `matrix_of`, where nearly every label may have a coefficient: a dense (k', T) matrix."""
    matrix = gradients.negative.new_zeros(len(positive_ids), num_labels)  # (k', L)
    matrix.index_add_(1, sampled_ids.clamp(min=0), gradients.negative)  # an empty slot adds 0
    matrix.scatter_add_(1, positive_ids.unsqueeze(1), gradients.positive.unsqueeze(1))
    touched = (matrix != 0).any(dim=0).nonzero().squeeze(1)  # (k', L) -> (T,)
    return touched, matrix.index_select(1, touched)
