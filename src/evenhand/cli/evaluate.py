"""`evenhand evaluate`, `compare`, `slices` and `report`: whom a run serves, and how well."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from evenhand.cli import options
from evenhand.cli.options import argument, flag
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data import Dataset
    from evenhand.run_folder import RunResult


def evaluate(
    run: Annotated[Path | None, argument("Run folder.", "[RUN]")] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
    predictions: Annotated[
        Path | None,
        flag("Table of any model's results, instead of a run: query_id, label_id, score."),
    ] = None,
    truth: Annotated[
        Path | None,
        flag(
            "Their right answers: a table of query_id, label_id and any columns of groups; or a "
            "data set; or a run, for its data set."
        ),
    ] = None,
    train: Annotated[
        Path | None, flag("Table of the pairs that model was trained on: for head, torso and tail.")
    ] = None,
    folder: Annotated[
        Path | None,
        flag("Folder to write for predictions.", "--run", show_default="runs/ and the file's name"),
    ] = None,
    rank_timeout: options.RankTimeout = 600.0,
    device: options.Device = None,
) -> None:
    """Evaluate a run on a part of its data, or the predictions of any model."""
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.distributed.ranks import joined_ranks
    from evenhand.result_tables import results_table
    from evenhand.runs import evaluate_run, open_run_data

    if predictions is not None and truth is not None and run is None:
        folder = folder or Path("runs") / predictions.name.split(".")[0]
        _evaluate_predictions(predictions, truth, train, folder, part)
        return
    flags = {"--predictions": predictions, "--truth": truth, "--train": train, "--run": folder}
    given = [name for name, value in flags.items() if value is not None]
    if given and run is not None:
        raise UserError(
            f"evaluate takes a run, or --predictions and --truth, and --run names the folder to "
            f"write for them; got {run} and {', '.join(given)}"
        )
    if run is None:
        raise UserError(
            f"name the folder of a run; or --predictions, and --truth for their right answers"
            f"{', got ' * bool(given)}{', '.join(given)}"
        )
    dataset = open_run_data(run, console, data=data)
    with joined_ranks(choose_device(device), timeout=rank_timeout) as (ranks, own_device):
        console.quiet |= ranks is not None and ranks.rank > 0
        scores = evaluate_run(run, dataset, part, device=own_device, console=console, ranks=ranks)
    console.print(results_table([(run.resolve().name, scores)], part_name=part))
    console.print(f"written to {run / 'evaluation' / part}")


def _evaluate_predictions(
    predictions: Path, truth: Path, train: Path | None, folder: Path, part: str
) -> None:
    """Writes a folder like a run's, with the report."""
    from evenhand import predictions as evaluation
    from evenhand.cli.console import console
    from evenhand.data import open_dataset
    from evenhand.progress import stage_bar
    from evenhand.result_tables import results_table
    from evenhand.run_folder import is_of_predictions, read_about

    with stage_bar(console) as advance:
        if truth.is_dir() and (truth / "run.json").exists():
            if is_of_predictions(truth):
                raise UserError(f"{truth} is not a run; give the --truth it was made with")
            truth = Path(read_about(truth)["dataset"]["folder"])  # the data set of a run
        if (truth / "dataset.json").exists():
            if train is not None:
                raise UserError(f"{truth} has its own training pairs; leave --train out")
            known = evaluation.truth_of_dataset(open_dataset(truth), part, truth.absolute())
        elif part != "test":
            raise UserError(f"--part {part} needs a data set as --truth, got {truth}")
        else:
            name = truth.name.split(".")[0]
            known = evaluation.truth_of_tables(truth, train, name=name, progress_fn=advance)
        evaluation.check_folder(folder, known)
        columns = evaluation.read_columns(predictions, "predictions", advance)
    with console.status("evaluating, with intervals"):
        found = evaluation.evaluate_columns(columns, known)
    for note in found.notes():
        console.print(note, markup=False)
    console.print(results_table([(folder.name, found.scores)], part_name=known.part_name))
    found.save(folder, source=str(predictions))
    with console.status("writing the report"):
        found.report(folder / "report.html", name=folder.name)
    console.print(f"report: {folder / 'report.html'}")
    console.print(f"next: evenhand slices {folder}; evenhand compare RUN {folder}")


