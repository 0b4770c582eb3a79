"""An encoder that nobody here has heard of: trained, checkpointed and split like our own."""

import copy

import pytest
import torch

import small
from evenhand.build import build_training
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
