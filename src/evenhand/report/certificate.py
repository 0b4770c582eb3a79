"""What is guaranteed: bounds on the loss of subpopulations that nobody named."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evenhand.data.dataset import memberships
from evenhand.evaluation import Outcome, certify, is_certifiable, loss_sample
from evenhand.evaluation.groups import DoubleArray
from evenhand.report.charts import DASHES, MARKS, legend, run_class
from evenhand.report.markup import (
    Attributes,
    Html,
    data_row,
    element,
    fragment,
    head_row,
    note,
    number,
    paragraph,
    section,
    table,
)
from evenhand.report.study import Study
from evenhand.theory.subpopulation_bounds import Certificate

LOSS = "reciprocal rank"
TABLE_FRACTIONS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SMALLEST = 0.01  # the share at which the charts begin
CURVE_FRACTIONS = tuple(np.geomspace(SMALLEST, 1, 81).tolist())
CHARTS = {  # units of `certify` -> the title of their chart
    "queries": "Any set of queries",
    "whole labels": "Any set of whole labels",
}
BLOCKS = {  # units of `certify` -> what the table says
    "queries": "Any set of queries, each drawn independently",
    "labels": "Any set of queries, where those of one label may stand or fall together",
    "whole labels": "Any set of labels, each with all of its queries",
}


class KnownGroup(NamedTuple):
    """A group that the data set names, seen as a subpopulation."""

    column: str
    name: str
    share: float  # of the queries, or of what the labels weigh
    loss: float


class Curve(NamedTuple):
    """One run in one chart."""

    run: int
    certificate: Certificate
    groups: list[KnownGroup]


def certificate_section(study: Study) -> Html:
    """The bound over the share of a subpopulation, beside the groups that are known."""
    if not len(study.results[0].outcome.ranks):
        return Html("")
    if study.part_name == "train":
        refusal = "The model was fitted to the train part: nothing can be guaranteed from it."
        return section("certificate", "What is guaranteed", note(refusal))
    curves = {
        units: [
            Curve(run, _certificate(study, run, units), _known_groups(study, run, units))
            for run in range(len(study.results))
        ]
        for units in BLOCKS
    }
    return section(
        "certificate",
        "What is guaranteed",
        *_meaning(study, curves["queries"][0].certificate),
        legend(study.run_names),
        element(
            "div",
            {"class": "panels pair"},
            *(_chart(study, units, curves[units]) for units in CHARTS),
        ),
        note(
            "Thick: the bound. Thin: the worst share of these very queries, an estimate without a "
            "guarantee. Marks: known groups that hold at least 1 % and are large enough to judge. "
            "Between a mark and the line is room for a worse group that nobody has named."
        ),
        *_worst_known(study, curves),
        _table(study, curves),
    )


def _certificate(study: Study, run: int, units: str) -> Certificate:
    return certify(
        study.results[run].outcome,
        study.dataset,
        study.part_name,
        loss=LOSS,
        units=units,
        tail_fractions=CURVE_FRACTIONS,
    )


# --- words ----------------------------------------------------------------------------------------


def _meaning(study: Study, found: Certificate) -> list[Html]:
    outcome = study.results[0].outcome
    confidence = f"{100 * (1 - found.delta):g} %"
    lines = [
        paragraph(
            f"With a confidence of {confidence}, every subpopulation that holds at least the share "
            f"on the horizontal axis has an expected loss of at most the thick line: for all "
            f"shares at once, and whether anybody has named it or not. The loss of a query is "
            f"1 − 1 / rank of its best placed answer, and 1 where none is among the first "
            f"{outcome.num_results} results; by label, the rank is that label's own."
        ),
        note(
            f"It assumes that new queries are drawn like these {number(found.num_losses)}, and "
            f"that the {study.part_name} part was used for no choice, such as which of several "
            f"runs to keep: each line holds alone. A subpopulation may be any set at all, even "
            f"that of the queries without a right answer: where they fill the share, no bound "
            f"below 1 is possible. Sets of whole labels cannot single out a query, and fare better."
        ),
    ]
    if not is_certifiable(study.part_name):
        warning = (
            f"This is not a certificate: settings were chosen on the {study.part_name} part, so "
            f"these figures are too good. Evaluate the run on the test part."
        )
        lines.insert(0, paragraph(element("strong", {}, warning)))
    return lines


def _worst_known(study: Study, curves: dict[str, list[Curve]]) -> list[Html]:
    """For each run, the known group that fares worst, and how badly one of its size could."""
    lines = []
    for name, curve in zip(study.run_names, curves["queries"], strict=True):
        if curve.groups:
            worst = max(curve.groups, key=lambda group: group.loss)
            bound = float(curve.certificate.bound_at(worst.share))
            lines.append(
                element(
                    "li",
                    {},
                    element("bdi", {}, name),
                    f": by this loss the worst known group is {worst.column} ",
                    element("bdi", {}, worst.name),
                    f", {_percent(worst.share)} of the queries, with a loss of {worst.loss:.3f}; "
                    f"{_bound_words(bound)}.",
                )
            )
    return [element("ul", {"class": "runs"}, *lines)] if lines else []


def _bound_words(bound: float) -> str:
    shown = _at_most(bound)
    if shown == "1.000":  # the largest loss there is
        return "for a group of that size nothing below 1 is guaranteed"
    return f"the bound for that size is {shown}"


def _table(study: Study, curves: dict[str, list[Curve]]) -> Html:
    rows = []
    for units, title in BLOCKS.items():
        heading: Attributes = {"colspan": 1 + len(TABLE_FRACTIONS), "scope": "colgroup"}
        rows.append(element("tr", {"class": "grey"}, element("th", heading, title)))
        for curve in curves[units]:
            cells = (_cell(curve.certificate, fraction) for fraction in TABLE_FRACTIONS)
            rows.append(data_row(element("bdi", {}, study.run_names[curve.run]), *cells))
    head = head_row("Share held, at least", *(_percent(fraction) for fraction in TABLE_FRACTIONS))
    caption = (
        "Highest expected loss of a subpopulation; in small print the estimate without a guarantee"
    )
    return fragment(table(caption, [head], rows), note(_cap_words(curves)))


def _cap_words(curves: dict[str, list[Curve]]) -> str:
    found = curves["labels"][0].certificate
    return (
        f"In the last two blocks the {number(found.num_units)} labels are what is drawn "
        f"independently, and one with more than {found.cap:g} queries counts as {found.cap:g}. "
        f"Labels that share queries are not quite independent (see docs/certificate.md)."
    )


def _cell(found: Certificate, fraction: float) -> Html:
    bound = float(found.bound_at(fraction))
    estimate = np.interp(fraction, found.tail_fractions, found.estimates)
    return fragment(_at_most(bound), element("small", {}, f"{estimate:.3f}"))


def _at_most(bound: float) -> str:
    """Rounded up: a bound must not be made smaller by printing it."""
    return f"{math.ceil(1000 * bound - 1e-9) / 1000:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %".replace("1e+02", "100")


# --- known groups ---------------------------------------------------------------------------------


def _known_groups(study: Study, run: int, units: str) -> list[KnownGroup]:
    """Groups with at least 1 %: of labels where whole labels are bounded, else of any kind."""
    outcome, found = study.results[run].outcome, []
    losses, weights = _pairs(outcome, units)
    for name in ("frequency", *study.own_columns):
        column = study.columns[name]
        if units == "whole labels" and column.is_of_queries:
            continue
        (pair_ids, groups), size = memberships(column.groups), len(column.group_names)
        of_pairs = weights[pair_ids]
        if column.is_of_queries:  # a query is in each group of its pairs, whole and once
            places = outcome.query_ids[pair_ids] * np.int64(size) + groups
            firsts = np.unique(places, return_index=True)[1]
            pair_ids, groups, of_pairs = pair_ids[firsts], groups[firsts], np.ones(len(firsts))
        masses = np.bincount(groups, weights=of_pairs, minlength=size)
        sums = np.bincount(groups, weights=of_pairs * losses[pair_ids], minlength=size)
        for group in np.flatnonzero(masses >= SMALLEST * weights.sum()):
            if not study.row(name, column.group_names[group])[run].is_judged:
                continue
            share, loss = masses[group] / weights.sum(), sums[group] / masses[group]
            found.append(KnownGroup(name, column.group_names[group], float(share), float(loss)))
    return found


def _pairs(outcome: Outcome, units: str) -> tuple[DoubleArray, DoubleArray]:
    """Loss and weight of each (query, label) pair: a query's are spread over its pairs."""
    sample = loss_sample(outcome, loss=LOSS, units=units)
    if units != "queries":
        return sample.losses, sample.weights
    positions = np.searchsorted(sample.ids, outcome.query_ids)
    return sample.losses[positions], 1 / np.bincount(positions)[positions]


