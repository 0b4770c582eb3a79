"""Runs a table of the paper, beside the paper's figures; or takes a quick look at all of them.

python -m experiments.reproduce --quick
python -m experiments.reproduce table2-mnist --tune --data downloads
python -m experiments.reproduce table3 --data places
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.data import Dataset
from evenhand.errors import StoppedError, UserError
from evenhand.faults import STOPPED, guard
from evenhand.files import read_json, write_json
from evenhand.locking import locked
from evenhand.progress import PipedConsole, stop_requested
from experiments.imbalanced_images import fixture, load_images
from experiments.output_folder import claim, digest_of
from experiments.table2 import Run, about, classifier_of, run_table, tune
from experiments.table2_rows import (
    OWN_OF_A_ROW,
    TABLES,
    Row,
    TableRow,
    check_together,
    table_rows,
)
from experiments.table3 import Protocol, format_table3, open_any, run_table3
from experiments.table3 import fixture as documents

EVALUATIONS = 5  # of a run, unless --every says otherwise
QUICK: dict[str, Any] = {
    "num_steps": 12, "tuning_steps": 4, "seeds": (1, 2), "tuning_seeds": (101,),
    "tail_share": 0.1, "batch_size": 16, "has_control": False,
}  # fmt: skip


QUICK_3 = Protocol(
    embedding_dim=16, batch_size=128, num_sampled_labels=64, num_hard_labels=16,
    hard_examples=(32,), learning_rates=(0.01, 0.03), steps=(15,), seeds=(1, 2),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = PipedConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:  # a file or a pipe has no width of its own: tables stay whole
        console.width = 132

    def run() -> int:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(options.device or default)
        return reproduce(options, device=device, console=console)

    return guard(run)


def reproduce(options: argparse.Namespace, *, device: torch.device, console: Console) -> int:
    known = [*TABLES, "table3"]
    if options.table is not None and options.table not in known:
        raise UserError(f"there is no table {options.table!r}; known: {', '.join(known)}")
    if options.table is None and not options.quick:
        raise UserError(f"name a table ({', '.join(known)}), or take a quick look with --quick")
    numbers = {name: getattr(options, name) for name in ("tuning_steps", "every", "minutes")}
    for name, value in [*numbers.items(), *(("steps", count) for count in options.steps or ())]:
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if options.table != "table3" and len(options.steps or ()) > 1:
        raise UserError(f"--steps takes several numbers for table3 alone, got {options.steps}")
    if options.set and options.table not in TABLES:
        raise UserError(
            f"--set is for the rows of one table ({', '.join(TABLES)}), got {options.set} with "
            f"{options.table or 'no table'}"
        )
    given = {"--power": options.power, "--learning-rates": options.learning_rates}
    given["--mask-all-positives"] = options.mask_all_positives or None
    for flag, value in given.items():
        if value is not None and options.table != "table3":
            raise UserError(f"{flag} is for table3, got {value} with {options.table or 'no table'}")
    if options.table == "table3" or (options.table is None and options.quick):
        _table3(options, device=device, console=console)
        if options.table == "table3":
            return 0
    if options.quick:
        for table in [options.table] if options.table else TABLES:
            with tempfile.TemporaryDirectory() as place:
                _quick(table, Path(place), options, device=device, console=console)
        return 0
    if options.data is None:
        raise UserError(f"--data is missing: the folder with the files of {options.table}")
    rows = _changed(table_rows(options.table, options.set), options)
    data = load_images(rows[0].row, Path(options.data))
    classifier = classifier_of(rows[0].row)
    folder = Path(options.out or f"runs/{options.table}")
    with locked(folder), stop_requested() as should_stop_fn:
        claim(folder, {"data": digest_of(data), **_fixed(rows)})
        run = Run(
            table=options.table,
            folder=folder,
            command=_command(options),
            device=device,
            console=console,
            every=options.every or max(1, rows[0].row.num_steps // EVALUATIONS),
            compiles=not options.no_compile,
            saves=not options.no_checkpoints,
            should_stop_fn=_with_limit(should_stop_fn, options.minutes),
        )
        tuned = tune(rows, data, classifier, run) if options.tune else rows
        if tuned is None:
            raise StoppedError("stopped before a learning rate was chosen; nothing was kept")
        if options.tune_only:
            _copy(folder / "tuning.json", options.json)
            return 0
        result = run_table(tuned, data, classifier, run)
        is_stopped = should_stop_fn() and not result["is_complete"]
    _copy(folder / "result.json", options.json)
    console.print(f"written to {folder / 'result.json'}")
    if not result["is_complete"]:
        console.print(f"stopped at step {result['num_steps']:,}; the same command continues")
    return STOPPED if is_stopped else 0


def _quick(
    table: str, folder: Path, options: argparse.Namespace, *, device: torch.device, console: Console
) -> None:
    """The smallest row and SGD, on generated pictures, with small models: does it all run?"""
    smallest, *_, sgd = table_rows(table, options.set)
    rows = [
        dataclasses.replace(
            row,
            row=dataclasses.replace(
                row.row,
                **QUICK,
                num_hard_examples=min(row.row.num_hard_examples, QUICK["batch_size"]),
                learning_rates=row.row.learning_rates[:2],
            ),
        )
        for row in (smallest, sgd)
    ]
    run = Run(
        table=f"{table} (quick: generated pictures, small models; the figures mean nothing)",
        folder=folder,
        command=_command(options),
        device=device,
        console=console,
        every=6,
    )
    data, classifier = fixture(rows[0].row), classifier_of(rows[0].row, is_small=True)
    tuned = tune(rows, data, classifier, run)
    assert tuned is not None  # nothing stops it
    result = run_table(tuned, data, classifier, run)
    if options.json:
        path = Path(options.json)
        name = path.name if options.table else f"{path.stem}-{table}{path.suffix}"
        write_json(path.with_name(name), result)


def _table3(options: argparse.Namespace, *, device: torch.device, console: Console) -> None:
    """Table 3's protocol on any multilabel data; or, quickly, on generated documents."""
    if options.quick:
        with tempfile.TemporaryDirectory() as place:
            _run_table3(QUICK_3, documents(), Path(place), options, device, console)
        return
    if options.data is None:
        raise UserError(
            "--data is missing: 'places', a folder made by evenhand data, or one with train.txt "
            "and test.txt"
        )
    given = {
        "steps": options.steps and tuple(options.steps),
        "power": options.power,
        "learning_rates": options.learning_rates and tuple(options.learning_rates),
        "seeds": options.seeds and tuple(options.seeds),
        "tuning_seed": options.tuning_seeds and options.tuning_seeds[0],
        "masks_all_positives": options.mask_all_positives,
    }
    protocol = Protocol(**{name: value for name, value in given.items() if value is not None})
    dataset = open_any(options.data, console)
    folder = Path(options.out or f"runs/table3-{dataset.name}")
    _run_table3(protocol, dataset, folder, options, device, console)


