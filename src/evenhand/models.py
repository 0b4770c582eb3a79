"""Query encoders, features to vectors and gradients back; and the labels they are matched with.

An encoder is any `nn.Module` that maps the features of B queries to (B, D). It needs nothing else:
a step encodes the batch without gradient, mines it, and encodes the survivors again with gradient,
both in chunks (see `encoding`, also for dropout); `torch.autograd` does the rest, and the dense
optimiser updates whatever has a `.grad`.

An encoder whose weights are one large table, of which a batch touches a few rows, may offer more:
see `RowEncoder`. No step asks which class an encoder is of.
"""

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand.data import FloatArray, IntArray, Part, Rows, take_rows
from evenhand.data.weighting import unit_values
from evenhand.encoding import encode_in_chunks, survivors_in_chunks
from evenhand.kernels.random import GOLDEN32
from evenhand.kernels.rows import through_unit, unit
from evenhand.kernels.sparse import Lists, distinct_ids, entries_of, transposed_product

LABELS_AT_ONCE = 1024


class Bags(NamedTuple):
    """Sparse features of a batch, as CSR."""

    ids: Tensor  # (nnz,) int64
    offsets: Tensor  # (B + 1,) int64
    values: Tensor | None = None  # (nnz,); None: a bag is the plain mean of its features

    @property
    def num_examples(self) -> int:
        return len(self.offsets) - 1

    def take(self, positions: Tensor) -> "Bags":
        """The bags of chosen examples, in that order."""
        entries, offsets = entries_of(self.offsets, positions.to(self.offsets.device))
        values = None if self.values is None else self.values[entries]
        return Bags(self.ids[entries], offsets, values)


Features = Bags | Tensor | list[str]  # a Tensor is dense: (B, F); a list holds B texts


