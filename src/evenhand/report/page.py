"""The report: every section's values, in the order a reader wants them, given to the template."""

from collections.abc import Sequence
from pathlib import Path

from evenhand.data import Dataset
from evenhand.files import write_text
from evenhand.report.bounds import compute_bounds
from evenhand.report.curves import recall_plots, training_plots
from evenhand.report.examples import changed_pairs, hardest_misses
from evenhand.report.facts import fact_rows, summarize_run
from evenhand.report.groups import find_slices, group_charts, main_table
from evenhand.report.headline import compare_runs, describe_baselines, headline
from evenhand.report.rendering import join_words, render
from evenhand.report.run_set import make_run_set
from evenhand.report.world_map import make_maps
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
        metric: that the page is about; recall@10 if not given.
    """
    runs = make_run_set(results, dataset, metric)
    comparisons = compare_runs(runs)
    page = render(
        "report.html",
        title=title or f"{join_words(runs.run_names)} on {dataset.name}",
        runs=runs,
        run_names=list(runs.run_names),
        run_facts=[summarize_run(result.about) for result in results],
        num_pairs=len(runs.results[0].outcome.ranks),
        verdict=(headline(runs, comparisons), describe_baselines(runs)),
        main=main_table(runs),
        columns=group_charts(runs),
        slices=find_slices(runs),
        bounds=compute_bounds(runs),
        maps=make_maps(runs),
        recall_plots=recall_plots(runs),
        training=training_plots(runs),
        misses=[hardest_misses(runs, run) for run in range(len(results))],
        changed=changed_pairs(runs) if len(results) > 1 else None,
        facts=fact_rows(runs),
    )
    write_text(path, page)
