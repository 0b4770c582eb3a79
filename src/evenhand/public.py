"""What `evenhand data list`, `fetch` and `verify` do: public data sets in a folder.

Each data set has a folder of its own in it, called by its name. Only `fetch` uses the network.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.data.catalog import PUBLIC_DATA, PublicData, public_data
from evenhand.data.download import fetch, part_path
from evenhand.data.folders import present_files, verified
from evenhand.errors import UserError
from evenhand.progress import download_bar


def list_public(folder: Path, console: Console) -> None:
    """The catalogue, and what of it is in the folder."""
    table = Table("name", "what it is", "to fetch", f"in {folder}")
    for data in PUBLIC_DATA.values():
        told = "yes" if data.files[0].urls else "by hand"
        table.add_row(data.title, data.about, told, Text(_presence(data, folder)))
    console.print(table)
    console.print(
        "fetch one with: evenhand data fetch NAME; by hand means: from the page of its publisher, "
        "which that command names"
    )


def fetch_public(names: list[str], folder: Path, console: Console) -> None:
    """Fetches what is not there yet, and says how the data set is opened and cited."""
    for data in [public_data(name) for name in names]:
        if not data.files[0].urls:
            raise UserError(
                f"{data.title} cannot be fetched by a program: get its archive from {data.page} "
                f"and save it as {folder / data.name / data.files[0].name}"
            )
        try:
            with download_bar(console) as advance:
                for file in data.files:
                    fetch(file, folder / data.name, progress_fn=advance)
        except UserError as error:
            raise UserError(
                f"{error}; by hand: {data.page}, saved in {folder / data.name} as "
                f"{', '.join(file.name for file in data.files)}"
            ) from error
        told = verified(data, folder)
        console.print("\n".join(told))
        console.print(f"{data.licence} Cite: {data.citation}")
        console.print(f"open it with: evenhand data extreme {data.name} --folder {folder}")


def verify_public(name: str | None, folder: Path, console: Console) -> None:
    """Checks every file of one data set, or of all that are in the folder."""
    chosen = list(PUBLIC_DATA.values()) if name is None else [public_data(name)]
    if name is None:
        chosen = [data for data in chosen if _is_present(data, folder)]
        if not chosen:
            raise UserError(f"{folder} holds no public data set; see: evenhand data list")
    wrong = []
    for data in chosen:
        try:
            with download_bar(console) as advance:
                told = verified(data, folder, progress_fn=advance)
            console.print("\n".join(told))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(wrong))


def _is_present(data: PublicData, folder: Path) -> bool:
    try:
        return bool(present_files(data, folder))
    except UserError:
        return False


def _presence(data: PublicData, folder: Path) -> str:
    """Where it is; or that a part of it is."""
    if _is_present(data, folder):
        return ", ".join(sorted({str(path.parent) for path in present_files(data, folder)}))
    own = folder / data.name
    some = [own / file.name for file in data.files]
    if any(path.exists() or part_path(path).exists() for path in some):
        return "not complete"
    return "-"
