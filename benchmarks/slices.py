"""Does `evenhand slices` claim what is not there, and find what is? Made data, known answers.

    python benchmarks/slices.py              the whole study, some minutes on two cores
    python benchmarks/slices.py --sets 100   a quick look

*Nothing there*: losses have nothing to do with any column; they are alike within a query. A claim
is a false one. Beside the test, what the same search claims without its correction.
*One bad slice*: 2 % of the pairs, of one condition or of two, fail with probability .6, all others
with .15. Is that very slice found first? Is anything claimed beside it? Of two conditions, each
alone holds at least twice as many pairs: otherwise one of them would say it all.
"""

import argparse
import json
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom, chi2

from evenhand.evaluation import find_slices
from evenhand.evaluation.slice_attributes import Attribute, nominal, ordinal
from evenhand.evaluation.slice_search import largest_score, slabs_of, slices_to_look_at, strata_of
from evenhand.files import write_json

RESULTS = Path(__file__).parent / "results" / "slices.json"
BAD, GOOD = 0.6, 0.15
PERMUTATIONS = 199


def columns(generator: np.random.Generator, query_ids: Any) -> list[Attribute]:
    """Groups of very different sizes, columns that lean on each other, one of numbers."""
    num_queries, num_pairs = int(query_ids[-1]) + 1, len(query_ids)
    scripts = np.minimum(generator.geometric(0.35, num_queries) - 1, 9)
    shifted = np.minimum(scripts + generator.geometric(0.5, num_queries) - 1, 11)
    lengths = generator.poisson(6 + scripts)  # longer in the rarer scripts
    countries = np.minimum(generator.geometric(0.08, num_pairs) - 1, 39)  # of labels: a pair's own
    return [
        nominal("script", scripts[query_ids], [f"script = {n}" for n in range(10)]),
        nominal("style", shifted[query_ids], [f"style = {n}" for n in range(12)]),
        ordinal("length", lengths[query_ids], (2, 4, 6, 8, 12, 16)),
        nominal("country", countries, [f"country = {n}" for n in range(40)]),
        ordinal("training pairs", generator.geometric(0.2, num_pairs), (1, 3, 7, 15)),
    ]


def queries(generator: np.random.Generator, num_queries: int) -> Any:
    """Which query each pair is of: most have one pair, some have up to five."""
    return np.repeat(np.arange(num_queries), np.minimum(generator.geometric(0.7, num_queries), 5))


def chances(generator: np.random.Generator, query_ids: Any, mean: float) -> Any:
    """How likely each pair fails: a chance for each query, so that its pairs are alike."""
    drawn = generator.beta(3 * mean, 3 * (1 - mean), size=int(query_ids[-1]) + 1)
    return drawn[query_ids]


