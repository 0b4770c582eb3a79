"""Time and memory of one training step on a CPU, beside the other ways to write it.

    python benchmarks/cpu.py                       13,330 labels, the shape of the docs
    python benchmarks/cpu.py --labels 13330 100000 --json speed.json
    python benchmarks/cpu.py --sweep               width 128, from 10^4 to 10^7 labels, as well
    python benchmarks/cpu.py --quick               a tiny shape: does everything run?
    python benchmarks/cpu.py --ways evenhand soft  only ways whose name holds one of these

`ways.py` says what a step is; `peers/README.md` how to have the peers' rows too. All ways run in
one process, on all cores and in float32, in turns (first way, second way, ..., first way, ...),
until each has had its repeats; `milliseconds` is the median. `ratio_to_product` is the time over
that of the bare score product of the same shape in the same run.

`peak_bytes` is measured before that, each way alone in a forked process: the highest resident
memory while the way is set up and does two steps (VmHWM of /proc), above that before, when table
and batch exist. So an optimiser's state counts, and the code of the libraries does not: a step of
a tiny shape has loaded it. Where /proc is missing it is null.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # every optimiser does; here once, before the processes are forked
from rich.console import Console
from rich.table import Table

from machine import proc_bytes, processor
from peers.ways import PEERS
from ways import GATHERED, PRODUCT, WAYS, Problem, Shape, Way

TINY = Shape(labels=500, batch_size=64, sampled=128, hard_labels=8, hard_examples=16, dim=16)
SWEEP_LABELS = (10**4, 10**5, 10**6, 10**7)
SWEEP_DIM = 128
MEMORY_SHARE = 0.6  # of the machine's memory, for all that the ways timed in turns hold together
REDUCTION = 8  # of the batch, for the way that few machines can hold


class Case(NamedTuple):
    """One row of the results: a way at a shape."""

    name: str
    way: Way
    shape: Shape
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    console = Console()
    ways = {
        name: way
        for name, way in {**WAYS, **PEERS}.items()
        if name == PRODUCT or any(word in name for word in options.ways)
    }
    if options.quick:
        ways = {name: way for name, way in ways.items() if not way.needs_compiler}  # a minute
        rounds = [_cases(ways, TINY, console)]
    else:
        rounds = [_cases(ways, shape, console) for shape in _shapes(options)]
    if options.sweep:
        ways = {name: way for name, way in ways.items() if way.is_swept}
        rounds += [_cases(ways, shape, console) for shape in _swept(options)]
    # Memory first: a process that has run threads must not be forked.
    peaks = [[_peak_bytes(case) for case in cases] for cases in rounds]
    rows = []
    for cases, peaks_of_cases in zip(rounds, peaks, strict=True):
        times = _times(cases, seconds=options.seconds)
        rows += _rows(cases, peaks_of_cases, times)
        console.print(_table(rows[-len(cases) :], cases[0].shape))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def _shapes(options: argparse.Namespace) -> list[Shape]:
    names = [field.name for field in dataclasses.fields(Shape) if field.name != "labels"]
    sizes = {name: getattr(options, name) for name in names}
    return [Shape(labels=labels, **sizes) for labels in options.labels]


def _swept(options: argparse.Namespace) -> list[Shape]:
    shape = _shapes(options)[0]
    return [dataclasses.replace(shape, labels=labels, dim=SWEEP_DIM) for labels in SWEEP_LABELS]


def _cases(ways: Mapping[str, Way], shape: Shape, console: Console) -> list[Case]:
    """The ways that can run here at this shape; a sentence is printed for each that cannot."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free_bytes = int(MEMORY_SHARE * machine_bytes) - 4 * shape.labels * shape.dim
    cases = []
    for name, way in ways.items():
        missing = [package for package in way.packages if _version(package) is None]
        least_bytes = way.least_bytes(shape)
        if missing:
            console.print(f"{name}: left out, {', '.join(missing)} is not installed")
        elif way.needs_compiler and not _has_compiler():
            console.print(f"{name}: left out, torch.compile needs a C++ compiler")
        elif least_bytes <= free_bytes:
            cases.append(Case(name, way, shape))
            free_bytes -= least_bytes
        elif name == GATHERED:
            words = f"batch {shape.batch_size:,} needs {least_bytes:,} bytes or more"
            cases += _reduced(shape, f"{words}, this machine has {machine_bytes:,}")
        else:
            console.print(
                f"{name}: left out at {shape.labels:,} labels, it needs {least_bytes:,} bytes "
                f"or more and {free_bytes:,} of {machine_bytes:,} are free"
            )
    return cases


