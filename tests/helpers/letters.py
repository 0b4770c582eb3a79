"""An encoder of texts that trains in a moment, and what a run with it answers."""

import torch
from torch import nn

import small


class Letters(nn.Module):
    """The mean of the vectors of a text's letters, with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(128, 16)
        self.layers = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 12))

    def forward(self, texts):
        means = [self.letters(torch.tensor([ord(c) % 128 for c in text])).mean(0) for text in texts]
        return self.layers(torch.stack(means))


def command(capsys, *words):
    answer = small.run_main(capsys, *words)
    assert answer.code == 0, answer


def answers(run):
    return run.search(["badoki", "tivwel"], 3)["score"].tolist()
