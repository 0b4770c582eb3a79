"""In-batch negatives, mined, for the trainer of sentence-transformers. Extra: evenhand[text].

loss = S2MRankingLoss(model)  # where MultipleNegativesRankingLoss(model) was
SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand.loss_module import S2MLoss


class S2MRankingLoss(nn.Module):
    """`S2MLoss` over the cosines of (anchor, positive, negative, ...) columns of a batch.

    Equal texts are one label: a text is never its own negative, nor that of an equal anchor. With
    `S2MLoss(num_hard_labels=all, tail_fraction=1)` and no repeats it is
    MultipleNegativesRankingLoss.
    """

    def __init__(
        self, model: nn.Module, loss: S2MLoss | None = None, *, scale: float = 20.0
    ) -> None:
        """
        Args:
            model: a SentenceTransformer.
            loss: None: `S2MLoss()`. The trainer's checkpoints hold the model alone; after a
                resume set `loss.step` to the trainer's.
            scale: of the cosines.
        """
        super().__init__()
        self.model, self.scale = model, scale
        self.loss = S2MLoss() if loss is None else loss

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            sentence_features: tokens of each column, (B, ...).
            labels: not used: a pair is right, whatever it is called.
        """
        anchors, *candidates = sentence_features
        ids = ids_of_texts(candidates)  # (C,)
        queries = ids_of_texts([anchors])  # (B,)
        # Other positives of the same text: ids (B, P), padded with -1.
        is_same = queries.unsqueeze(1) == queries  # (B, B)
        others = torch.where(is_same, ids[: len(queries)], -1).sort(dim=1, descending=True).values
        others = others[:, : int(is_same.sum(1).max())]

        self.loss.train(self.model.training)  # a trainer that evaluates switches the model alone
        vectors = [
            F.normalize(self.model(own)["sentence_embedding"]) for own in (anchors, *candidates)
        ]
        loss: Tensor = self.loss(
            self.scale * vectors[0], torch.cat(vectors[1:]), ids, positive_ids=others
        )
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of it."""
        names = ("num_hard_labels", "tail_fraction", "anneal_steps")
        return {"scale": self.scale} | {name: getattr(self.loss, name) for name in names}


def ids_of_texts(columns: Iterable[Mapping[str, Any]]) -> Tensor:
    """(C,) the same number for rows with the same tokens, over all columns one after the other."""
    tokens = [
        column["input_ids"].masked_fill(column["attention_mask"] == 0, -1) for column in columns
    ]
    width = max(own.shape[1] for own in tokens)
    padded = torch.cat([F.pad(own, (0, width - own.shape[1]), value=-1) for own in tokens])
    ids: Tensor = torch.unique(padded, dim=0, return_inverse=True)[1]
    return ids
