"""The report's curves: recall over the cut-off, and the training loss and validations."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.report.charts import Plot, Series, line_plot
from evenhand.report.run_set import RunSet
from evenhand.result_tables import summary_title

MAX_POINTS = 150  # of a line; more are averaged in stretches
TRAINING_PLOTS = {
    "loss": "Loss",
    "zero_loss_share": "Share of examples with zero loss",
    "learning_rate": "Learning rate",
    "num_hard_examples": "Hard examples kept in a batch",
}


def recall_plots(runs: RunSet) -> list[Plot]:
    """recall@r for every r, for all pairs and for the worst groups of each column."""
    titles = {("all", "all"): "All pairs"}
    for column in runs.own_columns:
        if summary := runs.headline(column):
            titles[column, summary] = summary_title(summary, column).replace("worst", "Worst", 1)
    plots = []
    for (column, group), title in titles.items():
        series: list[Series] = []
        for run, score in enumerate(runs.row(column, group)):
            members = score.members if column != "all" else ("all",)
            curve = recall_curve(runs, run, column, members)
            if np.isfinite(curve).all():
                series.append((run, range(1, len(curve) + 1), curve.tolist()))
        if series:
            x_title = "r, results looked at"
            plots.append(line_plot(title, series, x_title, is_log=True, is_share=True))
    return plots


def recall_curve(
    runs: RunSet, run: int, column: str, members: Iterable[str]
) -> NDArray[np.float64]:
    """Mean over the member groups of their recall at 1, 2, ...: (num_results,)."""
    outcome = runs.results[run].outcome
    curves = []
    for name in members:
        ranks = outcome.ranks[runs.columns[column].pairs_of(name)]
        hits = np.bincount(ranks, minlength=outcome.num_results + 1)[1:].cumsum()
        curves.append(hits / len(ranks) if len(ranks) else np.full(len(hits), np.nan))
    return np.mean(curves, axis=0) if curves else np.full(outcome.num_results, np.nan)


def training_plots(runs: RunSet) -> tuple[list[Plot], list[str]]:
    """What the runs recorded while they trained, and the names of those that recorded nothing."""
    panels: dict[str, list[Series]] = {title: [] for title in TRAINING_PLOTS.values()}
    for run, result in enumerate(runs.results):
        for key, title in TRAINING_PLOTS.items():
            panels[title] += make_series(run, result.metrics, key)
        validations = [
            {"step": row.get("step"), **row["validation"]}
            for row in result.metrics
            if isinstance(row.get("validation"), dict)
        ]
        names = dict.fromkeys(key for row in validations for key in row if key != "step")
        for name in names if len(validations) > 1 else ():  # one point is no curve
            panels.setdefault(f"Validation: {name}", []).extend(make_series(run, validations, name))
    plots = []
    for title, series in panels.items():
        is_named = "Share" in title or title.startswith("Validation")
        is_share = is_named and all(0 <= y <= 1 for _, _, ys in series for y in ys)
        if series:
            plots.append(line_plot(title, series, "step", is_share=is_share))
    recorded = {run for series in panels.values() for run, _, _ in series}
    return plots, [name for run, name in enumerate(runs.run_names) if run not in recorded]


def make_series(run: int, rows: Iterable[dict[str, Any]], key: str) -> list[Series]:
    """One series of a recorded value by step, thinned to means over equal stretches, or none."""

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and abs(value) < 1e300  # as JSON may hold any

    pairs = [(row.get("step"), row.get(key)) for row in rows]
    points = np.array([(x, y) for x, y in pairs if is_number(x) and is_number(y)], dtype=float)
    if not len(points):
        return []
    pieces = np.array_split(points, min(MAX_POINTS, len(points)))
    means = np.array([piece.mean(axis=0) for piece in pieces])  # (at most MAX_POINTS, 2)
    return [(run, means[:, 0].tolist(), means[:, 1].tolist())]
