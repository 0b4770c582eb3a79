"""Enumerates the candidate slices, scores them, and runs the permutation test.

Shapes: N pairs, S slices, B permutations. Slices over the same columns are unions of the *cells* of
those columns (each combination of their codes that occurs), so sums over all slices are two sparse
products: values to cells, cells to slices. A pair lies in one cell of each combination of columns,
but in hundreds of slices.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_diag, csr_matrix
from scipy.special import xlogy

from evenhand.data import IntArray
from evenhand.evaluation.groups import DoubleArray
from evenhand.evaluation.slice_attributes import Attribute

MAX_SHARE = 0.5  # a slice is a part: a larger one is what others are seen against
VALUES_AT_ONCE = 2**22  # of permuted losses: 16 MB
SLICES_AT_ONCE = 2**12
ROUNDING = 1e-5  # of a score: what comes this near has reached it

Conditions = tuple[tuple[int, int], ...]  # (attribute, condition) of each


# --- what there is to look at ---------------------------------------------------------------------


class Looks(NamedTuple):
    """The slices there are to look at, those of fewer conditions first."""

    conditions: list[Conditions]
    cells: Any  # sparse (cells, N)
    unions: Any  # sparse (S, cells)
    num_singles: int  # conditions there are to choose from

    def totals(self, values: NDArray[np.floating[Any]]) -> DoubleArray:
        """Sums over the pairs of every slice: (N, B) -> (S, B)."""
        return np.asarray(self.unions @ (self.cells @ values), dtype=np.float64)

    def among(self, pairs: IntArray, *, min_pairs: int) -> "Looks":
        """Of these pairs alone: slices that hold enough of them and not most, each set once."""
        cells = self.cells[:, pairs]
        kept = _distinct(self.unions, cells, min_pairs, most=MAX_SHARE * len(pairs))
        conditions = [self.conditions[row] for row in kept]
        return Looks(conditions, cells, self.unions[kept], self.num_singles)


class _Family(NamedTuple):
    """The slices over one combination of columns."""

    cells: IntArray  # (N,) of the pairs, -1: unknown in some column
    unions: Any  # sparse (s, cells)
    conditions: list[Conditions]  # s of them


def slices_to_look_at(
    attributes: Sequence[Attribute], *, max_conditions: int, min_pairs: int
) -> Looks:
    """Conjunctions of up to `max_conditions` conditions, each on another attribute."""
    singles = []
    for place, (_, codes, words, members) in enumerate(attributes):
        conditions: list[Conditions] = [((place, c),) for c in range(len(words))]
        singles.append(_keep(_Family(codes, members, conditions), min_pairs))
    families: dict[tuple[int, ...], _Family] = {(n,): f for n, f in enumerate(singles)}
    for size in range(2, max_conditions + 1):
        for chosen in itertools.combinations(range(len(attributes)), size):
            parent, last = families.get(chosen[:-1]), singles[chosen[-1]]
            if parent is not None and parent.conditions and last.conditions:
                families[chosen] = _join(parent, last, min_pairs)
    num_singles = sum(len(family.conditions) for family in singles)
    kept = [family for family in families.values() if family.conditions]
    if not kept:
        return Looks([], csr_matrix((0, 0)), csr_matrix((0, 0)), num_singles)
    everything = [slice_ for family in kept for slice_ in family.conditions]
    unions = block_diag([family.unions for family in kept], format="csr")
    return Looks(everything, _cell_matrix(kept), unions, num_singles)


def _join(parent: _Family, last: _Family, min_pairs: int) -> _Family:
    """Every slice of one family with every condition of a further column."""
    is_known = (parent.cells >= 0) & (last.cells >= 0)
    codes = parent.cells[is_known].astype(np.int64) * last.unions.shape[1] + last.cells[is_known]
    present, inverse = np.unique(codes, return_inverse=True)
    cells = np.full(len(parent.cells), -1)
    cells[is_known] = inverse
    firsts, lasts = np.divmod(present, max(1, last.unions.shape[1]))
    unions = _khatri_rao(parent.unions[:, firsts], last.unions[:, lasts])
    conditions = [a + b for a in parent.conditions for b in last.conditions]
    return _keep(_Family(cells, unions, conditions), min_pairs)


def _khatri_rao(first: Any, second: Any) -> Any:
    """Every row of one matrix of 0 and 1 times every row of another: (a, c), (b, c) -> (a * b, c).

    Of the Kronecker product only the cells that occur: two columns of many sets of groups have
    few of all their combinations, and all of them would not fit in memory.
    """
    first, second = first.tocsc(), second.tocsc()
    columns = np.repeat(np.arange(first.shape[1]), np.diff(first.indptr))  # of first's entries
    counts = np.diff(second.indptr)[columns]  # each meets those of second in its column
    owners = np.repeat(np.arange(len(columns)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = first.indices[owners] * np.int64(second.shape[0])
    rows += second.indices[second.indptr[columns[owners]] + within]
    shape = first.shape[0] * second.shape[0], first.shape[1]
    return csr_matrix((np.ones(len(rows)), (rows, columns[owners])), shape=shape)


def _keep(family: _Family, min_pairs: int) -> _Family:
    """Without the slices that are too small, that hold all pairs, or that are others again."""
    most = len(family.cells) - 1
    kept = _distinct(family.unions, _cell_matrix([family]), min_pairs, most=most)
    return _Family(family.cells, family.unions[kept], [family.conditions[row] for row in kept])


def _distinct(unions: Any, cells: Any, min_pairs: int, *, most: float) -> IntArray:
    """The slices of `min_pairs` to `most` pairs, of each set of pairs the first: positions."""
    # A random number for each pair, the sum of which tells sets apart. The numbers are whole, so
    # that sums do not depend on their order.
    marks = np.random.default_rng(0).integers(1, 2**30, size=cells.shape[1])
    values = np.stack([np.ones(len(marks)), marks], axis=1)  # (N, 2)
    counts, sums = (unions @ (cells @ values)).T  # (S,), (S,)
    enough = np.flatnonzero((counts >= min_pairs) & (counts <= most))
    return np.asarray(enough[np.sort(np.unique(sums[enough], return_index=True)[1])])


def _cell_matrix(families: Sequence[_Family]) -> Any:
    """Which pairs each cell holds, the cells of all families below one another: (cells, N)."""
    starts = np.cumsum([0, *(family.unions.shape[1] for family in families)])
    pairs = [np.flatnonzero(family.cells >= 0) for family in families]
    rows = [f.cells[p] + start for f, p, start in zip(families, pairs, starts, strict=False)]
    places = np.concatenate(rows), np.concatenate(pairs)
    shape = starts[-1], len(families[0].cells)
    return csr_matrix((np.ones(len(places[0])), places), shape=shape)


def is_in_slice(attributes: Sequence[Attribute], conditions: Conditions) -> NDArray[np.bool_]:
    """Which pairs fulfil all conditions: (N,)."""
    is_member = np.ones(len(attributes[0].codes), dtype=bool)
    for place, condition in conditions:
        codes, members = attributes[place].codes, attributes[place].members
        fulfils = members[[condition]].toarray()[0] > 0  # (codes,)
        is_member &= (codes >= 0) & fulfils[codes]
    return is_member


# --- which losses may change places ---------------------------------------------------------------


def strata_of(query_ids: IntArray, earlier: IntArray) -> IntArray:
    """Numbers of the queries' kinds: as many pairs, and of one `earlier` stratum: (N,) -> (N,)."""
    _, queries, lengths = np.unique(query_ids, return_inverse=True, return_counts=True)
    keys = earlier * (lengths.max(initial=0) + 1) + lengths[queries]
    return np.unique(keys, return_inverse=True)[1]


