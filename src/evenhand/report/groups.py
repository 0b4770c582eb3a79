"""The main table, recall by subpopulation, and the slices that explain failures."""

import math
from collections.abc import Sequence
from typing import Any

from evenhand.evaluation import Score, checked_slices, slices_of
from evenhand.report.examples import describe_pair
from evenhand.report.rendering import NOTHING, join_words, number, percent
from evenhand.report.run_set import FREQUENCY, RunSet
from evenhand.result_tables import summary_title

NUM_WORST, NUM_BEST = 25, 5  # drawn of a long column
NUM_NAMED = 3  # members named in the main table
NUM_LISTS = 3  # runs whose members are named there; with more, the full lists are below
NUM_SMALL_NAMED = 24
NUM_SLICES = 10
NUM_PERMUTATIONS = 99  # enough for 5 %, and a page is written in seconds
TITLES = {
    "frequency": "By frequency of the label (thirds of the labels)",
    "frequency over pairs": "By frequency of the label (thirds of the training pairs)",
}


def mark_best(scores: Sequence[Score]) -> list[tuple[Score, bool]]:
    """Each run's score, and whether it is the highest as shown; none is where all are alike."""
    shown = [percent(score.value) for score in scores]
    values = [score.value for score in scores if not math.isnan(score.value)]
    best = percent(max(values)) if len(set(shown)) > 1 and len(values) > 1 else None
    return [(score, text == best) for score, text in zip(scores, shown, strict=True)]


def main_table(runs: RunSet) -> dict[str, Any]:
    """Rows for everyone, by label frequency, and for the worst groups of each column."""
    frequencies = runs.columns["frequency"].group_names
    worst = [(column, name) for column in runs.own_columns for name in runs.summaries(column)]
    titles = {("all", "all"): "All pairs"}
    titles |= {("frequency", name): f"{name.capitalize()} labels" for name in frequencies}
    titles |= {(c, s): summary_title(s, c).replace("worst", "Worst", 1) for c, s in worst}
    rows = []
    for (column, group), title in titles.items():
        scores = runs.row(column, group)
        by_cutoff = [mark_best(runs.row(column, group, cutoff)) for cutoff in runs.shown_cutoffs]
        members = name_members(runs.run_names, [score.members for score in scores])
        counts = " / ".join(dict.fromkeys(number(score.count) for score in scores))
        rows.append((title, members, [cell for cells in by_cutoff for cell in cells], counts))
    lists = [
        (
            f"{titles[column, summary]}, {name}",
            [
                ", ".join(runs.row(column, summary, cutoff)[run].members) or NOTHING
                for cutoff in runs.shown_cutoffs
            ],
        )
        for column, summary in worst
        for run, name in enumerate(runs.run_names)
    ]
    list_titles = ["Row", *(f"by recall@{cutoff}" for cutoff in runs.shown_cutoffs)]
    return {
        "cutoffs": runs.shown_cutoffs,
        "rows": rows,
        "lists": lists,
        "list_titles": list_titles,
    }


def name_members(run_names: Sequence[str], lists: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Whom a worst row averages: (run, groups) for each run, or one ('', groups) for all."""
    if not any(lists):
        return []
    names = [join_words([name.strip() for name in members], most=NUM_NAMED) for members in lists]
    if len({frozenset(members) for members in lists}) == 1:
        return [("", names[0])]
    if len(lists) > NUM_LISTS:
        return [("", "each run's own: see below")]
    return list(zip(run_names, names, strict=True))


def group_charts(runs: RunSet) -> list[dict[str, Any]]:
    """For each column its groups, the worst first, and which of them are drawn."""
    charts = []
    for column in [*runs.own_columns, *FREQUENCY]:
        rows = runs.rows(column)
        judged = [row for row in rows if row.is_judged]
        num_between = max(0, len(judged) - NUM_WORST - NUM_BEST)
        small = [row for row in rows if not row.is_judged]
        named = [f"{row.name.strip()} ({number(row.num_pairs)})" for row in small if row.num_pairs]
        charts.append(
            {
                "column": column,
                "title": TITLES.get(column, f"By {column}"),
                "worst": judged[:NUM_WORST] if num_between else judged,
                "num_between": num_between,
                "best": judged[-NUM_BEST:] if num_between else [],
                "small": join_words(named, most=NUM_SMALL_NAMED),
                "num_empty": len(small) - len(named),
                "rows": [(row, mark_best(row.scores)) for row in rows],
            }
        )
    return [chart for chart in charts if chart["rows"]]


def find_slices(runs: RunSet) -> dict[str, Any]:
    """The slices that explain the failures of the first run, with the scores of every run there.

    All runs are seen in the slices of the first one; their test is about that run alone.
    """
    outcome, *others = [result.outcome for result in runs.results]
    where = runs.dataset, runs.part_name
    found = slices_of(
        outcome,
        *where,
        metric=runs.metric,
        num_permutations=NUM_PERMUTATIONS,
        max_slices=NUM_SLICES,
    )
    all_found = [found]
    if found.slices:
        all_found += [checked_slices(found, o, *where, metric=runs.metric) for o in others]
    rows = []
    for in_runs in zip(*(findings.slices for findings in all_found), strict=True):
        first = in_runs[0]
        rows.append(
            {
                "title": " and ".join(first.conditions),
                "scores": in_runs,
                "num_pairs": first.num_pairs,
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
