"""Text to features: hashed words and character n-grams, many strings at once."""

import dataclasses
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import Rows, collect_rows
from evenhand.errors import UserError
from evenhand.kernels.jit import jit
from evenhand.kernels.random import GOLDEN64, jit_mix64

SHORT_TEXT = 1000  # characters; whatever a text is made of, so few are normalised at once
MAX_MARKS = 30  # combining, one after the other
BLOCK_CHARACTERS = 2**20  # of texts hashed at once, about: bounds the memory, not the result
MAX_LENGTH = 64  # of an n-gram; every text has as many n-grams of each length as characters
MAX_WORDS = 8  # in a feature
TEXTS = {"kind": "texts"}  # a featurizer's settings: an encoder takes the texts, normalised
WORD_HASH = np.uint64(0x2545F4914F6CDD1D)  # where the hash of a word starts: not that of an n-gram

# What a character does to the word before it.
SEPARATOR, LETTER, ALONE, MARK, INVISIBLE = range(5)
UNSPACED = (  # code points of scripts without spaces between words: each letter is a word
    range(0x0E00, 0x0F00),  # Thai, Lao
    range(0x1000, 0x10A0),  # Myanmar
    range(0x1780, 0x1800),  # Khmer
    range(0x3005, 0x3100),  # Hiragana, Katakana
    range(0x31F0, 0x3200),
    range(0x3400, 0xA000),  # Han
    range(0xA9E0, 0xAA00),  # Myanmar
    range(0xAA60, 0xAA80),
    range(0xF900, 0xFB00),  # Han
    range(0x1AFF0, 0x1B170),  # Hiragana, Katakana
    range(0x20000, 0x40000),  # Han
)


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
    """Bags of hashed character n-grams, for short texts of any language, such as names.

    A string is first normalised and set between two marks, so that its beginning and its end
    are n-grams of their own. Hashes are fixed arithmetic on code points: they are the same on
    every machine and in every process.
    """

    min_length: int = 1
    max_length: int = 4
    num_buckets: int = 2**18

    def __post_init__(self) -> None:
        _check_range("min_length", self.min_length, 1, MAX_LENGTH)
        _check_range("max_length", self.max_length, self.min_length, MAX_LENGTH)
        _check_range("num_buckets", self.num_buckets, 1, 2**31 - 1)

    def settings(self) -> dict[str, Any]:
        """What is needed to build this featurizer again."""
        return {"kind": "ngrams", **dataclasses.asdict(self)}

    def describe(self) -> str:
        """'n-grams of 1 to 4 characters'"""
        return f"n-grams of {self.min_length} to {self.max_length} characters"

    def featurize(self, texts: Iterable[str]) -> Rows:
        """N strings -> N rows of feature ids, every value 1."""
        return collect_rows(self.blocks(texts))

    def ngrams(self, text: str) -> list[str]:
        """What the ids of a text stand for, in their order; `^` and `$` are its two ends."""
        marked = f"\x02{normalize(text)}\x03"
        shown = f"^{marked[1:-1]}$"
        return [
            shown[place : place + length]
            for length in range(self.min_length, self.max_length + 1)
            for place in range(len(marked) - length + 1)
            if length > 1 or ord(marked[place]) > 3
        ]

    def blocks(self, texts: Iterable[str]) -> Iterator[Rows]:
        """The same, of some texts after the others."""
        return _hashed_blocks(texts, 0, self.min_length, self.max_length, self.num_buckets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordFeaturizer:
    """Bags of hashed words and runs of words, with values, for sentences and documents.

    A word is a run of letters, marks and digits of the normalised text; in scripts that put no
    spaces between words (Chinese, Japanese, Thai, ...) every letter with its marks is one, and so
    is a symbol such as an emoji. A feature that occurs n times in a text has the value 1 + log n;
    how much each feature matters is up to `weighting`. On request there are the n-grams of
    `NgramFeaturizer` too.

    Hashes are fixed arithmetic on code points, as there. Which characters are letters is Python's
    table of Unicode: only characters that are newer than the oldest Python in use are not the same
    everywhere.
    """

    max_words: int = 2  # in a feature; 0: n-grams alone
    min_length: int = 1
    max_length: int = 0  # of the n-grams; 0: none
    num_buckets: int = 2**18

    def __post_init__(self) -> None:
        _check_range("max_words", self.max_words, 0 if self.max_length else 1, MAX_WORDS)
        least = 0 if self.min_length == 1 else self.min_length
        _check_range("min_length", self.min_length, 1, MAX_LENGTH)
        _check_range("max_length", self.max_length, least, MAX_LENGTH)
        _check_range("num_buckets", self.num_buckets, 1, 2**31 - 1)

    def settings(self) -> dict[str, Any]:
        """What is needed to build this featurizer again."""
        return {"kind": "words", **dataclasses.asdict(self)}

    def describe(self) -> str:
        """'words, in runs of up to 2'"""
        kinds = [f"words, in runs of up to {self.max_words}"] * bool(self.max_words)
        if self.max_length:
            kinds.append(f"n-grams of {self.min_length} to {self.max_length} characters")
        return " and ".join(kinds)

    def featurize(self, texts: Iterable[str]) -> Rows:
        """N strings -> N rows of different feature ids, in order, with values."""
        return collect_rows(self.blocks(texts))

    def blocks(self, texts: Iterable[str]) -> Iterator[Rows]:
        """The same, of some texts after the others."""
        span = self.min_length, self.max_length
        for rows in _hashed_blocks(texts, self.max_words, *span, self.num_buckets):
            counts = rows.to_merged(self.num_buckets)
            values = (1 + np.log(counts.data)).astype(np.float32)
            yield Rows(counts.indptr, counts.indices, values)


Featurizer = NgramFeaturizer | WordFeaturizer
FEATURIZERS: dict[str, type[Featurizer]] = {"ngrams": NgramFeaturizer, "words": WordFeaturizer}


def make_featurizer(kind: str, **settings: int | None) -> Featurizer:
    """The featurizer of a kind, "ngrams" or "words"; a setting that is None has its default."""
    if kind not in FEATURIZERS:
        raise UserError(f"features must be one of {', '.join(FEATURIZERS)}, got {kind!r}")
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in FEATURIZERS[kind].__dataclass_fields__:
            raise UserError(f"{name} is not for features of the kind {kind!r}")
    return FEATURIZERS[kind](**given)


def words_recur(texts: Sequence[str]) -> bool:
    """Whether words are better features of these texts than n-grams of characters.

    They are where most words of a text occur in others too: in sentences, in lists of ids. Of
    2,500 texts, 14 to 19 % of the words of package descriptions stand alone, 34 % and more of those
    of names, identifiers and messages in many languages. Of fewer texts, more words do.

    Example:
        >>> words_recur(["a tool for files", "a tool for text", "text of a tool"])
        True
        >>> words_recur(["new york", "paris", "los angeles"])
        False
    """
    rows = WordFeaturizer(max_words=1, num_buckets=2**31 - 1).featurize(texts)
    if len(rows.ids) < 3 * len(texts) or not len(rows.ids):
        return False  # a name or a title: parts of its words tell more than the whole
    counts = np.unique(rows.ids, return_counts=True)[1]
    return bool((counts == 1).sum() / len(rows.ids) < min(0.5, 3 / len(texts) ** 0.35))


def featurizer_from(settings: Mapping[str, Any] | None) -> Featurizer:
    """The featurizer that `Dataset.featurizer` (see `NgramFeaturizer.settings`) describes."""
    if settings is None:
        raise UserError(
            "this data set cannot turn a text into features: it was made from feature files; "
            "make one from a table of texts instead"
        )
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in FEATURIZERS:
        kinds = " or ".join(map(repr, FEATURIZERS))
        raise UserError(f"featurizer must be of kind {kinds}, got {kind!r}")
    names = FEATURIZERS[kind].__dataclass_fields__
    numbers: dict[str, Any] = {name: settings.get(name) for name in names}
    if not all(type(number) is int for number in numbers.values()):
        raise UserError(f"featurizer must have {len(names)} whole numbers, got {numbers}")
    try:
        return FEATURIZERS[kind](**numbers)
    except UserError as error:
        raise UserError(f"the featurizer of the data set is damaged: {error}") from error


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{name} must be between {low} and {high}, got {value}")


# --- blocks of texts, so that the memory is bounded beside the result -----------------------------


def _hashed_blocks(
    texts: Iterable[str], max_words: int, min_length: int, max_length: int, num_buckets: int
) -> Iterator[Rows]:
    """The texts block by block, as rows of the ids of their words and n-grams, with repeats."""
    num_kinds = max_words + max(0, max_length - min_length + 1)  # of features at a place
    kinds = _character_kinds() if max_words else np.zeros(1, dtype=np.uint8)
    for marked in _blocks(texts):
        lengths = np.fromiter(map(len, marked), dtype=np.int64, count=len(marked))
        utf32 = "".join(marked).encode("utf-32-le", "surrogatepass")  # half a pair is no crime
        points = np.frombuffer(utf32, dtype="<u4")  # (C,)
        hashes = np.zeros(len(points), dtype=np.uint64)
        offsets = np.zeros(len(marked) + 1, dtype=np.int64)
        ids = np.empty(num_kinds * len(points), dtype=np.int32)
        num_ids = _fill_buckets(
            points, lengths, kinds, hashes, max_words, min_length, max_length, num_buckets,
            offsets, ids,
        )  # fmt: skip
        yield Rows(offsets, ids[:num_ids])


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, normalised and between two marks, in lists of some BLOCK_CHARACTERS in all."""
    marked, num_characters = [], 0
    for text in texts:
        marked.append(f"\x02{normalize(text)}\x03")
        num_characters += len(marked[-1])
        if num_characters >= BLOCK_CHARACTERS:
            yield marked
            marked, num_characters = [], 0
    yield marked  # of no texts, one empty block


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """What each code point is to a word: SEPARATOR, LETTER, ALONE, MARK or INVISIBLE."""
    of_category = {"L": LETTER, "N": LETTER, "M": MARK}
    kinds = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for point in range(len(kinds)):
        category = unicodedata.category(chr(point))
        if category == "Cf":  # joiners, soft hyphens, marks of direction
            kinds[point] = INVISIBLE
        elif category == "So":
            kinds[point] = ALONE
        else:
            kinds[point] = of_category.get(category[0], SEPARATOR)
    for span in UNSPACED:
        letters = kinds[span.start : span.stop]
        letters[letters == LETTER] = ALONE
    return kinds


@jit
def _fill_buckets(
    points: NDArray[np.uint32],
    lengths: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    hashes: NDArray[np.uint64],
    max_words: int,
    min_length: int,
    max_length: int,
    num_buckets: int,
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
) -> int:
    """Fills in the buckets of the words and n-grams of each text; returns how many in all.

    Args:
        points: (C,) code points of all texts, one text after the other.
        lengths: (N,) of the texts.
        kinds: of every code point there is, see `_character_kinds`; not read without words.
        hashes: (C,) zeros, to become those of the n-grams that start at each place.
        offsets: (N + 1,) zeros, to become where the ids of each text start and end.
    """
    start = num_ids = 0
    run_hashes = np.zeros(max_words, dtype=np.uint64)
    for text in range(len(lengths)):
        end = start + lengths[text]
        if max_words:
            num_ids = _add_words(points[start:end], kinds, run_hashes, num_buckets, ids, num_ids)
        num_ids = _add_ngrams(
            points[start:end], hashes[start:end], min_length, max_length, num_buckets, ids, num_ids
        )
        offsets[text + 1] = num_ids
        start = end
    return num_ids


@jit
def _add_ngrams(
    points: NDArray[np.uint32],
    hashes: NDArray[np.uint64],
    min_length: int,
    max_length: int,
    num_buckets: int,
    ids: NDArray[np.int32],
    num_ids: int,
) -> int:
    """Appends the n-grams of one text to the first `num_ids` ids; returns how many there are."""
    for length in range(1, max_length + 1):
        for place in range(len(points) - length + 1):
            point = points[place + length - 1]
            hashes[place] = hashes[place] * GOLDEN64 + np.uint64(point) + np.uint64(length)
            is_mark_alone = length == 1 and point <= 3  # which says nothing
            if length >= min_length and not is_mark_alone:
                ids[num_ids] = jit_mix64(hashes[place]) % np.uint64(num_buckets)
                num_ids += 1
    return num_ids


@jit
def _add_words(
    points: NDArray[np.uint32],
    kinds: NDArray[np.uint8],
    run_hashes: NDArray[np.uint64],
    num_buckets: int,
    ids: NDArray[np.int32],
    num_ids: int,
) -> int:
    """Appends the runs of 1, 2, ... words of one text, which ends with a separator.

    Args:
        run_hashes: (W,) to hold those of the last 1, ..., W words.
    """
    num_words = num_points = 0  # the latter of the word that is being read
    word, first_kind = np.uint64(0), SEPARATOR
    for point in points:
        kind = kinds[point]
        if kind == INVISIBLE:
            continue
        is_apart = kind in (SEPARATOR, ALONE) or (kind == LETTER and first_kind == ALONE)
        if is_apart and num_points:
            num_words += 1
            for run in range(min(num_words, len(run_hashes)) - 1, -1, -1):
                before = run_hashes[run - 1] * GOLDEN64 if run else WORD_HASH
                run_hashes[run] = jit_mix64(before + word)
                ids[num_ids] = run_hashes[run] % np.uint64(num_buckets)
                num_ids += 1
            word, num_points = np.uint64(0), 0
        if kind != SEPARATOR:
            first_kind = first_kind if num_points else kind
            num_points += 1
            word = word * GOLDEN64 + np.uint64(point) + np.uint64(num_points)
    return num_ids