# --- the chart ------------------------------------------------------------------------------------

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 16, 10, 40  # margins
X_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Y_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _chart(study: Study, units: str, curves: Sequence[Curve]) -> Html:
    title = CHARTS[units]
    said = "; ".join(
        f"{study.run_names[curve.run]}: "
        + ", ".join(
            f"{_at_most(float(curve.certificate.bound_at(fraction)))} for {_percent(fraction)}"
            for fraction in TABLE_FRACTIONS
        )
        for curve in curves
    )
    cap = curves[0].certificate.cap
    x_title = "share of the queries" + (f", at most {cap:g} a label" if cap is not None else "")
    place: Attributes = {"x": (LEFT + WIDTH - RIGHT) / 2, "y": HEIGHT - 4, "text-anchor": "middle"}
    drawing = element(
        "svg",
        {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "class": "lines", "role": "img"},
        element("title", {}, f"{title}: the bound by the least share. {said}"),
        *_grid(),
        element("text", place, x_title),
        *(_known(study, curve, group) for curve in curves for group in curve.groups),
        *(_line(curve, "estimate") for curve in curves),
        *(_line(curve, "bound") for curve in curves),
    )
    return element("figure", {"class": "panel"}, element("figcaption", {}, title), drawing)


def _x(fraction: float) -> float:
    return LEFT + (1 - math.log(fraction) / math.log(SMALLEST)) * (WIDTH - RIGHT - LEFT)


