"""Test queries that one run answers and another does not: for a visitor to try."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evenhand.data import open_dataset
from evenhand.data.text import script_of
from evenhand.errors import UserError
from evenhand.run_folder import is_evaluated, load_result, read_about

NUM_EXAMPLES = 8
CUTOFF = 10  # results the page shows


def telling_queries(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Queries of the test part, each way as many as there are, drawn at random; one a script.

    Of the first and the last run. None where the data set is no longer there, or has no texts, or
    one of the runs was not evaluated.
    """
    first, last = folders[0], folders[-1]
    try:
        about = [read_about(folder)["dataset"] for folder in (first, last)]
        dataset = open_dataset(Path(about[0].get("folder", "")))
        part = dataset.parts.get("test")
        is_same = {dataset.fingerprint} == {one.get("fingerprint") for one in about}
        are_evaluated = all(is_evaluated(folder, "test") for folder in (first, last))
        if first == last or not is_same or not are_evaluated or part is None or part.texts is None:
            return []
        results = [load_result(folder) for folder in (first, last)]
    except UserError:
        return []
    ranks = [result.outcome.ranks for result in results]  # (N,) each, of the same pairs
    is_missed = [(rank == 0) | (rank > CUTOFF) for rank in ranks]
    ways = [(ranks[1 - way] == 1) & is_missed[way] for way in (0, 1)]
    num_ways = [int(way.sum()) for way in ways]
    examples: list[dict[str, Any]] = []
    for missed_by, is_chosen in enumerate(ways):
        # As many of each way as there are: a page that showed one way alone would flatter.
        share = round(NUM_EXAMPLES * num_ways[missed_by] / max(1, sum(num_ways)))
        scripts: set[str] = set()
        for pair in np.random.default_rng(0).permutation(np.flatnonzero(is_chosen)).tolist():
            outcome = results[0].outcome
            query = part.texts[int(outcome.query_ids[pair])]
            script = script_of(query)
            if len(scripts) >= share:
                break
            if script not in scripts:
                scripts.add(script)
                label_id = int(outcome.label_ids[pair])
                examples.append(
                    {
                        "query": query,
                        "label_id": label_id,
                        "label": dataset.label_name(label_id),
                        "found_by": results[1 - missed_by].name,
                        "missed_by": results[missed_by].name,
                    }
                )
    return examples
