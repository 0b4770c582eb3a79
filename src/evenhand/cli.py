"""The command `evenhand`."""

import argparse
import errno
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.config import (
    METHODS,
    Config,
    build_config,
    read_settings,
    toml_value,
    with_assignments,
)
from evenhand.data import (
    Dataset,
    featurizer_from,
    load_extreme,
    load_places,
    load_table,
    normalized,
    open_dataset,
    save_dataset,
)
from evenhand.demo import run_demo
from evenhand.errors import UserError
from evenhand.evaluation import GroupList, compare_outcomes, group_columns, worst_members
from evenhand.pipeline import (
    begin_run,
    evaluate_run,
    load_model,
    open_data,
    resumable_config,
    run_config,
    train_run,
)
from evenhand.progress import file_bar, stop_requested
from evenhand.report import write_report
from evenhand.runs import RunResult, check_trained_on, load_result
from evenhand.search import ExactIndex
from evenhand.tables import differences_table, parts_table, results_table, unseen_notes
from evenhand.training.feed import bags_of
from evenhand.version import __version__

# Names of labels and folders are printed as they are: "[b]" and ":smile:" mean nothing special.
console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip

EPILOG = """\
a first session:
  evenhand train --run runs/first                 train S2M on places, the default data set
  evenhand search runs/first "Wien" "ウィーン"      ask it
  evenhand train --method snm --run runs/snm      train the usual way, to compare
  evenhand compare runs/snm runs/first            who gains, who loses, with intervals
  evenhand report runs/snm runs/first             the same as a page with a map

methods:
""" + "\n".join(f"  {name:14s}{text}" for name, text in METHODS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; what a user can mend is one sentence and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command_fn(options)
        return code
    except UserError as error:
        print("evenhand:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        print(
            f"evenhand: {error.filename or 'a file'} could not be opened or written "
            f"({error.strerror}); what was complete before is untouched",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("evenhand: interrupted", file=sys.stderr)
        return 130


# --- commands -------------------------------------------------------------------------------------


def train_command(options: argparse.Namespace) -> int:
    if options.resume:
        if options.run is None:
            raise UserError("--resume needs the folder of the run: evenhand train --resume --run …")
        folder = Path(options.run)
        resumable_config(folder, None)  # there is something to resume
        config = resumable_config(folder, _config(options, default=folder / "config.toml"))
        dataset = open_data(config.data, console)
        resumable_config(folder, config, dataset)
    else:
        config = _config(options)
        dataset = open_data(config.data, console)
        name = f"{dataset.name}-{config.mining.method}-seed{config.training.seed}"
        folder = Path(options.run) if options.run else Path("runs") / name
        begin_run(folder, config, dataset, device=_device(options))
    _say_unseen(dataset)
    with stop_requested() as should_stop_fn:
        is_complete = train_run(
            folder,
            config,
            dataset,
            device=_device(options),
            console=console,
            title=f"training {config.mining.method}",
            should_stop_fn=should_stop_fn,
        )
    if not is_complete:
        if config.training.checkpoint_every:
            again = shlex.quote(str(folder))
            console.print(f"stopped; continue with: evenhand train --resume --run {again}")
        else:
            console.print("stopped; there is no checkpoint (training.checkpoint_every = 0)")
        return 130
    part_name = "test" if "test" in dataset.parts else "validation"
    if part_name in dataset.parts:
        scores = evaluate_run(folder, dataset, part_name, device=_device(options), console=console)
        console.print(results_table([(config.mining.method, scores)], part_name=part_name))
    console.print(f"run folder: {folder}")
    return 0


def evaluate_command(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    dataset = open_data(run_config(folder).data, console)
    scores = evaluate_run(folder, dataset, options.part, device=_device(options), console=console)
    console.print(results_table([(folder.resolve().name, scores)], part_name=options.part))
    console.print(f"written to {folder / 'evaluation' / options.part}")
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """Every run against the first, whose worst groups are the ones compared."""
    dataset, results = _open_results(options)
    known = sorted({f"recall@{r}" for result in results for r in result.outcome.cutoffs})
    if options.metric not in known:
        raise UserError(f"--metric must be one of {', '.join(known)}, got {options.metric!r}")
    table = [(result.name, result.scores) for result in results]
    console.print(results_table(table, part_name=options.part))
    groups = {}
    for column in group_columns(dataset, options.part):
        if column.name in ("all", "frequency", "frequency over pairs"):
            continue
        for title, count in (("worst 3", 3), ("worst tenth", None)):
            members = worst_members(results[0].scores, column.name, options.metric, count=count)
            if members:  # else no group is large enough to judge
                groups[f"{title} of {column.name}"] = GroupList(column.name, members)
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
        console.print(f"the worst groups are those of {results[0].name}, the same for all runs")
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
    dataset = open_data(run_config(folder).data, console)
    featurizer = featurizer_from(dataset.featurizer)
    device = _device(options)
    model = load_model(folder, dataset, device=device)
    index = ExactIndex(model.label_vectors(), label_bias=model.biases())
    bags = bags_of(featurizer.featurize(options.queries), device=device)
    found = index.search(model.query_vectors(bags), options.results)
    results = zip(options.queries, found.label_ids.tolist(), found.scores.tolist(), strict=True)
    for query, ids, scores in results:
        table = Table("score", "label", title=Text(f"“{query}”"), title_justify="left", box=None)
        for label_id, score in zip(ids, scores, strict=True):
            table.add_row(f"{score:.3f}", Text(dataset.label_name(label_id)))
        console.print(table)
    return 0


def data_places_command(options: argparse.Namespace) -> int:
    with console.status("preparing places"):
        dataset = load_places(
            min_population=options.min_population, num_buckets=options.num_buckets
        )
    return _save(dataset, options)


def data_extreme_command(options: argparse.Namespace) -> int:
    with file_bar(console) as advance:
        dataset = load_extreme(
            Path(options.train),
            Path(options.test),
            name=options.name or Path(options.train).parent.name,
            label_names_path=_path(options.label_names),
            train_groups_path=_path(options.train_groups),
            test_groups_path=_path(options.test_groups),
            validation_fraction=options.validation_fraction,
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
        )
    return _save(dataset, options)


def data_show_command(options: argparse.Namespace) -> int:
    _show(open_dataset(Path(options.folder)))
    return 0


def demo_command(options: argparse.Namespace) -> int:
    run_demo(Path(options.run), device=_device(options), console=console)
    return 0


# --- helpers --------------------------------------------------------------------------------------


def _open_results(options: argparse.Namespace) -> tuple[Dataset, list[RunResult]]:
    """The runs of `compare` and `report`, and the data set that all of them are of."""
    folders = [Path(run) for run in options.runs]
    dataset = open_data(run_config(folders[0]).data, console)
    for folder in folders:
        check_trained_on(folder, dataset)
    return dataset, [load_result(folder, options.part) for folder in folders]


def _config(options: argparse.Namespace, *, default: Path | None = None) -> Config:
    """The TOML file, or else the default one, with the flags on top."""
    path = Path(options.config) if options.config else default
    settings = read_settings(path) if path else {}
    settings = with_assignments(settings, [*_flag_settings(options), *options.set])
    return build_config(settings)


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
    _say_unseen(dataset)
    if dataset.attribution:
        console.print(dataset.attribution)


def _say_unseen(dataset: Dataset) -> None:
    for note in unseen_notes(dataset):
        console.print(note)


# --- the parser -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evenhand",
        description="Trains retrieval models that work for every part of the data.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"evenhand {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_train(commands)
    _add_readers(commands)
    _add_data(commands)
    demo = commands.add_parser("demo", help="SNM and S2M on places, side by side, in minutes")
    demo.add_argument("--run", default="runs/demo", help="folder to write to (%(default)s)")
    _finish(demo, demo_command)
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model into a run folder",
        description="Trains a model, evaluates it on the test part and writes a run folder. "
        "Settings come from the TOML file, then from the flags; every one that is not given has a "
        "default, and all of them are written to config.toml in the run folder.",
    )
    parser.add_argument("config", nargs="?", help="TOML file with settings")
    parser.add_argument("--run", help="run folder (runs/<data>-<method>-seed<n>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run")
    parser.add_argument("--data", help="'places' or a folder made by `evenhand data`")
    parser.add_argument("--method", help=", ".join(METHODS))
    parser.add_argument("--hard-labels", type=int, help="k: hardest labels kept for an example")
    parser.add_argument("--hard-examples", type=int, help="k': hardest examples kept of a batch")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, such as loss.name=softmax or model.embedding_dim=512",
    )
    _finish(parser, train_command)


def _add_readers(commands: Any) -> None:
    evaluate = commands.add_parser("evaluate", help="evaluate a run on a part of its data")
    evaluate.add_argument("run")
    _add_part(evaluate)
    _finish(evaluate, evaluate_command)
    compare = commands.add_parser("compare", help="two or more runs, with paired intervals")
    compare.add_argument("runs", nargs="+")
    compare.add_argument("--metric", default="recall@10", help="(%(default)s)")
    _add_part(compare)
    _finish(compare, compare_command)
    report = commands.add_parser("report", help="one page about one or more runs")
    report.add_argument("runs", nargs="+")
    report.add_argument("--out", help="file to write (report.html in the first run)")
    _add_part(report)
    _finish(report, report_command)
    search = commands.add_parser("search", help="ask a trained model")
    search.add_argument("run")
    search.add_argument("queries", nargs="+")
    search.add_argument("--results", type=int, default=5, help="labels to show (%(default)s)")
    _finish(search, search_command)


def _add_data(commands: Any) -> None:
    data = commands.add_parser("data", help="prepare a data set, or look at one")
    kinds = data.add_subparsers(required=True, metavar="kind")
    places = kinds.add_parser("places", help="cities by their names, from GeoNames (CC BY 4.0)")
    places.add_argument("--min-population", type=int, default=15000, help="(%(default)s)")
    places.add_argument("--num-buckets", type=int, default=2**18, help="(%(default)s)")
    extreme = kinds.add_parser("extreme", help="the Extreme Classification text format")
    extreme.add_argument("--train", required=True)
    extreme.add_argument("--test", required=True)
    extreme.add_argument("--name")
    extreme.add_argument("--label-names", help="a name a line")
    extreme.add_argument("--train-groups", help="TSV: id, group; a line a document")
    extreme.add_argument("--test-groups")
    table = kinds.add_parser("table", help="a CSV or TSV of queries and labels")
    table.add_argument("table")
    table.add_argument("--query-column", default="query", help="(%(default)s)")
    table.add_argument("--label-column", default="label", help="(%(default)s)")
    table.add_argument(
        "--group", action="append", default=[], help="a column of groups; repeatable"
    )
    table.add_argument("--test-fraction", type=float, default=0.2, help="(%(default)s)")
    for parser in (extreme, table):
        parser.add_argument("--validation-fraction", type=float, default=0.1, help="(%(default)s)")
    for parser, command_fn in (
        (places, data_places_command),
        (extreme, data_extreme_command),
        (table, data_table_command),
    ):
        parser.add_argument("--out", help="folder to write (datasets/<name>)")
        _finish(parser, command_fn)
    show = kinds.add_parser("show", help="what a prepared data set holds")
    show.add_argument("folder")
    _finish(show, data_show_command)


def _add_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", default="test", choices=("train", "validation", "test"), help="(%(default)s)"
    )


def _finish(parser: argparse.ArgumentParser, command_fn: Any) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (the GPU if there is one)")
    parser.set_defaults(command_fn=command_fn)


if __name__ == "__main__":
    raise SystemExit(main())