def _run_table3(
    protocol: Protocol,
    dataset: Dataset,
    folder: Path,
    options: argparse.Namespace,
    device: torch.device,
    console: Console,
) -> None:
    with locked(folder), stop_requested() as should_stop_fn:
        run = Run(
            table="table3",
            folder=folder,
            command=_command(options),
            device=device,
            console=console,
            every=1,
            should_stop_fn=_with_limit(should_stop_fn, options.minutes),
        )
        result = {"table": run.table, **run_table3(protocol, dataset, run), **about(run)}
    write_json(folder / "result.json", result)
    console.print(format_table3(result))
    name = Path(options.json or "result.json").name
    if options.json and options.quick and options.table is None:
        name = f"{Path(name).stem}-table3{Path(name).suffix}"
    if options.json:
        write_json(Path(options.json).with_name(name), result)
    if not options.quick:
        console.print(f"written to {folder / 'result.json'}")


def _fixed(rows: list[TableRow]) -> dict[str, Any]:
    """What a run that is continued may not change; more steps it may, at a constant rate."""
    free = {"num_steps"} if rows[0].row.schedule == "constant" else set()
    fixed = {
        field.name: getattr(rows[0].row, field.name)
        for field in dataclasses.fields(Row)
        if field.name not in {*OWN_OF_A_ROW, *free}
    }
    return {**fixed, "learning_rates": [row.row.learning_rates for row in rows]}


