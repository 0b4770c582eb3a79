"""Two towers in plain PyTorch: misspelt names find the right ones: python -m examples.two_towers"""

import itertools
import random
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand import S2MLoss, two_pass

WORDS = "small medium large", "red blue green black white", "shoe hat bag coat belt scarf sock"
NAMES = [" ".join(words) for words in itertools.product(*map(str.split, WORDS))]
NUM_TRIGRAMS, LENGTH, SCALE = 4096, 24, 20.0


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trigrams = nn.EmbeddingBag(NUM_TRIGRAMS, 64)
        self.rest = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, trigrams: Tensor) -> Tensor:
        return F.normalize(self.rest(self.trigrams(trigrams)))


def trigrams_of(texts: list[str]) -> Tensor:
    padded = [f"{text:{LENGTH + 2}}" for text in texts]
    codes = [[crc32(text[i : i + 3].encode()) for i in range(LENGTH)] for text in padded]
    return torch.tensor(codes) % NUM_TRIGRAMS


def misspell(text: str, generator: random.Random) -> str:
    left_out = generator.sample(range(len(text)), 2)
    return "".join(letter for place, letter in enumerate(text) if place not in left_out)


def main() -> float:  # recall@1 of new misspelt names
    torch.manual_seed(0)
    tower, loss_fn, generator = Tower(), S2MLoss(anneal_steps=150), random.Random(0)
    optimizer = torch.optim.Adam(tower.parameters(), 0.01)
    for _ in range(200):
        ids = generator.sample(range(len(NAMES)), 64)
        right = [NAMES[i] for i in ids]
        texts = trigrams_of([*(misspell(name, generator) for name in right), *right])
        vectors = two_pass(tower, texts, chunk_size=32)  # the memory of 32
        loss_fn(SCALE * vectors[:64], vectors[64:], torch.tensor(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    tower.eval()
    ids = generator.choices(range(len(NAMES)), k=500)
    queries = tower(trigrams_of([misspell(NAMES[i], generator) for i in ids]))
    found = (queries @ tower(trigrams_of(NAMES)).T).argmax(1)
    return float((found == torch.tensor(ids)).double().mean())


if __name__ == "__main__":
    print(f"recall@1 of misspelt names: {main():.3f}")
