"""Evaluation of a model whose tables ranks hold between them: the outcome of one process.

All ranks go through the part together. Each encodes its share of a block of queries and searches
its own labels for the whole block; what leaves a rank are vectors of queries, the rows of features
that they need, and the best labels: nothing of the size of a table.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenhand.data import Dataset, IntArray
from evenhand.distributed.exchange import RowExchange, sorted_distinct_ids
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.search import SplitIndex
from evenhand.distributed.shards import share_of, share_sizes
from evenhand.evaluation.outcome import CUTOFFS, Outcome, evaluate
from evenhand.models.encoders import Features, row_encoder
from evenhand.models.features import features_of
from evenhand.models.retriever import Retriever
from evenhand.search.exact import ExactIndex


class SplitEncoder:
    """Query vectors by all ranks together; each encodes some, and has all of them."""

    def __init__(self, model: Retriever, *, num_features: int, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.exchange = RowExchange("features", num_features, ranks)

    @torch.no_grad()
    def __call__(self, features_fn: Callable[[slice], Features], num_queries: int) -> Tensor:
        """(Q, D), scale included.

        Args:
            features_fn: the features of some of the queries.
            num_queries: Q, the same on all ranks.
        """
        ranks = self.ranks
        share = slice(*share_of(num_queries, ranks.rank, ranks.num_ranks))
        raw_vectors = self._encode(features_fn(share))  # (q, D)
        return ranks.gather(
            self.model.as_queries(raw_vectors),
            counts=share_sizes(num_queries, ranks.num_ranks),
            what="query vectors",
        )

    def _encode(self, features: Features) -> Tensor:
        """What the encoder makes of this rank's queries, with rows fetched from their owners."""
        encoder = row_encoder(self.model.encoder)
        if encoder is None:
            return self.model.encoder(features)  # type: ignore[no-any-return]
        ids, places = sorted_distinct_ids(encoder.row_ids(features))
        request = self.exchange.request(ids)
        rows = self.exchange.start_fetch(request, encoder.weight)()  # (n, D)
        small = encoder.with_rows(rows.to(torch.promote_types(rows.dtype, torch.float32)))
        return small(encoder.renumber(features, places))  # type: ignore[no-any-return]


def evaluate_split(
    model: Retriever,
    own_index: ExactIndex,
    dataset: Dataset,
    part_name: str,
    *,
    ranks: Ranks,
    num_results: int = 50,
    cutoffs: Sequence[int] = CUTOFFS,
    batch_size: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Searches all labels for every query of a part; called by all ranks, the same for all.

    Args:
        model: this rank's rows of the tables.
        own_index: the labels of this rank.
    """
    part, device = dataset.parts[part_name], model.label_table.device
    encoder = SplitEncoder(model, num_features=dataset.num_features, ranks=ranks)

    def encode(row_ids: IntArray) -> Tensor:
        return encoder(lambda share: features_of(part, row_ids[share], device=device), len(row_ids))

    return evaluate(
        encode,
        SplitIndex(own_index, dataset.num_labels, ranks),
        part,
        dataset.label_counts(),
        num_results=num_results,
        cutoffs=cutoffs,
        batch_size=batch_size,
        num_train_queries=len(dataset.parts["train"]),
        progress=progress,
    )
