"""The main table, and recall by subpopulation."""

import math
from collections.abc import Sequence
from typing import Any

from evenhand.evaluation import Score
from evenhand.report.rendering import NOTHING, join_words, number, percent
from evenhand.report.run_set import FREQUENCY, RunSet
from evenhand.tables import summary_title

NUM_WORST, NUM_BEST = 25, 5  # drawn of a long column
NUM_NAMED = 3  # members named in the main table
NUM_LISTS = 3  # runs whose members are named there; with more, the full lists are below
NUM_SMALL_NAMED = 24
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
        by_cutoff = [runs.row(column, group, cutoff) for cutoff in runs.shown_cutoffs]
        scores = runs.row(column, group)
        rows.append(
            {
                "title": title,
                "members": name_members(runs.run_names, [score.members for score in scores]),
                "cells": [cell for scores in by_cutoff for cell in mark_best(scores)],
                "counts": " / ".join(dict.fromkeys(number(score.count) for score in scores)),
            }
        )
    lists = [
        {
            "title": f"{titles[column, summary]}, {name}",
            "members": [
                ", ".join(runs.row(column, summary, cutoff)[run].members) or NOTHING
                for cutoff in runs.shown_cutoffs
            ],
        }
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

    def name(members: Sequence[str]) -> str:
        return join_words([member.strip() for member in members], most=NUM_NAMED)

    if not any(lists):
        return []
    if len({frozenset(members) for members in lists}) == 1:
        return [("", name(lists[0]))]
    if len(lists) > NUM_LISTS:
        return [("", "each run's own: see below")]
    return [(run, name(members)) for run, members in zip(run_names, lists, strict=True)]


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
