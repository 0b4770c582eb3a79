"""Runs compared query by query, and the sentence that says who gains and who loses.

The first sentence of the report, its charts and tables, and what `evenhand compare` prints are all
made of the list of differences that `compare_runs` returns, so they cannot disagree.

A difference is *significant* where its 95 % interval leaves out 0. The worst groups are those of
the first run, chosen on the validation part where the run has been evaluated there: on the part
that is compared on, some groups are lowest by chance, which would favour the others.
"""

import math
from typing import NamedTuple

from evenhand.config import build_config, parse_toml
from evenhand.evaluation import Difference, GroupList, compare_outcomes, worst_groups
from evenhand.evaluation.baselines import compare_with_baselines, sampled_queries
from evenhand.report.rendering import interval, join_words, number, percent, signed, span
from evenhand.report.run_set import RunSet
from evenhand.result_tables import difference_title, summary_title, telling_titles

MOST_NAMED = 4  # rows that the sentence calls significantly worse


class Comparison(NamedTuple):
    """A run minus the first one."""

    run: int  # position among the runs
    rows: list[Difference]  # of the table: all, by label frequency, worst groups; at every cut-off
    groups: dict[str, list[Difference]]  # column -> its groups that can be judged; at the metric
    worst_lists: dict[str, GroupList]  # title of a row -> the groups it averages
    chosen_on: str  # the part on which they are the worst


def compare_runs(runs: RunSet) -> list[Comparison]:
    """Every other run against the first one; none on a part without pairs."""
    first = runs.results[0]
    if not len(first.outcome.ranks):
        return []
    chosen_on = runs.part_name if first.validation is None else "validation"
    lists = telling_titles(
        worst_groups(
            first.validation or first.outcome,
            runs.dataset,
            chosen_on=chosen_on,
            compared_on=runs.part_name,
            metric=runs.metric,
            min_pairs=build_config(parse_toml(first.config_text)).evaluation.min_pairs,
        )
    )
    singles = {
        f"{column} = {row.name}": GroupList(column, (row.name,))
        for column in runs.own_columns
        for row in runs.rows(column)
        if row.is_judged
    }
    comparisons = []
    for run, result in enumerate(runs.results[1:], start=1):
        found = compare_outcomes(
            [first.outcome], [result.outcome], runs.dataset, runs.part_name, lists | singles
        )
        groups: dict[str, list[Difference]] = {column: [] for column in runs.own_columns}
        for row in found:
            if row.group in singles and row.metric == runs.metric:
                groups[singles[row.group].column].append(row)
        rows = [row for row in found if row.group not in singles]
        comparisons.append(Comparison(run, rows, groups, lists, chosen_on))
    return comparisons


def title_of(row: Difference) -> str:
    """`all pairs`, `tail labels`, `worst 3 scripts`."""
    if row.group == "all":
        return "all pairs"
    is_of_labels = row.group in ("head", "torso", "tail")
    return f"{row.group} labels" if is_of_labels else difference_title(row)


# --- sentences ------------------------------------------------------------------------------------


def headline(runs: RunSet, comparisons: list[Comparison]) -> str:
    """A sentence for the run, or for each that is compared; first whether a baseline beats it."""
    if math.isnan(runs.row("all", "all")[0].value):
        return f"The {runs.part_name} part holds no pair to judge by."
    warning = baseline_warning(runs)
    if not comparisons:
        return warning + _describe_one(runs)
    return warning + " ".join(describe_comparison(runs, found) for found in comparisons)