def _reduced(shape: Shape, note: str) -> list[Case]:
    """The gathered form at a batch that fits, with the product of that batch beside it."""
    small = dataclasses.replace(
        shape,
        batch_size=shape.batch_size // REDUCTION,
        hard_examples=shape.hard_examples // REDUCTION,
    )
    words = f", batch {small.batch_size}"
    return [
        Case(PRODUCT + words, WAYS[PRODUCT], small),
        Case(GATHERED + words, WAYS[GATHERED], small, note),
    ]


# --- measuring ------------------------------------------------------------------------------------


def _times(cases: Sequence[Case], *, seconds: float) -> list[list[float]]:
    """Times of each case's steps, in turns: as many as fit in `seconds` a case, at least 3."""
    problems = {case.shape: Problem(case.shape) for case in cases}
    steps = [case.way.build(problems[case.shape]) for case in cases]
    for step in steps:
        step()
    times: list[list[float]] = [[] for _ in steps]
    while unfinished := [i for i, own in enumerate(times) if len(own) < 3 or sum(own) < seconds]:
        for i in unfinished:
            began = time.perf_counter()
            steps[i]()
            times[i].append(time.perf_counter() - began)
    return times


def _peak_bytes(case: Case) -> int | None:
    if not Path("/proc/self/status").exists():
        return None
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, case))
    process.start()
    sender.close()
    try:
        peak: int = receiver.recv()
    except EOFError:
        process.join()
        raise SystemExit(
            f"{case.name} stopped with {process.exitcode} at {case.shape.words()}; "
            "-9 is for want of memory: lower --labels or --batch-size"
        ) from None
    process.join()
    return peak


def _send_peak(sender: Connection, case: Case) -> None:
    case.way.build(Problem(TINY))()
    problem = Problem(case.shape)
    gc.collect()
    start = proc_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest from now on
    step = case.way.build(problem)
    step()
    step()
    sender.send(max(0, proc_bytes("VmHWM") - start))


# --- reporting ------------------------------------------------------------------------------------


def _rows(
    cases: Sequence[Case], peaks: Sequence[int | None], times: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    medians = [statistics.median(own) for own in times]
    floors = {
        case.shape: median
        for case, median in zip(cases, medians, strict=True)
        if case.name.startswith(PRODUCT)
    }
    return [
        {
            "name": case.name,
            **dataclasses.asdict(case.shape),
            "milliseconds": round(1000 * median, 4),
            "milliseconds_min": round(1000 * min(own), 4),
            "repeats": len(own),
            "ratio_to_product": round(median / floors[case.shape], 3),
            "peak_bytes": peak,
            "device": f"{processor()}, {torch.get_num_threads()} threads",
            "versions": _versions(case.way.packages),
            "note": case.note,
        }
        for case, peak, own, median in zip(cases, peaks, times, medians, strict=True)
    ]


def _table(rows: Sequence[dict[str, Any]], shape: Shape) -> Table:
    shown = Table(
        "step", "ms", "fastest", "over the product", "peak MB",
        title=shape.words(), title_justify="left",
    )  # fmt: skip
    for row in rows:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}"
        shown.add_row(
            row["name"],
            f"{row['milliseconds']:,.1f}",
            f"{row['milliseconds_min']:,.1f}",
            f"{row['ratio_to_product']:.2f}",
            peak,
        )
    notes = [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    shown.caption, shown.caption_justify = "\n".join(notes) or None, "left"
    return shown


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    named = {package: _version(package) for package in ("torch", "numpy", *packages)}
    return {"python": platform.python_version(), **named}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++"))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labels", type=int, nargs="+", default=[13_330])
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--sampled", type=int, default=4096)
    parser.add_argument("--hard-labels", type=int, default=64)
    parser.add_argument("--hard-examples", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.5, help="of repeats for each way")
    parser.add_argument("--sweep", action="store_true", help="over numbers of labels, width 128")
    parser.add_argument("--quick", action="store_true", help="a tiny shape and three repeats")
    parser.add_argument("--ways", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    if min(options.labels) < options.sampled:
        parser.error(f"--labels must be at least --sampled ({options.sampled})")
    if options.quick:
        options.seconds = 0
    return options


if __name__ == "__main__":
    main()
