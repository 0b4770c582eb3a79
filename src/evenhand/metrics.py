"""How well ranked ids answer a query: one number for each query, and means by group.

Contract shared by every function here:

    retrieved_ids (Q, R): label ids, best first; -1 where fewer were found.
    positive_ids (Q, P): each query's true labels, without repeats, padded with -1.

Ranked ids come in, never raw scores: no threshold can hide here. Results beyond R count as not
retrieved. Values are (Q,), NaN for a query without positives. Nothing here averages over queries
but `mean_by_group`.
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


def recall_at(retrieved_ids: Tensor, positive_ids: Tensor, *, cutoff: int) -> Tensor:
    """Share of each query's positives found in its first `cutoff` results: (Q,).

    The paper's recall@r is over (query, label) pairs: see `pair_recall_at`.

    Example:
        >>> recall_at(torch.tensor([[7, 3, 5]]), torch.tensor([[5, 7]]), cutoff=2)
        tensor([0.5000])
    """
    return _recall(pair_ranks(retrieved_ids, positive_ids), _checked(cutoff))


def pair_recall_at(retrieved_ids: Tensor, positive_ids: Tensor, *, cutoff: int) -> Tensor:
    """1 for each (query, positive) pair within the first `cutoff` results, else 0: (Q, P).

    NaN where there is no positive. Its mean over pairs is the paper's recall@r.

    Example:
        >>> pair_recall_at(torch.tensor([[7, 3, 5]]), torch.tensor([[5, 7, -1]]), cutoff=2)
        tensor([[0., 1., nan]])
    """
    ranks = pair_ranks(retrieved_ids, positive_ids)
    hits = _is_hit(ranks, _checked(cutoff)).to(torch.get_default_dtype())
    return hits.masked_fill(ranks < 0, torch.nan)


def precision_at(retrieved_ids: Tensor, positive_ids: Tensor, *, cutoff: int) -> Tensor:
    """Share of the first `cutoff` results that are positives: (Q,).

    Example:
        >>> precision_at(torch.tensor([[7, 3, 5, 1]]), torch.tensor([[5, 7]]), cutoff=4)
        tensor([0.5000])
    """
    return _precision(pair_ranks(retrieved_ids, positive_ids), _checked(cutoff))


def ndcg_at(retrieved_ids: Tensor, positive_ids: Tensor, *, cutoff: int) -> Tensor:
    """Discounted gain of the first `cutoff` results over the best possible: (Q,).

    dcg = sum over positives of rank i <= cutoff of 1 / log2(1 + i); the best possible has the
    query's min(P, cutoff) positives first.

    Example:
        >>> ndcg_at(torch.tensor([[3, 7]]), torch.tensor([[7]]), cutoff=2)  # 1 / log2(3)
        tensor([0.6309])
    """
    return _ndcg(pair_ranks(retrieved_ids, positive_ids), _checked(cutoff))


def reciprocal_rank(retrieved_ids: Tensor, positive_ids: Tensor) -> Tensor:
    """1 / rank of the first positive, 0 when none was retrieved: (Q,).

    Example:
        >>> reciprocal_rank(torch.tensor([[3, 7, 5]]), torch.tensor([[5, 7]]))
        tensor([0.5000])
    """
    return _reciprocal_rank(pair_ranks(retrieved_ids, positive_ids))


class WeightedValues(NamedTuple):
    values: Tensor  # (Q,), NaN for a query without positives
    weights: Tensor  # (Q,), 0 for a query without positives


def propensity_scored_precision_at(
    retrieved_ids: Tensor, positive_ids: Tensor, propensities: Tensor, *, cutoff: int
) -> WeightedValues:
    """Precision in which finding a rare label counts more, over the best possible: (Q,), (Q,).

    value_q = gain_q / best_q, where gain_q sums 1 / propensity over the positives within the first
    `cutoff` results and best_q over the query's rarest min(P, cutoff) positives; the weight is
    best_q / cutoff. The figure of the extreme classification repository (Jain et al., 2016)
    divides sum of gains by sum of bests: it is (values * weights).sum() / weights.sum(), not the
    plain mean.

    Example:
        >>> propensity_scored_precision_at(
        ...     torch.tensor([[0]]), torch.tensor([[0, 1]]), torch.tensor([1.0, 0.25]), cutoff=1
        ... )
        WeightedValues(values=tensor([0.2500]), weights=tensor([4.]))
    """
    ranks = pair_ranks(retrieved_ids, positive_ids)
    return _propensity_scored(ranks, positive_ids, propensities, _checked(cutoff))


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
    """Every metric of this file at every cutoff, from one look-up of the ranks.

    Names: 'query recall@r', 'precision@r', 'ndcg@r', 'mrr', and 'psp@r' where propensities (L,)
    are given.

    Example:
        >>> found = query_metrics(torch.tensor([[3, 7]]), torch.tensor([[7]]), cutoffs=(1, 2))
        >>> {name: round(value.item(), 2) for name, value in found.values.items()}
        ... # doctest: +NORMALIZE_WHITESPACE
        {'query recall@1': 0.0, 'precision@1': 0.0, 'ndcg@1': 0.0,
         'query recall@2': 1.0, 'precision@2': 0.5, 'ndcg@2': 0.63, 'mrr': 0.5}
    """
    ranks = pair_ranks(retrieved_ids, positive_ids)
    values: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for cutoff in map(_checked, cutoffs):
        values[f"query recall@{cutoff}"] = _recall(ranks, cutoff)
        values[f"precision@{cutoff}"] = _precision(ranks, cutoff)
        values[f"ndcg@{cutoff}"] = _ndcg(ranks, cutoff)
        if propensities is not None:
            values[f"psp@{cutoff}"], weights[f"psp@{cutoff}"] = _propensity_scored(
                ranks, positive_ids, propensities, cutoff
            )
    values["mrr"] = _reciprocal_rank(ranks)
    return QueryMetrics(values, weights)


class GroupMeans(NamedTuple):
    means: Tensor  # (G,), NaN for a group without a scored query
    counts: Tensor  # (G,) how many queries each mean rests on


def mean_by_group(values: Tensor, group_ids: Tensor, num_groups: int) -> GroupMeans:
    """Averages (Q,) values within each of `num_groups` subpopulations, skipping NaN.

    A query whose group id is -1 belongs to none; one in several groups is given once for each.

    Example:
        >>> values = torch.tensor([1.0, 0.0, torch.nan, 0.5])
        >>> mean_by_group(values, torch.tensor([0, 0, 1, -1]), 2)
        GroupMeans(means=tensor([0.5000,    nan]), counts=tensor([2, 0]))
    """
    is_scored = ~values.isnan() & (group_ids >= 0)
    ids, scored = group_ids[is_scored].long(), values[is_scored].double()
    counts = torch.bincount(ids, minlength=num_groups)
    totals = scored.new_zeros(num_groups).index_add(0, ids, scored)
    return GroupMeans((totals / counts).to(values.dtype), counts)


# --- from ranks (Q, P), as `pair_ranks` gives them ------------------------------------------------


def _checked(cutoff: int) -> int:
    if cutoff < 1:
        raise ValueError(f"cutoff must be at least 1, got {cutoff}")
    return cutoff


def _is_hit(ranks: Tensor, cutoff: int) -> Tensor:
    return (ranks > 0) & (ranks <= cutoff)


def _recall(ranks: Tensor, cutoff: int) -> Tensor:
    return _is_hit(ranks, cutoff).sum(1) / (ranks >= 0).sum(1)  # (Q,)


def _precision(ranks: Tensor, cutoff: int) -> Tensor:
    precisions = _is_hit(ranks, cutoff).sum(1) / cutoff  # (Q,)
    return precisions.masked_fill((ranks < 0).all(1), torch.nan)


def _ndcg(ranks: Tensor, cutoff: int) -> Tensor:
    places = torch.arange(1, cutoff + 1, device=ranks.device)
    best = torch.cumsum(1 / (places + 1).log2(), dim=0)  # (cutoff,)
    gains = (1 / (ranks.clamp(min=1) + 1).log2()) * _is_hit(ranks, cutoff)  # (Q, P)
    num_positives = (ranks >= 0).sum(1)  # (Q,)
    ndcgs = gains.sum(1) / best[num_positives.clamp(1, cutoff) - 1]
    return ndcgs.masked_fill(num_positives == 0, torch.nan)


def _reciprocal_rank(ranks: Tensor) -> Tensor:
    inverses = (1 / ranks.clamp(min=1)) * (ranks > 0)  # (Q, P)
    first = torch.cat([inverses, inverses.new_zeros(len(ranks), 1)], dim=1).amax(1)  # P may be 0
    return first.masked_fill((ranks < 0).all(1), torch.nan)


def _propensity_scored(
    ranks: Tensor, positive_ids: Tensor, propensities: Tensor, cutoff: int
) -> WeightedValues:
    worths = (1 / propensities[positive_ids.clamp(min=0)]).masked_fill(ranks < 0, 0)  # (Q, P)
    gains = (worths * _is_hit(ranks, cutoff)).sum(1)  # (Q,)
    best = worths.topk(min(cutoff, worths.shape[1]), dim=1).values.sum(1)
    return WeightedValues(gains / best, best / cutoff)
