"""From a query's features to its vector, and from the vector's gradient back to the weights.

Every encoder does two things: `forward(features) -> (B, D)`, and
`accumulate(features, vector_gradients)`, the way back for the few examples that survive mining.
A table's gradient is returned as touched rows; dense weights receive theirs in `.grad`.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand.kernels.sparse import Lists, distinct_ids, entries_of, transposed_product
from evenhand.models.initial import RowRange, random_rows


class Bags(NamedTuple):
    """Sparse features of a batch, as CSR."""

    ids: Tensor  # (nnz,) int64
    offsets: Tensor  # (B + 1,) int64
    values: Tensor | None = None  # (nnz,); None: a bag is the plain mean of its features


Features = Bags | Tensor  # a Tensor is dense: (B, F)


class RowGradients(NamedTuple):
    """The gradient of a table, of the rows it is not zero for."""

    ids: Tensor  # (T,) int64, distinct
    values: Tensor  # (T, D)


class QueryEncoder(Protocol):
    def __call__(self, features: Features) -> Tensor:
        """(B, D) query vectors."""

    def accumulate(self, features: Features, vector_gradients: Tensor) -> RowGradients | None:
        """Carries (B, D) gradients back; returns those of the table, if there is one."""


def taken_features(features: Features, positions: Tensor) -> Features:
    """The features of chosen examples, in that order."""
    if isinstance(features, Tensor):
        return features.index_select(0, positions)
    entries, offsets = entries_of(features.offsets, positions)  # (nnz of the chosen,), (k' + 1,)
    values = None if features.values is None else features.values[entries]
    return Bags(features.ids[entries], offsets, values)


class BagEncoder(nn.Module):
    """A bag of weighted features through one linear layer: the paper's hidden layer.

    Features with values are summed, each times its value; features without are averaged.

    Args:
        rows: those of the table that are held here, where others hold the rest; None: all.
    """

    def __init__(
        self,
        num_features: int,
        embedding_dim: int,
        *,
        generator: torch.Generator | None = None,
        rows: RowRange | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        table = random_rows(
            num_features, embedding_dim, generator, rows=rows, device=device, dtype=dtype
        )
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, features: Features) -> Tensor:
        assert isinstance(features, Bags)
        values = features.values
        return F.embedding_bag(
            features.ids,
            self.weight,
            features.offsets,
            mode="mean" if values is None else "sum",
            per_sample_weights=None if values is None else values.to(self.weight.dtype),
            include_last_offset=True,
        )

    @torch.no_grad()
    def accumulate(self, features: Features, vector_gradients: Tensor) -> RowGradients:
        """The transposed product: row f receives the sum of value * gradient over its bags."""
        assert isinstance(features, Bags)
        values = features.values
        if values is None:
            lengths = features.offsets.diff()
            shares = 1 / lengths.clamp(min=1).to(vector_gradients.dtype)
            values = torch.repeat_interleave(shares, lengths)  # (nnz,)
        ids, columns = distinct_ids(features.ids)
        bags = Lists(features.offsets, columns, values.to(vector_gradients.dtype))  # (B, T)
        return RowGradients(ids, transposed_product(bags, vector_gradients, num_columns=len(ids)))


class MlpEncoder(nn.Module):
    """Dense features through a perceptron; without hidden widths it is one linear layer."""

    def __init__(
        self,
        num_features: int,
        embedding_dim: int,
        *,
        hidden_widths: tuple[int, ...] = (),
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        widths = [num_features, *hidden_widths, embedding_dim]
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            layer.weight.data = random_rows(
                layer.out_features, layer.in_features, generator
            ) * math.sqrt(2 if layer is not self.layers[-1] else 1)
            layer.bias.data.zero_()
        self.to(device)

    def forward(self, features: Features) -> Tensor:
        assert isinstance(features, Tensor)
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        return self.layers[-1](features)  # type: ignore[no-any-return]

    def accumulate(self, features: Features, vector_gradients: Tensor) -> None:
        with torch.enable_grad():
            self(features).backward(vector_gradients)
