"""Evaluates a model whose tables are sharded over ranks; the outcome equals that of one process.

All ranks go through the part together. Each encodes its share of a block of queries and searches
its own labels for the whole block; what leaves a rank are vectors of queries, the rows of features
that they need, and the best labels: nothing of the size of a table.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenhand.data import Dataset, IntArray
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.row_exchange import RowExchange, fetch_rows
from evenhand.distributed.search import SplitIndex
from evenhand.distributed.shards import share_of, share_sizes
from evenhand.evaluation.outcome import CUTOFFS, Outcome, evaluate
from evenhand.models.encoders import features_of, row_encoder
from evenhand.models.retriever import Retriever
from evenhand.search.exact import ExactIndex


@torch.no_grad()
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
    exchange = RowExchange("features", dataset.num_features, ranks)

    def encode(row_ids: IntArray) -> Tensor:
        """(Q, D), scale included: each rank encodes its share, and all have all of them."""
        counts = share_sizes(len(row_ids), ranks.num_ranks)
        share = slice(*share_of(len(row_ids), ranks.rank, ranks.num_ranks))
        features, encoder = features_of(part, row_ids[share], device=device), model.encoder
        by_rows = row_encoder(encoder)
        if by_rows is not None:
            _, rows, features = fetch_rows(exchange, by_rows, features)
            encoder = by_rows.with_rows(rows.to(torch.promote_types(rows.dtype, torch.float32)))
        vectors = model.as_queries(encoder(features))  # (q, D)
        return ranks.gather(vectors, counts=counts, what="query vectors")

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
