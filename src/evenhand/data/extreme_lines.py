"""Two parsers of the Extreme Classification text: one for speed, one for the truth.

    12,7 0:0.5 31:1.25      labels 12 and 7, two features
     0:0.5                  starts with a space: no label

`quick_block` parses a block of such lines in numpy and returns None at anything it does not
know. `careful_block` goes line by line, is the definition of the format, and names the file,
the line and the value it cannot accept. Where the first answers, both answer the same.
"""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.files import shown
from evenhand.errors import UserError

WHOLE_NUMBER = re.compile(rb"[0-9]+")
DECIMAL_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NOT_FINITE = re.compile(rb"[+-]?(nan|inf|infinity)", re.IGNORECASE)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

IntArray = NDArray[np.integer[Any]]


class Header(NamedTuple):
    """The first line of a file."""

    num_rows: int
    num_features: int
    num_labels: int


class Block(NamedTuple):
    """Some rows: how many ids each has, and the ids of all of them one after the other."""

    label_counts: IntArray  # (R,)
    label_ids: IntArray  # (sum of label_counts,) int32
    feature_counts: IntArray  # (R,)
    feature_ids: IntArray  # (sum of feature_counts,) int32
    values: NDArray[np.float32]  # (sum of feature_counts,)


# --- line by line -------------------------------------------------------------------------------


def careful_block(block: bytes, header: Header, *, path: Path, first_line: int) -> Block:
    """The rows of a block of lines, or a `UserError` at the first that is wrong."""
    rows = [
        _careful_row(line, header, f"{path}, line {line_number}")
        for line_number, line in enumerate(block[:-1].split(b"\n"), start=first_line)
    ]
    return Block(
        np.array([len(labels) for labels, _, _ in rows], dtype=np.int64),
        np.array([label for labels, _, _ in rows for label in labels], dtype=np.int32),
        np.array([len(features) for _, features, _ in rows], dtype=np.int64),
        np.array([feature for _, features, _ in rows for feature in features], dtype=np.int32),
        np.array([value for _, _, values in rows for value in values], dtype=np.float32),
    )


def _careful_row(
    line: bytes, header: Header, where: str
) -> tuple[list[int], list[int], list[float]]:
    if not line:
        raise UserError(
            f"{where}: is empty; a document without labels and features is one space, "
            f"and nothing may follow the last document"
        )
    label_text, _, feature_text = line.partition(b" ")
    labels = [
        _careful_id(item, header.num_labels, "label", "third", where)
        for item in (label_text.split(b",") if label_text else [])
    ]
    features, values = [], []
    for item in filter(None, feature_text.split(b" ")):
        id_text, colon, value_text = item.partition(b":")
        if not colon:
            raise UserError(
                f"{where}: {shown(item)} is not a feature; write it as id:value, "
                f"and labels before the first space with commas between them"
            )
        features.append(_careful_id(id_text, header.num_features, "feature", "second", where))
        values.append(_careful_value(value_text, where))
    return labels, features, values


def _careful_id(text: bytes, limit: int, kind: str, place: str, where: str) -> int:
    if not WHOLE_NUMBER.fullmatch(text) or len(text) > 4000 or int(text) >= limit:
        raise UserError(
            f"{where}: {kind} id {shown(text)} is not a whole number from 0 to {limit - 1}; "
            f"mend the line, or the {place} number of the header (number of {kind}s)"
        )
    return int(text)


def _careful_value(text: bytes, where: str) -> float:
    is_number = DECIMAL_NUMBER.fullmatch(text)
    if not is_number and not NOT_FINITE.fullmatch(text):
        raise UserError(
            f"{where}: feature value {shown(text)} is not a number; write it as 0.25 or 2.5e-1"
        )
    value = float(text)
    if not math.isfinite(value) or abs(value) > LARGEST_FLOAT32:
        raise UserError(
            f"{where}: feature value {shown(text)} is not a finite 32-bit number; "
            f"leave the feature out or scale it"
        )
    return value


# --- many lines at once -------------------------------------------------------------------------

# A token is what stands between two separators; the two of them tell its role.
NEWLINE, SPACE, COMMA, COLON, DOT, ODD = range(6)
KIND_OF_BYTE = np.full(256, ODD, dtype=np.uint8)
KIND_OF_BYTE[list(b"\n ,:.")] = NEWLINE, SPACE, COMMA, COLON, DOT

WRONG, LABEL, NOTHING, FEATURE, WHOLE, FRACTION = range(6)
ROLES = np.full((5, 5), WRONG, dtype=np.uint8)  # [separator before, separator after]
ROLES[[[NEWLINE], [COMMA]], [NEWLINE, SPACE, COMMA]] = LABEL
ROLES[SPACE, [NEWLINE, SPACE]] = NOTHING
ROLES[SPACE, COLON] = FEATURE
ROLES[COLON, [NEWLINE, SPACE, DOT]] = WHOLE
ROLES[DOT, [NEWLINE, SPACE]] = FRACTION

ID_DIGITS = 9  # more than fit below 2**31
EXACT_DIGITS = 15  # integers and powers of ten below 2**53: their quotient is rounded once
POWERS = 10 ** np.arange(EXACT_DIGITS + 1, dtype=np.int64)
PADDING = b"\n" * 16  # so that 16 bytes before any token are inside the buffer