class RowRange(NamedTuple):
    """Rows first .. last - 1 of a table."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


class RowGradients(NamedTuple):
    """The gradient of a table, of the rows it is not zero for."""

    ids: Tensor  # (T,) int64, distinct
    values: Tensor  # (T, D)


class RowEncoder(Protocol):
    """An encoder that is one table (R, D), updated row by row and split over ranks by its rows.

    Its table is the parameter `weight`, without `requires_grad`. There is no other parameter.
    """

    weight: nn.Parameter
    kernel_kind: str | None  # what the GPU's kernels compute the vectors by: "bag"; None: by none

    def __call__(self, features: Any) -> Tensor: ...

    def row_gradients(self, features: Any, vector_gradients: Tensor) -> RowGradients:
        """The gradient of the touched rows, from that of the vectors (B, D)."""

    def row_ids(self, features: Any) -> Tensor:
        """(n,) the row of every use of the table, repeats included."""

    def renumber(self, features: Any, row_ids: Tensor) -> Any:
        """The same features with other `row_ids` (n,), for a table that holds fewer rows."""

    def with_rows(self, rows: Tensor) -> Any:
        """A `RowEncoder` like this one, with another table (n, D)."""


def row_encoder(encoder: nn.Module) -> RowEncoder | None:
    """The encoder, if it is a table of rows; None: all its weights are dense."""
    return cast(RowEncoder, encoder) if hasattr(encoder, "row_gradients") else None


class Passes(NamedTuple):
    """How a dense encoder is run over a batch, twice: see `encoding`."""

    seeds: Tensor  # (B,) of the examples' dropout
    chunk_size: int
    is_mixed: bool = False  # in bfloat16 where autocast says so, on a GPU alone

    def take(self, positions: Tensor) -> "Passes":
        return self._replace(seeds=self.seeds[positions.to(self.seeds.device)])

    @property
    def chunks(self) -> dict[str, Any]:
        """What `encoding` asks for."""
        return {"seeds": self.seeds, "chunk_size": self.chunk_size}

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.is_mixed:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return contextlib.nullcontext()


def encode(encoder: nn.Module, features: Any, passes: Passes | None) -> Tensor:
    """The first pass, (B, D) without gradient; a table of rows is read at once."""
    if passes is None or row_encoder(encoder) is not None:
        with torch.no_grad():
            vectors: Tensor = encoder(features)
        return vectors
    with passes.precision():
        vectors = encode_in_chunks(encoder, features, **passes.chunks)
    return vectors.float() if passes.is_mixed else vectors


def backward(
    encoder: nn.Module, features: Any, vector_gradients: Tensor, passes: Passes | None = None
) -> RowGradients | None:
    """Carries gradients (B, D) of the vectors back to the encoder's weights: the second pass.

    Returns:
        Those of the table's rows; None: dense weights have theirs added to `.grad`.
    """
    by_rows = row_encoder(encoder)
    if by_rows is not None:
        return by_rows.row_gradients(features, vector_gradients)
    if passes is None:
        seeds = torch.zeros(len(vector_gradients), dtype=torch.int64)
        passes = Passes(seeds, chunk_size=max(1, len(seeds)))
    chunks = survivors_in_chunks(encoder, features, vector_gradients, **passes.chunks)
    while True:
        with passes.precision():
            chunk = next(chunks, None)
        if chunk is None:
            return None
        vectors, gradients = chunk
        if vectors.requires_grad:  # else all of its weights are frozen
            torch.autograd.backward([vectors], [gradients.to(vectors.dtype)])


def features_of(part: Part, query_ids: IntArray, *, device: torch.device) -> Features:
    """What the encoder takes of chosen queries, as tensors where it is no texts."""
    return as_tensors(inputs_of(part, query_ids), device=device)


def inputs_of(part: Part, query_ids: IntArray) -> Rows | FloatArray | list[str]:
    """What the encoder takes of chosen queries: their texts, or their features."""
    if part.is_read_as_text:
        assert part.texts is not None
        return [part.texts[query_id] for query_id in query_ids]
    return chosen_features(part, query_ids)


def chosen_features(part: Part, query_ids: IntArray) -> Rows | FloatArray:
    """The features of chosen queries, weighted if the part says so: rows, or dense (B, F)."""
    if not isinstance(part.features, Rows):
        return np.ascontiguousarray(part.features[query_ids])
    rows = take_rows(part.features, query_ids)
    if part.feature_weights is not None:
        rows = Rows(rows.offsets, rows.ids, unit_values(rows, part.feature_weights))
    return rows


def as_tensors(features: Rows | FloatArray | list[str], *, device: torch.device) -> Features:
    """Rows as bags, or a dense array as a tensor, on a device; texts as they are."""
    if isinstance(features, list):
        return features
    if not isinstance(features, Rows):
        return torch.from_numpy(features).to(device)
    offsets, ids, values = features.to_torch(device)
    return Bags(ids, offsets, values)


class BagEncoder(nn.Module):
    """A bag of weighted features through one linear layer: the paper's hidden layer.

    Features with values are summed, each times its value; features without are averaged.

    Args:
        rows: those of the table that are held here, where others hold the rest; None: all.
    """

    kernel_kind = "bag"

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
    def row_gradients(self, features: Features, vector_gradients: Tensor) -> RowGradients:
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

    def row_ids(self, features: Bags) -> Tensor:
        return features.ids

    def renumber(self, features: Bags, row_ids: Tensor) -> Bags:
        return features._replace(ids=row_ids)

    def with_rows(self, rows: Tensor) -> "BagEncoder":
        encoder = BagEncoder(0, rows.shape[1])
        encoder.weight.data = rows
        return encoder


class MlpEncoder(nn.Module):
    """Dense features through a perceptron; without hidden widths it is one linear layer."""

    def __init__(
        self,
        num_features: int,
        embedding_dim: int,
        *,
        hidden_widths: tuple[int, ...] = (),
        standardizes: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            standardizes: features less `means`, over `deviations`, which training sets.
        """
        super().__init__()
        self.means: Tensor | None
        self.deviations: Tensor | None
        self.register_buffer("means", torch.zeros(num_features) if standardizes else None)
        self.register_buffer("deviations", torch.ones(num_features) if standardizes else None)
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
        if self.means is not None and self.deviations is not None:
            features = (features - self.means) / self.deviations
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        return self.layers[-1](features)  # type: ignore[no-any-return]


class FrozenEncoder(nn.Module):
    """A perceptron over the vectors of an encoder that is not trained.

    It takes what that encoder takes, or its vectors (B, F), which need to be computed only once.
    """

    def __init__(self, frozen: nn.Module, head: MlpEncoder) -> None:
        super().__init__()
        self.frozen, self.head = frozen.requires_grad_(False), head

    def train(self, mode: bool = True) -> "FrozenEncoder":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, features: Any) -> Tensor:
        if not isinstance(features, Tensor):
            with torch.no_grad():
                features = self.frozen(features)
        return self.head(features)  # type: ignore[no-any-return]


# --- queries and labels in one space --------------------------------------------------------------


