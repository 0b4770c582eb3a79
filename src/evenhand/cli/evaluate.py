"""`evenhand evaluate`, `compare`, `slices` and `report`: whom a run serves, and how well."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from evenhand.cli import options
from evenhand.cli.options import argument, choose_device, flag, join_ranks
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data import Dataset
    from evenhand.run_folder import RunResult


def evaluate(
    run: options.RunFolder,
    part: options.Part = "test",
    data: options.MovedData = None,
    rank_timeout: options.RankTimeout = 600.0,
    device: options.Device = None,
) -> None:
    """Evaluate a run on a part of its data."""
    from evenhand.cli.console import console
    from evenhand.result_tables import results_table
    from evenhand.runs import evaluate_run, open_run_data

    dataset = open_run_data(run, console, data=data)
    with join_ranks(choose_device(device), timeout=rank_timeout) as (ranks, own_device):
        scores = evaluate_run(run, dataset, part, device=own_device, console=console, ranks=ranks)
    console.print(results_table([(run.resolve().name, scores)], part_name=part))
    console.print(f"written to {run / 'evaluation' / part}")


def compare(
    runs: Annotated[
        list[Path], argument("Run folders; the others are held to the first.", "RUN...")
    ],
    metric: Annotated[str, flag("Metric of the differences.")] = "recall@10",
    part: options.Part = "test",
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Two or more runs, with paired intervals."""
    from evenhand.cli.console import console
    from evenhand.evaluation import compare_outcomes, worst_groups
    from evenhand.result_tables import differences_table, results_table, telling_titles
    from evenhand.run_folder import load_result, run_config
    from evenhand.runs import evaluate_run

    dataset, results = _open_results(runs, part, data)
    first = results[0]
    if len(results) < 2:
        raise UserError(f"compare needs two runs or more, got {runs[0]} alone")
    cutoffs = set.intersection(*(set(result.outcome.cutoffs) for result in results))
    known = [f"recall@{cutoff}" for cutoff in sorted(cutoffs)]
    if metric not in known:
        raise UserError(f"--metric must be one of {', '.join(known)}, got {metric!r}")
    table = [(result.name, result.scores) for result in results]
    console.print(results_table(table, part_name=part))
    for column, found in (dataset.label_groups | dataset.parts[part].groups).items():
        if not len(found.names):
            console.print(f"the column {column!r} names no group, and is left out")
    # The first run's worst groups, chosen on the validation part where there is another one.
    chosen_on = "validation" if "validation" in dataset.parts else part
    if not (runs[0] / "evaluation" / chosen_on / "scores.json").is_file():
        evaluate_run(runs[0], dataset, chosen_on, device=choose_device(device), console=console)
    groups = worst_groups(
        load_result(runs[0], chosen_on).outcome,
        dataset,
        chosen_on=chosen_on,
        compared_on=part,
        metric=metric,
        min_pairs=run_config(runs[0]).evaluation.min_pairs,
    )
    groups = telling_titles(groups)
    for result in results[1:]:
        with console.status("intervals"):
            differences = compare_outcomes([first.outcome], [result.outcome], dataset, part, groups)
        console.print(
            differences_table(
                differences, baseline=first.name, contender=result.name, metric=metric
            )
        )
    if groups:
        console.print(
            f"in the first table the worst groups are each run's own; in the differences they are "
            f"those of {first.name} on the {chosen_on} part, the same for all runs"
        )


def slices(
    run: Annotated[Path, argument("Run folder, evaluated.", "RUN")],
    metric: Annotated[str, flag("recall at any cut-off, or 'reciprocal rank'.")] = "recall@10",
    units: Annotated[
        Literal["queries", "labels"],
        flag("What p-values are over; labels: also for labels not seen yet."),
    ] = "queries",
    conditions: Annotated[int, flag("Most conditions that define a slice.", min=1, max=3)] = 2,
    min_pairs: Annotated[
        int | None,
        flag("Fewest pairs in a slice.", min=1, show_default="30, or 0.1 % of all pairs"),
    ] = None,
    permutations: Annotated[int, flag("Number of permutations; more make p finer.", min=19)] = 200,
    top: Annotated[int, flag("Number of slices to show.", min=1)] = 20,
    seed: Annotated[int, flag("Seed of the permutations.", min=0)] = 0,
    check_on: Annotated[
        Literal["validation", "test"] | None,
        flag("Part to check the slices on that were found on --part."),
    ] = None,
    json: Annotated[Path | None, flag("Another file for the results.")] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
) -> None:
    """The subpopulations that explain a run's failures."""
    from evenhand.cli.console import console
    from evenhand.evaluation import checked_slices, findings_json, slices_of
    from evenhand.files import write_json
    from evenhand.progress import count_bar
    from evenhand.result_tables import slice_notes, slices_table
    from evenhand.run_folder import check_trained_on, load_result
    from evenhand.runs import open_run_data

    if check_on == part:
        raise UserError(
            f"--check-on must be another part than the one searched (--part), got {part} for "
            f"both; to find on one and check on the other: --part validation --check-on test"
        )
    dataset = open_run_data(run, console, data=data)
    check_trained_on(run, dataset)
    outcome = load_result(run, part).outcome
    judge, shown_on = outcome, part
    with count_bar(console, "permutations") as advance:
        found = slices_of(
            outcome,
            dataset,
            part,
            metric=metric,
            units=units,
            max_conditions=conditions,
            min_pairs=min_pairs,
            num_permutations=permutations,
            max_slices=top,
            seed=seed,
            progress=advance,
        )
    written = {"metric": metric, "units": units, "seed": seed}
    written |= findings_json(found, outcome, dataset, part)
    if check_on:
        judge, shown_on = load_result(run, check_on).outcome, check_on
        found = checked_slices(found, judge, dataset, check_on, metric=metric)
        written["checked"] = findings_json(found, judge, dataset, check_on)
    if found.slices:
        console.print(slices_table(found, judge, dataset, part_name=shown_on, metric=metric))
    for note in slice_notes(found, found_on=part, shown_on=shown_on):
        console.print(note)
    for place in (run / "evaluation" / part / "slices.json", json):
        if place is not None:
            write_json(place, written)
            console.print(f"written to {place}")


def report(
    runs: options.RunFolders,
    out: Annotated[
        Path | None, flag("File to write.", show_default="report.html in the first run")
    ] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
) -> None:
    """One page about one or more runs."""
    from evenhand.cli.console import console
    from evenhand.report import write_report

    dataset, results = _open_results(runs, part, data)
    path = out or runs[0] / "report.html"
    with console.status("writing the report"):
        write_report(results, dataset, path)
    console.print(f"report: {path}")


def _open_results(
    runs: list[Path], part: str, data: Path | None
) -> tuple["Dataset", list["RunResult"]]:
    """The runs of `compare` and `report`, and the data set that all of them are of."""
    from evenhand.cli.console import console
    from evenhand.run_folder import check_trained_on, load_result
    from evenhand.runs import open_run_data

    dataset = open_run_data(runs[0], console, data=data)
    for run in runs:
        check_trained_on(run, dataset)
    results = [load_result(run, part) for run in runs]
    for run, result in zip(runs, results, strict=True):
        highest = int(result.outcome.retrieved_ids.max(initial=-1))
        if highest >= dataset.num_labels:
            raise UserError(
                f"the outcome of {run} names label {highest} of {dataset.num_labels}: it is "
                f"damaged; evaluate the run again"
            )
    return dataset, results