def null_trial(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng([1, seed])
    query_ids = queries(generator, int(generator.choice([400, 1200, 4000])))
    attributes = columns(generator, query_ids)
    mean = float(generator.uniform(0.1, 0.3))
    failed = generator.random(len(query_ids)) < chances(generator, query_ids, mean)
    losses = failed.astype(np.float64)
    found = find_slices(losses, query_ids, attributes, num_permutations=PERMUTATIONS, seed=seed)
    return {
        "claimed": len(found.slices) > 0,
        "claimed uncorrected": uncorrected(losses, query_ids, attributes) < 0.05,
        "looks": found.num_looks,
    }


def uncorrected(losses: Any, query_ids: Any, attributes: list[Attribute]) -> float:
    """The p-value of the best slice by its own likelihood ratio, as if it were the only one."""
    looks = slices_to_look_at(attributes, max_conditions=2, min_pairs=30)
    looks = looks.among(np.arange(len(losses)), min_pairs=30)
    slabs = slabs_of(query_ids, strata_of(query_ids, np.zeros(len(losses), dtype=np.int64)))
    best = largest_score(
        losses,
        looks._replace(num_singles=1),  # without the price of a second condition
        slabs,
        mean_loss=float(losses.mean()),
        num_permutations=0,
        generator=np.random.default_rng(0),
    )
    return float(chi2.sf(2 * best.score, df=1) / 2)


def planted_trial(seed: int) -> dict[str, Any]:
    """One condition where the seed is even, two where it is odd."""
    generator = np.random.default_rng([2, seed])
    query_ids = queries(generator, 4000)
    attributes = columns(generator, query_ids)
    wanted = chosen_slice(generator, attributes, size=1 + seed % 2)
    is_bad = np.logical_and.reduce([member(attributes, words) for words in wanted])
    failed = generator.random(len(query_ids)) < np.where(is_bad, BAD, GOOD)
    found = find_slices(
        failed.astype(np.float64), query_ids, attributes, num_permutations=PERMUTATIONS, seed=seed
    )
    names = [set(s.conditions) for s in found.slices]
    first = [member(attributes, words) for words in (names[0] if names else [])]
    is_first = np.logical_and.reduce(first) if first else np.zeros(len(is_bad), dtype=bool)
    return {
        "conditions": len(wanted),
        "share": float(is_bad.mean()),
        "found first": names[:1] == [set(wanted)],
        "in common": float((is_bad & is_first).sum() / (is_bad | is_first).sum()),
        "claimed beside it": len(names) > 1,
        "first": sorted(names[0]) if names else [],
        "wanted": list(wanted),
    }


def chosen_slice(
    generator: np.random.Generator, attributes: list[Attribute], *, size: int
) -> tuple[str, ...]:
    """A slice of 2 % of the pairs, as near as there is among a few hundred drawn at random."""
    drawn = []
    for _ in range(300):
        places = generator.choice(len(attributes), size=size, replace=False)
        words = tuple(str(generator.choice(attributes[place].conditions)) for place in places)
        parents = [member(attributes, word) for word in words]
        share = float(np.logical_and.reduce(parents).mean())
        if size == 1 or min(parent.mean() for parent in parents) >= 2 * share:
            drawn.append((abs(share - 0.02), words))
    return min(drawn)[1]


def member(attributes: list[Attribute], words: str) -> Any:
    """Which pairs fulfil a condition, given in words."""
    attribute = next(a for a in attributes if words in a.conditions)
    fulfils = attribute.members.toarray()[attribute.conditions.index(words)] > 0
    return fulfils[attribute.codes]


def summary(nulls: list[dict[str, Any]], planted: list[dict[str, Any]]) -> dict[str, Any]:
    claims = sum(trial["claimed"] for trial in nulls)
    return {
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
        "permutations": PERMUTATIONS,
        "nothing there": {
            "sets": len(nulls),
            "claimed": claims,
            "share": claims / len(nulls),
            "chance of as many at 5 %": float(binom.sf(claims - 1, len(nulls), 0.05)),
            "claimed without a correction": sum(t["claimed uncorrected"] for t in nulls),
            "slices looked at": [min(t["looks"] for t in nulls), max(t["looks"] for t in nulls)],
        },
        "one bad slice": {
            f"{size} condition{'s' * (size > 1)}": {
                "sets": len(trials),
                "found first": sum(t["found first"] for t in trials),
                "found first, four fifths in common": sum(t["in common"] >= 0.8 for t in trials),
                "claimed beside it": sum(t["claimed beside it"] for t in trials),
                "shares": [min(t["share"] for t in trials), max(t["share"] for t in trials)],
                "others found first": [
                    {key: t[key] for key in ("wanted", "first", "in common")}
                    for t in trials
                    if not t["found first"]
                ],
            }
            for size in (1, 2)
            if (trials := [t for t in planted if t["conditions"] == size])
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=1000, help="of each kind (%(default)s)")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        nulls = list(pool.map(null_trial, range(options.sets), chunksize=4))
        planted = list(pool.map(planted_trial, range(options.sets), chunksize=4))
    result = summary(nulls, planted)
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
