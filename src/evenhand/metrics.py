"""How well ranked ids answer a query: one number for each query.

Contract shared by every function here:

    retrieved_ids (Q, R): label ids, best first; -1 where fewer were found.
    positive_ids (Q, P): each query's true labels, without repeats, padded with -1.

Ranked ids come in, never raw scores: no threshold can hide here. Results beyond R count as not
retrieved. Values are (Q,), NaN for a query without positives. Nothing here averages over queries.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def pair_ranks(retrieved_ids: Tensor, positive_ids: Tensor) -> Tensor:
    """Rank of each positive among the results, from 1: (Q, R), (Q, P) -> (Q, P) int64.

    0 where a positive was not retrieved, -1 where there is no positive.

    Example:
        >>> pair_ranks(torch.tensor([[7, 3, 5]]), torch.tensor([[5, 9, -1]]))
        tensor([[ 3,  0, -1]])
    """
    # Sorted look-up, because comparing all with all takes (Q, P, R).
    ids, order = retrieved_ids.sort(dim=1, stable=True)
    is_label = positive_ids >= 0
    if ids.shape[1] == 0:
        return is_label.long() - 1
    positions = torch.searchsorted(ids, positive_ids.contiguous())  # (Q, P)
    positions = positions.clamp(max=ids.shape[1] - 1)
    is_found = ids.gather(1, positions) == positive_ids
    ranks = (order.gather(1, positions) + 1).masked_fill(~is_found, 0)
    return ranks.masked_fill(~is_label, -1)


def label_propensities(
    label_counts: Tensor, num_examples: int, *, a: float = 0.55, b: float = 1.5
) -> Tensor:
    """How likely a label is recorded where it is true (Jain et al., 2016): (L,) -> (L,).

    p_l = 1 / (1 + c (n_l + b)^-a), c = (log N - 1) (b + 1)^a, where N = num_examples is the number
    of training queries. The letters are the paper's; a = 0.55, b = 1.5 its default (0.5, 0.4 for
    Wikipedia, 0.6, 2.6 for Amazon).

    Example:
        >>> label_propensities(torch.tensor([0, 10, 1000]), 10_000)
        tensor([0.0842, 0.2199, 0.7669])
    """
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}")
    counts = label_counts.to(torch.get_default_dtype())
    scale = max(0.0, math.log(num_examples) - 1) * (b + 1) ** a  # N < e: at most 1 all the same
    return torch.reciprocal(1 + scale * (counts + b) ** -a)


class QueryMetrics(NamedTuple):
    values: dict[str, Tensor]  # name -> (Q,), NaN for a query without positives
    weights: dict[str, Tensor]  # name -> (Q,), for the metrics whose mean is a weighted one


def query_metrics(
    retrieved_ids: Tensor,
    positive_ids: Tensor,
    *,
    cutoffs: tuple[int, ...],
    propensities: Tensor | None = None,
) -> QueryMetrics:
    """Every metric at every cutoff, from one look-up of the ranks.

    query recall@r   share of the query's positives within the first r results; the paper's
                     recall@r is over (query, label) pairs: a mean over `pair_ranks`
    precision@r      share of the first r results that are positives
    ndcg@r           sum over positives of rank i <= r of 1 / log2(1 + i), over the best possible,
                     which has the query's min(P, r) positives first
    mrr              1 / rank of the first positive, 0 when none was retrieved
    psp@r            precision in which a positive counts 1 / propensity, over the best possible

    Args:
        propensities: (L,) of the labels, for 'psp@r', the figure of the extreme classification
            repository (Jain et al., 2016). It divides a sum of gains by a sum of bests: its mean
            is (values * weights).sum() / weights.sum(), not the plain one.

    Example:
        >>> found = query_metrics(torch.tensor([[3, 7]]), torch.tensor([[7]]), cutoffs=(1, 2))
        >>> {name: round(value.item(), 2) for name, value in found.values.items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'query recall@1': 0.0, 'precision@1': 0.0, 'ndcg@1': 0.0,
         'query recall@2': 1.0, 'precision@2': 0.5, 'ndcg@2': 0.63, 'mrr': 0.5}
    """
    ranks = pair_ranks(retrieved_ids, positive_ids)  # (Q, P)
    num_positives = (ranks >= 0).sum(1)  # (Q,)
    inverse_ranks = (1 / ranks.clamp(min=1)) * (ranks > 0)  # (Q, P)
    discounts = 1 / (ranks.clamp(min=1) + 1).log2()  # (Q, P)
    values: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for cutoff in cutoffs:
        if cutoff < 1:
            raise ValueError(f"cutoff must be at least 1, got {cutoff}")
        is_hit = (ranks > 0) & (ranks <= cutoff)  # (Q, P)
        values[f"query recall@{cutoff}"] = is_hit.sum(1) / num_positives
        values[f"precision@{cutoff}"] = is_hit.sum(1) / cutoff
        places = torch.arange(1, cutoff + 1, device=ranks.device)
        best = torch.cumsum(1 / (places + 1).log2(), dim=0)  # (cutoff,)
        gains = (discounts * is_hit).sum(1)  # (Q,)
        values[f"ndcg@{cutoff}"] = gains / best[num_positives.clamp(1, cutoff) - 1]
        if propensities is not None:
            worths = 1 / propensities[positive_ids.clamp(min=0)]
            worths = worths.masked_fill(ranks < 0, 0)  # (Q, P)
            best = worths.topk(min(cutoff, worths.shape[1]), dim=1).values.sum(1)  # (Q,)
            values[f"psp@{cutoff}"] = (worths * is_hit).sum(1) / best
            weights[f"psp@{cutoff}"] = best / cutoff
    first = torch.cat([inverse_ranks, inverse_ranks.new_zeros(len(ranks), 1)], dim=1)  # P may be 0
    values["mrr"] = first.amax(1)
    is_empty = num_positives == 0
    values = {name: own.masked_fill(is_empty, torch.nan) for name, own in values.items()}
    return QueryMetrics(values, weights)