def _changed(rows: list[TableRow], options: argparse.Namespace) -> list[TableRow]:
    """Rows with the numbers that the flags give in the place of the files'."""
    changes = {
        "num_steps": options.steps and options.steps[0],
        "tuning_steps": options.tuning_steps,
        "seeds": options.seeds and tuple(options.seeds),
        "tuning_seeds": options.tuning_seeds and tuple(options.tuning_seeds),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if options.no_controls:
        given["has_control"] = False
    changed = [dataclasses.replace(row, row=dataclasses.replace(row.row, **given)) for row in rows]
    return check_together(changed)


def _with_limit(should_stop_fn: Callable[[], bool], minutes: float | None) -> Callable[[], bool]:
    end = None if minutes is None else time.monotonic() + 60 * minutes
    return lambda: should_stop_fn() or (end is not None and time.monotonic() > end)


def _copy(path: Path, target: str | None) -> None:
    if target:
        write_json(Path(target), read_json(path))


def _command(options: argparse.Namespace) -> str:
    """The words that matter for the figures; folders are the reader's own."""
    words = ["python", "-m", "experiments.reproduce", *([options.table] if options.table else [])]
    for name in ("power", "tuning_steps", "minutes", "every"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    if options.table == "table3" and options.data is not None:
        words += ["--data", Path(options.data).name]
    for name in ("steps", "seeds", "tuning_seeds", "learning_rates"):
        values = getattr(options, name) or []
        words += [f"--{name.replace('_', '-')}", *map(str, values)] if values else []
    for assignment in options.set:
        words += ["--set", assignment]
    for name in ("quick", "tune", "no_controls", "mask_all_positives"):
        words += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    return shlex.join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reproduce",
        description="Runs a table of the paper, beside the paper's figures.",
    )
    parser.add_argument(
        "table", nargs="?", help="table2-mnist, table2-mnist-odd, table2-cifar10 or table3"
    )
    parser.add_argument(
        "--data",
        help="folder with the files of MNIST or CIFAR-10; for table3: 'places', a folder made by "
        "`evenhand data`, or one with train.txt and test.txt",
    )
    parser.add_argument("--out", help="folder to write, and to continue from (runs/<table>)")
    parser.add_argument("--json", help="file to write the figures to as well")
    parser.add_argument("--quick", action="store_true", help="on generated data, in seconds")
    parser.add_argument(
        "--tune", action="store_true", help="choose each row's learning rate on validation first"
    )
    parser.add_argument("--tune-only", action="store_true", help="with --tune: only choose")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        help="training steps (the paper's; of table3: what is tried)",
    )
    parser.add_argument("--power", type=float, help="of table3's loss: 1 (the default) or 2")
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", help="what table3 tries for every k'"
    )
    parser.add_argument("--tuning-steps", type=int, help="steps of a trial of --tune")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of the table")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", help="other seeds, for --tune")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ROW.KEY=VALUE",
        help="any setting of table 2's rows, such as row.tail_classes=[1,3,5,7,9]",
    )
    parser.add_argument("--every", type=int, help="steps between evaluations (a fifth of all)")
    parser.add_argument("--minutes", type=float, help="stop after so many, to be continued")
    parser.add_argument(
        "--no-controls", action="store_true", help="without SGD at the larger learning rates"
    )
    parser.add_argument(
        "--mask-all-positives",
        action="store_true",
        help="table3 with every positive of a query kept out of its negatives",
    )
    parser.add_argument("--no-compile", action="store_true", help="do not try compiled code")
    parser.add_argument("--no-checkpoints", action="store_true", help="nothing to continue from")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (the GPU if there is one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
