"""Who gains and who loses, or is served and failed: charts and tables of groups, and of slices."""

import math
from typing import Any, NamedTuple

import numpy as np

from evenhand.evaluation import checked_slices, slices_of
from evenhand.evaluation.certificate import certify, is_certifiable
from evenhand.report.examples import describe_pair
from evenhand.report.forest_plots import (
    Estimate,
    Forest,
    ForestRow,
    make_forest,
    of_difference,
    of_score,
)
from evenhand.report.headline import Comparison, title_of
from evenhand.report.rendering import interval, join_words, number, percent, signed
from evenhand.report.run_set import RunSet
from evenhand.result_tables import summary_title

NUM_NAMED = 3  # groups that a row of worst groups names
NUM_PICTURED = 12  # groups in the first picture; of more, those at both ends
MOST_ROWS = 300  # of a column with thousands of groups, those at both ends
NUM_SMALL_NAMED = 24
NUM_SLICES = 10
NUM_PERMUTATIONS = 99  # enough for 5 %, and a page is written in seconds
SHARES = (0.5, 0.2, 0.1, 0.05)  # of the queries, for which a recall is guaranteed


class ColumnChart(NamedTuple):
    """Everything the page shows of one column of groups."""

    column: str
    summary: str  # in a sentence
    picture: Forest  # short: the groups at both ends
    chart: Forest  # all of them
    num_left_out: int
    small: str  # groups too small to judge
    num_empty: int


# --- the rows of the table ------------------------------------------------------------------------


def main_rows(runs: RunSet, comparisons: list[Comparison], metric: str) -> list[ForestRow]:
    """Everyone; then label frequencies and worst groups, the largest gain or recall first."""
    rows = []
    if comparisons:
        worst_lists = comparisons[0].worst_lists
        by_run = [[row for row in c.rows if row.metric == metric] for c in comparisons]
        for found in zip(*by_run, strict=True):
            estimates = [of_difference(c.run, r) for c, r in zip(comparisons, found, strict=True)]
            worst = worst_lists.get(found[0].group)
            note = _named(worst.names) if worst else ""
            rows.append(ForestRow(title_of(found[0]), note, estimates, found[0].count))
    else:
        keys = {("all", "all"): "all pairs"}
        keys |= {("frequency", name): f"{name} labels" for name in ("head", "torso", "tail")}
        for column in runs.own_columns:
            keys |= {(column, s): summary_title(s, column) for s in runs.summaries(column)}
        for (column, group), title in keys.items():
            score = runs.row(column, group, metric)[0]
            note = _named(score.members)
            rows.append(ForestRow(title, note, [of_score(0, score)], score.count))
    rows = [row for row in rows if row.num_pairs]
    return [*rows[:1], *sorted(rows[1:], key=_by_gain)]


def main_chart(runs: RunSet, comparisons: list[Comparison]) -> Forest:
    """The first picture of the page: all, head, torso, tail and the worst groups."""
    return _forest(runs, main_rows(runs, comparisons, runs.metric))


