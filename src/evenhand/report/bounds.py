"""The report's section on guarantees: bounds on the loss of every subpopulation."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evenhand.data import memberships
from evenhand.evaluation.certificate import certify, is_certifiable, loss_sample
from evenhand.report.charts import MEDIUM, Mark, Plot, linear_axis, log_axis, run_line
from evenhand.report.run_set import RunSet
from evenhand.theory.subpopulation_bounds import Certificate

LOSS = "reciprocal rank"
TABLE_FRACTIONS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SMALLEST = 0.01  # the share at which the charts begin
CURVE_FRACTIONS = tuple(np.geomspace(SMALLEST, 1, 81).tolist())
PLOTS = {  # units of `certify` -> the title of their chart
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


def compute_bounds(runs: RunSet) -> dict[str, Any] | None:
    """Charts, a table and the worst known group of each run; None for a part without pairs."""
    outcome = runs.results[0].outcome
    if not len(outcome.ranks):
        return None
    if runs.part_name == "train":  # the model was fitted to it
        return {"is_refused": True}
    given: dict[str, Any] = {"loss": LOSS, "tail_fractions": CURVE_FRACTIONS}
    certificates = {
        units: [
            certify(result.outcome, runs.dataset, runs.part_name, units=units, **given)
            for result in runs.results
        ]
        for units in BLOCKS
    }
    worst = []
    for run, name in enumerate(runs.run_names):
        if groups := known_groups(runs, run, "queries"):
            group = max(groups, key=lambda group: group.loss)
            bound = describe_bound(float(certificates["queries"][run].bound_at(group.share)))
            worst.append((name, group, format_percent(group.share), bound))
    by_label = certificates["labels"][0]
    return {
        "is_refused": False,
        "is_certifiable": is_certifiable(runs.part_name),
        "confidence": f"{100 * (1 - by_label.delta):g} %",
        "num_results": outcome.num_results,
        "num_queries": certificates["queries"][0].num_losses,
        "num_labels": by_label.num_units,
        "cap": f"{by_label.cap:g}",
        "plots": [_plot(runs, units, certificates[units]) for units in PLOTS],
        "worst": worst,
        "fractions": [format_percent(fraction) for fraction in TABLE_FRACTIONS],
        "blocks": [
            (title, list(zip(runs.run_names, map(_table_row, certificates[units]), strict=True)))
            for units, title in BLOCKS.items()
        ],
    }


def known_groups(runs: RunSet, run: int, units: str) -> list[KnownGroup]:
    """Groups with at least 1 %: of labels where whole labels are bounded, else of any kind."""
    outcome, found = runs.results[run].outcome, []
    sample = loss_sample(outcome, loss=LOSS, units=units)
    losses, weights = sample.losses, sample.weights  # of each (query, label) pair
    if units == "queries":  # spread over the pairs of a query
        positions = np.searchsorted(sample.ids, outcome.query_ids)
        losses, weights = losses[positions], 1 / np.bincount(positions)[positions]
    for name in ("frequency", *runs.own_columns):
        column = runs.columns[name]
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
            group_name = column.group_names[group]
            if runs.row(name, group_name)[run].is_judged:
                share, loss = masses[group] / weights.sum(), sums[group] / masses[group]
                found.append(KnownGroup(name, group_name, float(share), float(loss)))
    return found


def describe_bound(bound: float) -> str:
    shown = format_bound(bound)
    if shown == "1.000":  # the largest loss there is
        return "for a group of that size nothing below 1 is guaranteed"
    return f"the bound for that size is {shown}"


def format_bound(bound: float) -> str:
    """Rounded up: a bound must not be made smaller by printing it."""
    return f"{math.ceil(1000 * bound - 1e-9) / 1000:.3f}"


def format_percent(share: float) -> str:
    return f"{100 * share:.2g} %".replace("1e+02", "100")


def _table_row(found: Certificate) -> list[tuple[str, str]]:
    """Bound and estimate for each of TABLE_FRACTIONS."""
    estimates = np.interp(TABLE_FRACTIONS, found.tail_fractions, found.estimates)
    bounds = [format_bound(float(found.bound_at(fraction))) for fraction in TABLE_FRACTIONS]
    return [(bound, f"{estimate:.3f}") for bound, estimate in zip(bounds, estimates, strict=True)]


def _plot(runs: RunSet, units: str, certificates: Sequence[Certificate]) -> Plot:
    """Thick lines for bounds, thin ones for estimates, and a mark for each known group."""
    x_axis = log_axis(SMALLEST, 1, MEDIUM.left, MEDIUM.right, format_percent)
    y_axis = linear_axis(0, 1, MEDIUM.bottom, MEDIUM.top, "{:g}".format)
    lines, marks, said = [], [], []
    for run, (name, found) in enumerate(zip(runs.run_names, certificates, strict=True)):
        xs = [x_axis.place(fraction) for fraction in found.tail_fractions]
        for kind, values in ("estimate", found.estimates), ("bound", found.bounds):
            ys = [y_axis.place(value) for value in values]
            lines.append(run_line(run, zip(xs, ys, strict=True), kind))
        for column, group, share, loss in known_groups(runs, run, units):
            title = f"{name}, {column} {group}: {format_percent(share)}, loss {loss:.3f}"
            marks.append(Mark(run, x_axis.place(share), y_axis.place(loss), title, scale=0.6))
        cells = zip(_table_row(found), TABLE_FRACTIONS, strict=True)
        words = [f"{bound} for {format_percent(fraction)}" for (bound, _), fraction in cells]
        said.append(f"{name}: {', '.join(words)}")
    cap = certificates[0].cap
    x_title = "share of the queries" + (f", at most {cap:g} a label" if cap is not None else "")
    description = f"{PLOTS[units]}: the bound by the least share. {'; '.join(said)}"
    return Plot(PLOTS[units], description, MEDIUM, x_axis, y_axis, x_title, lines, marks)
