"""Public data sets by name: what they are, their files, where they come from, how to cite them.

Addresses are those of the publishers and of well-known mirrors. Where no address gives the file
to a program, there is the page where a person gets it, and the name to give it.
"""

import dataclasses
import difflib
from typing import NamedTuple

from evenhand.data.download import RemoteFile
from evenhand.errors import UserError


class ExtremeNames(NamedTuple):
    """How the files of a set of the Extreme Classification Repository are called."""

    folders: tuple[str, ...]  # in which the archive keeps them
    train: str
    test: str
    whole: str | None = None  # then `train` and `test` say which of its documents they are


class ExtremeCounts(NamedTuple):
    """As published."""

    num_train: int
    num_test: int
    num_features: int
    num_labels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicData:
    name: str
    title: str
    about: str
    files: tuple[RemoteFile, ...]  # what `fetch` brings
    page: str  # where a person finds it
    licence: str
    citation: str
    extreme: ExtremeNames
    counts: ExtremeCounts
    aliases: tuple[str, ...] = ()


def public_data(name: str) -> PublicData:
    """The data set of this name, in capitals or not."""
    wanted = name.strip().lower()
    for data in PUBLIC_DATA.values():
        if wanted in (data.name, *data.aliases):
            return data
    close = difflib.get_close_matches(wanted, PUBLIC_DATA, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(PUBLIC_DATA)}"
    raise UserError(f"there is no public data set {name!r}; {hint}")


# --- the Extreme Classification Repository --------------------------------------------------------

REPOSITORY = "http://manikvarma.org/downloads/XC/XMLRepository.html"
REPOSITORY_CITATION = (
    "Bhatia, Dahiya, Jain, Kar, Mittal, Prabhu, Varma: The extreme classification repository: "
    "multi-label datasets and code, 2016; and the original source that its page names."
)
DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="


def _extreme(
    title: str,
    counts: ExtremeCounts,
    names: ExtremeNames,
    *,
    drive_id: str | None = None,
    aliases: tuple[str, ...] = (),
) -> PublicData:
    """A set of the repository; the author of napkinXC keeps copies of the archives on a drive.

    No checksum is published for any of them.
    """
    name = title.lower()
    urls = () if drive_id is None else (DRIVE + drive_id,)
    return PublicData(
        name=name,
        title=title,
        about=f"{counts.num_train:,} / {counts.num_test:,} documents, {counts.num_features:,} "
        f"features, {counts.num_labels:,} labels",
        files=(RemoteFile(f"{name}.zip", urls),),
        page=REPOSITORY,
        licence="No licence is stated.",
        citation=REPOSITORY_CITATION,
        aliases=aliases,
        extreme=names,
        counts=counts,
    )


def _in_two(folder: str, *, prefix: str, folders: tuple[str, ...] = ()) -> ExtremeNames:
    return ExtremeNames((folder, *folders), f"{prefix}_train.txt", f"{prefix}_test.txt")


def _in_one(folder: str) -> ExtremeNames:
    """One file of all documents, and two that say in their first column which are of which part."""
    prefix = folder.lower()
    return ExtremeNames(
        (folder,), f"{prefix}_trSplit.txt", f"{prefix}_tstSplit.txt", f"{folder}_data.txt"
    )


EXTREME_DATA = (
    _extreme(
        "AmazonCat-13K",
        ExtremeCounts(1_186_239, 306_782, 203_882, 13_330),
        _in_two("AmazonCat", prefix="amazonCat", folders=("AmazonCat-13K.bow",)),
        drive_id="1WvBWF9hH5ZlFcpCRhp8wLVGwdeGZXKD2",
        aliases=("amazoncat", "amazoncat13k"),
    ),
    _extreme(
        "EURLex-4K",
        ExtremeCounts(15_539, 3_809, 5_000, 3_993),
        _in_two("Eurlex", prefix="eurlex"),
        drive_id="1xWW1UykQBTD2IorVn7V8XubJatQDScol",
        aliases=("eurlex", "eurlex4k"),
    ),
    _extreme(
        "Wiki10-31K",
        ExtremeCounts(14_146, 6_616, 101_938, 30_938),
        _in_two("Wiki10", prefix="wiki10", folders=("Wiki10.bow",)),
        drive_id="1uV-p682ggXQQTiKZyK5M6B0xJJk8_lJx",
        aliases=("wiki10", "wiki1031k"),
    ),
    _extreme("Delicious", ExtremeCounts(12_920, 3_185, 500, 983), _in_one("Delicious")),
    _extreme("Bibtex", ExtremeCounts(4_880, 2_515, 1_836, 159), _in_one("Bibtex")),
    _extreme(
        "Amazon-670K",
        ExtremeCounts(490_449, 153_025, 135_909, 670_091),
        _in_two("Amazon", prefix="amazon", folders=("Amazon-670K.bow", "Amazon670K.bow")),
        drive_id="1PV-wbKVv6Ng1K1XM1USqNxFhaQo2qfk6",
        aliases=("amazon670k",),
    ),
    _extreme(
        "WikiLSHTC-325K",
        ExtremeCounts(1_778_351, 587_084, 1_617_899, 325_056),
        _in_two("WikiLSHTC", prefix="wikiLSHTC"),
        drive_id="1Y5xEJu-j3M7voyFV5Ouq9Wl3vyd9fus2",
        aliases=("wikilshtc", "wikilshtc325k"),
    ),
)

PUBLIC_DATA = {data.name: data for data in EXTREME_DATA}
