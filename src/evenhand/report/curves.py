"""Recall over the cut-off, and what training looked like."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.report.charts import Line, legend, line_chart
from evenhand.report.markup import Html, element, note, paragraph, section
from evenhand.report.study import Study
from evenhand.tables import summary_title

MAX_POINTS = 150  # of a line; more are averaged in stretches
TRAINING_PANELS = {
    "loss": "Loss",
    "zero_loss_share": "Share of examples with zero loss",
    "learning_rate": "Learning rate",
    "num_hard_examples": "Hard examples kept in a batch",
}


def recall_section(study: Study) -> Html:
    """recall@r for every r, for all pairs and for the worst groups of each column."""
    panels = {"All pairs": [_recalls(study, run, "all", ("all",)) for run in _runs(study)]}
    for column in study.own_columns:
        summary = study.headline(column)
        if summary is not None:
            members = [score.members for score in study.row(column, summary)]
            panels[summary_title(summary, column).replace("worst", "Worst", 1)] = [
                _recalls(study, run, column, members[run]) for run in _runs(study)
            ]
    charts = []
    for title, curves in panels.items():
        lines = [
            Line(run, np.arange(1, len(curve) + 1).tolist(), curve.tolist())
            for run, curve in enumerate(curves)
            if np.isfinite(curve).all()
        ]
        if lines:
            charts.append(
                line_chart(title, lines, x_title="r, results looked at", is_log=True, is_share=True)
            )
    if not charts:
        return Html("")
    return section(
        "cutoffs",
        "Recall by the number of results looked at",
        paragraph(
            f"recall@r for every r. The worst groups are each run's own, chosen once, by "
            f"{study.metric}."
        ),
        legend(study.run_names),
        element("div", {"class": "panels"}, *charts),
    )


def _runs(study: Study) -> range:
    return range(len(study.results))


def _recalls(study: Study, run: int, column: str, members: Iterable[str]) -> NDArray[np.float64]:
    """Mean over the member groups of their recall at 1, 2, ...: (num_results,)."""
    outcome = study.results[run].outcome
    curves = []
    for name in members:
        ranks = outcome.ranks[study.columns[column].pairs_of(name)]
        hits = np.bincount(ranks, minlength=outcome.num_results + 1)[1:].cumsum()
        curves.append(hits / len(ranks) if len(ranks) else np.full(len(hits), np.nan))
    return np.mean(curves, axis=0) if curves else np.full(outcome.num_results, np.nan)


# --- training -------------------------------------------------------------------------------------


def training_section(study: Study) -> Html:
    panels: dict[str, list[Line]] = {title: [] for title in TRAINING_PANELS.values()}
    for run, result in enumerate(study.results):
        for key, title in TRAINING_PANELS.items():
            _add_line(
                panels[title], run, ((row.get("step"), row.get(key)) for row in result.metrics)
            )
        validations = [row for row in result.metrics if isinstance(row.get("validation"), dict)]
        if len(validations) < 2:  # one point is no curve
            continue
        for name in dict.fromkeys(key for row in validations for key in row["validation"]):
            lines = panels.setdefault(f"Validation: {name}", [])
            _add_line(lines, run, ((r.get("step"), r["validation"].get(name)) for r in validations))
    charts = [
        line_chart(title, lines, x_title="step", is_share=_is_share(title, lines))
        for title, lines in panels.items()
        if lines
    ]
    if not charts:
        return section("training", "Training", note("The runs left no record of their training."))
    drawn = {line.run for lines in panels.values() for line in lines}
    silent = [name for run, name in enumerate(study.run_names) if run not in drawn]
    missing = [note(f"No record of the training of {', '.join(silent)}.")] if silent else []
    return section(
        "training",
        "Training",
        legend(study.run_names),
        element("div", {"class": "panels"}, *charts),
        *missing,
    )


def _is_share(title: str, lines: list[Line]) -> bool:
    """Shares of something are shown in per cent."""
    is_named = "Share" in title or title.startswith("Validation")
    return is_named and all(0 <= y <= 1 for line in lines for y in line.ys)


def _add_line(lines: list[Line], run: int, pairs: Iterable[tuple[Any, Any]]) -> None:
    points = [(float(x), float(y)) for x, y in pairs if _is_number(x) and _is_number(y)]
    if points:
        lines.append(Line(run, *_thinned(np.array(points))))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # as JSON may hold any


def _thinned(points: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Means over equal stretches, so that a line has few points: (P, 2) -> xs, ys."""
    pieces = np.array_split(points, min(MAX_POINTS, len(points)))
    means = np.array([piece.mean(axis=0) for piece in pieces])  # (at most MAX_POINTS, 2)
    return means[:, 0].tolist(), means[:, 1].tolist()