def describe_comparison(runs: RunSet, found: Comparison) -> str:
    """Who gains and who loses, in one sentence, no stronger than the differences are.

    Gains are told at the metric, losses at every cut-off that is shown.
    """
    own = [row for row in found.rows if row.metric == runs.metric]
    everyone, *others = own
    first, run = runs.run_names[0], runs.run_names[found.run]
    found_more = (
        "more than" if everyone.low > 0 else "less than" if everyone.high < 0 else "as much as"
    )
    sentence = (
        f"{run} finds {found_more} {first}: {signed(everyone.difference)} points of {runs.metric} "
        f"over all pairs ({span(everyone)})"
    )
    if gains := [row for row in others if row.low > 0]:
        best = max(gains, key=lambda row: row.difference)
        where = "most on" if everyone.low > 0 else "but more on"
        sentence += f", {where} {title_of(best)} ({signed(best.difference)})"
    return f"{sentence}; {describe_losses(runs, found)}."


def describe_losses(runs: RunSet, found: Comparison) -> str:
    """Whether any row of the table is significantly worse than the first run's."""
    worse: dict[str, str] = {}
    for row in sorted(found.rows, key=lambda row: row.metric != runs.metric):
        if row.metric in runs.shown_metrics and row.high < 0:
            at = "" if row.metric == runs.metric else f" in {row.metric}"
            worse.setdefault(title_of(row), f"{title_of(row)} ({signed(row.difference)}{at})")
    if not worse:
        return "no row of the table is significantly worse"
    return f"significantly worse: {join_words(list(worse.values()), most=MOST_NAMED)}"


def baseline_warning(runs: RunSet) -> str:
    """Says of every run that is not above popularity, or the nearest queries; else nothing."""
    sentences = []
    for run, name in enumerate(runs.run_names):
        for baseline, row in baseline_rows(runs, run).items():
            if row.low <= 0:
                is_below = "is below" if row.high < 0 else "is not clearly above"
                sentences.append(
                    f"{name} {is_below} the {baseline} baseline, which needs no training "
                    f"({signed(row.difference)} points of {runs.metric}, {span(row)})"
                )
    return f"{'; '.join(sentences)}. " if sentences else ""


def describe_baselines(runs: RunSet) -> list[str]:
    """A line a baseline: what it finds, and how far above it every run is."""
    found = [baseline_rows(runs, run) for run in range(len(runs.results))]
    lines = []
    for baseline, first in found[0].items():
        ahead = [
            f"{name} {signed(rows[baseline].difference)} points ({span(rows[baseline])})"
            for name, rows in zip(runs.run_names, found, strict=True)
        ]
        lines.append(
            f"{baseline}: {runs.metric} {percent(first.baseline)} % without training; "
            f"compared with that, {join_words(ahead)}"
        )
    num_sampled = len(sampled_queries(runs.dataset, runs.part_name))
    if lines and num_sampled < len(runs.part):
        lines[-1] += f" (both on a sample of {number(num_sampled)} queries)"
    return lines


def baseline_rows(runs: RunSet, run: int) -> dict[str, Difference]:
    """A run minus each baseline, over all pairs, at the metric."""
    compared = compare_with_baselines(
        runs.results[run].outcome, runs.results[0].baselines, runs.dataset, runs.part_name
    )
    return {
        name: next(row for row in rows if (row.group, row.metric) == ("all", runs.metric))
        for name, rows in compared.items()
    }


def _describe_one(runs: RunSet) -> str:
    everyone, name = runs.row("all", "all")[0], runs.run_names[0]
    sentence = (
        f"Among its first {runs.cutoff} results, {name} finds the right label for "
        f"{percent(everyone.value)} % of all pairs"
    )
    rows = {  # the lowest of the tail and of the worst groups of each column
        summary_title(summary, column): runs.row(column, summary)[0]
        for column in runs.own_columns
        if (summary := runs.telling_summary(column))
    } | {"tail labels": runs.row("frequency", "tail")[0]}
    worst = {where: row for where, row in rows.items() if not math.isnan(row.value)}
    if not worst:
        return f"{sentence}."
    where, lowest = min(worst.items(), key=lambda item: item[1].value)
    around = interval(lowest.low, lowest.high)
    return (
        f"{sentence}, but for {percent(lowest.value)} % on the {where}"
        f"{f' ({around})' if around else ''}."
    )