def compare(
    runs: Annotated[
        list[Path], argument("Run folders; the others are compared with the first.", "RUN...")
    ],
    metric: Annotated[
        str | None,
        flag(
            "Metric to compare: recall@10, or one of queries: mrr, ndcg@10, precision@1, ...",
            show_default="recall@10",
        ),
    ] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Compare two or more runs, with paired intervals."""
    from evenhand.cli.console import console
    from evenhand.report.headline import compare_runs, describe_baselines, headline
    from evenhand.report.run_set import make_run_set
    from evenhand.result_tables import differences_table, results_table

    if len(runs) < 2:
        raise UserError(f"compare needs two runs or more, got {runs[0]} alone")
    dataset, results = _open_results(runs, part, data, metric, device)
    side_by_side = make_run_set(results, dataset, metric)
    if side_by_side.is_of_pairs:
        scores = [result.scores for result in results]
        table = list(zip(side_by_side.run_names, scores, strict=True))
        console.print(results_table(table, part_name=part))
    for column, found in (dataset.label_groups | dataset.parts[part].groups).items():
        if not len(found.names):
            console.print(f"the column {column!r} names no group, and is left out")
    with console.status("intervals"):
        comparisons = compare_runs(side_by_side)
    names, metric = side_by_side.run_names, side_by_side.metric
    for compared in comparisons:
        sides = {"baseline": names[0], "contender": names[compared.run]}
        console.print(differences_table(compared.rows, **sides, metric=metric))
    if comparisons[0].worst_lists:
        first = "in the first table the worst groups are each run's own; in the differences they"
        console.print(
            f"{first if side_by_side.is_of_pairs else 'the worst groups'} are those of {names[0]} "
            f"on the {comparisons[0].chosen_on} part, the same for all runs"
        )
    for line in [headline(side_by_side, comparisons), *describe_baselines(side_by_side)]:
        console.print(line, markup=False)


def slices(
    run: Annotated[Path, argument("Run folder, evaluated.", "RUN")],
    metric: Annotated[str, flag("Recall at any cut-off, or 'reciprocal rank'.")] = "recall@10",
    units: Annotated[
        Literal["queries", "labels"],
        flag("Units of the permutation test; labels: findings hold for new labels too."),
    ] = "queries",
    conditions: Annotated[int, flag("Most conditions in a slice.", min=1, max=3)] = 2,
    min_pairs: Annotated[
        int | None,
        flag("Fewest pairs in a slice.", min=1, show_default="30, or 0.1 % of all pairs"),
    ] = None,
    permutations: Annotated[
        int, flag("Number of permutations; more resolve p more finely.", min=19)
    ] = 200,
    top: Annotated[int, flag("Number of slices to show.", min=1)] = 20,
    seed: Annotated[int, flag("Seed of the permutations.", min=0)] = 0,
    check_on: Annotated[
        Literal["validation", "test"] | None,
        flag("Another part, to measure the slices on that were found on --part."),
    ] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
) -> None:
    """Find the subpopulations that explain a run's failures."""
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
            f"both; for example: --part validation --check-on test"
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
    place = run / "evaluation" / part / "slices.json"
    write_json(place, written)
    console.print(f"written to {place}")


def report(
    runs: options.RunFolders,
    out: Annotated[
        Path | None, flag("File to write.", show_default="report.html in the first run")
    ] = None,
    metric: Annotated[
        str | None, flag("Recall at the cut-off that the page shows.", show_default="recall@10")
    ] = None,
    part: options.Part = "test",
    data: options.MovedData = None,
) -> None:
    """Write one page about one or more runs."""
    from evenhand.cli.console import console
    from evenhand.report import write_report

    dataset, results = _open_results(runs, part, data, metric)
    path = out or runs[0] / "report.html"
    with console.status("writing the report"):
        write_report(results, dataset, path, metric=metric)
    console.print(f"report: {path}")


def _open_results(
    runs: list[Path], part: str, data: Path | None, metric: str | None, device: str | None = None
) -> tuple["Dataset", list["RunResult"]]:
    """The evaluated runs of `compare` and `report`, and the data set they share."""
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.report.run_set import open_results
    from evenhand.runs import open_run_data

    dataset, own_device = open_run_data(runs[0], console, data=data), choose_device(device)
    return dataset, open_results(
        runs, dataset, part, metric=metric, device=own_device, console=console
    )
