"""Who is failed: the slices that explain the failures of the first run, and how others fare there.

The slices are those of the first run, so that all runs are seen in the same ones; the test of
`evaluation.slices` is about that run alone.
"""

from collections.abc import Sequence

from evenhand.evaluation import Findings, Score, Slice, checked_slices, slices_of
from evenhand.report.charts import interval_axis, interval_row, legend
from evenhand.report.markup import (
    Attributes,
    Child,
    Html,
    data_row,
    element,
    folded,
    head_row,
    note,
    number,
    paragraph,
    percent,
    section,
    table,
    user_text,
)
from evenhand.report.study import Study

NUM_SLICES = 10
NUM_PERMUTATIONS = 99  # enough for 5 %, and a page is written in seconds


def slices_section(study: Study) -> Html:
    outcome = study.results[0].outcome
    found = slices_of(
        outcome,
        study.dataset,
        study.part_name,
        metric=study.metric,
        num_permutations=NUM_PERMUTATIONS,
        max_slices=NUM_SLICES,
    )
    if not found.slices:
        return section("slices", "Who is failed", paragraph(_nobody(found)))
    others = [
        checked_slices(found, result.outcome, study.dataset, study.part_name, metric=study.metric)
        for result in study.results[1:]
    ]
    return section(
        "slices",
        "Who is failed",
        _told(study, found),
        legend(study.run_names),
        _chart(study, [found, *others]),
        _explained(study, found),
        _examples(study, found),
    )


def _nobody(found: Findings) -> str:
    if not found.num_looks:
        return f"No slice holds the {number(found.min_pairs)} pairs that are needed to judge it."
    return (
        f"No slice is worse than chance explains: {number(found.num_looks)} slices of at least "
        f"{number(found.min_pairs)} pairs were looked at, all with one or two conditions."
    )


def _told(study: Study, found: Findings) -> Html:
    explained = sum(s.excess for s in found.slices)
    failures = (1 - found.value) * found.num_pairs
    covered = sum(s.num_new_pairs for s in found.slices) / found.num_pairs
    return paragraph(
        "The subpopulations that explain most failures of ",
        element("bdi", {}, study.run_names[0]),
        f", found among {number(found.num_looks)} slices: all groups, features of the query and "
        f"the label, and every two of them together. They hold {percent(covered)} % of the pairs "
        f"and {percent(_failed(found) / max(1.0, failures))} % of its failures, "
        f"{number(round(explained))} more than as many average pairs.",
    )


def _failed(found: Findings) -> float:
    return sum(s.num_new_pairs * (1 - s.new_value) for s in found.slices)


def _chart(study: Study, runs: list[Findings]) -> Html:
    head = element(
        "tr",
        {},
        element("th", {"scope": "col"}, "Slice"),
        element(
            "th",
            {"scope": "col", "class": "axis"},
            element("span", {"class": "hidden"}, f"{study.metric}, %"),
            interval_axis(),
        ),
        *(
            element("th", {"scope": "col", "class": "number"}, title)
            for title in (f"{study.metric}, %", "pairs", "excess failures", "chance")
        ),
    )
    rows = [_row(study, "All pairs", study.row("all", "all"), "", "")]
    for place, first in enumerate(runs[0].slices):
        scores = [_score(study, run.slices[place]) for run in runs]
        words = user_text(" and ".join(first.conditions))
        rows.append(_row(study, words, scores, number(round(first.excess)), chance(first.p_value)))
    caption = f"{study.metric} in per cent, in the slices that explain most failures"
    return table(caption, [head], rows, css_class="dots slices")


def _score(study: Study, s: Slice) -> Score:
    title = " and ".join(s.conditions)
    return Score(study.metric, "slice", title, s.value, s.low, s.high, s.num_pairs, is_judged=True)


def _row(study: Study, title: Child, scores: Sequence[Score], *cells: str) -> Html:
    figures = " / ".join(percent(score.value) for score in scores)
    return element(
        "tr",
        {},
        element("th", {"scope": "row"}, title),
        element("td", {"class": "axis"}, interval_row(study.run_names, scores)),
        *(
            element("td", {"class": "number"}, cell)
            for cell in (figures, number(scores[0].count), *cells)
        ),
    )


def chance(p_value: float) -> str:
    """A p-value in words: 0.01 -> 'at most 1 in 100'."""
    return f"at most {-int(-100 * p_value // 1)} in 100"


def _explained(study: Study, found: Findings) -> Html:
    return note(
        f"Slices are in the order they were found: each is the one that explains most of what "
        f"those above it leave. {study.metric} over all pairs of the first run is "
        f"{percent(found.value)} %. Bars are 95 % intervals over queries. Excess failures: "
        f"beyond those of as many average pairs, a pair counting once, for the first slice it is "
        f"in. Chance: how often permuted losses would make any slice look as bad. The slices were "
        f"chosen because the first run fails there on these pairs, so on other pairs expect it to "
        f"do a little better in them."
    )


def _examples(study: Study, found: Findings) -> Html:
    rows = []
    for s in found.slices:
        heading: Attributes = {"colspan": 3, "scope": "rowgroup", "class": "block"}
        words = user_text(" and ".join(s.conditions))
        rows.append(element("tr", {}, element("th", heading, words)))
        rows += [data_row(*_example(study, pair)) for pair in s.examples]
    caption = "Failures in these slices, drawn at random"
    head = head_row("Query", "Right label", "Rank")
    return folded(caption, table(caption, [head], rows, css_class="examples"))


def _example(study: Study, pair: int) -> tuple[Child, Child, str]:
    outcome, texts = study.results[0].outcome, study.part.texts
    query, rank = int(outcome.query_ids[pair]), int(outcome.ranks[pair])
    return (
        f"query {query}" if texts is None else user_text(texts[query]),
        user_text(study.dataset.label_name(int(outcome.label_ids[pair]))),
        number(rank) if rank else f"> {outcome.num_results}",
    )
