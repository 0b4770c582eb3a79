"""What `evenhand data list`, `fetch` and `verify` do: public data sets in a folder.

Each data set has a folder of its own in it, called by its name. Only `fetch` uses the network.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.data.download import fetch, part_path
from evenhand.data.public_data import (
    CITATION,
    LICENCE,
    PUBLIC_DATA,
    REPOSITORY,
    PublicData,
    find_public_data,
    stored_files,
    verify_files,
)
from evenhand.errors import UserError
from evenhand.progress import download_bar


def list_public(folder: Path, console: Console) -> None:
    """The catalogue, and what of it is in the folder."""
    table = Table("name", "what it is", "to fetch", f"in {folder}")
    for data in PUBLIC_DATA.values():
        how = "yes" if data.archive.urls else "by hand"
        table.add_row(data.title, str(data.counts), how, Text(_describe_presence(data, folder)))
    console.print(table)
    console.print(
        "fetch one with: evenhand data fetch NAME; by hand means: from the page of its publisher, "
        "which that command names"
    )


def fetch_public(names: list[str], folder: Path, console: Console) -> None:
    """Fetches what is not there yet, and says how the data set is opened and cited."""
    for data in [find_public_data(name) for name in names]:
        own_folder = folder / data.name
        if not data.archive.urls:
            raise UserError(
                f"{data.title} cannot be fetched by a program: get its archive from {REPOSITORY} "
                f"and save it as {own_folder / data.archive.name}"
            )
        try:
            with download_bar(console) as advance:
                fetch(data.archive, own_folder, progress_fn=advance)
        except UserError as error:
            raise UserError(
                f"{error}; by hand: {REPOSITORY}, saved in {own_folder} as {data.archive.name}"
            ) from error
        console.print("\n".join(verify_files(data, folder)))
        console.print(f"{LICENCE} Cite: {CITATION}")
        console.print(f"open it with: evenhand data extreme {data.name} --folder {folder}")


def verify_public(name: str | None, folder: Path, console: Console) -> None:
    """Checks every file of one data set, or of all that are in the folder."""
    chosen = [find_public_data(name)] if name is not None else list(PUBLIC_DATA.values())
    if name is None:
        chosen = [data for data in chosen if _stored_files(data, folder)]
        if not chosen:
            raise UserError(f"{folder} holds no public data set; see: evenhand data list")
    wrong = []
    for data in chosen:
        try:
            with download_bar(console) as advance:
                sentences = verify_files(data, folder, progress_fn=advance)
            console.print("\n".join(sentences))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("; ".join(wrong))


def _stored_files(data: PublicData, folder: Path) -> list[Path]:
    try:
        return stored_files(data, folder)
    except UserError:
        return []


def _describe_presence(data: PublicData, folder: Path) -> str:
    """Where it is; or that a part of it is."""
    if files := _stored_files(data, folder):
        return ", ".join(sorted({str(path.parent) for path in files}))
    archive = folder / data.name / data.archive.name
    return "not complete" if archive.exists() or part_path(archive).exists() else "-"
