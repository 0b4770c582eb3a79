"""What each command does. Its words and flags are in `cli`."""

import argparse
import dataclasses
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from evenhand import exporting
from evenhand.averaging import average_runs
from evenhand.build import check_all_ids
from evenhand.config import (
    Config,
    DataConfig,
    preset_names,
    read_preset,
    read_settings,
    toml_value,
    with_assignments,
)
from evenhand.data import (
    Dataset,
    load_extreme,
    load_places,
    load_public_extreme,
    load_table,
    normalized,
    open_dataset,
    save_dataset,
)
from evenhand.demo import run_demo
from evenhand.doctor import doctor
from evenhand.errors import UserError
from evenhand.evaluation import (
    GroupList,
    checked_slices,
    compare_outcomes,
    findings_json,
    slices_of,
    worst_groups,
)
from evenhand.faults import without_controls
from evenhand.files import write_json
from evenhand.progress import PipedConsole, count_bar, file_bar
from evenhand.public import fetch_public, list_public, verify_public
from evenhand.report import write_report
from evenhand.run_folder import RunResult, check_trained_on, load_result
from evenhand.runs import evaluate_run, load_searcher, open_run_data, query_data_path
from evenhand.saved_models import run_config
from evenhand.stream_command import data_check, data_stream
from evenhand.tables import (
    differences_table,
    group_notes,
    parts_table,
    results_table,
    slice_notes,
    slices_table,
    telling_titles,
    unseen_notes,
)
from evenhand.train_command import ranks_of, train
from evenhand.tuning.command import tune
from evenhand.tuning.shares import guarded_config

# Names of labels and folders are printed as they are: "[b]" and ":smile:" mean nothing special.
console = PipedConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)
if not console.is_terminal:  # a file or a pipe has no width of its own: tables stay whole
    console.width = 132

# --- commands -------------------------------------------------------------------------------------


def train_command(options: argparse.Namespace) -> int:
    def config_fn(default: Path | None) -> Config:
        return _config(options, default=default)

    return train(options, config_fn, device=_device(options), console=console)


def tune_command(options: argparse.Namespace) -> int:
    config = None if options.resume else _config(options)
    return tune(options, config, device=_device(options), console=console)


def average_command(options: argparse.Namespace) -> int:
    """Several runs as one, evaluated like any other."""
    folders, out = [Path(run) for run in options.runs], Path(options.run)
    dataset = open_run_data(folders[0], console, data=options.data)
    average_runs(folders, out, dataset, console=console)
    part_name = "test" if "test" in dataset.parts else "validation"
    if part_name in dataset.parts:
        scores = evaluate_run(out, dataset, part_name, device=_device(options), console=console)
        console.print(results_table([(out.resolve().name, scores)], part_name=part_name))
    console.print(f"run folder: {out}")
    return 0


