"""Proposition 5 against simulation: where the printed bound fails, and a correct one does not.

    python benchmarks/bounds.py                       the tables
    python benchmarks/bounds.py --json bounds.json    and the figures as JSON

`one function`: losses 0 and B with P[B] = alpha, and a class of one scorer, so Rad = 0. What the
printed bound lacks is the range B/alpha of the deviation. Violation rates are exact as well.

`memory`: scorers that can be right on any finite set of points and are wrong elsewhere. A share
alpha of the points is hard; off its set a scorer has loss B there. The scorer that has the sample
as its set has empirical CVaR 0 and true CVaR B. What the printed bound lacks is the factor 2.
`memory, vectors` has the same losses from scores in the plane: plus or minus (1, 1) B/sqrt 8, and
the loss along that direction, 1-Lipschitz. What is lacking even with the 2 is Maurer's sqrt 2.

`distances`: 17 scorers with losses |x - c|, x uniform. A tame class: all bounds hold with room.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom, binomtest

from evenhand.files import write_json
from evenhand.theory.bounds import Sample, corrected_bound, finite_class_bound, paper_bound
from evenhand.theory.rademacher import sampled_rademacher

DoubleArray = NDArray[np.float64]
CENTRES = np.linspace(0, 1, 17)
SEED = 7


def rate(count: int, trials: int) -> dict[str, float]:
    """A violation rate with its exact 95 % interval."""
    interval = binomtest(count, trials).proportion_ci(0.95)
    return {"rate": count / trials, "low": float(interval.low), "high": float(interval.high)}


def top_mean(losses: DoubleArray, num_hard_examples: int) -> DoubleArray:
    """Average of the k' largest of each row: (..., N) -> (...)."""
    position = losses.shape[-1] - num_hard_examples
    largest: DoubleArray = np.partition(losses, position, axis=-1)[..., position:].mean(axis=-1)
    return largest


def one_function(num_examples: int, trials: int, rng: np.random.Generator) -> dict[str, Any]:
    """CVaR - CVaR_hat = B (1 - min(1, X/(alpha N))) with X binomial(N, alpha)."""
    alpha, bound, delta = 0.5, 100.0, 0.001
    sample = Sample(
        loss_bound=bound, num_examples=num_examples, tail_fraction=alpha, failure_probability=delta
    )
    hard = rng.binomial(num_examples, alpha, size=trials)
    gaps = bound * (1 - np.minimum(1, hard / (alpha * num_examples)))
    quantile = bound * (1 - binom.ppf(delta, num_examples, alpha) / (alpha * num_examples))
    bounds = {
        "paper": paper_bound(0.0, sample).total,
        "corrected": corrected_bound(0.0, sample).total,
        "finite class": finite_class_bound(sample, num_functions=1),
    }
    return {
        "case": "one function",
        **vars(sample),
        "gap quantile": float(quantile),
        "gap quantile is": "exact",
        "bounds": bounds,
        "violations": {name: rate(int((gaps > b).sum()), trials) for name, b in bounds.items()},
        "exact violations": {
            name: one_function_violation(b, num_examples, alpha, bound)
            for name, b in bounds.items()
        },
    }


def one_function_violation(total: float, num_examples: int, alpha: float, bound: float) -> float:
    """P[gap > total] exactly: X must be below alpha N (1 - total/B)."""
    limit = alpha * num_examples * (1 - total / bound)
    return float(binom.cdf(math.ceil(limit) - 1, num_examples, alpha))


def memory(
    num_examples: int, trials: int, rng: np.random.Generator, *, vectors: bool
) -> dict[str, Any]:
    """The scorer that knows the sample; complexities are exact (see the module's text).

    The supremum over scorers for given signs leaves out of its set the hard points with sign +1: B
    for half of the hard points, so Rad = alpha B/2. For vectors a point gives B/sqrt 8 times
    |sigma_1 + sigma_2|, which is 1 on average, so Rad = alpha B/sqrt 8.
    """
    alpha, bound, delta = 0.25, 1.0, 0.05
    sample = Sample(
        loss_bound=bound, num_examples=num_examples, tail_fraction=alpha, failure_probability=delta
    )
    rademacher = alpha * bound / (math.sqrt(8) if vectors else 2)
    contraction = math.sqrt(2) if vectors else 1.0
    paper = paper_bound(rademacher, sample)
    bounds = {
        "paper": paper.total,
        "paper, factor 2": paper.total + paper.complexity,
        "corrected": corrected_bound(rademacher, sample, contraction=contraction).total,
    }
    gaps = np.array([memory_gap(rng.random(num_examples), alpha, bound) for _ in range(trials)])
    return {
        "case": "memory, vectors" if vectors else "memory",
        **vars(sample),
        "rademacher": rademacher,
        "gap quantile": float(np.quantile(gaps, 1 - delta)),
        "gap quantile is": "simulated",
        "bounds": bounds,
        "violations": {name: rate(int((gaps > b).sum()), trials) for name, b in bounds.items()},
    }


