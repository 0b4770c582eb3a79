"""Runs compared query by query, and the sentence that says who gains and who loses.

The sentence, the charts and tables of the report, and what `evenhand compare` prints are all made
of the differences that `compare_runs` returns, so they cannot disagree.

A difference is *significant* where its 95 % interval leaves out 0. The worst groups are those of
the first run, chosen on the validation part where the run has been evaluated there: on the part
that is compared on, some groups are lowest by chance, which would favour the others.
"""

import math
from typing import NamedTuple

from evenhand.config import build_config, parse_toml
from evenhand.evaluation import Difference, GroupList, compare_outcomes, worst_groups
from evenhand.evaluation.baselines import sampled_queries
from evenhand.evaluation.comparison import is_of_pairs
from evenhand.report.rendering import interval, join_words, number, percent, signed, span
from evenhand.report.run_set import RunSet
from evenhand.result_tables import difference_title, summary_title, telling_titles

MOST_NAMED = 4  # rows that the sentence calls significantly worse
NO_LOSS = "no row of the table is significantly worse"


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
    columns = runs.own_columns if runs.is_of_pairs else []
    singles = {
        f"{column} = {row.name}": GroupList(column, (row.name,))
        for column in columns
        for row in runs.rows(column)
        if row.is_judged
    }
    comparisons = []
    for run, result in enumerate(runs.results[1:], start=1):
        found = compare_outcomes(
            [first.outcome],
            [result.outcome],
            runs.dataset,
            runs.part_name,
            lists | singles,
            metric=None if runs.is_of_pairs else runs.metric,
        )
        groups: dict[str, list[Difference]] = {column: [] for column in columns}
        for row in found:
            if row.group in singles and row.metric == runs.metric:
                groups[singles[row.group].column].append(row)
        rows = [row for row in found if row.group not in singles]
        comparisons.append(Comparison(run, rows, groups, lists, chosen_on))
    return comparisons


def title_of(row: Difference) -> str:
    """`all pairs`, `tail labels`, `worst 3 scripts`."""
    if row.group == "all":
        return "all pairs" if is_of_pairs(row.metric) else "all queries"
    is_of_labels = row.group in ("head", "torso", "tail")
    return f"{row.group} labels" if is_of_labels else difference_title(row)


# --- sentences ------------------------------------------------------------------------------------


def headline(runs: RunSet, comparisons: list[Comparison]) -> str:
    """A sentence on the run, or on those that are compared; first whether a baseline beats one."""
    if math.isnan(runs.row("all", "all")[0].value):
        return f"The {runs.part_name} part holds no pair to judge by."
    sentence = describe_comparisons(runs, comparisons) if comparisons else _describe_one(runs)
    return baseline_warning(runs) + sentence


def describe_comparisons(runs: RunSet, comparisons: list[Comparison]) -> str:
    """Who gains and who loses, in one sentence, no stronger than the differences are.

    Gains are those at the metric, losses those at any cut-off that is shown.
    """
    first, several = runs.run_names[0], len(comparisons) > 1
    verb, more, less = "finds", "more", "less"
    if not runs.is_of_pairs:
        verb, more, less = "ranks", "better", "worse"
    alike = "as much" if runs.is_of_pairs else "as well"
    verdicts: list[str] = []
    gains = []
    for found in comparisons:
        everyone, *others = (row for row in found.rows if row.metric == runs.metric)
        name, points = runs.run_names[found.run], signed(everyone.difference)
        verdict = more if everyone.low > 0 else less if everyone.high < 0 else alike
        gains += [(row.difference, name, row) for row in others if row.low > 0]
        over = f" points of {runs.metric} over {title_of(everyone)}"
        if several:
            over = "" if verdicts else over
            verdicts.append(f"{name} {verb} {verdict} ({points}{over}, {span(everyone)})")
        else:
            than = "as" if verdict == alike else "than"
            verdicts.append(f"{name} {verb} {verdict} {than} {first}: {points}{over}")
            verdicts[0] += f" ({span(everyone)})"
    sentence = f"Compared with {first}, {join_words(verdicts)}" if several else verdicts[0]
    if gains:
        _, name, row = max(gains, key=lambda gain: gain[0])
        where = f"{title_of(row)} ({signed(row.difference)})"
        if several:
            sentence += f"; the largest gain is that of {name} on {where}"
        else:
            sentence += f", {'most on' if verdict == more else 'but more on'} {where}"
    if not several:
        return f"{sentence}; {describe_losses(runs, comparisons[0])}."
    losses = []
    for found in comparisons:
        if worse := list(significant_losses(runs, found).values()):
            where = worse[0] if len(worse) == 1 else f"{len(worse)} rows, such as {worse[0]}"
            losses.append(f"{runs.run_names[found.run]} on {where}")
    said = f"significantly worse: {join_words(losses)}" if losses else NO_LOSS
    return f"{sentence}; {said}."