def _y(loss: float) -> float:
    return HEIGHT - BOTTOM - loss * (HEIGHT - BOTTOM - TOP)


def _grid() -> list[Html]:
    parts = []
    for tick in Y_TICKS:
        y = _y(tick)
        parts.append(
            element("line", {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y, "y2": y, "class": "grid"})
        )
        label: Attributes = {"x": LEFT - 6, "y": y + 4, "text-anchor": "end"}
        parts.append(element("text", label, f"{tick:g}"))
    for tick in X_TICKS:
        x, y = _x(tick), HEIGHT - BOTTOM
        parts.append(element("line", {"x1": x, "x2": x, "y1": y, "y2": y + 4, "class": "tick"}))
        place: Attributes = {"x": x, "y": y + 17, "text-anchor": "middle"}
        parts.append(element("text", place, _percent(tick)))
    return parts


def _line(curve: Curve, kind: str) -> Html:
    found = curve.certificate
    values = found.bounds if kind == "bound" else found.estimates
    points = (f"{_x(x):.1f} {_y(y):.1f}" for x, y in zip(found.tail_fractions, values, strict=True))
    dashes = DASHES[curve.run % len(DASHES)]
    look: Attributes = {
        "class": f"line {kind} {run_class(curve.run)}",
        "stroke-dasharray": dashes,
    }
    return element("path", {"d": "M" + "L".join(points), **look})


def _known(study: Study, curve: Curve, group: KnownGroup) -> Html:
    said = (
        f"{study.run_names[curve.run]}, {group.column} {group.name}: "
        f"{_percent(group.share)}, loss {group.loss:.3f}"
    )
    shape: Attributes = {
        "d": MARKS[curve.run % len(MARKS)],
        "class": f"mark {run_class(curve.run)}",
        "transform": f"translate({_x(group.share):.1f} {_y(group.loss):.1f}) scale(0.6)",
    }
    return element("path", shape, element("title", {}, said))
