"""Text to features: hashed character n-grams, many strings at once."""

import dataclasses
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import Rows
from evenhand.errors import UserError
from evenhand.kernels.jit import jit
from evenhand.kernels.random import GOLDEN64, jit_mix64

SHORT_TEXT = 1000  # characters; whatever a text is made of, so few are normalised at once
MAX_MARKS = 30  # combining, one after the other
BLOCK_TEXTS = 2**16  # texts hashed at once: bounds the memory, not the result
MAX_LENGTH = 64  # of an n-gram; every text has as many n-grams of each length as characters


def normalize(text: str) -> str:
    """The form in which two spellings count as one: NFKC, case folded, white space joined."""
    if len(text) > SHORT_TEXT and not text.isascii():
        text = _stream_safe(text)
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _stream_safe(text: str) -> str:
    """The text with a joiner after every 30 combining marks in a row (UAX #15, Stream-Safe).

    No writing has as many. Python sorts them in a time that grows with the square of their number.
    """
    pieces, num_marks = [], 0
    for character in text:
        num_marks = num_marks + 1 if unicodedata.combining(character) else 0
        if num_marks > MAX_MARKS:
            pieces.append("\u034f")
            num_marks = 1
        pieces.append(character)
    return "".join(pieces)


def script_of(text: str) -> str:
    """The first word of the Unicode name of the first letter, such as LATIN; `?` without one."""
    for character in text:
        if character.isalpha():
            return unicodedata.name(character, "?").split(" ")[0]
    return "?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramFeaturizer:
    """Bags of hashed character n-grams.

    A string is first normalised and set between two marks, so that its beginning and its end
    are n-grams of their own. Hashes are fixed arithmetic on code points: they are the same on
    every machine and in every process.
    """

    min_length: int = 1
    max_length: int = 4
    num_buckets: int = 2**18

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"min_length must be between 1 and max_length ({self.max_length}), "
                f"got {self.min_length}"
            )
        if self.max_length > MAX_LENGTH:
            raise ValueError(f"max_length must be at most {MAX_LENGTH}, got {self.max_length}")
        if not 1 <= self.num_buckets < 2**31:
            raise ValueError(f"num_buckets must be between 1 and 2**31 - 1, got {self.num_buckets}")

    def settings(self) -> dict[str, Any]:
        """What is needed to build this featurizer again."""
        return {"kind": "ngrams", **dataclasses.asdict(self)}

    def featurize(self, texts: Sequence[str]) -> Rows:
        """(N,) strings -> N rows of feature ids, every value 1."""
        all_counts, all_ids = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int32)]
        for start in range(0, len(texts), BLOCK_TEXTS):
            marked = [f"\x02{normalize(text)}\x03" for text in texts[start : start + BLOCK_TEXTS]]
            lengths = np.fromiter(map(len, marked), dtype=np.int64, count=len(marked))
            utf32 = "".join(marked).encode("utf-32-le", "surrogatepass")  # half a pair is no crime
            points = np.frombuffer(utf32, dtype="<u4")  # (C,)
            hashes = np.zeros(len(points), dtype=np.uint64)
            counts = np.empty(len(marked), dtype=np.int64)
            span = self.min_length, self.max_length
            ids = np.empty((span[1] - span[0] + 1) * len(points), dtype=np.int32)
            num_ids = _fill_buckets(points, lengths, hashes, *span, self.num_buckets, counts, ids)
            all_counts.append(counts)
            all_ids.append(ids[:num_ids])
        return Rows(np.cumsum(np.concatenate(all_counts)), np.concatenate(all_ids))


def featurizer_from(settings: Mapping[str, Any] | None) -> NgramFeaturizer:
    """The featurizer that `Dataset.featurizer` (see `NgramFeaturizer.settings`) describes."""
    if settings is None:
        raise UserError(
            "this data set cannot turn a text into features: it was made from feature files; "
            "make one from a table of texts instead"
        )
    if settings.get("kind") != "ngrams":
        raise UserError(f"featurizer must be of kind 'ngrams', got {settings.get('kind')!r}")
    names = [field.name for field in dataclasses.fields(NgramFeaturizer)]
    numbers: dict[str, Any] = {name: settings.get(name) for name in names}
    if not all(type(number) is int for number in numbers.values()):
        raise UserError(f"featurizer must have three whole numbers, got {numbers}")
    try:
        return NgramFeaturizer(**numbers)
    except ValueError as error:
        raise UserError(f"the featurizer of the data set is damaged: {error}") from error


@jit
def _fill_buckets(
    points: NDArray[np.uint32],
    lengths: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    min_length: int,
    max_length: int,
    num_buckets: int,
    counts: NDArray[np.int64],
    ids: NDArray[np.int32],
) -> int:
    """Fills in how many n-grams each text has and the bucket of each; returns how many in all.

    Args:
        points: (C,) code points of all texts, one text after the other.
        lengths: (N,) of the texts.
        hashes: (C,) zeros, to become those of the n-grams that start at each place.
    """
    start = num_ids = 0
    for text in range(len(lengths)):
        end, num_ids_before = start + lengths[text], num_ids
        for length in range(1, max_length + 1):
            for place in range(start, end - length + 1):
                point = points[place + length - 1]
                hashes[place] = hashes[place] * GOLDEN64 + np.uint64(point) + np.uint64(length)
                is_mark_alone = length == 1 and point <= 3  # which says nothing
                if length >= min_length and not is_mark_alone:
                    ids[num_ids] = jit_mix64(hashes[place]) % np.uint64(num_buckets)
                    num_ids += 1
        counts[text] = num_ids - num_ids_before
        start = end
    return num_ids
