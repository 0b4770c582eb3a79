"""The report: every section's values, in the order a reader wants them, given to the template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from evenhand.report.rendering import (
    NOTHING,
    format_duration,
    format_time,
    join_words,
    number,
    render,
)
from evenhand.report.run_set import RunSet, make_run_set
from evenhand.report.world_map import make_map
from evenhand.run_folder import RunResult

TITLES = {  # run.json, in the order it is shown
    "method": "Method", "seed": "Seed", "started": "Started", "num_steps": "Steps",
    "best_step": "Step that is kept", "training_seconds": "Training time",
    "milliseconds_a_step": "Milliseconds a step", "ranker_seconds": "Time to fit the ranker",
    "step": "Training step", "device": "Device", "num_ranks": "Ranks",
    "bytes_sent_a_step": "Bytes a rank sent in a step", "interruptions": "Interrupted",
    "is_complete": "Complete", "commit": "Commit", "command": "Command", "versions": "Versions",
    "dataset": "Data set",
}  # fmt: skip
ELSEWHERE = ("name", "is_running")  # shown elsewhere on the page


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


# --- how the runs were made -----------------------------------------------------------------------


def fact_rows(runs: RunSet) -> list[tuple[str, list[str]]]:
    """(title, a text for each run) of every fact that some run has."""
    abouts = [result.about for result in runs.results]
    keys = dict.fromkeys([*TITLES, *(key for about in abouts for key in about)])
    return [
        (TITLES.get(key, key), [format_fact(key, about.get(key)) for about in abouts])
        for key in keys
        if key not in ELSEWHERE and any(about.get(key) is not None for about in abouts)
    ]


def format_fact(key: str, value: Any) -> str:
    """One value of run.json, whatever it holds."""
    if value is None or value != value:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_seconds") and isinstance(value, int | float):
        return format_duration(value)
    if key == "started":
        return format_time(str(value))
    if key == "interruptions" and isinstance(value, list):
        return "; ".join(_format_interruption(item) for item in value if isinstance(item, Mapping))
    if key == "step" and isinstance(value, Mapping):
        kind, reason = str(value.get("kind", NOTHING)), value.get("reason")
        return f"{kind} (no CUDA graph: {reason})" if reason else kind
    if isinstance(value, Mapping):
        shown = (f"{name.replace('_', ' ')} {format_fact('', v)}" for name, v in value.items())
        return ", ".join(shown)
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return number(value) if isinstance(value, int) and key != "seed" else str(value)


def _format_interruption(fact: Mapping[str, Any]) -> str:
    """'resumed at step 50 (20 steps trained again), 2025-11-15 09:06 UTC; a damaged file'."""
    step, lost = fact.get("resumed_at_step", 0), fact.get("lost_steps", 0)
    again = f" ({lost} steps trained again)" if lost else ""
    sentences = fact.get("damaged_checkpoints")
    damaged = "".join(f"; {said}" for said in sentences) if isinstance(sentences, list) else ""
    return f"resumed at step {step}{again}, {format_time(str(fact.get('at', '')))}{damaged}"
