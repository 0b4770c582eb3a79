"""An encoder that nobody here has heard of: trained, checkpointed and split like our own."""

import copy

import pytest
import torch
import torch.nn.functional as F

import small
from evenhand.build import build_training
from evenhand.losses import softmax_loss
from evenhand.training.loop import train
from evenhand.training.step import gradients_of, mine
from examples import own_encoder
from experiments.simulated_ranks import run_ranks
from split import joined, tables_of, take_steps

CPU = torch.device("cpu")
torch.manual_seed(0)
ENCODER = own_encoder.GruEncoder()  # the same weights on all ranks


@pytest.fixture(scope="module")
def dataset():
    return own_encoder.make_dataset(900)


def build(dataset, ranks=None):
    settings = {"model__embedding_dim": own_encoder.DIM, "loss__name": "softmax"}
    config = small.config("none", **settings, training__max_gradient_norm=0.5)
    return build_training(config, dataset, CPU, ranks=ranks, encoder=copy.deepcopy(ENCODER))


def test_the_example_learns_the_order_of_tokens():
    """A model that does not see the order finds the label of (a, b) half of the time at most."""
    assert own_encoder.main() > 0.7


def test_the_gradient_is_that_of_autograd_on_the_obvious_formula(dataset):
    built = build(dataset)
    model, batch = built.training.model.double(), built.training.feed.next_batch()
    positive_ids, generator = batch.positive_ids, torch.Generator().manual_seed(0)
    sample = built.plan.sampler.sample(positive_ids, 40, generator=generator)
    mined = mine(
        model.query_vectors(batch.features), batch, model, sample, num_hard_labels=5,
        loss_fn=softmax_loss, risk_fn=lambda losses: built.training.risk.weights(losses, batch, 8),
    )  # fmt: skip
    gradients = gradients_of(mined, model.query_vectors(batch.features), batch, model)

    table = model.label_table.detach().clone().requires_grad_()
    encoder = copy.deepcopy(model.encoder)
    encoder.zero_grad()
    queries = F.normalize(encoder(batch.features))
    scores = model.scale * queries @ F.normalize(table).T  # (B, L)
    is_own = sample.ids.unsqueeze(0) == positive_ids  # (B, M): one positive each
    hardest = scores[:, sample.ids].masked_fill(is_own, -torch.inf).topk(5).values
    losses = softmax_loss(scores.gather(1, batch.label_ids.unsqueeze(1))[:, 0], hardest)
    losses.topk(8).values.mean().backward()

    near = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(mined.losses, losses.detach(), **near)
    assert gradients.feature_rows is None
    for ours, theirs in zip(model.encoder.parameters(), encoder.parameters(), strict=True):
        assert theirs.grad.abs().max() > 0
        torch.testing.assert_close(ours.grad, theirs.grad, **near)
    label_rows = torch.zeros_like(table).index_copy(0, *gradients.label_rows)
    torch.testing.assert_close(label_rows, table.grad, **near)


def test_it_resumes_exactly(dataset):
    whole, first, second = (build(dataset) for _ in range(3))
    for built, last in ((whole, 10), (first, 4)):
        step, training = built.choose_step().step, built.training
        train(training, built.plan, step, should_stop_fn=lambda t=training, n=last: t.step == n)
    second.training.load(first.training.checkpoint())
    take_steps(second, 6)
    expected = tables_of(whole.training)
    for name, tensor in tables_of(second.training).items():
        assert tensor.equal(expected[name]), name


def test_two_ranks_sum_its_gradients(dataset):
    alone = build(dataset)
    figures, expected = take_steps(alone, 8), tables_of(alone.training)

    def rank_fn(ranks):
        built = build(dataset, ranks)
        return take_steps(built, 8), tables_of(built.training)

    results = run_ranks(2, rank_fn)
    torch.testing.assert_close(results[0][0], figures, rtol=1e-4, atol=1e-5)
    for name, tensor in joined([tables for _, tables in results], expected).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)
