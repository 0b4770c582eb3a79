"""Search, and evaluation, of a model whose tables are split over ranks.

Every rank searches its own labels for all queries. What they found is merged by shares of the
queries: each rank is sent the others' best for its share, merges them, and the merged shares are
gathered. So a rank receives about twice what an answer holds, however many ranks there are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenhand.data import Dataset, IntArray
from evenhand.distributed.ranks import Ranks, Shards, share_of, share_sizes
from evenhand.distributed.row_exchange import RowExchange, fetch_rows
from evenhand.evaluation.outcome import Outcome, evaluate
from evenhand.models import Retriever, features_of, row_encoder
from evenhand.search.exact import ExactIndex, SearchResult


class SplitIndex:
    """Answers as one `ExactIndex` over the labels of all ranks would, ties included.

    All ranks ask the same at the same time, and all have the whole answer.
    """

    def __init__(self, own: ExactIndex, num_labels: int, ranks: Ranks) -> None:
        """Args:
        own: the labels of this rank, which may be none.
        num_labels: of all ranks.
        """
        self.own, self.ranks = own, ranks
        shards = Shards(num_labels, ranks.num_ranks)
        self.num_labels = num_labels
        self.counts = [shards.rows_of(rank).size for rank in range(ranks.num_ranks)]
        self.first, self.last = shards.rows_of(ranks.rank)
        if len(own) != self.last - self.first:
            raise ValueError(
                f"rank {ranks.rank} of {ranks.num_ranks} holds {self.last - self.first} of "
                f"{num_labels} labels, got an index of {len(own)}"
            )

    def __len__(self) -> int:
        return self.num_labels

    @torch.no_grad()
    def search(self, queries: Tensor, num_results: int) -> SearchResult:
        """The labels of the highest score: (Q, D) -> (Q, R), where R = min(num_results, L)."""
        if num_results < 1:
            raise ValueError(f"num_results must be at least 1, got {num_results}")
        ranks = self.ranks
        widths = [min(num_results, count) for count in self.counts]
        # This rank's best, padded to what the ranks with the most labels find: (Q, C).
        width, shape = widths[ranks.rank], (len(queries), max(widths))
        found = queries.new_full(shape, -1, dtype=torch.long), queries.new_zeros(shape)
        if width:
            own_ids, own_scores = self.own.search(queries, width)
            found[0][:, :width], found[1][:, :width] = own_ids + self.first, own_scores
        shares = share_sizes(len(queries), ranks.num_ranks)
        sizes = {"sent": shares, "received": [shares[ranks.rank]] * ranks.num_ranks}
        waits = [ranks.start_exchange(part, **sizes, what="search: found") for part in found]
        ids, scores = (wait().view(ranks.num_ranks, -1, max(widths)) for wait in waits)  # (W, q, C)
        best = merge(ids, scores, widths, num_results=num_results)  # (q, R)
        return SearchResult(
            *(ranks.gather(part, counts=shares, what="search: merged") for part in best)
        )

    @torch.no_grad()
    def scores_of(self, queries: Tensor, label_ids: Tensor) -> Tensor:
        """Scores of chosen labels: (Q, D), (Q, P) -> (Q, P), -inf where the id is -1."""
        is_own = (label_ids >= self.first) & (label_ids < self.last)
        scores = queries.new_zeros(label_ids.shape)
        if len(self.own):
            own_ids = torch.where(is_own, label_ids - self.first, -1)
            own_scores = self.own.scores_of(queries, own_ids)
            scores = torch.where(is_own, own_scores, scores)
        # Every label is one rank's own, and to add zeros changes nothing.
        scores = self.ranks.sum_(scores, what="search: scores")
        return scores.masked_fill(label_ids < 0, -torch.inf)


def merge(
    label_ids: Tensor, scores: Tensor, widths: Sequence[int], *, num_results: int
) -> SearchResult:
    """The best of what ranks found, each best first: (W, q, C), (W, q, C) -> (q, R).

    Of rank r the first widths[r] columns count. Ranks hold ids in ascending order, so that a
    stable sort leaves the lower id first among equals.

    Example:
        >>> ids, scores = torch.tensor([[[1, 0]], [[2, -1]]]), torch.tensor([[[3, 1]], [[3, 0]]])
        >>> merge(ids, scores, [2, 1], num_results=2)
        SearchResult(label_ids=tensor([[1, 2]]), scores=tensor([[3, 3]]))
    """
    all_ids, all_scores = (
        torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        for parts in (label_ids, scores)
    )  # (q, sum of the widths)
    ordered, order = all_scores.sort(dim=1, descending=True, stable=True)
    kept = order[:, :num_results]  # (q, R)
    return SearchResult(all_ids.gather(1, kept), ordered[:, :num_results].contiguous())


@torch.no_grad()
def evaluate_split(
    model: Retriever,
    own_index: ExactIndex,
    dataset: Dataset,
    part_name: str,
    *,
    ranks: Ranks,
    **settings: Any,
) -> Outcome:
    """Searches all labels for every query of a part; the outcome equals that of one process.

    All ranks go through the part together. Each encodes its share of a block of queries and
    searches its own labels for the whole block; what leaves a rank are vectors of queries, the rows
    of features that they need, and the best labels: nothing of the size of a table.

    Args:
        model: this rank's rows of the tables.
        own_index: the labels of this rank.
        settings: of `evaluate`.
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
        num_train_queries=len(dataset.parts["train"]),
        **settings,
    )