class Retriever(nn.Module):
    """Scores are `scale * cosine` or `scale * dot product + label bias`.

    Label vectors have no autograd gradient: training writes the touched rows itself. Where a tower
    reads the labels, the table holds what it gave when all labels were last encoded.

    Args:
        encoder: any `nn.Module` from features to (B, D); see above.
        label_tower: the encoder of the labels, which may be `encoder` itself; None: a table.
        has_label_offsets: a label's vector is that of the tower plus a row of its own.
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
        label_tower: nn.Module | None = None,
        has_label_offsets: bool = False,
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
        self.is_tower_shared = label_tower is encoder
        self.label_tower = None if self.is_tower_shared else label_tower
        self.label_offsets: nn.Parameter | None = None
        if has_label_offsets:
            self.label_offsets = nn.Parameter(torch.zeros_like(table), requires_grad=False)
        self.label_bias: nn.Parameter | None = None
        if has_label_bias:
            biases = torch.zeros(len(table), 1, device=device)
            self.label_bias = nn.Parameter(biases, requires_grad=False)
        self.eval()  # a step alone puts the encoder into training mode

    @property
    def tower(self) -> nn.Module | None:
        """The encoder of the labels; None: they have a table."""
        return self.encoder if self.is_tower_shared else self.label_tower

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
        if self.is_cosine:
            return unit(self.label_table, label_ids)
        return (
            self.label_table if label_ids is None else self.label_table.index_select(0, label_ids)
        )

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

    def through_unit(self, gradients: Tensor, vectors: Tensor, ids: Tensor | None = None) -> Tensor:
        """Gradients (n, D) by vectors, or by some rows of a table, from those by their `unit`s."""
        return through_unit(gradients, vectors, ids) if self.is_cosine else gradients


@torch.no_grad()
def tower_rows(
    tower: nn.Module, labels: Part, *, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """What a tower makes of all labels, block by block: the first label, and rows (n, D)."""
    tower.eval()
    for first in range(0, len(labels), LABELS_AT_ONCE):
        ids = np.arange(first, min(first + LABELS_AT_ONCE, len(labels)))
        yield first, tower(features_of(labels, ids, device=device))


# --- the rows that tables begin with --------------------------------------------------------------

FIRST_BLOCK = 2**20  # rows of one stream; a table of so many or fewer has no other
LATER_BLOCK = 2**16
CHUNK = 2**15  # numbers drawn at once: no more than these are held beside the table
GROUP = 16  # torch draws normal numbers in groups of so many: a chunk must not end within one


@torch.no_grad()
def random_rows(
    num_rows: int,
    embedding_dim: int,
    generator: torch.Generator | None = None,
    *,
    rows: RowRange | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows of length about 1 in random directions: (R, D), or of a range of them alone.

    The first rows come from `generator`, in one stream; later ones in blocks with a generator each,
    so that a rank draws the blocks of its own rows alone. Neither the rows nor the state that the
    generator is left in depend on the range. On the meta device nothing is drawn.
    """
    first, last = RowRange(0, num_rows) if rows is None else rows
    if not 0 <= first <= last <= num_rows:
        raise ValueError(f"rows must be a range within 0 to {num_rows}, got {first} to {last}")
    table = torch.empty(last - first, embedding_dim, device=device, dtype=dtype)
    if table.device.type == "meta":
        return table
    step = GROUP * max(1, CHUNK // (GROUP * max(1, embedding_dim)))  # rows of a chunk

    def fill(start: int, stop: int, own: torch.Generator | None, *, is_drawn_whole: bool) -> None:
        while start < stop and (is_drawn_whole or start < last):
            end = start + step
            if (stop - end) * embedding_dim < GROUP:  # torch would draw the last group anew
                end = stop
            drawn = torch.empty(end - start, embedding_dim).normal_(generator=own)
            low, high = max(start, first), min(end, last)
            if low < high:
                drawn = drawn[low - start : high - start].div_(math.sqrt(embedding_dim))
                table[low - first : high - first].copy_(drawn)
            start = end

    fill(0, min(num_rows, FIRST_BLOCK), generator, is_drawn_whole=True)
    if num_rows <= FIRST_BLOCK:
        return table
    seed = int(torch.randint(2**32, (), generator=generator))

    def fill_later(block: int) -> None:
        start = FIRST_BLOCK + block * LATER_BLOCK
        # An odd stride, so that all blocks of a table have seeds of their own.
        own = torch.Generator().manual_seed((seed + block * GOLDEN32) % 2**32)
        fill(start, min(start + LATER_BLOCK, num_rows), own, is_drawn_whole=False)

    first_block = max(0, (first - FIRST_BLOCK) // LATER_BLOCK)
    blocks = range(first_block, math.ceil((last - FIRST_BLOCK) / LATER_BLOCK))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill_later, blocks))
    return table
