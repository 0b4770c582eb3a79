"""The report's headline: one sentence, computed from the numbers and no stronger than they are.

A run is ahead of another where its recall is higher by what the table shows; it is *clearly*
ahead where their 95 % intervals do not overlap. Overlapping intervals prove nothing either way,
and the wording must not say that they do.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from evenhand.evaluation import Score
from evenhand.report.rendering import interval, join_words, percent, points
from evenhand.report.run_set import RunSet
from evenhand.result_tables import summary_title

VISIBLE = 0.0005  # a smaller difference would read 0.0 points


class Comparison(NamedTuple):
    """Who is ahead in one row, of runs that all have a value there."""

    where: str
    leader: int | None  # None: no difference to be seen
    lead: float
    is_clear: bool  # no other run's interval reaches the leader's

    def describe(self, run_names: Sequence[str]) -> str:
        words = "clearly ahead" if self.is_clear else "ahead, though the intervals overlap,"
        return f"{run_names[self.leader or 0]} is {words}"


def compare(where: str, scores: Sequence[Score]) -> Comparison:
    """Compares the runs in one row, of which there are at least two."""
    order = sorted(range(len(scores)), key=lambda run: -scores[run].value)
    best = scores[order[0]]
    lead = best.value - scores[order[1]].value
    is_clear = all(best.low > scores[run].high for run in order[1:])
    return Comparison(where, order[0] if lead >= VISIBLE else None, lead, is_clear)


def reach_verdict(runs: RunSet) -> tuple[str, list[str]]:
    """A sentence, and the figures behind it, one a line."""
    rows = {  # what 'the worst groups' means here: a row for each column, or the tail without any
        summary_title(summary, column): runs.row(column, summary)
        for column in runs.own_columns
        if (summary := runs.headline(column))
    } or {"tail labels": runs.row("frequency", "tail")}
    worst = {w: row for w, row in rows.items() if not any(math.isnan(s.value) for s in row)}
    everyone = runs.row("all", "all")
    if any(math.isnan(score.value) for score in everyone):
        return f"The {runs.part_name} part holds no pair to judge by.", []
    if len(runs.results) > 1:
        overall = compare("all pairs", everyone)
        sentence = _describe_worst(runs, [compare(where, row) for where, row in worst.items()])
        if overall.leader is None:
            sentence += " Over all pairs no difference can be seen."
        else:
            lead = points(overall.lead).removeprefix("+")
            sentence += f" Over all pairs {overall.describe(runs.run_names)} by {lead}."
    else:
        sentence = (
            f"Among its first {runs.cutoff} results, {runs.run_names[0]} finds the right label for "
            f"{percent(everyone[0].value)} % of all pairs"
        )
        if not worst:
            return f"{sentence}; no group is large enough to be judged by itself.", []
        lowest = min(worst, key=lambda where: worst[where][0].value)
        sentence += f", and for {percent(worst[lowest][0].value)} % on the {lowest}."
    lines = []
    for where, scores in {**worst, "all pairs": everyone}.items():
        values = []
        for name, score in zip(runs.run_names, scores, strict=True):
            around = interval(score.low, score.high)
            value = f"{percent(score.value)} %" + (f" ({around})" if around else "")
            values.append(f"{name} {value}" if len(scores) > 1 else value)
        lines.append(f"{runs.metric} on {where}: {', '.join(values)}")
    return sentence, lines


def _describe_worst(runs: RunSet, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "No group is large enough to be compared by itself."
    led = [item for item in comparisons if item.leader is not None]
    leaders = {item.leader for item in led if item.leader is not None}
    if not leaders:
        return "On the worst groups no difference can be seen."
    if len(leaders) > 1:
        parts = [f"{item.describe(runs.run_names)} on the {item.where}" for item in led]
        return f"It depends on the group: {join_words(parts)}."
    leader = leaders.pop()
    name, others = runs.run_names[leader], [n for r, n in enumerate(runs.run_names) if r != leader]
    rest = others[0] if len(others) == 1 else f"each of {join_words(others)}"
    clear = [item.where for item in led if item.is_clear]
    if len(clear) == len(comparisons):
        return f"{name} serves the worst groups better than {rest}."
    if clear:
        return (
            f"{name} serves the {join_words(clear)} better than {rest}; on the other worst groups "
            f"the difference is not clear."
        )
    return f"{name} is ahead of {rest} on the worst groups, but not clearly: the intervals overlap."
