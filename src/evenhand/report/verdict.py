"""The one sentence a reader takes away, computed from the numbers and no stronger than they are.

A run is ahead of another where its recall is higher by what the table shows; it is *clearly*
ahead where their 95 % intervals do not overlap. Overlapping intervals prove nothing either way,
and the wording must not say that they do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from evenhand.evaluation import Score
from evenhand.report.markup import interval, listed, percent, points
from evenhand.report.study import Study
from evenhand.tables import summary_title

SEEN = 0.0005  # a smaller difference would read 0.0 points


class Comparison(NamedTuple):
    """Who is ahead in one row, of runs that all have a value there."""

    where: str
    scores: list[Score]
    leader: int | None  # None: no difference to be seen
    runner_up: int
    is_clear: bool  # no other run's interval reaches the leader's


def comparison(where: str, scores: list[Score]) -> Comparison:
    order = sorted(range(len(scores)), key=lambda run: -scores[run].value)
    best, second = order[0], order[1]
    is_clear = all(scores[best].low > scores[run].high for run in order[1:])
    is_ahead = scores[best].value - scores[second].value >= SEEN
    return Comparison(where, scores, best if is_ahead else None, second, is_clear)


def worst_rows(study: Study) -> list[tuple[str, list[Score]]]:
    """What 'the worst groups' means here: a row for each column, or the tail without columns."""
    rows = [
        (summary_title(summary, column), study.row(column, summary))
        for column in study.own_columns
        if (summary := study.headline(column))
    ]
    rows = rows or [("tail labels", study.row("frequency", "tail"))]
    return [(where, scores) for where, scores in rows if all(s.value == s.value for s in scores)]


def verdict(study: Study) -> tuple[str, list[str]]:
    """A sentence, and the figures behind it, one a line."""
    everyone, worst = study.row("all", "all"), worst_rows(study)
    if any(score.value != score.value for score in everyone):
        return f"The {study.part_name} part holds no pair to judge by.", []
    if len(study.results) == 1:
        return _verdict_on_one(study, everyone[0], [(where, rows[0]) for where, rows in worst])
    comparisons = [comparison(where, scores) for where, scores in worst]
    overall = comparison("all pairs", everyone)
    details = [_detail(study, item) for item in [*comparisons, overall]]
    return _lead(study, comparisons, overall), details


def _verdict_on_one(
    study: Study, everyone: Score, worst: Sequence[tuple[str, Score]]
) -> tuple[str, list[str]]:
    opening = (
        f"Among its first {study.cutoff} results, {study.run_names[0]} finds the right label for "
        f"{percent(everyone.value)} % of all pairs"
    )
    if not worst:
        return f"{opening}; no group is large enough to be judged by itself.", []
    lowest = min(worst, key=lambda row: row[1].value)
    sentence = f"{opening}, and for {percent(lowest[1].value)} % on the {lowest[0]}."
    rows = [*worst, ("all pairs", everyone)]
    return sentence, [f"{study.metric} on {where}: {_value(score)}" for where, score in rows]


def _lead(study: Study, comparisons: list[Comparison], overall: Comparison) -> str:
    if not comparisons:
        return f"No group is large enough to be compared by itself. {_overall(study, overall)}"
    leaders = {item.leader for item in comparisons}
    if leaders == {None}:
        return f"On the worst groups no difference can be seen. {_overall(study, overall)}"
    if len(leaders - {None}) > 1:
        parts = [
            f"{study.run_names[item.leader]} is {_ahead(item)} on the {item.where}"
            for item in comparisons
            if item.leader is not None
        ]
        return f"It depends on the group: {listed(parts)}. {_overall(study, overall)}"
    (leader,) = leaders - {None}
    assert leader is not None
    name, others = study.run_names[leader], _others(study, leader)
    clear = [item.where for item in comparisons if item.leader is not None and item.is_clear]
    if len(clear) == len(comparisons):
        sentence = f"{name} serves the worst groups better than {others}."
    elif clear:
        sentence = (
            f"{name} serves the {listed(clear)} better than {others}; on the other worst groups "
            f"the difference is not clear."
        )
    else:
        sentence = (
            f"{name} is ahead of {others} on the worst groups, but not clearly: the intervals "
            f"overlap."
        )
    return f"{sentence} {_overall(study, overall)}"


def _overall(study: Study, overall: Comparison) -> str:
    if overall.leader is None:
        return "Over all pairs no difference can be seen."
    lead = overall.scores[overall.leader].value - overall.scores[overall.runner_up].value
    name = study.run_names[overall.leader]
    return f"Over all pairs {name} is {_ahead(overall)} by {points(lead).removeprefix('+')}."


def _ahead(item: Comparison) -> str:
    return "clearly ahead" if item.is_clear else "ahead, though the intervals overlap,"


def _others(study: Study, leader: int) -> str:
    names = [name for run, name in enumerate(study.run_names) if run != leader]
    return names[0] if len(names) == 1 else f"each of {listed(names)}"


def _detail(study: Study, item: Comparison) -> str:
    values = [
        f"{name} {_value(score)}" for name, score in zip(study.run_names, item.scores, strict=True)
    ]
    return f"{study.metric} on {item.where}: {', '.join(values)}"


def _value(score: Score) -> str:
    around = interval(score.low, score.high)
    return f"{percent(score.value)} %" + (f" ({around})" if around else "")
