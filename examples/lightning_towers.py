"""The same towers in Lightning, with negatives from all labels. python -m examples.lightning_towers

`S2MLoss` is a module, so Lightning needs no adapter: it switches the loss to eval mode for
validation, and its checkpoints hold how far k' has shrunk.
"""

import random
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from evenhand import S2MLoss
from examples.two_towers import NAMES, SCALE, Tower, misspell, trigrams_of


class Towers(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.loss_fn = S2MLoss(len(NAMES), num_sampled_labels=100, anneal_steps=150)
        self.register_buffer("names", trigrams_of(NAMES))

    def labels(self, ids: Tensor) -> Tensor:
        return self.tower(self.names[ids])

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss_fn(SCALE * self.tower(batch[0]), self.labels, batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.loss_of(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        found = (self.tower(batch[0]) @ self.tower(self.names).T).argmax(1)
        self.log("recall@1", (found == batch[1]).float().mean())
        self.log("loss", self.loss_of(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def loader(count: int, *, seed: int) -> Any:
    generator = random.Random(seed)
    ids = generator.choices(range(len(NAMES)), k=count)
    queries = trigrams_of([misspell(NAMES[i], generator) for i in ids])
    return DataLoader(TensorDataset(queries, torch.tensor(ids)), batch_size=64)


def main() -> float:  # recall@1 of new misspelt names
    torch.manual_seed(0)
    options = {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", **options)
    trainer.fit(Towers(), loader(4000, seed=1), loader(500, seed=2))
    return float(trainer.callback_metrics["recall@1"])


if __name__ == "__main__":
    print(f"recall@1 of misspelt names: {main():.3f}")
