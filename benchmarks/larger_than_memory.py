"""A text of many gigabytes, converted and trained on, with the memory of both measured.

    python benchmarks/larger_than_memory.py --gigabytes 1
    python benchmarks/larger_than_memory.py --gigabytes 20 --delete-text --json memory.json

An Extreme Classification text is made on the spot: 100,000 labels by a Zipf law, 1 to 5 a row,
200,000 features, 40 to 160 a row, half of which follow from the row's first label. Then
`evenhand data stream` converts it, `evenhand data check` compares the checksums and `evenhand
train` trains on it, each in a process of its own whose anonymous memory (RssAnon, what the system
could not drop and read again) is looked at 50 times a second. The page cache is not counted: it is
given up for anything else. The data set is dropped from the cache before training, so that it comes
from the disk. The model is small (vectors of 64: 73 MB, and as much twice for Adam), because tables
are not what is measured. All files are removed at the end.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from evenhand.kernels.jit import jit
from evenhand.kernels.random import jit_mix64
from machine import peak_anonymous_memory

NUM_LABELS, NUM_FEATURES = 100_000, 200_000
ROWS_AT_ONCE = 20_000
MOST_ROW_BYTES = 160 * 16 + 64
GIGABYTE = 10**9


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="larger-than-memory-", dir=options.folder) as name:
        figures = _figures(Path(name), options, console)
    table = Table("what", "seconds", "peak anonymous memory, MB", title_justify="left")
    table.title = f"{figures['text_bytes'] / GIGABYTE:.1f} GB of text, {figures['rows']:,} rows"
    for step in figures["steps"]:
        table.add_row(step["name"], f"{step['seconds']:.1f}", f"{step['peak_anonymous'] / 1e6:.0f}")
    console.print(table)
    console.print(json.dumps(figures, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _figures(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    text, data, run = folder / "train.txt", folder / "data", folder / "run"
    began = time.perf_counter()
    rows = write_text(text, int(options.gigabytes * GIGABYTE), console)
    figures: dict[str, Any] = {
        "gigabytes": options.gigabytes,
        "rows": rows,
        "text_bytes": text.stat().st_size,
        "labels": NUM_LABELS,
        "features": NUM_FEATURES,
        "memory_setting": options.memory,
        "ranks": options.ranks,
        "seconds_to_make_the_text": round(time.perf_counter() - began, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "steps": [],
    }
    evenhand = [sys.executable, "-m", "evenhand"]
    steps = figures["steps"]
    command = ["data", "stream", "--train", str(text), "--out", str(data), "--name", "large"]
    command += ["--memory", str(options.memory), "--validation-fraction", "0.0005"]
    command += ["--validation-block", "100"]
    steps.append(_watched("convert", [*evenhand, *command], folder, console))
    steps[-1]["rows_a_second"] = round(rows / steps[-1]["seconds"])
    steps[-1]["text_megabytes_a_second"] = round(figures["text_bytes"] / 1e6 / steps[-1]["seconds"])
    if options.delete_text:
        text.unlink()
    figures["data_bytes"] = sum(path.stat().st_size for path in data.iterdir())
    about = json.loads((data / "dataset.json").read_text(encoding="utf-8"))
    figures["pairs"] = about["arrays"]["train.positives.ids"][0]
    figures["block_pairs"] = about["streamed"]["block_pairs"]["train"]
    check = ["data", "check", str(data)]
    steps.append(_watched("check", [*evenhand, *check], folder, console))
    drop_from_cache(data)
    command = ["train", "--data", str(data), "--run", str(run), "--method", "s2m"]
    command += ["--steps", str(options.steps), "--device", "cpu", "--hard-examples", "256"]
    settings = ["model.embedding_dim=64", "mining.batch_size=1024", "training.log_every=10"]
    settings += ["mining.num_sampled_labels=1024", f"training.checkpoint_every={options.steps}"]
    settings += ["evaluation.num_resamples=100", f'data.weighting="{options.weighting}"']
    command += [word for setting in settings for word in ("--set", setting)]
    if options.ranks > 1:
        command += ["--ranks", str(options.ranks)]
    steps.append(_watched("train and evaluate", [*evenhand, *command], folder, console))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in line]
    steps[-1] |= {"num_steps": options.steps, "first_loss": losses[0], "last_loss": losses[-1]}
    about_run = json.loads((run / "run.json").read_text(encoding="utf-8"))
    steps[-1]["milliseconds_a_step"] = about_run["milliseconds_a_step"]
    return figures


# --- the text -----------------------------------------------------------------------------------


def write_text(path: Path, num_bytes: int, console: Console) -> int:
    """Writes about so many bytes of rows; returns how many rows there are."""
    ends = np.cumsum(1 / np.arange(1, NUM_LABELS + 1))  # a Zipf law
    ends /= ends[-1]
    buffer = np.empty(ROWS_AT_ONCE * MOST_ROW_BYTES, dtype=np.uint8)
    with open(path, "wb") as file, Progress(console=console) as progress:
        task = progress.add_task("making the text", total=num_bytes)
        file.write(_header(0))
        written, rows = 0, 0
        while written < num_bytes:
            length = _rows(rows, ends, buffer)
            file.write(buffer[:length].data)
            written, rows = written + length, rows + ROWS_AT_ONCE
            progress.update(task, completed=written)
        file.seek(0)
        file.write(_header(rows))
    return rows


def _header(rows: int) -> bytes:
    return f"{rows:012d} {NUM_FEATURES} {NUM_LABELS}\n".encode()


@jit
def _rows(first_row: int, ends: NDArray[np.float64], text: NDArray[np.uint8]) -> int:
    """Rows from `first_row` on as text; how many bytes they are."""
    at = 0
    for row in range(first_row, first_row + ROWS_AT_ONCE):
        state = jit_mix64(np.uint64(row) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        first_label = np.uint64(0)
        for number in range(1 + state % np.uint64(5)):
            state = jit_mix64(state)
            share = (state >> np.uint64(11)) * 2.0**-53
            label = np.uint64(np.searchsorted(ends, share))
            if number == 0:
                first_label = label
            else:
                text[at] = 44  # comma
                at += 1
            at = _number(text, at, label)
        state = jit_mix64(state)
        for number in range(40 + state % np.uint64(121)):
            state = jit_mix64(state)
            feature = state >> np.uint64(20)
            if number % 2:
                feature = first_label * np.uint64(31) + feature % np.uint64(100) * np.uint64(1999)
            text[at] = 32  # space
            at = _number(text, at + 1, feature % np.uint64(NUM_FEATURES))
            text[at], text[at + 1], text[at + 2] = 58, 48, 46  # :0.
            at += 3
            for _ in range(4):
                state = (state >> np.uint64(3)) ^ (state << np.uint64(7))
                text[at] = 48 + state % np.uint64(10)
                at += 1
        text[at] = 10  # newline
        at += 1
    return at


@jit
def _number(text: NDArray[np.uint8], at: int, number: np.uint64) -> int:
    divisor = np.uint64(1)
    while number // divisor >= np.uint64(10):
        divisor *= np.uint64(10)
    while divisor > np.uint64(0):
        text[at] = 48 + number // divisor % np.uint64(10)
        divisor //= np.uint64(10)
        at += 1
    return at


# --- processes, watched -------------------------------------------------------------------------


def _watched(name: str, command: list[str], folder: Path, console: Console) -> dict[str, Any]:
    """Runs a command; its seconds, and the most anonymous memory that one of its processes had."""
    console.print(f"{name}: {' '.join(command[1:])}", soft_wrap=True)
    began = time.perf_counter()
    log = folder / "log.txt"
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        with peak_anonymous_memory(process.pid) as peaks:
            code = process.wait()
    if code:
        sys.exit(f"{name} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return {
        "name": name,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_anonymous": max(peaks.values()),
        "peak_anonymous_of_each": sorted(peaks.values(), reverse=True),
    }


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Data larger than memory, end to end.")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of text (%(default)s)")
    parser.add_argument("--memory", type=int, default=512, help="of `data stream` (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="under torchrun (%(default)s)")
    parser.add_argument("--weighting", default="as-is", help="data.weighting (%(default)s)")
    parser.add_argument("--folder", help="where there is room (the folder for temporary files)")
    parser.add_argument("--delete-text", action="store_true", help="as soon as it is converted")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    free = shutil.disk_usage(options.folder or tempfile.gettempdir()).free
    if free < 1.7 * options.gigabytes * GIGABYTE:
        parser.error(f"{options.gigabytes} GB of text need 1.7 times as much room; {free} are free")
    return options


if __name__ == "__main__":
    main()
