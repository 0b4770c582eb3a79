"""`evenhand doctor`; the checks are in `evenhand.doctor`."""

from pathlib import Path
from typing import Annotated

from evenhand.cli.options import argument, flag


def doctor(
    folder: Annotated[Path, argument("Folder of the runs.", "[FOLDER]")] = Path("runs"),
    json: Annotated[bool, flag("Print JSON.", "--json")] = False,
) -> int:
    """What is installed, usable and slow on this machine.

    Exit code 1 if anything is broken; what is slow or missing still works.
    """
    from evenhand.cli.console import console
    from evenhand.doctor import print_findings

    return 0 if print_findings(folder, console=console, as_json=json) else 1
