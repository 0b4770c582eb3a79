"""Trains an encoder of your own: a GRU that reads the tokens of a query in their order.

    python examples/own_encoder.py

Any `nn.Module` from a batch's features to (B, D) will do: Evenhand encodes a batch without
gradient, mines it, and encodes the survivors again with gradient. Features are a (B, F) tensor, or
`Bags`: the ids of all queries in one row, and where those of each begin. No more is to be written.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from evenhand.build import build_training
from evenhand.config import build_config
from evenhand.data import Dataset, Part, Rows
from evenhand.models import Bags
from evenhand.runs import evaluate_model
from evenhand.training.loop import train

NUM_TOKENS, NUM_LABELS, DIM = 12, 132, 32
SETTINGS = {
    "model": {"embedding_dim": DIM, "scale": 10.0},
    "loss": {"name": "softmax"},
    "mining": {
        "batch_size": 64,
        "num_sampled_labels": 100,
        "num_hard_labels": 10,
        "num_hard_examples": 32,
    },
    "training": {"num_steps": 300, "learning_rate": 0.01, "evaluate_every": 0},
}


class GruEncoder(nn.Module):
    """The last state of a GRU over the tokens of each query."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 16)
        self.gru = nn.GRU(16, DIM, batch_first=True)

    def forward(self, features: Bags) -> Tensor:
        lengths = features.offsets.diff()  # (B,)
        tokens = pad_sequence(features.ids.split(lengths.tolist()), batch_first=True)  # (B, T)
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        return last[0]  # type: ignore[no-any-return]


def make_dataset(num_queries: int = 3000) -> Dataset:
    """Four tokens a query. The first two, in their order, are its label: (a, b) is not (b, a)."""
    generator = np.random.default_rng(0)
    pairs = np.array([(a, b) for a in range(NUM_TOKENS) for b in range(NUM_TOKENS) if a != b])
    labels = generator.integers(NUM_LABELS, size=num_queries)
    tokens = np.hstack([pairs[labels], generator.integers(NUM_TOKENS, size=(num_queries, 2))])
    parts = {}
    for name, rows in (("train", slice(500, None)), ("validation", slice(0, 500))):
        own = tokens[rows].astype(np.int32)
        features = Rows(np.arange(len(own) + 1) * own.shape[1], own.ravel())
        positives = Rows(np.arange(len(own) + 1), labels[rows].astype(np.int32))
        parts[name] = Part(features, positives)
    return Dataset(name="pairs", num_features=NUM_TOKENS, num_labels=NUM_LABELS, parts=parts)


def main() -> float:
    """Trains, and returns the recall@1 on queries that were not trained on."""
    torch.manual_seed(0)
    config, dataset = build_config(SETTINGS), make_dataset()
    built = build_training(config, dataset, torch.device("cpu"), encoder=GruEncoder())
    train(built.training, built.plan, built.choose_step().step)
    outcome = evaluate_model(built.training.model, dataset, "validation", config)
    recall = float((outcome.ranks == 1).mean())
    print(f"recall@1 of the GRU: {recall:.3f}")
    return recall


if __name__ == "__main__":
    main()
