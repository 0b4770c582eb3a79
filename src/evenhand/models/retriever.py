"""A retriever: a query encoder, a table of label vectors and the similarity between the two."""

import torch
from torch import Tensor, nn

from evenhand.kernels.rows import through_unit, through_unit_rows, unit, unit_rows
from evenhand.models.encoders import Features, RowRange, random_rows


class Retriever(nn.Module):
    """Scores are `scale * cosine` or `scale * dot product + label bias`.

    Label vectors have no autograd gradient: training writes the touched rows itself.

    Args:
        encoder: any `nn.Module` from features to (B, D); see `models.encoders`.
        label_rows: those of the label table that are held here, where others hold the rest.
        dtype: of the label table; biases are float32.
    """

    def __init__(
        self,
        encoder: nn.Module,
        num_labels: int,
        embedding_dim: int,
        *,
        is_cosine: bool = True,
        scale: float = 1.0,
        has_label_bias: bool = False,
        generator: torch.Generator | None = None,
        label_rows: RowRange | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if is_cosine and has_label_bias:
            raise ValueError("a label bias goes with the dot product, not with cosine scores")
        if not scale > 0:
            raise ValueError(f"scale must be above 0, got {scale}")
        self.encoder = encoder
        self.is_cosine = is_cosine
        self.scale = scale
        table = random_rows(
            num_labels, embedding_dim, generator, rows=label_rows, device=device, dtype=dtype
        )
        self.label_table = nn.Parameter(table, requires_grad=False)
        self.label_bias: nn.Parameter | None = None
        if has_label_bias:
            biases = torch.zeros(len(table), 1, device=device)
            self.label_bias = nn.Parameter(biases, requires_grad=False)

    @torch.no_grad()
    def query_vectors(self, features: Features) -> Tensor:
        """(B, D), scale included: their product with `label_vectors` is the score, less a bias."""
        return self.as_queries(self.encoder(features))

    def as_queries(self, raw_vectors: Tensor) -> Tensor:
        """`query_vectors` from what the encoder gave: (B, D) -> (B, D)."""
        return self.scaled(self.unit(raw_vectors))

    @torch.no_grad()
    def label_vectors(self, label_ids: Tensor | None = None) -> Tensor:
        """(n, D) of chosen labels, or of all."""
        if label_ids is None:
            return self.unit(self.label_table)
        if not self.is_cosine:
            return self.label_table.index_select(0, label_ids)
        return unit_rows(self.label_table, label_ids)

    def biases(self, label_ids: Tensor | None = None) -> Tensor | None:
        """(n,) of chosen labels, or of all; None for a model without."""
        if self.label_bias is None:
            return None
        if label_ids is None:
            return self.label_bias[:, 0]
        return self.label_bias.index_select(0, label_ids)[:, 0]

    def scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self.scale == 1 else self.scale * vectors

    def unit(self, vectors: Tensor) -> Tensor:
        """Rows of length 1 under the cosine, the rows themselves under the dot product."""
        return unit(vectors) if self.is_cosine else vectors

    def through_unit(self, gradients: Tensor, vectors: Tensor) -> Tensor:
        """Gradients by vectors from gradients by their `unit` vectors: (n, D), (n, D) -> (n, D)."""
        return through_unit(gradients, vectors) if self.is_cosine else gradients

    def through_label_vectors(self, gradients: Tensor, label_ids: Tensor) -> Tensor:
        """Gradients by rows of the table from gradients by `label_vectors`: (n, D) -> (n, D)."""
        if not self.is_cosine:
            return gradients
        return through_unit_rows(gradients, self.label_table, label_ids)
