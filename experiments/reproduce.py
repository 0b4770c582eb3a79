"""Runs a table of the paper, beside the paper's figures; or takes a quick look at all of them.

python -m experiments.reproduce --quick
python -m experiments.reproduce table2-mnist --tune --data downloads
python -m experiments.reproduce table3 --data places
"""

import argparse
import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from evenhand.cli import guard
from evenhand.config import check_choice
from evenhand.errors import UserError
from evenhand.files import locked, read_json, write_json
from evenhand.progress import PipedConsole, stop_requested
from experiments.imbalanced_images import fixture, load_images
from experiments.output_folder import claim, digest_of
from experiments.table2 import Run, about, run_table, tune
from experiments.table2_rows import OWN_OF_A_ROW, TABLES, Row, check_together, table_rows
from experiments.table3 import Protocol, format_table3, open_any, run_table3
from experiments.table3 import fixture as documents

DATA_OF = {  # is it table 3 -> what --data is
    False: "the folder with the files of MNIST or CIFAR-10",
    True: "'places', a folder made by `evenhand data`, or one with train.txt and test.txt",
}
QUICK: dict[str, Any] = {
    "num_steps": 12, "tuning_steps": 4, "seeds": (1, 2), "tuning_seeds": (101,),
    "tail_share": 0.1, "batch_size": 16, "has_control": False,
}  # fmt: skip


QUICK_3 = Protocol(
    embedding_dim=16, batch_size=128, num_sampled_labels=64, num_hard_labels=16,
    hard_examples=(32,), learning_rates=(0.01, 0.03), steps=(15,), seeds=(1, 2),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    options.command = _command(arguments)
    options.console = PipedConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)
    if not options.console.is_terminal:  # a file or a pipe has no width of its own
        options.console.width = 132
    return guard(lambda: reproduce(options))


def reproduce(options: argparse.Namespace) -> int:
    """Runs the table that was named; without one, the quick look at all of them."""
    options.device = torch.device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if options.table is None and not options.quick:
        known = ", ".join([*TABLES, "table3"])
        raise UserError(f"name a table ({known}), or take a quick look with --quick")
    if options.quick:
        if options.table in (None, "table3"):
            _table3(options)
        for table in TABLES:
            if options.table in (None, table):
                with tempfile.TemporaryDirectory() as place:
                    _quick(table, Path(place), options)
        return 0
    if options.data is None:
        raise UserError(f"--data is missing: {DATA_OF[options.table == 'table3']}")
    if options.table == "table3":
        _table3(options)
        return 0
    return _table2(options)


def _table2(options: argparse.Namespace) -> int:
    rows = _changed(table_rows(options.table, options.set), options)
    data = load_images(rows[0], Path(options.data))
    folder = Path(options.out or f"runs/{options.table}")
    with locked(folder), stop_requested() as should_stop_fn:
        claim(folder, {"data": digest_of(data), **_fixed(rows)})
        run = Run(
            table=options.table,
            folder=folder,
            **_circumstances(options),
            should_stop_fn=_with_limit(should_stop_fn, options.minutes),
            at_once=options.at_once,
        )
        tuned = tune(rows, data, run) if options.tune else rows
        if options.tune_only:
            if options.json:
                write_json(Path(options.json), read_json(folder / "tuning.json"))
            return 0
        result = run_table(tuned, data, run)
    if options.json:
        write_json(Path(options.json), result)
    options.console.print(f"written to {folder / 'result.json'}")
    return 0


def _quick(table: str, folder: Path, options: argparse.Namespace) -> None:
    """The smallest row and SGD, on generated pictures, with small models: does it all run?"""
    smallest, *_, sgd = table_rows(table, getattr(options, "set", ()))
    rows = [
        dataclasses.replace(
            row,
            **QUICK,
            num_hard_examples=min(row.num_hard_examples, QUICK["batch_size"]),
            learning_rates=row.learning_rates[:2],
        )
        for row in (smallest, sgd)
    ]
    run = Run(
        table=f"{table} (quick: generated pictures, small models; the figures mean nothing)",
        folder=folder,
        **_circumstances(options),
        is_small=True,
    )
    data = fixture(rows[0])
    result = run_table(tune(rows, data, run), data, run)
    if options.json:
        write_json(_json_path(options, table), result)


def _table3(options: argparse.Namespace) -> None:
    """Table 3's protocol on any multilabel data; with --quick on generated documents."""
    with contextlib.ExitStack() as stack:
        if options.quick:
            protocol, dataset = QUICK_3, documents()
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            given = {
                "steps": options.steps,
                "power": options.power,
                "learning_rates": options.learning_rates,
                "seeds": options.seeds,
                "tuning_seed": options.tuning_seeds and options.tuning_seeds[0],
                "masks_all_positives": options.mask_all_positives,
            }
            chosen: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in given.items()
                if value is not None
            }
            protocol, dataset = Protocol(**chosen), open_any(options.data, options.console)
            folder = Path(options.out or f"runs/table3-{dataset.name}")
        stack.enter_context(locked(folder))
        should_stop_fn = stack.enter_context(stop_requested())
        run = Run(
            table="table3",
            folder=folder,
            **_circumstances(options),
            should_stop_fn=_with_limit(should_stop_fn, getattr(options, "minutes", None)),
        )
        result = {"table": run.table, **run_table3(protocol, dataset, run), **about(run)}
        write_json(folder / "result.json", result)
    options.console.print(format_table3(result))
    if options.json:
        write_json(_json_path(options, "table3"), result)
    if not options.quick:
        options.console.print(f"written to {folder / 'result.json'}")


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("command", "device", "console")}


