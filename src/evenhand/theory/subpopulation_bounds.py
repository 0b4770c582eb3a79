"""A certificate: with confidence 1 - delta, no subpopulation fares worse than this, for every size.

U is the loss in [0, 1] of a random query, of a model that is fixed. Among all subpopulations that
hold at least a share alpha of the queries, the worst has expected loss

    CVaR_alpha(U) = min over t of t + E[(U - t)+] / alpha.

So upper bounds of the excess E[(U - t)+] that hold for all t at once bound every subpopulation of
every size at once. They come from two sources, each with its share of delta:

- a band: P[U > k-th largest loss] <= mass_k for many k at once. The masses are quantiles of Beta
  laws, all at one level, and that level is chosen so that the whole band fails with probability
  delta exactly (for a continuous law; less often for another);
- anchors: bounds of E[(U - t)+] at few thresholds t fixed beforehand (`mean_bounds`).

They meet in E[(U - t)+] <= E[(U - anchor)+] + integral from t to the anchor of P[U > u] du; the
anchor 1, whose excess is 0, leaves the band alone.

Where queries come in clusters, clusters are the independent draws. A query of a cluster of m counts
min(1, cap / m), and U is the loss of a query drawn with probability proportional to that. A band
of single queries would be wrong then; anchors hold as they are, so more of them stand in for it.
"""

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, gammaln

from evenhand.theory.arguments import DoubleArray, check_chance
from evenhand.theory.cvar import cvar_curve
from evenhand.theory.mean_bounds import mean_bound

IntArray = NDArray[np.int64]