def quick_block(block: bytes, header: Header) -> Block | None:
    """The same rows as `careful_block`, or None if that one should have a look."""
    text = np.frombuffer(PADDING + block, dtype=np.uint8)
    ends = np.flatnonzero(text - np.uint8(48) > 9)[len(PADDING) - 1 :]  # not a digit
    kinds = KIND_OF_BYTE[text[ends]]
    is_odd = kinds == ODD  # signs and exponents, unless they are rubbish
    odd_positions = ends[is_odd]
    if len(odd_positions):
        ends, kinds = ends[~is_odd], kinds[~is_odd]
    starts, ends = ends[:-1] + 1, ends[1:]  # (T,) tokens
    roles = ROLES.ravel()[kinds[:-1] * np.uint8(5) + kinds[1:]]
    lengths = ends - starts

    labels = np.flatnonzero((roles == LABEL) & (lengths > 0))
    features = np.flatnonzero(roles == FEATURE)
    wholes = np.flatnonzero(roles == WHOLE)
    row_ends = np.flatnonzero(kinds[1:] == NEWLINE)
    odd_tokens = np.unique(np.searchsorted(ends, odd_positions))
    if not _is_regular(roles, lengths, kinds, odd_tokens):
        return None
    label_ids = _integers(text, ends[labels], lengths[labels])
    feature_ids = _integers(text, ends[features], lengths[features])
    values = _quick_values(text, starts, ends, kinds, wholes, odd_tokens)
    if values is None or not (
        label_ids.max(initial=0) < header.num_labels
        and feature_ids.max(initial=0) < header.num_features
    ):
        return None
    return Block(
        np.diff(np.searchsorted(labels, row_ends, side="right"), prepend=0),
        label_ids.astype(np.int32),
        np.diff(np.searchsorted(features, row_ends, side="right"), prepend=0),
        feature_ids.astype(np.int32),
        values,
    )


def _is_regular(
    roles: NDArray[np.uint8], lengths: IntArray, kinds: NDArray[np.uint8], odd_tokens: IntArray
) -> bool:
    """Whether every token has a role and a length that suits it, and signs are in values alone."""
    shortest = np.array([1, 1, 0, 1, 0, 0])[roles]
    starts_without_label = (kinds[:-1] == NEWLINE) & (kinds[1:] == SPACE)
    longest = np.array([0, ID_DIGITS, 0, ID_DIGITS, 2**31, 2**31])[roles]
    is_suited = ((lengths >= shortest) | starts_without_label) & (lengths <= longest)
    return bool(is_suited.all() and (roles[odd_tokens] >= WHOLE).all())


def _quick_values(
    text: NDArray[np.uint8],
    starts: IntArray,
    ends: IntArray,
    kinds: NDArray[np.uint8],
    wholes: IntArray,
    odd_tokens: IntArray,
) -> NDArray[np.float32] | None:
    """The feature values, digits / 10**places; None if one is not a finite number."""
    has_fraction = kinds[1:][wholes] == DOT
    last_tokens = wholes + has_fraction  # the token with the last digit of a value
    places = np.where(has_fraction, ends[last_tokens] - starts[last_tokens], 0)
    whole_digits = ends[wholes] - starts[wholes]
    num_digits = whole_digits + places
    is_hard = num_digits > EXACT_DIGITS
    is_hard[np.searchsorted(last_tokens, odd_tokens)] = True
    if (num_digits == 0).any():
        return None
    places = np.minimum(places, EXACT_DIGITS)
    digits = _integers(text, ends[wholes], whole_digits) * POWERS[places]
    digits += _integers(text, ends[last_tokens], places)
    values = digits / POWERS[places]
    for position in np.flatnonzero(is_hard):
        number = text[starts[wholes[position]] : ends[last_tokens[position]]].tobytes()
        if not DECIMAL_NUMBER.fullmatch(number):
            return None
        values[position] = float(number)
    return values.astype(np.float32) if np.abs(values).max(initial=0) <= LARGEST_FLOAT32 else None


def _integers(text: NDArray[np.uint8], ends: IntArray, lengths: IntArray) -> NDArray[np.int64]:
    """The numbers of at most 16 digits that end before `ends`: (T,)."""
    numbers = _eight_digits(text, ends, lengths)
    long = np.flatnonzero(lengths > 8)
    if len(long):
        numbers[long] += 10**8 * _eight_digits(text, ends[long] - 8, lengths[long] - 8)
    return numbers


def _eight_digits(text: NDArray[np.uint8], ends: IntArray, lengths: IntArray) -> NDArray[np.int64]:
    """The numbers made of the last digits, 8 at most: all digits of a number at once in a word."""
    words_at = np.ndarray(len(text) - 7, dtype="<u8", buffer=text.data, strides=(1,))
    words = words_at[ends - 8]  # (T,) the last digit in the highest byte
    num_other_bits = (64 - 8 * np.minimum(lengths, 8)).astype(np.uint64)
    words >>= num_other_bits  # what stands before the number goes
    words <<= num_other_bits
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    words *= np.uint64(10 * 2**8 + 1)  # neighbours: 10 a + b, in every second byte
    words >>= np.uint64(8)
    words &= np.uint64(0x00FF00FF00FF00FF)
    words *= np.uint64(100 * 2**16 + 1)
    words >>= np.uint64(16)
    words &= np.uint64(0x0000FFFF0000FFFF)
    words *= np.uint64(10000 * 2**32 + 1)
    words >>= np.uint64(32)
    return words.astype(np.int64)
