import math

import pytest
import torch

from evenhand.losses import contrastive_loss
from evenhand.models import MlpEncoder, Retriever
from evenhand.risk import mean_weights
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch
from evenhand.training.step import gradients_of, mine

WIDTH, NUM_LABELS = 4, 9
KINDS = {
    "cosine": {"is_cosine": True, "scale": 3.0},
    "dot": {"is_cosine": False, "scale": 0.5},
    "dot and bias": {"is_cosine": False, "has_label_bias": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def retriever(kind="cosine", seed=0):
    generator = torch.Generator().manual_seed(seed)
    encoder = MlpEncoder(5, WIDTH, generator=generator)
    model = Retriever(encoder, NUM_LABELS, WIDTH, generator=generator, **KINDS[kind]).double()
    if model.label_bias is not None:
        model.label_bias.data.normal_(generator=generator)
    return model


def score_by_hand(model, query, label_id):
    label = model.label_table[label_id].tolist()
    product = sum(q * v for q, v in zip(query, label, strict=True))
    if model.is_cosine:
        product /= math.hypot(*query) * math.hypot(*label)
    bias = 0 if model.label_bias is None else model.label_bias[label_id].item()
    return model.scale * product + bias


@every_kind
def test_scores_match_their_definition(kind):
    model, features = retriever(kind), torch.randn(3, 5, dtype=torch.float64)
    scores = model.query_vectors(features) @ model.label_vectors().T
    if model.biases() is not None:
        scores = scores + model.biases()
    for row, query in zip(scores.tolist(), model.encoder(features).tolist(), strict=True):
        expected = [score_by_hand(model, query, label_id) for label_id in range(NUM_LABELS)]
        assert row == pytest.approx(expected, rel=1e-12)


def test_a_query_of_zeros_does_not_throw_dense_weights_far_away():
    """With a bias that is still zero its vector is the zero vector."""
    encoder = MlpEncoder(3, WIDTH, hidden_widths=(4,))
    model = Retriever(encoder, NUM_LABELS, WIDTH)
    batch = Batch(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([[0], [1]]))
    queries = model.query_vectors(batch.features)
    sample = LabelSample(torch.tensor([2, 3]), torch.zeros(2))
    mined = mine(
        queries, batch, model, sample, num_hard_labels=2,
        loss_fn=contrastive_loss, risk_fn=mean_weights,
    )  # fmt: skip
    gradients_of(mined, queries, batch, model)
    gradients = [weights.grad for weights in encoder.parameters()]
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)
