"""Two parsers of the Extreme Classification text: one for speed, one for the truth.

    12,7 0:0.5 31:1.25      labels 12 and 7, two features
     0:0.5                  starts with a space: no label

`careful_block` is the definition of the format, and names the file, the line and the value it
cannot accept. `quick_block` is compiled, goes byte by byte and stops before a line with anything
it does not know; as far as it goes, both answer the same. `parsed_blocks` takes turns with them.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.files import shown
from evenhand.errors import UserError
from evenhand.kernels.jit import jit

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

    label_counts: IntArray  # (R,) int64
    label_ids: IntArray  # (sum of label_counts,) int32, distinct in a row
    feature_counts: IntArray  # (R,) int64
    feature_ids: IntArray  # (sum of feature_counts,) int32
    values: NDArray[np.float32]  # (sum of feature_counts,)
    num_repeated_labels: int  # dropped: labels named before in the same line


def parsed_blocks(text: bytes, header: Header, *, path: Path, first_line: int) -> Iterator[Block]:
    """The rows of whole lines, or a `UserError` at the first line that is wrong."""
    start, line_number = 0, first_line
    while start < len(text):
        block, start = quick_block(text, start, header)
        yield block
        line_number += len(block.label_counts)
        if start < len(text):
            end = text.index(b"\n", start) + 1
            yield careful_block(text[start:end], header, path=path, first_line=line_number)
            start, line_number = end, line_number + 1


# --- line by line -------------------------------------------------------------------------------


def careful_block(block: bytes, header: Header, *, path: Path, first_line: int) -> Block:
    """The rows of a block of lines, or a `UserError` at the first that is wrong."""
    rows = [
        _careful_row(line, header, f"{path}, line {line_number}")
        for line_number, line in enumerate(block[:-1].split(b"\n"), start=first_line)
    ]
    distinct = [list(dict.fromkeys(labels)) for labels, _, _ in rows]
    num_distinct = [len(labels) for labels in distinct]
    return Block(
        np.array(num_distinct, dtype=np.int64),
        np.array([label for labels in distinct for label in labels], dtype=np.int32),
        np.array([len(features) for _, features, _ in rows], dtype=np.int64),
        np.array([feature for _, features, _ in rows for feature in features], dtype=np.int32),
        np.array([value for _, _, values in rows for value in values], dtype=np.float32),
        sum(len(labels) for labels, _, _ in rows) - sum(num_distinct),
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


# --- byte by byte -------------------------------------------------------------------------------

NEWLINE, SPACE, COMMA, COLON, DOT, PLUS, MINUS = b"\n ,:.+-"
UPPER_E, LOWER_E = b"Ee"
MANY_LABELS = 1000  # of one line: each is compared with those before it, so not for more than this
ENOUGH = 10**17  # a mantissa this large takes no more digits: it stays below 2**63
MAX_POWER = 280  # 10**-280 times a mantissa that is not 0 is far from the smallest numbers
POWERS = np.array([float(f"1e{power}") for power in range(MAX_POWER + 1)])
EXACT_POWER = 22  # powers of ten up to this one are floats without rounding, ...
EXACT_MANTISSA = 2**53  # ... and so are mantissas up to this one: their quotient is rounded once
ERROR = 2.0**-50  # of any other product: mantissa, power and product are each off by 2**-53


def quick_block(text: bytes, start: int, header: Header) -> tuple[Block, int]:
    """The rows from a line's start up to the first line it does not know, and where that is."""
    if not text.endswith(b"\n"):
        raise ValueError(f"text must be whole lines, but ends with {shown(text[-9:])}")
    most = len(text) - start  # bytes; an id takes 2 of them or more, a feature 4, a line 2
    label_counts, feature_counts = np.empty((2, most // 2 + 1), dtype=np.int64)
    label_ids = np.empty(most // 2 + 1, dtype=np.int32)
    feature_ids = np.empty(most // 4 + 1, dtype=np.int32)
    values = np.empty(most // 4 + 1, dtype=np.float32)
    end, num_rows, num_labels, num_features, num_repeated = _quick_rows(
        np.frombuffer(text, dtype=np.uint8),
        start,
        header.num_labels,
        header.num_features,
        label_counts,
        label_ids,
        feature_counts,
        feature_ids,
        values,
    )
    block = Block(
        label_counts[:num_rows],
        label_ids[:num_labels],
        feature_counts[:num_rows],
        feature_ids[:num_features],
        values[:num_features],
        num_repeated,
    )
    return block, end


@jit
def _quick_rows(
    text: NDArray[np.uint8],
    start: int,
    label_limit: int,
    feature_limit: int,
    label_counts: IntArray,
    label_ids: IntArray,
    feature_counts: IntArray,
    feature_ids: IntArray,
    values: NDArray[np.float32],
) -> tuple[int, int, int, int, int]:
    num_rows = num_labels = num_features = num_repeated = 0  # of whole lines
    while start < len(text):
        at, labels_end, num_new_repeated = _labels(text, start, label_limit, label_ids, num_labels)
        if at < 0:
            break
        at, features_end = _features(text, at, feature_limit, feature_ids, values, num_features)
        if at < 0 or at == start:  # an empty line is no row
            break
        label_counts[num_rows] = labels_end - num_labels
        feature_counts[num_rows] = features_end - num_features
        num_labels, num_features = labels_end, features_end
        num_repeated += num_new_repeated
        num_rows += 1
        start = at + 1
    return start, num_rows, num_labels, num_features, num_repeated


@jit
def _labels(
    text: NDArray[np.uint8], at: int, limit: int, ids: IntArray, count: int
) -> tuple[int, int, int]:
    """Adds a line's distinct labels: (where in the line they end or -1, count, repeated)."""
    first, num_repeated = count, 0
    if _byte(text, at) in (SPACE, NEWLINE):
        return at, count, 0
    while True:
        label, at = _id(text, at, limit)
        if label < 0 or count - first == MANY_LABELS:
            return -1, count, 0
        is_new = True
        for place in range(first, count):
            is_new &= ids[place] != label
        if is_new:
            ids[count] = label
            count += 1
        else:
            num_repeated += 1
        if _byte(text, at) != COMMA:
            return at, count, num_repeated
        at += 1


@jit
def _features(
    text: NDArray[np.uint8],
    at: int,
    limit: int,
    ids: IntArray,
    values: NDArray[np.float32],
    count: int,
) -> tuple[int, int]:
    """Adds a line's features: (where its newline is or -1, count)."""
    while _byte(text, at) == SPACE:
        at += 1
        if _byte(text, at) in (SPACE, NEWLINE):
            continue
        feature, at = _id(text, at, limit)
        if feature < 0 or _byte(text, at) != COLON:
            return -1, count
        value, at = _value(text, at + 1)
        if not abs(value) <= LARGEST_FLOAT32:  # also if it is not a number
            return -1, count
        ids[count], values[count] = feature, value
        count += 1
    return (at if _byte(text, at) == NEWLINE else -1), count


@jit
def _id(text: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """A whole number below the limit, or -1, and where it ends."""
    number, start = 0, at
    while _digit(text, at) <= 9:
        number = 10 * number + _digit(text, at)
        if number >= limit:
            return -1, at
        at += 1
    return (number if at > start else -1), at


@jit
def _value(text: NDArray[np.uint8], at: int) -> tuple[float, int]:
    """A decimal number, or NaN where its 32-bit form is not certain, and where it ends."""
    is_negative, at = _sign(text, at)
    mantissa, power, start = 0, 0, at
    while _digit(text, at) <= 9:
        if mantissa < ENOUGH:
            mantissa = 10 * mantissa + _digit(text, at)
        else:
            power += 1
        at += 1
    num_digits = at - start
    if _byte(text, at) == DOT:
        at += 1
        start = at
        while _digit(text, at) <= 9:
            if mantissa < ENOUGH:
                mantissa = 10 * mantissa + _digit(text, at)
                power -= 1
            at += 1
        num_digits += at - start
    if num_digits == 0:
        return np.nan, at
    if _byte(text, at) in (LOWER_E, UPPER_E):
        is_below_one, at = _sign(text, at + 1)
        exponent, at = _id(text, at, MAX_POWER)
        if exponent < 0:
            return np.nan, at
        power += -exponent if is_below_one else exponent
    if not -MAX_POWER <= power <= MAX_POWER:
        return np.nan, at
    value = mantissa / POWERS[-power] if power < 0 else mantissa * POWERS[power]
    is_exact = mantissa <= EXACT_MANTISSA and -EXACT_POWER <= power <= EXACT_POWER
    if is_exact or np.float32(value * (1 - ERROR)) == np.float32(value * (1 + ERROR)):
        return (-value if is_negative else value), at
    return np.nan, at


@jit
def _sign(text: NDArray[np.uint8], at: int) -> tuple[bool, int]:
    """Whether a minus stands here, and where the number goes on."""
    byte = _byte(text, at)
    return byte == MINUS, at + (byte in (MINUS, PLUS))


@jit
def _digit(text: NDArray[np.uint8], at: int) -> int:
    """The digit at a place, or more than 9."""
    return np.uint8(_byte(text, at) - 48)  # type: ignore[return-value]


@jit
def _byte(text: NDArray[np.uint8], at: int) -> int:
    # Unsigned, so that no code is made for places counted from the end: a fifth of the time.
    return text[np.uint64(at)]  # type: ignore[no-any-return]
