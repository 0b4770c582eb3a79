"""Finds the subpopulations that explain a model's failures, corrected for multiple testing.

A slice is a conjunction of conditions on different columns (see `slice_attributes`), such as
"script = THAI and length 9 or more". `find_slices` looks at all of them that hold enough pairs,
takes the one that explains most, sets its pairs aside and looks again, until what is left could be
chance.

For a slice of n pairs with a mean loss of t, where e is expected of them,

    score = scale * n * KL(t, e) - (conditions - 1) * log(number of single conditions)

if t is above e, and nothing otherwise. e is the mean loss of the queries with as many pairs that
are left, or of all pairs if that is higher; `scale` is the variance of n coins over the variance
that permutations give the slice.

The test permutes losses: queries with as many pairs change places, and the pairs within a query.
The share of permutations whose *largest* score over all slices reaches the observed one is an exact
p-value. With labels as the units, labels with as many pairs change places instead. After a slice is
set aside the same test is made of the rest; a slice's p-value is never below that of those before
it. Why all this is so, and what was measured: docs/slices.md.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data import Dataset, IntArray
from evenhand.errors import UserError
from evenhand.evaluation.groups import DoubleArray, check_belongs
from evenhand.evaluation.outcome import Outcome, pair_losses
from evenhand.evaluation.slice_attributes import Attribute, attributes_of
from evenhand.evaluation.slice_search import (
    is_in_slice,
    largest_score,
    slabs_of,
    slices_to_look_at,
    strata_of,
)

MIN_PAIRS, MIN_SHARE = 30, 0.001  # the smallest slice that is tested
LEVEL = 0.05
NUM_EXAMPLES = 3
NORMAL_QUANTILE = 1.959964  # 97.5 %

_Found = tuple[tuple[str, ...], NDArray[np.bool_], float]  # words, members (N,), p-value


@dataclasses.dataclass(frozen=True)
class Slice:
    """A subpopulation that fares worse than chance explains. Values are 1 - mean loss."""

    conditions: tuple[str, ...]  # in words; all of them hold
    num_pairs: int
    num_queries: int
    value: float
    low: float  # 95 %, over queries
    high: float
    rest: float  # the value over all pairs outside
    num_new_pairs: int  # in no slice found before
    new_value: float  # over those
    excess: float  # loss of the new pairs beyond that of as many average pairs
    p_value: float  # of the part it was found on, corrected for every look
    examples: tuple[int, ...]  # failed pairs of different queries, drawn at random


@dataclasses.dataclass(frozen=True)
class Findings:
    """The slices in the order they were found, and what they were found among."""

    slices: tuple[Slice, ...]
    value: float  # over all pairs
    num_pairs: int
    num_queries: int
    num_looks: int  # slices that were compared
    min_pairs: int
    num_permutations: int


def find_slices(
    losses: DoubleArray,
    query_ids: IntArray,
    attributes: Sequence[Attribute],
    *,
    unit_ids: IntArray | None = None,
    max_conditions: int = 2,
    min_pairs: int | None = None,
    num_permutations: int = 200,
    max_slices: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """The slices that explain the losses (N,) of pairs, at a level of 5 % for all together.

    Args:
        losses: in [0, 1]; 1 is a failure.
        query_ids: (N,) of the pairs.
        unit_ids: (N,) whose losses stay together when losses are permuted; the queries by default.
        min_pairs: of a slice; by default 30, or a thousandth of the pairs if that is more.
        progress: called with the number of permutations done, and how many are certain to come.

    Example:
        >>> from evenhand.evaluation.slice_attributes import nominal
        >>> script = nominal("script", np.repeat([0, 1], [300, 100]), ["LATIN", "THAI"])
        >>> losses = np.concatenate([np.arange(300) % 10 == 0, np.arange(100) % 2 == 0])
        >>> found = find_slices(losses.astype(float), np.arange(400), [script])
        >>> [(s.conditions, s.num_pairs, s.value) for s in found.slices]
        [(('THAI',), 100, 0.5)]
    """
    if min_pairs is None:
        min_pairs = max(MIN_PAIRS, math.ceil(MIN_SHARE * len(losses)))
    lengths = {len(losses), len(query_ids), *(len(a.codes) for a in attributes)}
    if len(lengths) > 1:
        raise ValueError(
            f"losses, query_ids and the codes of attributes must be of one length (the pairs), got "
            f"{sorted(lengths)}"
        )
    if len(losses) and not (losses.min() >= 0 and losses.max() <= 1):
        raise ValueError(f"losses must be between 0 and 1, got {losses.min()} to {losses.max()}")
    if not 1 <= max_conditions <= 3:
        raise ValueError(f"max_conditions must be between 1 and 3, got {max_conditions}")
    if min_pairs < 1:
        raise ValueError(f"min_pairs must be at least 1, got {min_pairs}")
    if num_permutations < 1 / LEVEL - 1:
        raise ValueError(
            f"num_permutations must be at least {1 / LEVEL - 1:.0f} (with fewer nothing is ever "
            f"clear at {LEVEL:.0%}), got {num_permutations}"
        )
    mean_loss, unit_ids = _mean(losses), query_ids if unit_ids is None else unit_ids
    kept: IntArray = np.arange(len(losses))
    strata: IntArray = np.zeros(len(losses), dtype=np.int64)
    everything = slices_to_look_at(attributes, max_conditions=max_conditions, min_pairs=min_pairs)
    found: list[_Found] = []
    num_looks, p_value = 0, 0.0
    while len(found) < max_slices and everything.conditions:
        looks = everything.among(kept, min_pairs=min_pairs)
        num_looks = num_looks or len(looks.conditions)
        strata = strata_of(unit_ids[kept], strata)
        done = len(found) * num_permutations
        best = largest_score(
            losses[kept],
            looks,
            slabs_of(unit_ids[kept], strata),
            mean_loss=mean_loss,
            num_permutations=num_permutations,
            generator=np.random.default_rng([seed, len(found)]),
            progress=lambda count, done=done: progress(done + count, done + num_permutations),  # type: ignore[misc]
        )
        p_value = max(p_value, best.p_value)
        if p_value > LEVEL:
            break
        conditions = looks.conditions[best.place]
        words = tuple(attributes[a].conditions[c] for a, c in conditions)
        is_member = is_in_slice(attributes, conditions)
        found.append((words, is_member, p_value))
        kept, strata = kept[~is_member[kept]], strata[~is_member[kept]]
    return Findings(
        slices=_describe(losses, query_ids, found, seed=seed),
        value=1 - mean_loss,
        num_pairs=len(losses),
        num_queries=len(np.unique(query_ids)),
        num_looks=num_looks,
        min_pairs=min_pairs,
        num_permutations=num_permutations,
    )


# --- figures --------------------------------------------------------------------------------------


def _describe(
    losses: DoubleArray, query_ids: IntArray, found: Sequence[_Found], *, seed: int
) -> tuple[Slice, ...]:
    """Figures of slices in the order they were found."""
    is_old = np.zeros(len(losses), dtype=bool)
    slices = []
    for conditions, is_member, p_value in found:
        is_new = is_member & ~is_old
        new_losses, mine = losses[is_new], losses[is_member]
        low, high = loss_interval(mine, query_ids[is_member])
        # Examples: some pairs of the largest loss there is, of different queries.
        worst = np.flatnonzero(is_new & (losses == new_losses.max(initial=0.0)) & (losses > 0))
        worst = worst[np.unique(query_ids[worst], return_index=True)[1]]
        drawn = np.random.default_rng(seed).permutation(worst)[:NUM_EXAMPLES]
        slices.append(
            Slice(
                conditions=conditions,
                num_pairs=len(mine),
                num_queries=len(np.unique(query_ids[is_member])),
                value=1 - _mean(mine),
                low=1 - high,
                high=1 - low,
                rest=1 - _mean(losses[~is_member]),
                num_new_pairs=len(new_losses),
                new_value=1 - _mean(new_losses),
                excess=float(new_losses.sum() - len(new_losses) * losses.mean()),
                p_value=p_value,
                examples=tuple(np.sort(drawn).tolist()),
            )
        )
        is_old |= is_member
    return tuple(slices)


def _mean(losses: DoubleArray) -> float:
    return float(losses.mean()) if len(losses) else np.nan


def loss_interval(losses: DoubleArray, query_ids: IntArray) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean loss, a query's pairs counting for what they tell.

    The number of pairs is divided by the design effect: how much larger the variance is because
    the losses of a query are alike.

    Example:
        >>> low, high = loss_interval(np.array([1.0, 0, 0, 0]), np.arange(4))
        >>> f"{low:.3f} to {high:.3f}"
        '0.046 to 0.699'
    """
    if not len(losses):
        return np.nan, np.nan
    mean = losses.mean()
    by_query = np.bincount(np.unique(query_ids, return_inverse=True)[1], weights=losses - mean)
    spread = float(((losses - mean) ** 2).sum())
    effect = max(1.0, float((by_query**2).sum()) / spread) if spread > 0 else 1.0
    number, square = len(losses) / effect, NORMAL_QUANTILE**2
    centre = (mean + square / (2 * number)) / (1 + square / number)
    half = np.sqrt(mean * (1 - mean) / number + square / (4 * number**2)) / (1 + square / number)
    return float(centre - NORMAL_QUANTILE * half), float(centre + NORMAL_QUANTILE * half)