def describe_losses(runs: RunSet, found: Comparison) -> str:
    """Whether any row of the table is significantly worse than the first run's."""
    worse = list(significant_losses(runs, found).values())
    return f"significantly worse: {join_words(worse, most=MOST_NAMED)}" if worse else NO_LOSS


def significant_losses(runs: RunSet, found: Comparison) -> dict[str, str]:
    """`tail labels (−2.00)` of each row of the table that is significantly worse, by its title.

    A row that is worse at another cut-off alone names that cut-off.
    """
    worse: dict[str, str] = {}
    for row in sorted(found.rows, key=lambda row: row.metric != runs.metric):
        if row.metric in runs.shown_metrics and row.high < 0:
            at = "" if row.metric == runs.metric else f" in {row.metric}"
            worse.setdefault(title_of(row), f"{title_of(row)} ({signed(row.difference)}{at})")
    return worse


def baseline_warning(runs: RunSet) -> str:
    """Which runs are not above popularity, or the nearest queries; nothing if all are."""
    clauses = []
    for name, above in zip(runs.run_names, runs.above_baselines, strict=True):
        for verdict in ("below", "not clearly above"):
            rows = {
                baseline: row
                for baseline, row in above.items()
                if row.low <= 0 and (row.high < 0) == (verdict == "below")
            }
            if rows:
                which = "baseline, which needs" if len(rows) == 1 else "baselines, which need"
                points = join_words([signed(row.difference) for row in rows.values()])
                around = "".join(f", {span(row)}" for row in rows.values() if len(rows) == 1)
                clauses.append(
                    f"{name} is {verdict} the {join_words([*rows])} {which} no training "
                    f"({points} points of {runs.metric}{around})"
                )
    return f"{'; '.join(clauses)}. " if clauses else ""


def describe_baselines(runs: RunSet) -> list[str]:
    """A line a baseline: what it finds, and how far above it every run is."""
    lines = []
    for baseline, first in runs.above_baselines[0].items():
        rows = [above[baseline] for above in runs.above_baselines]
        ahead = [
            f"{name} {signed(row.difference)} points ({span(row)})"
            for name, row in zip(runs.run_names, rows, strict=True)
        ]
        lines.append(
            f"{baseline}: {runs.metric} {percent(first.baseline)} % without training; "
            f"compared with that, {join_words(ahead)}"
        )
    num_sampled = len(sampled_queries(runs.dataset, runs.part_name))
    if lines and num_sampled < len(runs.part):
        lines[-1] += f" (both on a sample of {number(num_sampled)} queries)"
    return lines


def _describe_one(runs: RunSet) -> str:
    everyone, name = runs.row("all", "all")[0], runs.run_names[0]
    sentence = (
        f"{runs.where_found.replace('the', 'its').capitalize()}, {name} finds the right label for "
        f"{percent(everyone.value)} % of all pairs"
    )
    rows = {  # the lowest of the tail and of the worst groups of each column
        summary_title(summary, column): runs.row(column, summary)[0]
        for column in runs.own_columns
        if (summary := runs.telling_summary(column))
    } | {"tail labels": runs.row("frequency", "tail")[0]}
    worst = {where: row for where, row in rows.items() if row.value < everyone.value}
    if not worst:
        return f"{sentence}."
    where, lowest = min(worst.items(), key=lambda item: item[1].value)
    around = interval(lowest.low, lowest.high)
    return (
        f"{sentence}, but for {percent(lowest.value)} % on the {where}"
        f"{f' ({around})' if around else ''}."
    )
