"""How often ids are drawn, and how many distinct ones to expect: what the cost of a step rests on.

A law says for one draw (an example's positive, or the bag of a query's features) how probable it
is that it holds an id. Ids of the same probability are one entry, so that a law of 10^9 labels is
a few thousand numbers. Draws are taken to be independent of each other.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT_IDS = 2**16  # of a Zipf law, each an entry of its own; beyond, a sum is an integral
_NODES = 8  # of Gauss and Legendre, in every stretch over which an id's number doubles


class Law(NamedTuple):
    probabilities: Array  # (n,) of an id being in one draw
    multiplicities: Array  # (n,) how many ids have that probability

    @property
    def num_ids(self) -> float:
        return float(self.multiplicities.sum())

    @property
    def ids_a_draw(self) -> float:
        """1 where a draw is one id; of bags, their mean size."""
        return float(self.probabilities @ self.multiplicities)


def uniform_law(num_ids: int) -> Law:
    return Law(np.array([1 / num_ids]), np.array([float(num_ids)]))


def zipf_law(num_ids: int, *, exponent: float = 1.0, rows: tuple[int, int] | None = None) -> Law:
    """The id that is i-th in order of frequency has probability proportional to i ** -exponent.

    Args:
        rows: only the ids of this range, 0 being the most frequent; None: all.
    """
    total = _weights(0, num_ids, exponent)
    scale = 1 / float(total.probabilities @ total.multiplicities)
    chosen = total if rows is None else _weights(*rows, exponent)
    return Law(chosen.probabilities * scale, chosen.multiplicities)


def law_of_counts(counts: NDArray[Any], *, num_draws: int) -> Law:
    """The law that was observed: how many of `num_draws` draws held each id."""
    seen, multiplicities = np.unique(counts, return_counts=True)
    return Law(np.minimum(1, seen / num_draws), multiplicities.astype(np.float64))


def in_bags(law: Law, size: float) -> Law:
    """A draw that is a bag of `size` independent draws."""
    return Law(-np.expm1(size * _log_misses(law)), law.multiplicities)


def thin(law: Law, share: float) -> Law:
    """A draw that counts only with this probability, and else is empty."""
    return Law(law.probabilities * share, law.multiplicities)


def expected_distinct(law: Law, num_draws: float) -> float:
    """Of how many ids at least one of the draws holds: sum of 1 - (1 - p) ** n.

    Example:
        >>> expected_distinct(uniform_law(2), 2)  # of 4 cases, two hold both ids
        1.5
    """
    hit = -np.expm1(num_draws * _log_misses(law))
    return float(hit @ law.multiplicities)


def _log_misses(law: Law) -> Array:
    with np.errstate(divide="ignore"):  # a certain id has no miss: exp(-inf) is 0
        return np.log1p(-law.probabilities)


def _weights(first: int, last: int, exponent: float) -> Law:
    """i ** -exponent for the 1-based numbers first + 1 ... last."""
    exact_last = min(last, max(first, EXACT_IDS))
    numbers = [np.arange(first + 1, exact_last + 1, dtype=np.float64)]
    counts = [np.ones(exact_last - first)]
    # A sum over whole numbers is the integral from half before the first to half after the last,
    # here with respect to log i: the error is of the order 1 / i ** 2.
    low, high = np.log(exact_last + 0.5), np.log(last + 0.5)
    num_stretches = int(np.ceil((high - low) / np.log(2)))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.linspace(low, high, num_stretches + 1)
    for start, end in pairwise(edges):
        inner = np.exp((start + end) / 2 + nodes * (end - start) / 2)
        numbers.append(inner)
        counts.append(weights * (end - start) / 2 * inner)
    return Law(np.concatenate(numbers) ** -exponent, np.concatenate(counts))