def _fixed(rows: list[Row]) -> dict[str, Any]:
    """What a run that is continued may not change; a training of more steps is another one."""
    free = {"num_steps", "tuning_steps"}
    fixed = {
        field.name: getattr(rows[0], field.name)
        for field in dataclasses.fields(Row)
        if field.name not in {*OWN_OF_A_ROW, *free}
    }
    return {**fixed, "learning_rates": [row.learning_rates for row in rows]}


def _changed(rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """Rows with the numbers that the flags give in the place of the files'."""
    changes = {
        "num_steps": options.steps,
        "tuning_steps": options.tuning_steps,
        "seeds": options.seeds and tuple(options.seeds),
        "tuning_seeds": options.tuning_seeds and tuple(options.tuning_seeds),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if options.no_controls:
        given["has_control"] = False
    if options.rows:
        for name in options.rows:
            check_choice("--rows", name, [row.name for row in rows])
        rows = [row for row in rows if row.name in options.rows or row.is_sgd]
    return check_together([dataclasses.replace(row, **given) for row in rows])


def _with_limit(should_stop_fn: Callable[[], bool], minutes: float | None) -> Callable[[], bool]:
    end = None if minutes is None else time.monotonic() + 60 * minutes
    return lambda: should_stop_fn() or (end is not None and time.monotonic() > end)


def _json_path(options: argparse.Namespace, table: str) -> Path:
    """Where --json asks for the figures; with the table's name where it is one of several."""
    path = Path(options.json)
    return path if options.table else path.with_name(f"{path.stem}-{table}{path.suffix}")


def _command(arguments: Sequence[str]) -> str:
    """The words that matter for the figures; folders and devices are the reader's own."""
    words, rest = ["python", "-m", "experiments.reproduce"], iter(arguments)
    for word in rest:
        if word in ("--out", "--json", "--device"):
            next(rest, None)
        else:
            words.append(Path(word).name if "/" in word else word)
    return shlex.join(words)


def _positive(text: str, kind: type[float] = float) -> float:
    if not kind(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return kind(text)


def _positive_int(text: str) -> float:
    return _positive(text, int)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reproduce",
        description="Runs a table of the paper, beside the paper's figures.",
    )
    for_all = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for each in (parser, for_all):
        each.add_argument("--quick", action="store_true", help="on generated data, in seconds")
        each.add_argument("--json", help="file to write the figures to as well")
        each.add_argument("--device", help="cpu, cuda, cuda:1 … (the GPU if there is one)")
    tables = parser.add_subparsers(dest="table", metavar="TABLE")
    for name in (*TABLES, "table3"):
        table = tables.add_parser(name, parents=[for_all], help=TABLES.get(name, "recall by group"))
        add = table.add_argument
        add("--data", help=DATA_OF[name == "table3"])
        add("--out", help="folder to write, and to continue from (runs/<table>)")
        add("--seeds", type=int, nargs="+", help="seeds of the table")
        add("--tuning-seeds", type=int, nargs="+", help="other seeds, to choose settings with")
        add("--minutes", type=_positive, help="stop after so many, to be continued")
        if name == "table3":
            add("--steps", type=_positive_int, nargs="+", help="training steps to try")
            add("--learning-rates", type=_positive, nargs="+", help="what is tried for every k'")
            add("--power", type=float, help="of the loss: 1 (the default) or 2")
            masks = "every positive of a query is kept out of its negatives"
            add("--mask-all-positives", action="store_true", help=masks)
            continue
        add("--steps", type=_positive_int, help="training steps (the paper's)")
        add("--tune", action="store_true", help="choose each row's rate on validation first")
        add("--tune-only", action="store_true", help="with --tune: only choose")
        add("--tuning-steps", type=_positive_int, help="steps of a trial of --tune")
        settings = "any setting of the rows, such as row.tail_classes=[1,3,5,7,9]"
        add("--set", action="append", default=[], metavar="ROW.KEY=VALUE", help=settings)
        add("--rows", nargs="+", metavar="NAME", help="these rows and SGD, such as top-16")
        side_by_side = "trainings side by side on a GPU (%(default)s); a stop loses what they did"
        add("--at-once", type=_positive_int, default=1, metavar="N", help=side_by_side)
        add("--no-controls", action="store_true", help="without SGD at larger learning rates")
    return parser


if __name__ == "__main__":
    sys.exit(main())
