"""Public data sets by name: what they are, their files, where they come from, how to cite them.

Addresses are those of the publishers and of well-known mirrors. Where no address gives the file
to a program, there is the page where a person gets it, and the name to give it.
"""

import dataclasses
import difflib
from typing import NamedTuple

from evenhand.data.download import Checksum, RemoteFile
from evenhand.data.images import CIFAR_BATCHES
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
    aliases: tuple[str, ...] = ()
    extreme: ExtremeNames | None = None  # None: images
    counts: ExtremeCounts | None = None

    def num_bytes(self) -> int | None:
        sizes = [file.num_bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


def public_data(name: str) -> PublicData:
    """The data set of this name, in capitals or not."""
    wanted = name.strip().lower()
    for data in PUBLIC_DATA.values():
        if wanted in (data.name, *data.aliases):
            return data
    close = difflib.get_close_matches(wanted, PUBLIC_DATA, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(PUBLIC_DATA)}"
    raise UserError(f"there is no public data set {name!r}; {hint}")


def known_checksum(name: str) -> Checksum | None:
    """What a file of this name must come to, where that is published."""
    digest = KNOWN_MD5.get(name) or KNOWN_MD5.get(name.replace(".idx", "-idx"))
    return Checksum("md5", digest) if digest else None


# --- checksums ------------------------------------------------------------------------------------

MNIST_GZ = {
    "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
CIFAR_BINARY_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25", "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421", "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d", "803d5f7f4d78ea53de84dbe85f74fb6d",
)  # fmt: skip
CIFAR_PYTHON_MD5 = (
    "c99cafc152244af753f735de768cd75f", "d4bba439e000b95fd0a9bffe97cbabec",
    "54ebc095f3ab1f0389bbae665268c751", "634d18415352ddfa80567beed471001a",
    "482c414d41f54cd18b22e5b47cb7c3cb", "40351d587109b95175f43aff81a1287e",
)  # fmt: skip
KNOWN_MD5 = {
    **{name: digest for name, (digest, _) in MNIST_GZ.items()},
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    **{f"{name}.bin": md5 for name, md5 in zip(CIFAR_BATCHES, CIFAR_BINARY_MD5, strict=True)},
    **dict(zip(CIFAR_BATCHES, CIFAR_PYTHON_MD5, strict=True)),
}

# --- images ---------------------------------------------------------------------------------------

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
MNIST = PublicData(
    name="mnist",
    title="MNIST",
    about="60,000 / 10,000 handwritten digits, 28 x 28 grey points, 10 classes",
    files=tuple(
        RemoteFile(name, tuple(mirror + name for mirror in MNIST_MIRRORS), known_checksum(name), n)
        for name, (_, n) in MNIST_GZ.items()
    ),
    page="http://yann.lecun.com/exdb/mnist/",
    licence="Copyright of Yann LeCun and Corinna Cortes, CC BY-SA 3.0.",
    citation="LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document "
    "recognition, Proceedings of the IEEE 86(11), 1998.",
)
CIFAR10 = PublicData(
    name="cifar10",
    title="CIFAR-10",
    about="50,000 / 10,000 photographs, 32 x 32 coloured points, 10 classes",
    files=(
        RemoteFile(
            "cifar-10-binary.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            known_checksum("cifar-10-binary.tar.gz"),
            170_052_171,
        ),
    ),
    page="https://www.cs.toronto.edu/~kriz/cifar.html",
    licence="No licence is stated.",
    citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009.",
    aliases=("cifar-10",),
)

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

PUBLIC_DATA = {data.name: data for data in (MNIST, CIFAR10, *EXTREME_DATA)}
