"""`evenhand data stream` and `evenhand data check`: data sets that may be larger than memory."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from evenhand.data import Dataset
from evenhand.data.checksums import check_manifest
from evenhand.data.stream import stream_extreme
from evenhand.errors import UserError
from evenhand.faults import without_controls
from evenhand.progress import download_bar

LEAST_MEGABYTES = 64


def data_stream(
    options: argparse.Namespace, console: Console, *, show_fn: Callable[[Dataset], None]
) -> int:
    """Converts a text of any size, all of it or nothing."""
    if options.memory < LEAST_MEGABYTES:
        raise UserError(f"--memory must be at least {LEAST_MEGABYTES}, got {options.memory}")
    train_path = Path(options.train)
    name = options.name or without_controls(train_path.resolve().parent.name)
    folder = Path(options.out) if options.out else Path("datasets") / name
    with download_bar(console) as advance:
        dataset = stream_extreme(
            train_path,
            folder,
            name=name,
            test_path=None if options.test is None else Path(options.test),
            label_names_path=None if options.label_names is None else Path(options.label_names),
            validation_fraction=options.validation_fraction,
            validation_block=options.validation_block,
            seed=options.seed,
            memory_bytes=options.memory * 2**20,
            progress_fn=advance,
        )
    show_fn(dataset)
    console.print(f"written to {folder}; train on it with: evenhand train --data {folder}")
    return 0


def data_check(options: argparse.Namespace, console: Console) -> int:
    """Every file of a streamed data set against its checksum."""
    folder = Path(options.folder)
    with download_bar(console) as advance:
        num_files = check_manifest(folder, progress_fn=advance)
    console.print(f"{folder}: all {num_files} files are as they were written")
    return 0