# --- of an evaluated run --------------------------------------------------------------------------


def slices_of(
    outcome: Outcome,
    dataset: Dataset,
    part_name: str,
    *,
    metric: str = "recall@10",
    units: str = "queries",
    **search: Any,
) -> Findings:
    """`find_slices` among the pairs of an evaluated part, by its groups and `attributes_of`.

    Args:
        units: what is exchanged when losses are permuted, "queries" or "labels".
        search: the other settings of `find_slices`.
    """
    check_belongs(outcome, dataset.parts[part_name], part_name)
    unit_ids = {"queries": outcome.query_ids, "labels": outcome.label_ids}
    if units not in unit_ids:
        raise ValueError(f"units must be 'queries' or 'labels', got {units!r}")
    losses, attributes = metric_losses(outcome, metric), attributes_of(dataset, part_name)
    return find_slices(losses, outcome.query_ids, attributes, unit_ids=unit_ids[units], **search)


def checked_slices(
    findings: Findings, outcome: Outcome, dataset: Dataset, part_name: str, *, metric: str
) -> Findings:
    """The same slices with the figures of another part, which did not choose them."""
    check_belongs(outcome, dataset.parts[part_name], part_name)
    attributes = attributes_of(dataset, part_name)
    places = {
        words: (a, c)
        for a, attribute in enumerate(attributes)
        for c, words in enumerate(attribute.conditions)
    }
    losses = metric_losses(outcome, metric)
    nobody = np.zeros(len(losses), dtype=bool)  # where this part has no such group
    found = []
    for s in findings.slices:
        known = tuple(places[words] for words in s.conditions if words in places)
        is_member = is_in_slice(attributes, known) if len(known) == len(s.conditions) else nobody
        found.append((s.conditions, is_member, s.p_value))
    return dataclasses.replace(
        findings,
        slices=_describe(losses, outcome.query_ids, found, seed=0),
        value=1 - float(losses.mean()),
        num_pairs=len(losses),
        num_queries=len(np.unique(outcome.query_ids)),
    )


def findings_json(findings: Findings, outcome: Outcome, dataset: Dataset, part_name: str) -> Any:
    """Findings for other programs, with the texts of the examples."""

    def example(pair: int) -> dict[str, Any]:
        query, label = int(outcome.query_ids[pair]), int(outcome.label_ids[pair])
        texts = dataset.parts[part_name].texts
        return {
            "query_id": query,
            "query": None if texts is None else texts[query],
            "label_id": label,
            "label": dataset.label_name(label),
            "rank": int(outcome.ranks[pair]) or None,
        }

    rows = [
        {**dataclasses.asdict(s), "examples": [example(pair) for pair in s.examples]}
        for s in findings.slices
    ]
    return {"part": part_name, **dataclasses.asdict(findings), "slices": rows}


def metric_losses(outcome: Outcome, metric: str) -> DoubleArray:
    """1 where a pair is missed ('recall@10'), or 1 - 1/rank ('reciprocal rank'): (N,)."""
    known: dict[str, int | None] = {f"recall@{cutoff}": cutoff for cutoff in outcome.cutoffs}
    known["reciprocal rank"] = None
    if metric not in known:
        raise UserError(f"--metric must be one of {', '.join(known)}, got {metric!r}")
    return pair_losses(outcome, known[metric])