def cutoff_tables(runs: RunSet, comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """For each comparison, or the one run: rows of (title, an estimate for each shown metric)."""
    titles = [row.title for row in main_rows(runs, comparisons, runs.metric)]
    of_metrics = [
        {row.title: row.estimates for row in main_rows(runs, comparisons, metric)}
        for metric in runs.shown_metrics
    ]
    return [
        {
            "run": runs.run_names[found.run if found else 0],
            "rows": [(title, [rows[title][place] for rows in of_metrics]) for title in titles],
        }
        for place, found in enumerate(comparisons or [None])
    ]


def _named(members: tuple[str, ...]) -> str:
    return join_words([name.strip() for name in members], most=NUM_NAMED)


def _by_gain(row: ForestRow) -> float:
    value = row.estimates[-1].value
    return math.inf if math.isnan(value) else -value


def _forest(runs: RunSet, rows: list[ForestRow]) -> Forest:
    is_compared = len(runs.results) > 1
    return make_forest(
        f"{runs.metric}, points more or less" if is_compared else f"{runs.metric}, %",
        rows,
        reference=0.0 if is_compared else runs.row("all", "all")[0].value,
        is_of_differences=is_compared,
    )


# --- the groups of each column --------------------------------------------------------------------


def column_charts(runs: RunSet, comparisons: list[Comparison]) -> list[ColumnChart]:
    """For each column of the data set its groups, the largest gain or recall first."""
    charts = []
    for column in runs.own_columns:
        groups = runs.rows(column)
        judged = [group for group in groups if group.is_judged]
        small = [group for group in groups if not group.is_judged]
        estimates = [[of_score(0, group.scores[0])] for group in judged]
        if comparisons:  # in the order of the groups that can be judged
            found = zip(*(c.groups[column] for c in comparisons), strict=True)
            estimates = [
                [of_difference(c.run, r) for c, r in zip(comparisons, of_group, strict=True)]
                for of_group in found
            ]
        rows = [
            ForestRow(group.name.strip(), "", own, group.num_pairs)
            for group, own in zip(judged, estimates, strict=True)
        ]
        rows.sort(key=_by_gain)
        if not rows:
            continue
        named = [f"{row.name.strip()} ({number(row.num_pairs)})" for row in small if row.num_pairs]
        kept = _both_ends(rows, MOST_ROWS)
        summary = f"By {column}: {number(len(rows))} groups that can be judged"
        if comparisons:
            kinds = [row.estimates[-1].kind() for row in rows]
            summary = (
                f"By {column}: of {number(len(rows))} groups that can be judged, "
                f"{kinds.count('gain')} gain significantly and {kinds.count('loss')} lose"
            )
        charts.append(
            ColumnChart(
                column,
                summary,
                _forest(runs, _both_ends(rows, NUM_PICTURED)),
                _forest(runs, kept),
                len(rows) - len(kept),
                join_words(named, most=NUM_SMALL_NAMED),
                len(small) - len(named),
            )
        )
    return charts


def _both_ends(rows: list[ForestRow], most: int) -> list[ForestRow]:
    return rows if len(rows) <= most else rows[: most // 2] + rows[-(most // 2) :]


# --- slices, and what is guaranteed ---------------------------------------------------------------


def find_slices(runs: RunSet) -> dict[str, Any]:
    """The slices that explain the failures of the last run, and how the first one does there."""
    first, last = runs.results[0].outcome, runs.results[-1].outcome
    run, where = len(runs.results) - 1, (runs.dataset, runs.part_name)
    most: Any = {"num_permutations": NUM_PERMUTATIONS, "max_slices": NUM_SLICES}
    found = slices_of(last, *where, metric=runs.metric, **most)
    before = checked_slices(found, first, *where, metric=runs.metric) if found.slices else found
    rows = []
    for own, other in zip(found.slices, before.slices, strict=True):
        change = f"{signed(own.value - other.value)} vs {runs.run_names[0]}" if run else ""
        shown, around = percent(own.value), interval(own.low, own.high)
        value = Estimate(run, own.value, own.low, own.high, shown, around, change)
        chance = math.ceil(100 * own.p_value - 1e-9)  # in 100, never rounded down
        note = f"chance: at most {chance} in 100" if chance > 1 else ""
        rows.append(ForestRow(" and ".join(own.conditions), note, [value], own.num_pairs))
    failures = (1 - found.value) * found.num_pairs
    failed = sum(s.num_new_pairs * (1 - s.new_value) for s in found.slices)
    heading, reference = f"{runs.metric}, %", found.value
    return {
        "run": runs.run_names[-1],
        "found": found,
        "chart": make_forest(heading, rows, reference=reference, is_of_differences=False),
        "examples": [
            (" and ".join(s.conditions), [describe_pair(runs, last, pair) for pair in s.examples])
            for s in found.slices
        ],
        "covered": sum(s.num_new_pairs for s in found.slices) / max(1, found.num_pairs),
        "failed": failed / max(1.0, failures),
    }


def guarantees(runs: RunSet) -> dict[str, Any] | None:
    """Recall at the metric's cut-off that every subpopulation of a share has, named or not.

    None where nothing above 0 is guaranteed, or on a part that settings were chosen on.
    """
    if not is_certifiable(runs.part_name) or not len(runs.results[0].outcome.ranks):
        return None
    found = [
        certify(r.outcome, runs.dataset, runs.part_name, loss=f"miss@{runs.cutoff}")
        for r in runs.results
    ]
    bounds, seen = (  # (shares, runs)
        1 - np.stack(values, axis=1)
        for values in ([c.bounds(SHARES) for c in found], [c.estimates(SHARES) for c in found])
    )
    rows = [
        (
            f"{100 * share:g} % of any queries",
            [*zip(map(_at_least, low), map(percent, mean), strict=True)],
        )
        for share, low, mean in zip(SHARES, bounds, seen, strict=True)
        if max(low) >= 0.0005
    ]
    return {"rows": rows, "num_queries": len(found[0].losses)} if rows else None


def _at_least(recall: float) -> str:
    """Rounded down: a guarantee must not grow by printing it."""
    return f"{math.floor(1000 * recall + 1e-9) / 10:.1f}"
