"""Data sets of the Extreme Classification Repository by name: what they are, found and opened.

    dataset = load_public_extreme("EURLex-4K", Path("downloads"))

Their files are looked for under their published names in the folder itself, in `<folder>/<name>`
and in the folders that their archives hold; plain, compressed (.gz, .bz2, .xz) or in the .zip they
come in. Nothing is fetched, and nothing is unpacked: a member of an archive is read where it is.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evenhand.data.checksums import ProgressFn
from evenhand.data.dataset import Dataset
from evenhand.data.download import RemoteFile, check_file
from evenhand.data.extreme import ProgressFn as RowsFn
from evenhand.data.extreme import load_extreme, load_extreme_split, read_header
from evenhand.data.text_files import OPENERS, open_archive
from evenhand.errors import UserError

REPOSITORY = "http://manikvarma.org/downloads/XC/XMLRepository.html"
CITATION = (
    "Bhatia, Dahiya, Jain, Kar, Mittal, Prabhu, Varma: The extreme classification repository: "
    "multi-label datasets and code, 2016; and the original source that its page names."
)
LICENCE = "No licence is stated."
# Where the author of napkinXC keeps copies of the archives; no checksum is published for any.
DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
GENERAL_NAMES = ("train.txt", "test.txt")  # of newer archives; they tell nothing by themselves


class Counts(NamedTuple):
    """As published."""

    num_train: int
    num_test: int
    num_features: int
    num_labels: int

    def __str__(self) -> str:
        return (
            f"{self.num_train:,} / {self.num_test:,} documents, {self.num_features:,} features, "
            f"{self.num_labels:,} labels"
        )


class PublicData(NamedTuple):
    """A data set of the repository, and how its files are called."""

    title: str
    counts: Counts
    folders: tuple[str, ...]  # in which the archive keeps them
    train: str
    test: str
    whole: str | None = None  # then `train` and `test` say which of its documents they are
    drive_id: str | None = None  # None: a person must get it from the page of the repository

    @property
    def name(self) -> str:
        return self.title.lower()

    @property
    def archive(self) -> RemoteFile:
        """What `evenhand data fetch` brings."""
        urls = () if self.drive_id is None else (DRIVE + self.drive_id,)
        return RemoteFile(f"{self.name}.zip", urls)


def _in_two(title: str, counts: Counts, prefix: str, drive_id: str, *folders: str) -> PublicData:
    """A data set of two files of documents."""
    names = f"{prefix}_train.txt", f"{prefix}_test.txt"
    return PublicData(title, counts, folders, *names, drive_id=drive_id)


def _in_one(title: str, counts: Counts) -> PublicData:
    """A data set of one file of documents, and of two that say which are of which part."""
    names = f"{title.lower()}_trSplit.txt", f"{title.lower()}_tstSplit.txt"
    return PublicData(title, counts, (title,), *names, whole=f"{title}_data.txt")


_SETS = (
    _in_two("AmazonCat-13K", Counts(1_186_239, 306_782, 203_882, 13_330), "amazonCat",
            "1WvBWF9hH5ZlFcpCRhp8wLVGwdeGZXKD2", "AmazonCat", "AmazonCat-13K.bow"),
    _in_two("EURLex-4K", Counts(15_539, 3_809, 5_000, 3_993), "eurlex",
            "1xWW1UykQBTD2IorVn7V8XubJatQDScol", "Eurlex"),
    _in_two("Wiki10-31K", Counts(14_146, 6_616, 101_938, 30_938), "wiki10",
            "1uV-p682ggXQQTiKZyK5M6B0xJJk8_lJx", "Wiki10", "Wiki10.bow"),
    _in_one("Delicious", Counts(12_920, 3_185, 500, 983)),
    _in_one("Bibtex", Counts(4_880, 2_515, 1_836, 159)),
    _in_two("Amazon-670K", Counts(490_449, 153_025, 135_909, 670_091), "amazon",
            "1PV-wbKVv6Ng1K1XM1USqNxFhaQo2qfk6", "Amazon", "Amazon-670K.bow", "Amazon670K.bow"),
    _in_two("WikiLSHTC-325K", Counts(1_778_351, 587_084, 1_617_899, 325_056), "wikiLSHTC",
            "1Y5xEJu-j3M7voyFV5Ouq9Wl3vyd9fus2", "WikiLSHTC"),
)  # fmt: skip
PUBLIC_DATA = {data.name: data for data in _SETS}


def find_public_data(name: str) -> PublicData:
    """The data set of this name, in capitals or not, with or without hyphens and size."""
    wanted = name.strip().lower()
    for data in PUBLIC_DATA.values():
        if wanted in (data.name, data.name.replace("-", ""), data.name.split("-")[0]):
            return data
    close = difflib.get_close_matches(wanted, PUBLIC_DATA, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(PUBLIC_DATA)}"
    raise UserError(f"there is no public data set {name!r}; {hint}")


def load_public_extreme(
    name: str,
    folder: Path,
    *,
    validation_fraction: float = 0.1,
    validation_block: int = 1,
    progress_fn: RowsFn | None = None,
) -> Dataset:
    """A set of the repository, found in a folder, under its published train and test part."""
    data = find_public_data(name)
    files = find_files(data, folder)
    load_fn: Callable[..., Dataset] = load_extreme if data.whole is None else load_extreme_split
    dataset = load_fn(
        *files,
        name=data.name,
        validation_fraction=validation_fraction,
        validation_block=validation_block,
        progress_fn=progress_fn,
    )
    return dataclasses.replace(dataset, attribution=f"{data.title}: {CITATION}")


def verify_files(
    data: PublicData, folder: Path, *, progress_fn: ProgressFn | None = None
) -> list[str]:
    """Sentences on what was found right; what is wrong is a `UserError`."""
    sentences = []
    for path in stored_files(data, folder):
        held_to = check_file(path, None, progress_fn=progress_fn)
        if path.suffix == ".zip":
            check_archive(path)
            held_to += ", every member is whole"
        sentences.append(f"{path}: {held_to}")
    files = find_files(data, folder)
    headers = [read_header(path) for path in (files if data.whole is None else files[:1])]
    found = [*(header.num_rows for header in headers), *headers[0][1:]]
    expected = list(data.counts)
    if data.whole is not None:
        expected[:2] = [data.counts.num_train + data.counts.num_test]
    numbers, published = (", ".join(f"{n:,}" for n in counts) for counts in (found, expected))
    if found == expected:
        verdict = f"documents, features and labels as published ({numbers})"
    else:
        verdict = (
            f"the files say {numbers} documents, features and labels, published are {published}: "
            f"this is another version"
        )
    return [*sentences, f"{data.title}: {verdict}"]


def check_archive(path: Path) -> None:
    """Reads every member to its end, which also compares its checksum."""
    with open_archive(path) as archive:
        if damaged := archive.testzip():
            raise UserError(f"{path}: the member {damaged} is damaged; fetch or copy it again")


# --- finding --------------------------------------------------------------------------------------


def stored_files(data: PublicData, folder: Path) -> list[Path]:
    """The files on the disk, among them archives, that hold what `find_files` finds."""
    paths = [
        next(place for place in (path, *path.parents) if place.exists())
        for path in find_files(data, folder)
    ]
    return list(dict.fromkeys(paths))  # an archive once


def find_files(data: PublicData, folder: Path) -> list[Path]:
    """Where train and test are, after the file of all documents if there is one.

    A path that goes through a .zip names a member of it. A `UserError` says what is missing.
    """
    names = [name for name in (data.whole, data.train, data.test) if name is not None]
    places = list(_places(data, folder))
    for place, _ in places:
        if paths := _find_in(place, names):
            return paths
    for place, is_own in places:
        if is_own and data.whole is None and (paths := _find_in(place, GENERAL_NAMES)):
            return paths
    archive = data.archive
    remedy = (
        f"`evenhand data fetch {data.name}`, or copy them"
        if archive.urls
        else f"get the archive from {REPOSITORY} and save it as {folder / archive.name}"
    )
    raise UserError(
        f"{folder} has no {' and '.join(names)} (plain, .gz, .bz2, .xz or in {archive.name}): "
        f"{remedy}"
    )


def _places(data: PublicData, folder: Path) -> Iterator[tuple[Path, bool]]:
    """Folders and archives to look in, and whether their name says that they hold the data set."""
    own_names = {data.name, f"{data.name}.bow", *(name.lower() for name in data.folders)}
    for base in (folder / data.name, folder / data.title, folder):
        if base.is_dir():
            yield base, base.name.lower() in own_names
            for place in sorted(base.iterdir()):
                is_archive = place.suffix.lower() == ".zip" and place.is_file()
                own_name = (place.stem if is_archive else place.name).lower()
                if own_name in own_names and (is_archive or place.is_dir()):
                    yield place, True


def _find_in(place: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names in a folder, or in any folder of an archive; [] if not all are."""
    found: dict[str, Path] = {}
    if place.is_dir():
        for name in names:
            spellings = [place / f"{name}{ending}" for ending in ("", *OPENERS)]
            found.update((name, path) for path in spellings[::-1] if path.is_file())
    else:
        with open_archive(place) as archive:
            members = archive.namelist()
        for member in members:
            *folders, name = member.split("/")
            is_odd = not all(folders) or "__MACOSX" in folders  # absolute, or a Mac's remarks
            if name in names and not is_odd:
                if name in found:
                    raise UserError(
                        f"{place} holds more than one {name}; unpack it and give the files to "
                        f"evenhand data extreme --train ... --test ..."
                    )
                found[name] = place / member
    return [found[name] for name in names] if len(found) == len(names) else []