def slabs_of(query_ids: IntArray, strata: IntArray) -> list[IntArray]:
    """The pairs of each stratum, a row a query: (queries, pairs of each) positions."""
    order = np.lexsort((query_ids, strata))
    slabs: list[IntArray] = []
    for pairs in np.split(order, np.flatnonzero(np.diff(strata[order])) + 1):
        num_queries = len(np.unique(query_ids[pairs]))
        slabs.append(pairs.reshape(num_queries, -1))  # queries of a stratum have as many pairs
    return slabs


def permute_losses(
    losses: NDArray[np.floating[Any]],
    slabs: Sequence[IntArray],
    count: int,
    generator: np.random.Generator,
) -> NDArray[np.floating[Any]]:
    """Losses of whole queries at other queries' places, in any order within: (N,) -> (N, B)."""
    permuted = np.empty((count, len(losses)), dtype=losses.dtype)
    for pairs in slabs:
        if pairs.shape[1] == 1:
            drawn = generator.permuted(np.tile(losses[pairs[:, 0]], (count, 1)), axis=1)
        else:
            places = np.tile(np.arange(len(pairs)), (count, 1))  # (B, queries)
            drawn = losses[pairs][generator.permuted(places, axis=1)]  # (B, queries, m)
            drawn = generator.permuted(drawn, axis=2)
        permuted[:, pairs.ravel()] = drawn.reshape(count, -1)
    return np.ascontiguousarray(permuted.T)


# --- the score ------------------------------------------------------------------------------------


class Scorer(NamedTuple):
    """What a score needs of every slice beside its total loss."""

    counts: DoubleArray  # (S, 1) pairs
    baselines: DoubleArray  # (S, 1) the total loss that a worse slice exceeds
    scales: DoubleArray  # (S, 1) variance of as many coins over the true variance
    penalties: DoubleArray  # (S, 1)

    def scores(self, totals: DoubleArray) -> DoubleArray:
        """(S, B) -> (S, B), 0 or less where a slice is not worse than its baseline."""
        divergences = np.zeros_like(totals)
        for observed, expected in (
            (totals, self.baselines),
            (np.maximum(self.counts - totals, 0.0), self.counts - self.baselines),
        ):  # t log(t / e); 0 where nothing is expected, since the total is then 0 too
            ratios = np.maximum(observed, 1e-300) / np.maximum(expected, 1e-300)
            divergences += xlogy(observed, ratios)
        is_worse = totals > self.baselines + 1e-9
        return np.where(is_worse, self.scales * divergences, 0.0) - self.penalties


