"""`evenhand labels`: labels that a trained run did not know."""

from pathlib import Path
from typing import Annotated

from evenhand.cli import options
from evenhand.cli.options import argument


def add(
    run: options.RunFolder,
    table: Annotated[Path, argument("Table of labels: id, and name or text.", "LABELS")],
    device: options.Device = None,
) -> None:
    """Make new labels searchable, by what the run's label tower reads of them."""
    from evenhand.added_labels import add_labels
    from evenhand.build import choose_device
    from evenhand.cli.console import console

    count = add_labels(run, table, device=choose_device(device))
    console.print(f"labels added to {run}: {count:,}; an index of it must be built again")
