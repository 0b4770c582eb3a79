"""The report's headline: a sentence or two, from the numbers, and no stronger than they are.

Runs are compared query by query, as in `evenhand compare`: a difference is *clear* where its 95 %
interval leaves out 0. The worst groups are those of the first run, chosen on the validation part
where the run has been evaluated there: on the part that is compared on, some groups are lowest by
chance, which would favour the others.
"""

import math
from collections.abc import Sequence

from evenhand.config import build_config, parse_toml
from evenhand.evaluation import Difference, compare_outcomes, worst_groups
from evenhand.report.rendering import interval, join_words, percent, points
from evenhand.report.run_set import RunSet
from evenhand.result_tables import difference_title, summary_title, telling_titles


def reach_verdict(runs: RunSet) -> tuple[str, list[str]]:
    """The sentences, and the figures behind them, one a line."""
    if any(math.isnan(score.value) for score in runs.row("all", "all")):
        return f"The {runs.part_name} part holds no pair to judge by.", []
    if len(runs.results) == 1:
        return _describe_one(runs)
    first, part_name = runs.results[0], runs.part_name
    chosen_on = part_name if first.validation is None else "validation"
    groups = worst_groups(
        first.validation or first.outcome,
        runs.dataset,
        chosen_on=chosen_on,
        compared_on=part_name,
        metric=runs.metric,
        min_pairs=build_config(parse_toml(first.config_text)).evaluation.min_pairs,
    )
    sentences, lines = [], []
    for run, result in enumerate(runs.results[1:], start=1):
        found = compare_outcomes(
            [first.outcome], [result.outcome], runs.dataset, part_name, telling_titles(groups)
        )
        shown = {f"recall@{cutoff}" for cutoff in runs.shown_cutoffs}
        found = [row for row in found if row.metric in shown]
        names = runs.run_names[0], runs.run_names[run]
        sentences.append(describe_differences(found, *names, metric=runs.metric))
        for row in found:
            if row.metric == runs.metric and not math.isnan(row.difference):
                span = f"{points(row.low).removesuffix(' points')} to {points(row.high)}"
                lines.append(
                    f"{row.metric} on {_who(row)}: {names[0]} {percent(row.baseline)} "
                    f"%, {names[1]} {percent(row.contender)} % ({points(row.difference)}; {span})"
                )
    if groups:
        lines.append(f"worst groups: those of {runs.run_names[0]} on the {chosen_on} part")
    return " ".join(sentences), lines


def describe_differences(
    rows: Sequence[Difference], baseline: str, contender: str, *, metric: str
) -> str:
    """Who gains and who pays, in one sentence.

    Args:
        rows: at every cut-off that is shown; gains are told at `metric`, losses wherever they are.
    """
    gains = [_who(row) for row in rows if row.metric == metric and row.low > 0]
    losses = [
        f"{_who(row)} ({points(row.difference)} of {row.metric})"
        for row in rows
        if row.high < 0
    ]
    ahead = f"{contender} finds more than {baseline} on {join_words(gains, most=6)}"
    if gains and losses:
        return f"{ahead}; for this it pays on {join_words(losses, most=4)}."
    if losses:
        return f"{contender} is clearly behind {baseline} on {join_words(losses, most=4)}."
    if gains:
        return f"{ahead}, and nobody pays for it: no row is clearly worse, at any cut-off."
    return f"Between {contender} and {baseline} no difference is clear."


def _describe_one(runs: RunSet) -> tuple[str, list[str]]:
    rows = {  # what 'the worst groups' means here: a row for each column, or the tail without any
        summary_title(summary, column): runs.row(column, summary)[0]
        for column in runs.own_columns
        if (summary := runs.headline(column))
    } or {"tail labels": runs.row("frequency", "tail")[0]}
    worst = {where: row for where, row in rows.items() if not math.isnan(row.value)}
    everyone = runs.row("all", "all")[0]
    sentence = (
        f"Among its first {runs.cutoff} results, {runs.run_names[0]} finds the right label for "
        f"{percent(everyone.value)} % of all pairs"
    )
    if not worst:
        return f"{sentence}; no group is large enough to be judged by itself.", []
    lowest = min(worst, key=lambda where: worst[where].value)
    sentence += f", and for {percent(worst[lowest].value)} % on the {lowest}."
    lines = []
    for where, score in {**worst, "all pairs": everyone}.items():
        around = interval(score.low, score.high)
        value = f"{percent(score.value)} %" + (f" ({around})" if around else "")
        lines.append(f"{runs.metric} on {where}: {value}")
    return sentence, lines


def _who(row: Difference) -> str:
    """`all pairs`, `tail labels`, `worst 3 scripts`."""
    if row.group == "all":
        return "all pairs"
    is_of_labels = row.group in ("head", "torso", "tail")
    return f"{row.group} labels" if is_of_labels else difference_title(row)