TAIL_FRACTIONS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
CAP = 10.0
# Over the laws of benchmarks/certificate.py, two anchors make the band up to a third narrower
# where losses vary smoothly, and at most a tenth wider where they are nearly all 0 or 1.
ANCHORS = (0.0, 0.5)
ANCHOR_SHARE = 0.4  # of delta; the rest is the band's
CLUSTER_ANCHORS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
NUM_DENSE = 40  # the band holds each of the largest losses, then ever fewer
CHANCE_ROUNDING = 1e-14  # for each draw: log-gamma of n loses digits, and so the chance of a band
RESOLUTION = 2.0**-14  # losses are rounded up to multiples, for the anchors: fewer distinct values


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Every subpopulation of mass at least `tail_fractions[i]` has expected loss <= `bounds[i]`.

    That holds for all fractions at once, those of `bound_at` included, with probability 1 - delta.
    """

    tail_fractions: DoubleArray  # (A,)
    bounds: DoubleArray  # (A,)
    estimates: DoubleArray  # (A,) the worst share of the sample itself; not a bound
    delta: float
    num_losses: int
    num_units: int  # independent draws: clusters, or losses where there are none
    cap: float | None  # the most that one cluster counts; None: no clusters
    thresholds: DoubleArray  # (T,) t, and
    excesses: DoubleArray  # (T,) the bounds of E[(U - t)+], for all t at once

    def bound_at(self, tail_fraction: ArrayLike) -> DoubleArray:
        """Bounds for other fractions than those listed, under the same delta: (...) -> (...)."""
        return bounds_of(self.thresholds, self.excesses, _checked_fractions(tail_fraction))


def certificate(
    losses: ArrayLike,
    *,
    delta: float = 0.05,
    cluster_ids: ArrayLike | None = None,
    cap: float = CAP,
    tail_fractions: ArrayLike = TAIL_FRACTIONS,
) -> Certificate:
    """Bounds the expected loss of every subpopulation of every size, all at once.

    Args:
        losses: (N,) between 0 and 1, on data used for no choice, each drawn like the next ones.
        delta: how likely any of the bounds may fail.
        cluster_ids: (N,) losses with the same id may depend on each other; clusters are drawn
            independently. None: losses are.
        cap: the most that a cluster counts, at least 1 and chosen before the losses and the sizes
            of the clusters are seen. A loss in a cluster of m counts min(1, cap / m): with 1 all
            clusters count alike, with the largest size there can be all losses do.

    Example:
        >>> losses = np.repeat([0.0, 0.5, 1.0], [900, 80, 20])
        >>> found = certificate(losses, tail_fractions=[1.0, 0.1])
        >>> found.estimates, found.bounds.round(3)
        (array([0.06, 0.6 ]), array([0.084, 0.688]))
    """
    values = np.asarray(losses, dtype=np.float64)
    fractions = _checked_fractions(tail_fractions)
    check_chance("delta", delta)
    if values.ndim != 1 or not len(values) or not (np.all(values >= 0) and np.all(values <= 1)):
        raise ValueError(f"losses must be one or more numbers between 0 and 1, got {values}")
    if cluster_ids is None:
        weights, num_units = np.ones(len(values)), len(values)
        ranks, masses = tail_masses(len(values), (1 - ANCHOR_SHARE) * delta)
        rounded = np.ceil(values / RESOLUTION) * RESOLUTION
        distinct, counts = np.unique(rounded, return_counts=True)
        share = ANCHOR_SHARE * delta / len(ANCHORS)
        anchor_excesses = [anchor_excess(distinct, counts, anchor, share) for anchor in ANCHORS]
        largest = -np.sort(-values)[ranks - 1]
        thresholds, excesses = excess_curve(
            largest, masses, np.array(ANCHORS), np.array(anchor_excesses)
        )
    else:
        if np.shape(cluster_ids) != values.shape:
            raise ValueError(
                f"cluster_ids must have one id a loss ({len(values)}), got {np.shape(cluster_ids)}"
            )
        names, units = np.unique(np.asarray(cluster_ids), return_inverse=True)
        num_units = len(names)
        weights = loss_weights(units, cap)
        thresholds = np.array(CLUSTER_ANCHORS)
        excesses = _cluster_excesses(values, weights, units, cap, delta)
    return Certificate(
        tail_fractions=fractions,
        bounds=bounds_of(thresholds, excesses, fractions),
        estimates=weighted_cvar(values, weights, fractions),
        delta=delta,
        num_losses=len(values),
        num_units=num_units,
        cap=None if cluster_ids is None else float(cap),
        thresholds=thresholds,
        excesses=excesses,
    )


def bounds_of(
    thresholds: DoubleArray, excesses: DoubleArray, tail_fractions: DoubleArray
) -> DoubleArray:
    """CVaR_alpha <= min over t of t + E[(U - t)+] / alpha, and at most 1: (T,), (T,), (A,) -> (A,).

    Each line falls in alpha, so their minimum does: no repair is needed to make it monotone.
    """
    lines = thresholds + excesses / tail_fractions[..., None]  # (A, T)
    return np.asarray(np.minimum(1.0, lines.min(axis=-1)))


def weighted_cvar(
    losses: DoubleArray, weights: DoubleArray, tail_fractions: DoubleArray
) -> DoubleArray:
    """Mean of the largest losses that together weigh alpha of the whole: (N,), (N,), (A,) -> (A,).

    Example:
        >>> weighted_cvar(np.array([0.0, 1.0, 0.5]), np.ones(3), np.array([1.0, 0.5]))
        array([0.5       , 0.83333333])
    """
    return cvar_curve(losses, tail_fractions, probabilities=weights / weights.sum())


# --- independent losses: a band and anchors -------------------------------------------------------


def anchor_excess(losses: DoubleArray, counts: IntArray, anchor: float, delta: float) -> float:
    """Upper confidence bound of E[(U - anchor)+] from distinct losses and their counts."""
    shares = np.maximum(losses - anchor, 0) / (1 - anchor)
    return (1 - anchor) * mean_bound(shares, counts=counts, delta=delta)


def excess_curve(
    largest: DoubleArray, masses: DoubleArray, anchors: DoubleArray, anchor_excesses: DoubleArray
) -> tuple[DoubleArray, DoubleArray]:
    """Bounds of E[(U - t)+] at every t where their slope changes, from band and anchors together.

    Args:
        largest: (B,) falling; P[U > largest[j]] <= masses[j].
        anchors: (K,); E[(U - anchors[j])+] <= anchor_excesses[j].
    """
    # P[U > u] is at most `steps[i]` for starts[i] <= u < starts[i + 1]; `areas` integrate it.
    starts = np.concatenate([[0.0], largest[::-1], [1.0]])
    steps = np.concatenate([[1.0], masses[::-1]])
    areas = np.concatenate([[0.0], np.cumsum(steps * np.diff(starts))])
    anchors, anchor_excesses = np.append(anchors, 1.0), np.append(anchor_excesses, 0.0)
    thresholds = np.unique(np.concatenate([starts, anchors]))
    reached = anchor_excesses + np.interp(anchors, starts, areas)  # (K + 1,)
    is_above = anchors >= thresholds[:, None]  # (T, K + 1)
    best = np.where(is_above, reached, np.inf).min(axis=1)
    return thresholds, best - np.interp(thresholds, starts, areas)


# --- the band -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def tail_masses(num_draws: int, delta: float) -> tuple[IntArray, DoubleArray]:
    """P[U > k-th largest of the draws] <= mass_k for all listed k at once, but with probability
    delta: the ranks k and their masses.

    A uniform variable's k-th smallest of n follows Beta(k, n - k + 1). Every mass is the quantile
    of its law at one level (Berk and Jones, 1979), found by bisection on the exact probability that
    all hold. The arrays are kept for the next call, and read-only.
    """
    # 1, 2, ..., 40, then steps of half a standard deviation of a count of that size.
    listed = [1]
    while listed[-1] < num_draws:
        step = 1 if listed[-1] < NUM_DENSE else max(1, round(0.5 * math.sqrt(listed[-1])))
        listed.append(listed[-1] + step)
    ranks = np.array([rank for rank in listed if rank <= num_draws], dtype=np.int64)

    def masses_at(log_level: float) -> DoubleArray:
        chance = min(1.0, -math.expm1(log_level) + 2.0**-52)  # rounded up: a wider band holds too
        return np.asarray(betaincinv(ranks, num_draws - ranks + 1.0, chance))

    def gap(log_level: float) -> float:
        failing = 1 - all_hold_probability(ranks, masses_at(log_level), num_draws)
        return math.log(max(failing, 0.0) + CHANCE_ROUNDING * (num_draws + 10)) - math.log(delta)

    level = math.log(delta)
    lowest = level - math.log(len(ranks) + 1)  # the union bound, which holds in any case
    if gap(lowest) >= 0:  # delta is so small that it is lost in rounding
        level = lowest
    elif gap(level) > 0:
        level = float(brentq(gap, lowest, level, xtol=1e-3))
    while level > lowest and gap(level) > -1e-6:  # the root is known to a thousandth: be safe
        level -= 1e-3
    masses = masses_at(level)
    ranks.flags.writeable = masses.flags.writeable = False
    return ranks, masses


def all_hold_probability(ranks: IntArray, masses: DoubleArray, num_draws: int) -> float:
    """P[for all j, at least ranks[j] of n uniform draws lie below masses[j]].

    The counts below 0 < m_1 < m_2 < ... are those of a Poisson process of rate n, given that it
    counts n at 1: independent steps, so their law is a chain of convolutions, cut off below the
    ranks. What is cut off above is lost: but for rounding, the answer errs to the safe side.
    """
    log_factorials = gammaln(np.arange(num_draws + 2) + 1.0)
    chances, lowest, reached = np.ones(1), 0, 0.0  # of the counts lowest, lowest + 1, ...
    for rank, mass in zip(ranks.tolist(), masses.tolist(), strict=True):
        if mass >= 1:
            break
        mean = num_draws * (mass - reached)
        width = 9 * math.sqrt(mean) + 20  # other counts have no measurable probability
        first = max(0, int(mean - width))
        counts = np.arange(first, min(int(mean + width), num_draws + 1))
        steps = np.exp(_log_poisson(counts, mean, log_factorials))
        chances, lowest, reached = _convolve(chances, steps), lowest + first, mass
        cut = max(rank - lowest, 0)
        chances, lowest = chances[cut : num_draws - lowest + 1], lowest + cut
        kept = np.flatnonzero(chances > 1e-16)
        if not len(kept):
            return 0.0
        chances = np.maximum(chances[: kept[-1] + 1], 0)  # the Fourier transform errs below 0
    missing = num_draws - lowest - np.arange(len(chances))
    ends = _log_poisson(missing, num_draws * (1 - reached), log_factorials)
    whole = _log_poisson(np.array([num_draws]), num_draws, log_factorials)
    return float(chances @ np.exp(ends - whole))


def _log_poisson(counts: IntArray, mean: float, log_factorials: DoubleArray) -> DoubleArray:
    if mean <= 0:
        return np.where(counts == 0, 0.0, -np.inf)
    return counts * math.log(mean) - mean - log_factorials[counts]


def _convolve(left: DoubleArray, right: DoubleArray) -> DoubleArray:
    """As numpy does it, or by Fourier transform where that is faster."""
    if len(left) * len(right) < 20_000:
        return np.convolve(left, right)
    size = len(left) + len(right) - 1
    fast = 1 << (size - 1).bit_length()
    return np.fft.irfft(np.fft.rfft(left, fast) * np.fft.rfft(right, fast), fast)[:size]


# --- clusters -------------------------------------------------------------------------------------


def loss_weights(cluster_ids: IntArray, cap: float) -> DoubleArray:
    """min(1, cap / m) for a loss in a cluster of m: ids from 0 (N,) -> (N,)."""
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1 (a cluster of one query), got {cap}")
    return np.minimum(1.0, cap / np.bincount(cluster_ids)[cluster_ids])


def _cluster_excesses(
    losses: DoubleArray, weights: DoubleArray, cluster_ids: IntArray, cap: float, delta: float
) -> DoubleArray:
    """Bounds of E[(U - t)+] at CLUSTER_ANCHORS, U drawn with probability as the weights: (T,)."""
    share, bounds = delta / len(CLUSTER_ANCHORS), []
    totals = np.minimum(np.bincount(cluster_ids) / cap, 1)  # (C,) what clusters weigh, of the cap
    for anchor in CLUSTER_ANCHORS:
        values = weights * np.maximum(losses - anchor, 0) / (1 - anchor)
        sums = np.bincount(cluster_ids, weights=values) / cap  # (C,)
        sums = np.minimum(np.ceil(sums / RESOLUTION) * RESOLUTION, totals)
        pairs, counts = np.unique(sums + 1j * totals, return_counts=True)
        bound = mean_bound(pairs.real, weights=pairs.imag, counts=counts, delta=share)
        bounds.append((1 - anchor) * bound)
    return np.array(bounds)


def _checked_fractions(tail_fractions: ArrayLike) -> DoubleArray:
    fractions = np.asarray(tail_fractions, dtype=np.float64)
    if not (np.all(fractions > 0) and np.all(fractions <= 1)):
        raise ValueError(f"tail_fractions must be above 0 and at most 1, got {fractions}")
    return fractions
