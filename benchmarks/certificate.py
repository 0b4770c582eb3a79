"""How often the bounds on the worst subpopulation hold, and how loose they are.

    python benchmarks/certificate.py --json benchmarks/results/certificate.json
    python benchmarks/certificate.py --draws 500 --trials 200              a quick look

A trial draws a sample of a law whose CVaR is known and asks each method for its bounds. It fails
where a bound lies below the truth at any of 45 tail fractions; delta is 0.05. `p_value` is the
chance of so many failures or more if the method failed with probability delta: small values
refute it. `excess` is the mean bound minus the truth. `single` is the same for the best that could
be had at that one fraction alone: exact Clopper-Pearson bounds where the law has two points, the
normal quantile times the true standard error elsewhere.

Methods: 'certificate' (what `evenhand` uses), 'dkw' (the band of Dvoretzky, Kiefer, Wolfowitz and
Massart: Thomas and Learned-Miller, 2019), and two that promise too much: 'estimate' and 'normal'
(one fraction at a time).
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import beta, binom

from evenhand.theory.cvar import cvar_curve
from evenhand.theory.subpopulation_bounds import certificate

DELTA = 0.05
SHOWN = np.array([1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01])
FRACTIONS = np.unique(np.concatenate([np.geomspace(0.005, 1, 40), SHOWN]))

Array = NDArray[np.float64]
Method = Callable[[Array], Array]  # losses (N,) -> bounds at FRACTIONS


class Law(NamedTuple):
    draw: Callable[[np.random.Generator, int], Array]
    quantiles: Array  # (100,000,) of equal mass: a law to reckon with
    share: float | None = None  # of the upper point, where there are two


def main() -> None:
    options = _options()
    rows = []
    for num_draws in options.draws:
        for name, law in _laws().items():
            found = _studied(name, law, num_draws, options)
            _print(found)
            rows += found
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, nargs="*", default=[500, 5000, 60_000])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


# --- laws -----------------------------------------------------------------------------------------


def _laws() -> dict[str, Law]:
    ranks = np.arange(2, 51)
    shares = 0.1 * (1 / ranks) / np.sum(1 / ranks)
    return {
        "0 or 1, a tenth of 1": _atoms([0.0, 1.0], [0.9, 0.1]),
        "0 or 1, a fiftieth of 1": _atoms([0.0, 1.0], [0.98, 0.02]),
        "0.2 or 0.8, a tenth of 0.8": _atoms([0.2, 0.8], [0.9, 0.1]),
        "reciprocal rank": _atoms([0.0, *(1 - 1 / ranks), 1.0], [0.8, *shares, 0.1]),
        "uniform": Law(lambda generator, n: generator.random(n), _levels()),
        "Beta(0.5, 5)": Law(
            lambda generator, n: generator.beta(0.5, 5, n), np.asarray(beta.ppf(_levels(), 0.5, 5))
        ),
    }


def _levels() -> Array:
    return (np.arange(100_000) + 0.5) / 100_000


def _atoms(values: list[float], shares: list[float]) -> Law:
    steps = np.cumsum(shares)
    quantiles = np.array(values)[np.minimum(np.searchsorted(steps, _levels()), len(values) - 1)]

    def draw(generator: np.random.Generator, num_draws: int) -> Array:
        counts = generator.multinomial(num_draws, np.array(shares) / steps[-1])
        return np.repeat(values, counts)  # the methods mind no order

    return Law(draw, quantiles, shares[-1] if len(values) == 2 else None)


def _truth(law: Law) -> Array:
    return cvar_curve(law.quantiles, FRACTIONS)


def _single(law: Law, num_draws: int) -> Array:
    """Bound minus truth where one fraction is asked for, and all is known but the truth: (A,)."""
    truth = _truth(law)
    if law.share is None:
        return np.minimum(truth + 1.645 * _errors(law.quantiles, num_draws), 1) - truth
    counts = np.arange(num_draws + 1)
    shares = np.append(beta.ppf(1 - DELTA, counts[:-1] + 1, num_draws - counts[:-1]), 1.0)
    low, high = law.quantiles[[0, -1]]
    bounds = low + (high - low) * np.minimum(shares[:, None] / FRACTIONS, 1)  # (N + 1, A)
    return np.asarray(binom.pmf(counts, num_draws, law.share) @ bounds - truth)


def _errors(losses: Array, num_draws: int) -> Array:
    quantiles = np.quantile(losses, 1 - FRACTIONS)
    spread = [np.std(np.maximum(losses - quantile, 0)) for quantile in quantiles]
    return np.array(spread) / FRACTIONS / math.sqrt(num_draws)


# --- methods --------------------------------------------------------------------------------------


def _certificate(losses: Array) -> Array:
    return certificate(losses, delta=DELTA).bounds(FRACTIONS)


def _dkw(losses: Array) -> Array:
    """A share epsilon of the law may lie at 1 instead of at its smallest losses."""
    moved = min(1.0, math.sqrt(math.log(1 / DELTA) / (2 * len(losses))))
    ordered = np.sort(losses)
    left = np.minimum(np.arange(len(losses), 0, -1) / len(losses), 1 - moved)
    kept = -np.diff(np.append(left, 0.0))
    probabilities = np.append(kept, moved)
    return cvar_curve(np.append(ordered, 1.0), FRACTIONS, probabilities=probabilities)


def _estimate(losses: Array) -> Array:
    return cvar_curve(losses, FRACTIONS)


def _normal(losses: Array) -> Array:
    return np.minimum(1, _estimate(losses) + 1.645 * _errors(losses, len(losses)))


METHODS: dict[str, Method] = {
    "certificate": _certificate,
    "dkw": _dkw,
    "estimate": _estimate,
    "normal": _normal,
}


# --- the study ------------------------------------------------------------------------------------


def _studied(
    name: str, law: Law, num_draws: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    truth, single = _truth(law), _single(law, num_draws)
    generator = np.random.default_rng(options.seed)
    bounds: dict[str, list[Array]] = {method: [] for method in METHODS}
    seconds = dict.fromkeys(METHODS, 0.0)
    for _ in range(options.trials):
        losses = law.draw(generator, num_draws)
        for method, bounds_fn in METHODS.items():
            start = time.perf_counter()
            bounds[method].append(bounds_fn(losses))
            seconds[method] += time.perf_counter() - start
    about = {"law": name, "n": num_draws, "delta": DELTA}
    return [
        {
            **about,
            "method": method,
            **_figures(np.stack(bounds[method]), truth),
            "single": _shown(single),
            "seconds": round(seconds[method] / options.trials, 5),
        }
        for method in METHODS
    ]


def _figures(bounds: Array, truth: Array) -> dict[str, Any]:
    """Failures and looseness from the bounds of all trials: (trials, A), (A,)."""
    # The law to reckon with is right to about 1e-5; a bound that close has not failed.
    failures = int(np.count_nonzero((bounds < truth - 2e-5).any(axis=1)))
    return {
        "trials": len(bounds),
        "failures": failures,
        "p_value": float(f"{binom.sf(failures - 1, len(bounds), DELTA):.3g}"),
        "fractions": SHOWN.tolist(),
        "truth": _shown(truth),
        "bound": _shown(bounds.mean(axis=0)),
        "excess": _shown(bounds.mean(axis=0) - truth),
    }


def _shown(values: Array) -> list[float]:
    return np.interp(SHOWN, FRACTIONS, values).round(5).tolist()


def _print(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    table = Table(title=f"{first['law']}, n = {first['n']:,}: bound minus truth")
    for title in ("method", "failures", "p value", *(f"{share:g}" for share in SHOWN)):
        table.add_column(title, justify="right")
    for row in rows:
        excess = [f"{value:.4f}" for value in row["excess"]]
        table.add_row(row["method"], str(row["failures"]), f"{row['p_value']:.2g}", *excess)
    table.add_row("one fraction alone", "", "", *(f"{v:.4f}" for v in first["single"]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