def memory_gap(points: DoubleArray, alpha: float, bound: float) -> float:
    """CVaR - CVaR_hat of the scorer whose set is the sample: points below alpha are hard."""

    def losses(places: DoubleArray) -> DoubleArray:
        return np.where((places < alpha) & ~np.isin(places, points), bound, 0.0)

    true_value = bound  # the set has mass 0, so the loss is B with probability alpha
    return true_value - float(top_mean(losses(points), round(alpha * len(points))))


def distances(num_examples: int, trials: int, rng: np.random.Generator) -> dict[str, Any]:
    alpha, delta = 0.25, 0.05
    sample = Sample(
        loss_bound=1.0, num_examples=num_examples, tail_fraction=alpha, failure_probability=delta
    )
    kept = round(alpha * num_examples)
    true_values = np.array([distance_cvar(centre, alpha) for centre in CENTRES])
    gaps = np.empty(trials)
    for trial in range(trials):
        losses = np.abs(rng.random(num_examples) - CENTRES[:, None])  # (17, N)
        gaps[trial] = (true_values - top_mean(losses, kept)).max()
    table = np.abs(rng.random(num_examples) - CENTRES[:, None])
    rademacher = sampled_rademacher(table, num_draws=1000, generator=rng).mean
    bounds = {
        "paper": paper_bound(rademacher, sample).total,
        "corrected": corrected_bound(rademacher, sample).total,
        "finite class": finite_class_bound(sample, num_functions=len(CENTRES)),
    }
    return {
        "case": "distances",
        **vars(sample),
        "rademacher": rademacher,
        "gap quantile": float(np.quantile(gaps, 1 - delta)),
        "gap quantile is": "simulated",
        "bounds": bounds,
        "violations": {name: rate(int((gaps > b).sum()), trials) for name, b in bounds.items()},
    }


def distance_cvar(centre: float, alpha: float) -> float:
    """CVaR of |x - c|, x uniform: the mean over the alpha of [0, 1] that is farthest from c."""
    near = min(centre, 1 - centre)
    if alpha <= 1 - 2 * near:  # one side alone
        return 1 - near - alpha / 2
    both = (alpha - (1 - 2 * near)) / 2  # length taken at the near side
    left = near - both / 2
    right = 1 - near - (alpha - both) / 2
    return (both * left + (alpha - both) * right) / alpha


def any_constant(extra: float) -> dict[str, Any]:
    """The printed deviation fails for some delta however large a term free of delta is added.

    `extra` is that term in units of B/(alpha sqrt N). For B/alpha large the tail beyond it is
    about Gaussian, while the printed deviation, in the same units, stays below alpha/B times a log.
    """
    num_examples, alpha, bound = 10_000, 0.5, 1000.0
    delta = 1e-3
    while True:
        sample = Sample(
            loss_bound=bound, num_examples=num_examples, tail_fraction=alpha,
            failure_probability=delta,
        )  # fmt: skip
        printed = paper_bound(0.0, sample).total
        total = printed + extra * bound / (alpha * math.sqrt(num_examples))
        violation = one_function_violation(total, num_examples, alpha, bound)
        if violation > delta:
            return {
                "extra": extra,
                "failure_probability": delta,
                "violation": violation,
                "num_examples": num_examples,
                "tail_fraction": alpha,
                "loss_bound": bound,
            }
        delta /= 10


def run_cases(sizes: list[int], trials: int) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    few = max(20, trials // 100)
    rows = [one_function(size, trials, rng) for size in sizes]
    rows += [memory(size, few, rng, vectors=False) for size in sizes]
    rows += [memory(size, few, rng, vectors=True) for size in sizes]
    rows += [distances(size, few, rng) for size in sizes]
    return {
        "seed": SEED,
        "trials": trials,
        "few trials": few,
        "cases": rows,
        "any constant": [any_constant(extra) for extra in (0.0, 1.0, 2.0)],
    }


def show(results: dict[str, Any]) -> None:
    """The largest sample of each case; the JSON has them all."""
    names = ("case", "delta", "gap, 1 - delta", "bound", "value", "violated", "95 %", "exact")
    largest = max(row["num_examples"] for row in results["cases"])
    table = Table(*names, title=f"CVaR - CVaR_hat, worst scorer of the class, N = {largest}")
    for row in results["cases"]:
        if row["num_examples"] == largest:
            for name in row["bounds"]:
                table.add_row(*shown_row(row, name))
    console = Console(width=120)
    console.print(table)
    for row in results["any constant"]:
        console.print(
            f"one function, N = {row['num_examples']}, {row['extra']:g} B/(alpha sqrt N) added: "
            f"delta = {row['failure_probability']:.0e}, violated with probability "
            f"{row['violation']:.1e}"
        )


def shown_row(row: dict[str, Any], name: str) -> list[str]:
    found, exact = row["violations"][name], row.get("exact violations", {}).get(name)
    return [
        row["case"],
        f"{row['failure_probability']:g}",
        f"{row['gap quantile']:.3g}",
        name,
        f"{row['bounds'][name]:.3g}",
        f"{found['rate']:.4f}",
        f"{found['low']:.4f} to {found['high']:.4f}",
        "" if exact is None else f"{exact:.2g}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulated gaps against generalisation bounds.")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[100, 200, 400, 800, 1600, 3200, 6400]
    )
    options = parser.parse_args(arguments)
    results = run_cases(options.sizes, options.trials)
    show(results)
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
