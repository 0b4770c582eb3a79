"""Text to features: hashed character n-grams, many strings at once, in numpy alone."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.dataset import Rows
from evenhand.errors import UserError

BLOCK_TEXTS = 2**16  # texts hashed at once: bounds the memory, not the result


def normalized(text: str) -> str:
    """The form in which two spellings count as one: NFKC, case folded, white space joined."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def script_of(text: str) -> str:
    """The first word of the Unicode name of the first letter, such as LATIN; `?` without one."""
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "?").split(" ")[0]
    return "?"


class NgramFeaturizer:
    """Bags of hashed character n-grams.

    A string is first `normalized` and set between two marks, so that its beginning and its end
    are n-grams of their own. Hashes are fixed arithmetic on code points: they are the same on
    every machine and in every process.
    """

    def __init__(
        self, *, min_length: int = 1, max_length: int = 4, num_buckets: int = 2**18
    ) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(
                f"min_length must be between 1 and max_length ({max_length}), got {min_length}"
            )
        if not 1 <= num_buckets < 2**31:
            raise ValueError(f"num_buckets must be between 1 and 2**31 - 1, got {num_buckets}")
        self.min_length = min_length
        self.max_length = max_length
        self.num_buckets = num_buckets

    def settings(self) -> dict[str, int | str]:
        """What is needed to build this featurizer again."""
        return {
            "kind": "ngrams",
            "min_length": self.min_length,
            "max_length": self.max_length,
            "num_buckets": self.num_buckets,
        }

    def featurize(self, texts: Sequence[str]) -> Rows:
        """(N,) strings -> N rows of feature ids, every value 1."""
        counts, ids = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int32)]
        for start in range(0, len(texts), BLOCK_TEXTS):
            block_counts, block_ids = self._hashed(texts[start : start + BLOCK_TEXTS])
            counts.append(block_counts)
            ids.append(block_ids)
        return Rows(np.cumsum(np.concatenate(counts)), np.concatenate(ids))

    def _hashed(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """How many n-grams each text has, and the bucket of each, text by text."""
        marked = [f"\x02{normalized(text)}\x03" for text in texts]
        lengths = np.fromiter(map(len, marked), dtype=np.int64, count=len(marked))
        utf32 = "".join(marked).encode("utf-32-le", "surrogatepass")  # half a pair is no crime
        points = np.frombuffer(utf32, dtype="<u4").astype(np.uint64)  # (C,)
        text_ids = np.repeat(np.arange(len(marked)), lengths)  # (C,) which text a character is of
        rows, ids = [], []
        hashes = np.zeros(len(points), dtype=np.uint64)
        for length in range(1, self.max_length + 1):
            hashes = _extended(hashes, points, length)  # (C - length + 1,)
            if length < self.min_length:
                continue
            inside = text_ids[: len(hashes)] == text_ids[length - 1 :]  # not across two texts
            if length == 1:  # the marks alone say nothing
                inside &= points > 3
            rows.append(text_ids[: len(hashes)][inside])
            ids.append(_mixed(hashes[inside]) % np.uint64(self.num_buckets))
        all_rows, all_ids = np.concatenate(rows), np.concatenate(ids)
        order = np.argsort(all_rows, kind="stable")
        counts = np.bincount(all_rows, minlength=len(marked))
        return counts, all_ids[order].astype(np.int32)


def featurizer_from(settings: Mapping[str, Any] | None) -> NgramFeaturizer:
    """The featurizer that `Dataset.featurizer` (see `NgramFeaturizer.settings`) describes."""
    if settings is None:
        raise UserError(
            "this data set cannot turn a text into features: it was made from feature files; "
            "make one from a table of texts instead"
        )
    if settings.get("kind") != "ngrams":
        raise UserError(f"featurizer must be of kind 'ngrams', got {settings.get('kind')!r}")
    lengths = {name: settings[name] for name in ("min_length", "max_length", "num_buckets")}
    return NgramFeaturizer(**lengths)


def _extended(
    hashes: NDArray[np.uint64], points: NDArray[np.uint64], length: int
) -> NDArray[np.uint64]:
    """Hashes of all n-grams of one length from those one shorter (arithmetic modulo 2**64)."""
    last = points[length - 1 :]
    return hashes[: len(last)] * np.uint64(0x9E3779B97F4A7C15) + last + np.uint64(length)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads every bit over the word (the finaliser of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