def scorer_of(
    losses: DoubleArray, looks: Looks, slabs: Sequence[IntArray], *, mean_loss: float
) -> Scorer:
    """The scores of slices of these pairs; `mean_loss` is that of all pairs, set aside or not."""
    means = np.empty(len(losses))
    for pairs in slabs:
        means[pairs] = losses[pairs].mean()
    sums = looks.totals(np.stack([np.ones(len(losses)), means], axis=1))  # (S, 2)
    counts, expected = sums[:, :1], sums[:, 1:]
    coins = expected * (1 - expected / counts)
    variances = _variances(losses, looks, slabs)[:, None]  # (S, 1)
    is_free = variances > 1e-9 * coins  # otherwise no permutation changes the slice
    num_conditions = np.array([[len(conditions)] for conditions in looks.conditions])
    return Scorer(
        counts=counts,
        baselines=np.maximum(expected, counts * mean_loss),
        scales=np.divide(coins, variances, out=np.zeros_like(coins), where=is_free),
        penalties=(num_conditions - 1) * np.log(max(1, looks.num_singles)),
    )


def _variances(losses: DoubleArray, looks: Looks, slabs: Sequence[IntArray]) -> DoubleArray:
    """Variance of each slice's total over all permutations, in closed form: (S,).

    A loss is its query's mean plus a rest. Means change places between the n queries of a stratum,
    rests within each query of m pairs; with c_q pairs of query q in the slice, the two parts are

        sum_q (c_q - mean c)^2 * var(means)    and    sum_q c_q (m - c_q) / m * var(rests).
    """
    num_pairs = looks.cells.shape[1]
    is_here = np.zeros((num_pairs, len(slabs)))
    for stratum, pairs in enumerate(slabs):
        is_here[pairs.ravel(), stratum] = 1
    sums = looks.totals(is_here)  # of c_q over each stratum: (S, strata)
    squares = sums.copy()  # of c_q ** 2; where a query has one pair, c_q is 0 or 1
    by_query = {}  # of each stratum with several pairs a query: (cells, queries)
    for stratum, pairs in enumerate(slabs):
        if pairs.shape[1] > 1:
            columns = np.repeat(np.arange(len(pairs)), pairs.shape[1])
            entries = np.ones(pairs.size), (pairs.ravel(), columns)
            by_query[stratum] = looks.cells @ csr_matrix(entries, shape=(num_pairs, len(pairs)))
    for start in range(0, len(sums) if by_query else 0, SLICES_AT_ONCE):  # bounds the memory
        some = slice(start, start + SLICES_AT_ONCE)
        unions = looks.unions[some]
        for stratum, cells in by_query.items():
            squares[some, stratum] = (unions @ cells).power(2).sum(axis=1).A1
    num_queries, lengths = np.array([pairs.shape for pairs in slabs]).T  # (strata,)
    between, within = [], []
    for pairs in slabs:
        means = losses[pairs].mean(axis=1, keepdims=True)
        between.append(means.var() * len(pairs) / max(1, len(pairs) - 1))
        rests = losses[pairs] - means
        within.append((rests**2).sum() / len(pairs) / max(1, pairs.shape[1] - 1))
    of_means = (squares - sums**2 / num_queries) @ np.array(between)
    of_rests = (sums - squares / lengths) @ np.array(within)
    return np.asarray(of_means + of_rests)


# --- the test -------------------------------------------------------------------------------------


class Found(NamedTuple):
    place: int  # of the slice with the largest score
    score: float
    p_value: float


def largest_score(
    losses: DoubleArray,
    looks: Looks,
    slabs: Sequence[IntArray],
    *,
    mean_loss: float,
    num_permutations: int,
    generator: np.random.Generator,
    progress: Callable[[int], None] = lambda count: None,
) -> Found:
    """The slice of the largest score, and how often chance alone would reach that score."""
    if not looks.conditions:
        return Found(-1, 0.0, 1.0)
    scorer = scorer_of(losses, looks, slabs, mean_loss=mean_loss)
    observed = scorer.scores(looks.totals(losses[:, None]))[:, 0]  # (S,)
    place = int(observed.argmax())
    score = float(observed[place])
    single = losses.astype(np.float32)  # twice as fast; counts of failures stay exact
    fast = looks._replace(cells=looks.cells.astype(np.float32))
    # What is compared is summed alike: sums of float32 err to one side where losses are equal.
    to_reach = float(scorer.scores(fast.totals(single[:, None])).max())
    num_reached = 0
    at_once = max(1, min(num_permutations, VALUES_AT_ONCE // len(losses)))
    for start in range(0, num_permutations, at_once):
        count = min(at_once, num_permutations - start)
        permuted = permute_losses(single, slabs, count, generator)
        largest = scorer.scores(fast.totals(permuted)).max(axis=0)  # (B,)
        num_reached += int((largest >= to_reach - ROUNDING * max(1.0, to_reach)).sum())
        progress(start + count)
    p_value = (1 + num_reached) / (1 + num_permutations) if score > 0 else 1.0
    return Found(place, score, p_value)
