"""The attributes that slices are built from: columns over the pairs, and conditions on them.

The groups of the data set come first. Added to them are features of any query (how rare its
features are in training), of a query's text (its length, words, script, digits, signs) and of any
label (how many training pairs it has). Bounds of numbers are fixed beforehand, not taken
from the part at hand, so that a condition means the same on every part.

How many labels a query has is left out on purpose: the test of `slices` compares queries with as
many labels, and so can say nothing about that number.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, identity

from evenhand.data import Dataset, Groups, IntArray, Part, Rows, Strings, pairs_of
from evenhand.data.csr import count_ids
from evenhand.evaluation.groups import BUILT_IN, group_columns

DOUBLINGS = (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023)  # 0 | 1 | 2 to 3 | 4 to 7 | ...
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
WORDS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.0, 5.0, 10.0, 25.0, 50.0)  # per cent

TEXTS_ARE_IDS = {"kind": "id"}  # a `Dataset.featurizer`: of an id the length tells nothing

NumberArray = NDArray[np.integer[Any] | np.floating[Any]]


class Attribute(NamedTuple):
    """One column that divides the pairs, and the conditions a slice may set on it."""

    name: str
    codes: IntArray  # (N,) of the pairs, -1: unknown
    conditions: tuple[str, ...]  # in words
    members: Any  # sparse (conditions, codes): 1 where a code fulfils a condition


def nominal(name: str, codes: IntArray, conditions: Sequence[str]) -> Attribute:
    """A condition for each code: the groups of a column."""
    return Attribute(name, codes, tuple(conditions), identity(len(conditions), format="csr"))


def of_groups(name: str, groups: Groups) -> Attribute:
    """A condition for each group; a code is a set of groups, and fulfils those of all of them."""
    conditions = [f"{name} = {group.strip()}" for group in groups.names]
    attribute = nominal(name, groups.ids, conditions)
    if groups.sets is None:
        return attribute
    members = groups.sets.to_scipy(len(conditions))  # (sets, conditions)
    return attribute._replace(members=members.T.tocsr())  # (conditions, sets)


def ordinal(name: str, values: NumberArray, bounds: Sequence[float], unit: str = "") -> Attribute:
    """Conditions on either side of every bound: `values` (N,), NaN: unknown.

    Whole bounds are of whole numbers: what is above 8 is '9 or more'.

    Example:
        >>> ordinal("length", np.array([2, 9]), (4, 8)).conditions
        ('length at most 4', 'length at most 8', 'length 5 or more', 'length 9 or more')
    """
    codes = np.searchsorted(bounds, values)  # (N,) how many bounds are below the value
    codes = np.where(np.isnan(values), -1, codes)
    at_most = np.arange(len(bounds))[:, None] >= np.arange(len(bounds) + 1)  # (bounds, codes)
    below = [f"{name} at most {bound:g}{unit}" for bound in bounds]
    above = [
        f"{name} {bound + 1} or more" if isinstance(bound, int) else f"{name} over {bound:g}{unit}"
        for bound in bounds
    ]
    members = csr_matrix(np.vstack([at_most, ~at_most]).astype(np.float64))
    return Attribute(name, codes, (*below, *above), members)


def attributes_of(dataset: Dataset, part_name: str) -> list[Attribute]:
    """Every column of the data set's groups, and the features of queries and labels.

    A feature whose name is that of a column of the data set gives way to it.
    """
    part = dataset.parts[part_name]
    pairs = pairs_of(part.positives)
    own = [
        of_groups(c.name, c.groups)
        for c in group_columns(dataset, part_name)
        if c.name not in BUILT_IN  # finer below
    ]
    features = [
        attribute._replace(codes=attribute.codes[pairs.query_ids])
        for attribute in _query_features(dataset, part)
    ]
    if (label_counts := dataset.label_counts()).any():  # else none was trained
        own_counts = label_counts[pairs.label_ids]  # (N,)
        features.insert(0, ordinal("training pairs of the label", own_counts, DOUBLINGS))
    taken = {attribute.name for attribute in own}
    return [*own, *(attribute for attribute in features if attribute.name not in taken)]


def _query_features(dataset: Dataset, part: Part) -> Iterable[Attribute]:
    """Attributes of the queries of a part, with a code for each query (Q,)."""
    train, features = dataset.parts["train"].features, part.features
    if isinstance(features, Rows) and isinstance(train, Rows):
        # How often a query's rarest feature occurs in training, and how many do not at all.
        counts = count_ids(train.ids, dataset.num_features)[features.ids]  # (nnz,)
        has_any = features.lengths() > 0  # (Q,)
        starts = features.offsets[:-1][has_any]  # the rows without a feature have none between
        rarest, shares = np.full((2, len(features)), np.nan)
        if len(starts):
            rarest[has_any] = np.minimum.reduceat(counts, starts)
            unseen = np.add.reduceat((counts == 0).astype(np.float64), starts)
            shares[has_any] = 100 * unseen / features.lengths()[has_any]
        yield ordinal("rarest feature in training", rarest, DOUBLINGS)
        yield ordinal("features unseen in training", shares, SHARES, " %")
    elif not isinstance(features, Rows) and not isinstance(train, Rows):
        # Dense features have no names: their norm, by the quartiles of the training part.
        norms, train_norms = (  # by doubles: squares of float32 may overflow
            np.sqrt(np.einsum("nf,nf->n", rows, rows, dtype=np.float64))
            for rows in (features, train)
        )
        quartiles = np.quantile(train_norms, (0.25, 0.5, 0.75)) if len(train) else np.zeros(0)
        bounds = [float(f"{quartile:.4g}") for quartile in np.unique(quartiles)]
        yield ordinal("norm of the query", norms, bounds)
    if part.texts is not None and len(part.texts) and dataset.featurizer != TEXTS_ARE_IDS:
        yield from text_attributes(part.texts)


# --- texts ----------------------------------------------------------------------------------------


def text_attributes(texts: Strings) -> list[Attribute]:
    """Length, words, script, digits and signs of Q texts, character by character in numpy."""
    utf8 = np.asarray(texts.utf8)[texts.offsets[0] : texts.offsets[-1]]
    points = np.frombuffer(utf8.tobytes().decode("utf-8").encode("utf-32-le"), dtype="<u4")  # (C,)
    # A character begins where a byte does not continue another.
    num_begun = np.concatenate([[0], np.cumsum((utf8 & 0xC0) != 0x80)])
    lengths = np.diff(num_begun[np.asarray(texts.offsets) - texts.offsets[0]])  # (Q,)
    text_ids = np.repeat(np.arange(len(texts)), lengths)  # (C,)
    known, kinds = np.unique(points, return_inverse=True)
    first_letters = [unicodedata.category(chr(point))[0] for point in known]
    categories = np.array(first_letters, dtype="<U1")[kinds]  # (C,)
    starts = np.diff(text_ids, prepend=-1) > 0  # (C,) the first character of a text
    is_space = categories == "Z"
    begins_word = ~is_space & (starts | np.roll(is_space, 1))

    def per_text(is_counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(text_ids[is_counted], minlength=len(texts))

    # The script of the first letter, and whether letters are of several.
    names = [unicodedata.name(chr(point), "?").split(" ")[0] for point in known]
    script_names, places = np.unique(np.array(names, dtype=str), return_inverse=True)
    is_letter = categories == "L"
    scripts, owners = places[kinds[is_letter]], text_ids[is_letter]
    num_scripts = max(1, len(script_names))
    used = np.unique(owners * num_scripts + scripts)  # every (text, script) once
    is_mixed = np.bincount(used // num_scripts, minlength=len(texts)) > 1
    first = np.full(len(texts), -1)
    first[owners[::-1]] = scripts[::-1]  # the last to be written is the first letter
    two_scripts = ["letters of one script", "letters of several scripts"]
    return [
        ordinal("length", lengths, LENGTHS),
        ordinal("words", per_text(begins_word), WORDS),
        _yes_no("digit", per_text(categories == "N") > 0),
        _yes_no("sign such as - or '", per_text(np.isin(categories, ["P", "S", "C"])) > 0),
        nominal("script", first, [f"script = {name}" for name in script_names]),
        nominal("scripts", is_mixed.astype(np.int64), two_scripts),
    ]


def _yes_no(what: str, is_so: NDArray[np.bool_]) -> Attribute:
    return nominal(what, is_so.astype(np.int64), [f"has no {what}", f"has a {what}"])
