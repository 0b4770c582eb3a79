"""`evenhand doctor`; the checks are in `evenhand.doctor`."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folder: Annotated[Path, typer.Argument(help="Of the runs.", metavar="[FOLDER]")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> int:
    """What is installed, usable and slow on this machine.

    Exit code 1 if anything is broken; what is slow or missing still works.
    """
    from evenhand.cli.console import console
    from evenhand.doctor import print_findings

    return 0 if print_findings(folder, console=console, as_json=json) else 1
