"""Who is failed: the slices that explain the failures of the first run, and how others fare there.

The slices are those of the first run, so that all runs are seen in the same ones; the test of
`evaluation.slices` is about that run alone.
"""

import math
from typing import Any

from evenhand.evaluation import Score, checked_slices, slices_of
from evenhand.report.examples import describe_pair
from evenhand.report.run_set import RunSet

NUM_SLICES = 10
NUM_PERMUTATIONS = 99  # enough for 5 %, and a page is written in seconds


def find_slices(runs: RunSet) -> dict[str, Any]:
    """The slices with the scores of every run, the failures they hold, and some of those."""
    outcome, dataset, part_name = runs.results[0].outcome, runs.dataset, runs.part_name
    found = slices_of(
        outcome,
        dataset,
        part_name,
        metric=runs.metric,
        num_permutations=NUM_PERMUTATIONS,
        max_slices=NUM_SLICES,
    )
    others = [
        checked_slices(found, result.outcome, dataset, part_name, metric=runs.metric)
        for result in runs.results[1:]
        if found.slices
    ]
    rows = []
    for place, first in enumerate(found.slices):
        title = " and ".join(first.conditions)
        in_runs = [findings.slices[place] for findings in (found, *others)]
        rows.append(
            {
                "title": title,
                "scores": [
                    Score(runs.metric, "slice", title, s.value, s.low, s.high, s.num_pairs, True)
                    for s in in_runs
                ],
                "excess": round(first.excess),
                "chance": math.ceil(100 * first.p_value - 1e-9),  # in 100, never rounded down
                "examples": [describe_pair(runs, outcome, pair) for pair in first.examples],
            }
        )
    failures = (1 - found.value) * found.num_pairs
    failed = sum(s.num_new_pairs * (1 - s.new_value) for s in found.slices)
    return {
        "found": found,
        "rows": rows,
        "covered": sum(s.num_new_pairs for s in found.slices) / max(1, found.num_pairs),
        "failed": failed / max(1.0, failures),
        "explained": round(sum(s.excess for s in found.slices)),
    }