def evaluate_command(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    dataset = open_run_data(folder, console, data=options.data)
    with ranks_of(options, _device(options), console) as (ranks, device):
        scores = evaluate_run(
            folder, dataset, options.part, device=device, console=console, ranks=ranks
        )
    console.print(results_table([(folder.resolve().name, scores)], part_name=options.part))
    console.print(f"written to {folder / 'evaluation' / options.part}")
    return 0


def export_command(options: argparse.Namespace) -> int:
    return exporting.export_command(options, device=_device(options), console=console)


def compare_command(options: argparse.Namespace) -> int:
    """Every run against the first, whose worst groups are the ones compared."""
    dataset, results = _open_results(options)
    if len(results) < 2:
        raise UserError(f"compare needs two runs or more, got {options.runs[0]} alone")
    cutoffs = set.intersection(*(set(result.outcome.cutoffs) for result in results))
    known = [f"recall@{cutoff}" for cutoff in sorted(cutoffs)]
    if options.metric not in known:
        raise UserError(f"--metric must be one of {', '.join(known)}, got {options.metric!r}")
    table = [(result.name, result.scores) for result in results]
    console.print(results_table(table, part_name=options.part))
    for column, found in (dataset.label_groups | dataset.parts[options.part].groups).items():
        if not len(found.names):
            console.print(f"the column {column!r} names no group, and is left out")
    groups, chosen_on = _groups_to_compare(options, dataset)
    for result in results[1:]:
        with console.status("intervals"):
            differences = compare_outcomes(
                [results[0].outcome], [result.outcome], dataset, options.part, groups
            )
        console.print(
            differences_table(
                differences,
                baseline=results[0].name,
                contender=result.name,
                metric=options.metric,
            )
        )
    if groups:
        console.print(
            f"in the first table the worst groups are each run's own; in the differences they are "
            f"those of {results[0].name} on the {chosen_on} part, the same for all runs"
        )
    return 0


def _groups_to_compare(
    options: argparse.Namespace, dataset: Dataset
) -> tuple[dict[str, GroupList], str]:
    """The first run's worst groups, chosen on the validation part where there is another one."""
    folder, chosen_on = Path(options.runs[0]), options.part
    if options.part != "validation" and "validation" in dataset.parts:
        chosen_on = "validation"
        if not (folder / "evaluation" / chosen_on / "scores.json").is_file():
            evaluate_run(folder, dataset, chosen_on, device=_device(options), console=console)
    outcome = load_result(folder, chosen_on).outcome
    groups = worst_groups(
        outcome,
        dataset,
        chosen_on=chosen_on,
        compared_on=options.part,
        metric=options.metric,
        min_pairs=run_config(folder).evaluation.min_pairs,
    )
    return telling_titles(groups), chosen_on


def slices_command(options: argparse.Namespace) -> int:
    """The subpopulations that explain a run's failures."""
    for name, least in {"min_pairs": 1, "permutations": 19, "top": 1, "seed": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be at least {least}, got {value}")
    if options.check_on == options.part:
        raise UserError(
            f"--check-on must be another part than the one searched (--part), got {options.part} "
            f"for both; to find on one and check on the other: --part validation --check-on test"
        )
    folder, part, metric = Path(options.run), options.part, options.metric
    dataset = open_run_data(folder, console, data=options.data)
    check_trained_on(folder, dataset)
    outcome = load_result(folder, part).outcome
    judge = load_result(folder, options.check_on).outcome if options.check_on else outcome
    with count_bar(console, "permutations") as advance:
        found = slices_of(
            outcome,
            dataset,
            part,
            metric=metric,
            units=options.units,
            max_conditions=options.conditions,
            min_pairs=options.min_pairs,
            num_permutations=options.permutations,
            max_slices=options.top,
            seed=options.seed,
            progress=advance,
        )
    written = {"metric": metric, "units": options.units, "seed": options.seed}
    written |= findings_json(found, outcome, dataset, part)
    if options.check_on:
        part = options.check_on
        found = checked_slices(found, judge, dataset, part, metric=metric)
        written["checked"] = findings_json(found, judge, dataset, part)
    if found.slices:
        console.print(slices_table(found, judge, dataset, part_name=part, metric=metric))
    for note in slice_notes(found, found_on=options.part, shown_on=part):
        console.print(note)
    path = folder / "evaluation" / options.part / "slices.json"
    for place in (path, _path(options.json)):
        if place is not None:
            write_json(place, written)
            console.print(f"written to {place}")
    return 0


def report_command(options: argparse.Namespace) -> int:
    dataset, results = _open_results(options)
    path = Path(options.out or Path(options.runs[0]) / "report.html")
    with console.status("writing the report"):
        write_report(results, dataset, path)
    console.print(f"report: {path}")
    return 0


def search_command(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    for query in options.queries:
        if not normalized(query):
            raise UserError(f"a query must hold more than white space, got {query!r}")
    if options.results < 1:
        raise UserError(f"--results must be at least 1, got {options.results}")
    needs_data = options.data is not None or not query_data_path(folder).exists()
    dataset = open_run_data(folder, console, data=options.data) if needs_data else None
    searcher = load_searcher(folder, device=_device(options), dataset=dataset)
    found = searcher.search(options.queries, options.results)
    results = zip(options.queries, found.label_ids.tolist(), found.scores.tolist(), strict=True)
    for query, ids, scores in results:
        table = Table("score", "label", title=Text(f"“{query}”"), title_justify="left", box=None)
        for label_id, score in zip(ids, scores, strict=True):
            table.add_row(f"{score:.3f}", Text(searcher.label_name(label_id)))
        console.print(table)
    return 0


def data_places_command(options: argparse.Namespace) -> int:
    asked = DataConfig(min_population=options.min_population, num_buckets=options.num_buckets)
    with console.status("preparing places"):
        dataset = load_places(min_population=asked.min_population, num_buckets=asked.num_buckets)
    return _save(dataset, options)


def data_extreme_command(options: argparse.Namespace) -> int:
    if options.public is not None:
        groups = (options.train_groups, options.test_groups)
        if any((options.train, options.test, options.label_names, *groups)):
            raise UserError(
                f"{options.public} is opened by its name, so the files are known; give the name "
                f"alone, or files alone"
            )
        with file_bar(console) as advance:
            dataset = load_public_extreme(
                options.public,
                Path(options.folder),
                validation_fraction=options.validation_fraction,
                validation_block=options.validation_block,
                progress_fn=advance,
            )
        if options.name:
            dataset = dataclasses.replace(dataset, name=options.name)
        return _save(dataset, options)
    if options.train is None or options.test is None:
        raise UserError(
            "evenhand data extreme needs the name of a public data set (see: evenhand data list), "
            "or --train and --test"
        )
    with file_bar(console) as advance:
        dataset = load_extreme(
            Path(options.train),
            Path(options.test),
            name=options.name or without_controls(Path(options.train).resolve().parent.name),
            label_names_path=_path(options.label_names),
            train_groups_path=_path(options.train_groups),
            test_groups_path=_path(options.test_groups),
            validation_fraction=options.validation_fraction,
            validation_block=options.validation_block,
            progress_fn=advance,
        )
    return _save(dataset, options)


def data_table_command(options: argparse.Namespace) -> int:
    with console.status(f"reading {options.table}"):
        dataset = load_table(
            Path(options.table),
            query_column=options.query_column,
            label_column=options.label_column,
            group_columns=options.group,
            test_fraction=options.test_fraction,
            validation_fraction=options.validation_fraction,
            note_fn=console.print,
        )
    return _save(dataset, options)


def data_stream_command(options: argparse.Namespace) -> int:
    return data_stream(options, console, show_fn=_show)


def data_check_command(options: argparse.Namespace) -> int:
    return data_check(options, console)


def data_show_command(options: argparse.Namespace) -> int:
    dataset = open_dataset(Path(options.folder))
    check_all_ids(dataset)
    _show(dataset)
    return 0


def data_list_command(options: argparse.Namespace) -> int:
    list_public(Path(options.folder), console)
    return 0


def data_fetch_command(options: argparse.Namespace) -> int:
    fetch_public(options.names, Path(options.folder), console)
    return 0


def data_verify_command(options: argparse.Namespace) -> int:
    verify_public(options.name, Path(options.folder), console)
    return 0


def doctor_command(options: argparse.Namespace) -> int:
    return doctor(options, console=console)


def demo_command(options: argparse.Namespace) -> int:
    run_demo(Path(options.run), device=_device(options), console=console)
    return 0


# --- helpers --------------------------------------------------------------------------------------


def _open_results(options: argparse.Namespace) -> tuple[Dataset, list[RunResult]]:
    """The runs of `compare` and `report`, and the data set that all of them are of."""
    folders = [Path(run) for run in options.runs]
    dataset = open_run_data(folders[0], console, data=options.data)
    for folder in folders:
        check_trained_on(folder, dataset)
    results = [load_result(folder, options.part) for folder in folders]
    for folder, result in zip(folders, results, strict=True):
        highest = int(result.outcome.retrieved_ids.max(initial=-1))
        if highest >= dataset.num_labels:
            raise UserError(
                f"the outcome of {folder} names label {highest} of {dataset.num_labels}: it is "
                f"damaged; evaluate the run again"
            )
    return dataset, results


def _config(options: argparse.Namespace, *, default: Path | None = None) -> Config:
    """The TOML file, or else the default one, with the flags on top."""
    path = Path(options.config) if options.config else default
    if path and not path.exists() and str(path) in preset_names():
        settings = read_preset(str(path))
    else:
        settings = read_settings(path) if path else {}
    settings = with_assignments(settings, [*_flag_settings(options), *options.set])
    return guarded_config(settings, options, console)


def _flag_settings(options: argparse.Namespace) -> list[str]:
    flags = {
        "data.dataset": options.data,
        "mining.method": options.method,
        "mining.num_hard_labels": options.hard_labels,
        "mining.num_hard_examples": options.hard_examples,
        "training.num_steps": options.steps,
        "training.learning_rate": options.learning_rate,
        "training.seed": options.seed,
    }
    return [f"{name}={toml_value(value)}" for name, value in flags.items() if value is not None]


def _device(options: argparse.Namespace) -> torch.device:
    if options.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton's kernels and new streams go
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {options.device} cannot be used here: {error}") from error
    return device


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _save(dataset: Dataset, options: argparse.Namespace) -> int:
    folder = Path(options.out) if options.out else Path("datasets") / dataset.name
    _show(save_dataset(dataset, folder))
    console.print(f"written to {folder}; train on it with: evenhand train --data {folder}")
    return 0


def _show(dataset: Dataset) -> None:
    console.print(parts_table(dataset))
    columns = ", ".join(f"{name} ({len(g.names)})" for name, g in dataset.label_groups.items())
    console.print(
        f"{dataset.num_labels:,} labels, {dataset.num_features:,} features"
        + (f"; labels are grouped by {columns}" if columns else "")
    )
    for note in (*group_notes(dataset), *unseen_notes(dataset)):
        console.print(note)
    if dataset.attribution:
        console.print(dataset.attribution)
