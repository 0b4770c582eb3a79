"""The files of a public data set in a folder: found under their published names, and opened.

    dataset = load_public_extreme("EURLex-4K", Path("downloads"))

They are looked for in the folder itself, in `<folder>/<name>`, and in the folders that their
archives hold; plain, compressed (.gz, .bz2, .xz) or in the .zip they come in. Nothing is fetched,
and nothing is unpacked: a member of an archive is read where it is.
"""

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from evenhand.data.catalog import ExtremeNames, PublicData, public_data
from evenhand.data.dataset import Dataset
from evenhand.data.download import ProgressFn, check_file
from evenhand.data.extreme import ProgressFn as RowsFn
from evenhand.data.extreme import load_extreme, load_extreme_split, read_header
from evenhand.data.files import OPENERS
from evenhand.errors import UserError

GENERAL_NAMES = ("train.txt", "test.txt")  # of newer archives; they tell nothing by themselves


class ExtremeFiles(NamedTuple):
    """Paths to open; one that goes through a .zip names a member of it."""

    train: Path
    test: Path
    whole: Path | None = None  # then the other two are lists of its rows


def load_public_extreme(
    name: str,
    folder: Path,
    *,
    validation_fraction: float = 0.1,
    validation_block: int = 1,
    progress_fn: RowsFn | None = None,
) -> Dataset:
    """A set of the Extreme Classification Repository, under its published train and test part."""
    data = public_data(name)
    files = extreme_files(data, folder)
    load_fn: Callable[..., Dataset] = load_extreme
    if files.whole is not None:
        load_fn = functools.partial(load_extreme_split, files.whole)
    dataset = load_fn(
        files.train,
        files.test,
        name=data.name,
        validation_fraction=validation_fraction,
        validation_block=validation_block,
        progress_fn=progress_fn,
    )
    return dataclasses.replace(dataset, attribution=f"{data.title}: {data.citation}")


def present_files(data: PublicData, folder: Path) -> list[Path]:
    """The files on the disk that make the data set, or a `UserError` that says what is missing."""
    files = [path for path in extreme_files(data, folder) if path is not None]
    on_disk = [next(place for place in (path, *path.parents) if place.exists()) for path in files]
    return list(dict.fromkeys(on_disk))  # an archive once


def verified(data: PublicData, folder: Path, *, progress_fn: ProgressFn | None = None) -> list[str]:
    """Sentences on what was found right; what is wrong is a `UserError`."""
    told = []
    for path in present_files(data, folder):
        held_to = check_file(path, None, progress_fn=progress_fn)
        if path.suffix == ".zip":
            _check_archive(path)
            held_to += ", every member is whole"
        told.append(f"{path}: {held_to}")
    return [*told, _counted(data, extreme_files(data, folder))]


def _counted(data: PublicData, files: ExtremeFiles) -> str:
    """What the headers say, beside what is published."""
    published = data.counts
    if files.whole is not None:
        header = read_header(files.whole)
        found = [header.num_rows, header.num_features, header.num_labels]
        expected = [published.num_train + published.num_test, *published[2:]]
    else:
        train, test = read_header(files.train), read_header(files.test)
        found = [train.num_rows, test.num_rows, train.num_features, train.num_labels]
        expected = list(published)
    numbers = ", ".join(f"{number:,}" for number in found)
    if found == expected:
        return f"{data.title}: documents, features and labels as published ({numbers})"
    others = ", ".join(f"{number:,}" for number in expected)
    return (
        f"{data.title}: the files say {numbers} documents, features and labels, published are "
        f"{others}: this is another version"
    )


# --- finding --------------------------------------------------------------------------------------


def extreme_files(data: PublicData, folder: Path) -> ExtremeFiles:
    """Where train, test and, for the small sets, the file of all documents are."""
    for place in _places(data, folder):
        if (files := _in_place(place, data.extreme)) is not None:
            return files
    for place in _own_places(data, folder):  # whose name says what is in them
        if (files := _in_place(place, GENERAL)) is not None:
            return files
    for archive in _archives(data, folder):
        for names in (data.extreme, GENERAL):
            if (files := _in_archive(archive, names)) is not None:
                return files
    wanted = [name for name in data.extreme[1:] if name is not None]
    how = (
        f"`evenhand data fetch {data.name}`, or copy them"
        if data.files[0].urls
        else f"get the archive from {data.page} and save it as {folder / data.files[0].name}"
    )
    raise UserError(
        f"{folder} has no {' and '.join(wanted)} (plain, .gz, .bz2, .xz or in "
        f"{data.files[0].name}): {how}"
    )


GENERAL = ExtremeNames((), *GENERAL_NAMES)


def _own_places(data: PublicData, folder: Path) -> Iterator[Path]:
    for base in (folder / data.name, folder / data.title, folder):
        if base != folder:
            yield base
        yield from (base / name for name in data.extreme.folders)
    if folder.name.lower() in (data.name, *(name.lower() for name in data.extreme.folders)):
        yield folder


def _places(data: PublicData, folder: Path) -> Iterator[Path]:
    yield from _own_places(data, folder)
    yield folder


def _in_place(place: Path, names: ExtremeNames) -> ExtremeFiles | None:
    found = {
        name: next((path for path in _spellings(place, name) if path.is_file()), None)
        for name in names[1:]
        if name is not None
    }
    return _files({name: path for name, path in found.items() if path is not None}, names)


def _spellings(place: Path, name: str) -> list[Path]:
    return [place / f"{name}{ending}" for ending in ("", *OPENERS)]


def _files(found: dict[str, Path], names: ExtremeNames) -> ExtremeFiles | None:
    if any(name is not None and name not in found for name in names[1:]):
        return None
    whole = None if names.whole is None else found[names.whole]
    return ExtremeFiles(found[names.train], found[names.test], whole)


def _archives(data: PublicData, folder: Path) -> Iterator[Path]:
    stems = (data.name, data.title, f"{data.title}.bow", *data.extreme.folders)
    for base in (folder / data.name, folder / data.title, folder):
        for stem in dict.fromkeys(stems):
            if (path := base / f"{stem}.zip").is_file():
                yield path


def _in_archive(archive: Path, names: ExtremeNames) -> ExtremeFiles | None:
    """The members of these names, in whatever folder of the archive they are."""
    found: dict[str, Path] = {}
    for member in _members(archive):
        *folders, name = member.split("/")
        is_odd = not all(folders) or "__MACOSX" in folders  # absolute, or a Mac's remarks
        if name in names[1:] and not is_odd:
            if name in found:
                raise UserError(
                    f"{archive} holds more than one {name}; unpack it and give the files to "
                    f"evenhand data extreme --train ... --test ..."
                )
            found[name] = archive / member
    return _files(found, names)


def _members(archive: Path) -> list[str]:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.namelist()
    except Exception as error:  # Python's reader of a damaged archive raises a dozen kinds
        raise UserError(
            f"{archive} is not a whole .zip archive ({error}); fetch or copy it again"
        ) from error


def _check_archive(archive: Path) -> None:
    """Reads every member to its end, which also compares its checksum."""
    try:
        with zipfile.ZipFile(archive) as opened:
            damaged = opened.testzip()
    except Exception as error:  # encrypted, not implemented, damaged: a dozen kinds
        raise UserError(f"{archive} cannot be read ({error}); fetch or copy it again") from error
    if damaged is not None:
        raise UserError(f"{archive}: the member {damaged} is damaged; fetch or copy it again")
