"""Data sets of the Extreme Classification Repository by name: what they are, found and opened.

    dataset = load_public_extreme("EURLex-4K", Path("downloads"))

Their files are looked for under their published names in the folder itself, in `<folder>/<name>`
and in the folders that their archives hold; plain, compressed (.gz, .bz2, .xz) or in the .zip they
come in. Nothing is fetched, and nothing is unpacked: a member of an archive is read where it is.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from evenhand.data.dataset import Dataset
from evenhand.data.download import RemoteFile
from evenhand.data.extreme import load_extreme, read_header
from evenhand.data.text_io import OPENERS, open_archive
from evenhand.errors import UserError
from evenhand.files import ProgressFn

REPOSITORY = "http://manikvarma.org/downloads/XC/XMLRepository.html"
CITATION = (
    "Bhatia, Dahiya, Jain, Kar, Mittal, Prabhu, Varma: The extreme classification repository: "
    "multi-label datasets and code, 2016; and the original source that its page names."
)
LICENCE = "No licence is stated."
# Where the author of napkinXC keeps copies of the archives; no checksum is published for any.
DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
GENERAL_NAMES = ("train.txt", "test.txt")  # of newer archives; they tell nothing by themselves


class PublicData(NamedTuple):
    """A data set of the repository, and how its files are called."""

    title: str
    counts: tuple[int, int, int, int]  # published: training and test documents, features, labels
    folders: tuple[str, ...]  # the archive's name, and that of the folder in it
    files: tuple[str, str]  # train and test
    drive_id: str

    @property
    def name(self) -> str:
        return self.title.lower()

    @property
    def archive(self) -> RemoteFile:
        """What `evenhand data fetch` brings."""
        return RemoteFile(f"{self.name}.zip", DRIVE + self.drive_id)


PUBLIC_DATA = {
    data.name: data
    for data in (
        PublicData(
            "AmazonCat-13K", (1_186_239, 306_782, 203_882, 13_330),
            ("AmazonCat", "AmazonCat-13K.bow"), ("amazonCat_train.txt", "amazonCat_test.txt"),
            "1WvBWF9hH5ZlFcpCRhp8wLVGwdeGZXKD2"),
        PublicData(
            "EURLex-4K", (15_539, 3_809, 5_000, 3_993),
            ("Eurlex", "EURLex-4K.bow"), ("eurlex_train.txt", "eurlex_test.txt"),
            "1xWW1UykQBTD2IorVn7V8XubJatQDScol"),
        PublicData(
            "Wiki10-31K", (14_146, 6_616, 101_938, 30_938),
            ("Wiki10", "Wiki10.bow", "Wiki10-31K.bow"), ("wiki10_train.txt", "wiki10_test.txt"),
            "1uV-p682ggXQQTiKZyK5M6B0xJJk8_lJx"),
        PublicData(
            "Amazon-670K", (490_449, 153_025, 135_909, 670_091),
            ("Amazon", "Amazon-670K.bow", "Amazon670K.bow"),
            ("amazon_train.txt", "amazon_test.txt"), "1PV-wbKVv6Ng1K1XM1USqNxFhaQo2qfk6"),
        PublicData(
            "WikiLSHTC-325K", (1_778_351, 587_084, 1_617_899, 325_056),
            ("WikiLSHTC", "WikiLSHTC-325K.bow"), ("wikiLSHTC_train.txt", "wikiLSHTC_test.txt"),
            "1Y5xEJu-j3M7voyFV5Ouq9Wl3vyd9fus2"),
    )
}  # fmt: skip


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
    progress_fn: ProgressFn | None = None,
) -> Dataset:
    """A set of the repository, found in a folder, under its published train and test part."""
    data = find_public_data(name)
    dataset = load_extreme(
        *find_files(data, folder),
        name=data.name,
        validation_fraction=validation_fraction,
        validation_block=validation_block,
        progress_fn=progress_fn,
    )
    return dataclasses.replace(dataset, attribution=f"{data.title}: {CITATION}")


def verify_files(data: PublicData, folder: Path) -> list[str]:
    """Sentences on what was found right; what is wrong is a `UserError`."""
    sentences = []
    for path in stored_files(data, folder):
        if path.suffix == ".zip":
            with open_archive(path) as archive:
                if damaged := archive.testzip():  # reads every member, and compares checksums
                    raise UserError(f"{path}: the member {damaged} is damaged; fetch it again")
            sentences.append(f"{path}: every member is whole")
    train, test = map(read_header, find_files(data, folder))
    found = (train.num_rows, test.num_rows, train.num_features, train.num_labels)
    numbers, published = (", ".join(f"{n:,}" for n in counts) for counts in (found, data.counts))
    verdict = f"documents, features and labels as published ({numbers})"
    if found != data.counts:
        verdict = (
            f"the files say {numbers} documents, features and labels, published are {published}: "
            f"this is another version"
        )
    return [*sentences, f"{data.title}: {verdict}"]


def stored_files(data: PublicData, folder: Path) -> list[Path]:
    """The files on the disk, among them archives, that hold what `find_files` finds."""
    paths = [
        next(place for place in (path, *path.parents) if place.exists())
        for path in find_files(data, folder)
    ]
    return list(dict.fromkeys(paths))  # an archive once


def find_files(data: PublicData, folder: Path) -> list[Path]:
    """Where train and test are; a path that goes through a .zip names a member of it."""
    own_names = {data.name, *(name.lower() for name in data.folders)}

    def is_own(place: Path) -> bool:
        return place.name.lower().removesuffix(".zip") in own_names

    for base in filter(Path.is_dir, (folder / data.name, folder)):
        for place in (base, *filter(is_own, sorted(base.iterdir()))):
            for names in (data.files, GENERAL_NAMES) if is_own(place) else (data.files,):
                if paths := _find_in(place, names):
                    return paths
    raise UserError(
        f"{folder} has no {' and '.join(data.files)} (plain, .gz, .bz2, .xz or in "
        f"{data.archive.name}): `evenhand data fetch {data.name}`, or copy them"
    )


def _find_in(place: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names in a folder, or in any folder of an archive; [] if not all are."""
    found: dict[str, Path] = {}
    if place.is_dir():
        for name in names:
            spellings = [place / f"{name}{ending}" for ending in ("", *OPENERS)]
            found.update((name, path) for path in spellings[::-1] if path.is_file())
    elif place.suffix.lower() == ".zip" and place.is_file():
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
