"""The report: every section's values, in the order a reader wants them, given to the template."""

from collections.abc import Sequence
from pathlib import Path

from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.files import write_text
from evenhand.report.examples import changed_pairs, hardest_misses
from evenhand.report.groups import (
    column_charts,
    cutoff_tables,
    find_slices,
    guarantees,
    main_chart,
)
from evenhand.report.headline import compare_runs, describe_baselines, describe_losses, headline
from evenhand.report.rendering import join_words, render
from evenhand.report.run_set import RunSet, make_run_set
from evenhand.report.training import fact_rows, training_plots
from evenhand.report.world_map import make_map
from evenhand.run_folder import RunResult


def write_report(
    results: Sequence[RunResult],
    dataset: Dataset,
    path: Path,
    *,
    title: str | None = None,
    metric: str | None = None,
) -> None:
    """Writes one HTML file about one run, or several side by side; it needs no network.

    Args:
        results: evaluated on the same part of `dataset`; the first is the one others are
            compared with.
        title: if not given, the names of the runs and of the data set.
        metric: that the page is about; recall@10 if not given (of few labels, recall@1).
    """
    runs = _page_of(make_run_set(results, dataset, metric))
    comparisons = compare_runs(runs)
    page = render(
        "report.html",
        title=title or f"{join_words(runs.run_names)} on {dataset.name}",
        runs=runs,
        run_names=list(runs.run_names),
        num_pairs=len(runs.results[0].outcome.ranks),
        comparisons=comparisons,
        sentence=headline(runs, comparisons),
        losses=[describe_losses(runs, found) for found in comparisons],
        baselines=describe_baselines(runs),
        main=main_chart(runs, comparisons),
        columns=column_charts(runs, comparisons),
        tables=cutoff_tables(runs, comparisons),
        slices=find_slices(runs),
        guarantees=guarantees(runs),
        map=make_map(runs),
        plots=training_plots(runs),
        misses=hardest_misses(runs),
        changed=changed_pairs(runs) if comparisons else [],
        facts=fact_rows(runs),
    )
    write_text(path, page)


def render_charts(runs: RunSet) -> str:
    """The first picture of the report, as a page of its own."""
    comparisons = compare_runs(_page_of(runs))
    return render(
        "charts.html",
        title=join_words(runs.run_names),
        sentence=headline(runs, comparisons),
        metric=runs.metric,
        run_names=list(runs.run_names),
        main=main_chart(runs, comparisons),
        columns=column_charts(runs, comparisons),
    )


def _page_of(runs: RunSet) -> RunSet:
    """The runs, if the metric divides pairs, as all charts do."""
    if not runs.is_of_pairs:
        known = ", ".join(f"recall@{cutoff}" for cutoff in runs.cutoffs)
        raise UserError(f"--metric of a page must be one of {known}, got {runs.metric!r}")
    return runs
