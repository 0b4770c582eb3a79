"""An encoder that nobody here has heard of: trained, checkpointed and split like our own."""

import torch
from torch import nn

import small
from examples import own_encoder
from ranks import exit_codes
from split_training import take_steps, whole_training

torch.manual_seed(0)


def test_the_example_learns_the_order_of_tokens():
    """A model that does not see the order finds the label of (a, b) half of the time at most."""
    assert own_encoder.main() > 0.7


class Attention(nn.Module):
    """A transformer with dropout over features that are cut into tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, own_encoder.DIM)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)

    def forward(self, features):
        return self.last(self.layer(self.first(features.view(len(features), 4, 3))).mean(1))


def attention_training(chunk_size, ranks=None):
    settings = {"model__embedding_dim": own_encoder.DIM, "loss__name": "softmax"}
    config = small.config("none", **settings, training__chunk_size=chunk_size)
    return whole_training(
        config, small.dense_dataset(), dtype=torch.float64, ranks=ranks, encoder=Attention()
    )


def train_and_save(ranks, folder):
    built = attention_training(4, ranks)
    figures = take_steps(built, 6)
    torch.save((figures, dict(built.training.model.encoder.state_dict())), folder / f"{ranks.rank}")


def test_chunks_and_processes_change_nothing_with_dropout(tmp_path):
    alone, chunked = attention_training(0), attention_training(5)
    figures = take_steps(alone, 6)
    expected = alone.training.model.encoder.state_dict()
    torch.testing.assert_close(take_steps(chunked, 6), figures, rtol=1e-9, atol=1e-10)
    assert exit_codes(2, tmp_path, train_and_save, tmp_path) == [0, 0]
    for rank in range(2):
        own_figures, weights = torch.load(tmp_path / str(rank), weights_only=True)
        torch.testing.assert_close(own_figures, figures, rtol=1e-9, atol=1e-10)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9, msg=name)
            other = chunked.training.model.encoder.state_dict()[name]
            torch.testing.assert_close(other, expected[name], rtol=1e-7, atol=1e-9, msg=name)
