"""The parser of Extreme Classification text.

    12,7 0:0.5 31:1.25      labels 12 and 7, two features
     0:0.5                  starts with a space: no label

`parse_line` is the definition of the format, and names the file, the line and the value it cannot
accept. `parse_quickly` is compiled, goes byte by byte and stops before a line with anything it does
not know; as far as it goes, both answer the same. `parse_lines` takes turns with them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenhand.data.csr import IntArray, Rows, rows_from_lists
from evenhand.data.text_io import quote_value
from evenhand.errors import UserError
from evenhand.kernels.jit import jit

WHOLE_NUMBER = re.compile(rb"[0-9]{1,4000}")
NUMBER = re.compile(
    rb"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE
)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Header(NamedTuple):
    """The first line of a file."""

    num_rows: int
    num_features: int
    num_labels: int


class Block(NamedTuple):
    """The documents of some lines."""

    positives: Rows  # ids are distinct in a row
    features: Rows  # with values


def parse_lines(text: bytes, header: Header, *, path: Path, first_line: int) -> Iterator[Block]:
    """The rows of whole lines, or a `UserError` at the first line that is wrong."""
    start, line_number = 0, first_line
    while start < len(text):
        block, start = parse_quickly(text, start, header)
        line_number += len(block.positives)
        if len(block.positives):
            yield block
        if start < len(text):
            line, start = text[start : (end := text.index(b"\n", start))], end + 1
            yield parse_line(line, header, where=f"{path}, line {line_number}")
            line_number += 1


# --- line by line -------------------------------------------------------------------------------


def parse_line(line: bytes, header: Header, *, where: str) -> Block:
    """The row of one line, without its newline, or a `UserError` that says where it is wrong."""
    if not line:
        raise UserError(
            f"{where}: is empty; a document without labels and features is one space, "
            f"and nothing may follow the last document"
        )

    def parse_id(text: bytes, kind: str, limit: int, place: str) -> int:
        if not WHOLE_NUMBER.fullmatch(text) or int(text) >= limit:
            raise UserError(
                f"{where}: {kind} id {quote_value(text)} is not a whole number from 0 to "
                f"{limit - 1}; mend the line, or the {place} number of the header (number of "
                f"{kind}s)"
            )
        return int(text)

    label_text, _, feature_text = line.partition(b" ")
    labels = [
        parse_id(item, "label", header.num_labels, "third")
        for item in (label_text.split(b",") if label_text else [])
    ]
    features, values = [], []
    for item in filter(None, feature_text.split(b" ")):
        id_text, colon, value_text = item.partition(b":")
        if not colon:
            raise UserError(
                f"{where}: {quote_value(item)} is not a feature; write it as id:value, "
                f"and labels before the first space with commas between them"
            )
        features.append(parse_id(id_text, "feature", header.num_features, "second"))
        if not NUMBER.fullmatch(value_text):
            raise UserError(
                f"{where}: feature value {quote_value(value_text)} is not a number; write it as "
                f"0.25 or 2.5e-1"
            )
        values.append(float(value_text))
        if not abs(values[-1]) <= LARGEST_FLOAT32:  # also if it is not a number
            raise UserError(
                f"{where}: feature value {quote_value(value_text)} is not a finite 32-bit number; "
                f"leave the feature out or scale it"
            )
    rows = rows_from_lists([features]).with_values(np.array(values, dtype=np.float32))
    return Block(rows_from_lists([list(dict.fromkeys(labels))]), rows)


# --- byte by byte -------------------------------------------------------------------------------

NEWLINE, SPACE, COMMA, COLON, DOT, PLUS, MINUS = b"\n ,:.+-"
UPPER_E, LOWER_E = b"Ee"
MANY_LABELS = 1000  # of one line: each is compared with those before it, so not for more than this
ENOUGH = 10**17  # a mantissa this large takes no more digits: it stays below 2**63
MAX_POWER = 280  # 10**-280 times a mantissa that is not 0 is far from the smallest numbers
POWERS = np.char.mod("1e%d", np.arange(MAX_POWER + 1)).astype(float)
EXACT_POWER = 22  # powers of ten up to this one are floats without rounding, ...
EXACT_MANTISSA = 2**53  # ... and so are mantissas up to this one: their quotient is rounded once
ERROR = 2.0**-50  # of any other product: mantissa, power and product are each off by 2**-53


def parse_quickly(text: bytes, start: int, header: Header) -> tuple[Block, int]:
    """The rows from a line's start up to the first line it does not know, and where that is."""
    if not text.endswith(b"\n"):
        raise ValueError(f"text must be whole lines, but ends with {quote_value(text[-9:])}")
    most = len(text) - start  # bytes; an id takes 2 of them or more, a feature 4, a line 2
    label_offsets, feature_offsets = np.zeros((2, most // 2 + 2), dtype=np.int64)
    label_ids = np.empty(most // 2 + 1, dtype=np.int32)
    feature_ids = np.empty(most // 4 + 1, dtype=np.int32)
    values = np.empty(most // 4 + 1, dtype=np.float32)
    rows: Any = label_offsets, label_ids, feature_offsets, feature_ids, values
    limits = header.num_labels, header.num_features
    end, num_rows = _parse_rows(np.frombuffer(text, dtype=np.uint8), start, *limits, *rows)
    label_offsets, feature_offsets = label_offsets[: num_rows + 1], feature_offsets[: num_rows + 1]
    num_labels, num_features = label_offsets[-1], feature_offsets[-1]
    features = Rows(feature_offsets, feature_ids[:num_features], values[:num_features])
    return Block(Rows(label_offsets, label_ids[:num_labels]), features), end


@jit
def _parse_rows(
    text: NDArray[np.uint8],
    start: int,
    label_limit: int,
    feature_limit: int,
    label_offsets: IntArray,
    label_ids: IntArray,
    feature_offsets: IntArray,
    feature_ids: IntArray,
    values: NDArray[np.float32],
) -> tuple[int, int]:
    """Fills in the rows up to the first line it does not know: (where that starts, rows)."""
    num_rows = num_labels = num_features = 0
    while start < len(text):
        at, first_label = start, num_labels
        is_label = _byte(text, at) not in (SPACE, NEWLINE)
        while is_label:
            label, at = _parse_id(text, at, label_limit)
            if label < 0 or num_labels - first_label == MANY_LABELS:
                return start, num_rows
            is_new = True
            for place in range(first_label, num_labels):
                is_new &= label_ids[place] != label
            label_ids[num_labels] = label
            num_labels += is_new
            is_label = _byte(text, at) == COMMA
            at += is_label
        while _byte(text, at) == SPACE:
            at += 1
            if _byte(text, at) in (SPACE, NEWLINE):
                continue
            feature, at = _parse_id(text, at, feature_limit)
            if feature < 0 or _byte(text, at) != COLON:
                return start, num_rows
            value, at = _parse_value(text, at + 1)
            if not abs(value) <= LARGEST_FLOAT32:  # also if it is not a number
                return start, num_rows
            feature_ids[num_features], values[num_features] = feature, value
            num_features += 1
        if _byte(text, at) != NEWLINE or at == start:  # an empty line is no row
            break
        num_rows += 1
        label_offsets[num_rows], feature_offsets[num_rows] = num_labels, num_features
        start = at + 1
    return start, num_rows


@jit
def _parse_id(text: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """A whole number below the limit, or -1, and where it ends."""
    number, start = 0, at
    while _digit(text, at) <= 9:
        number = 10 * number + _digit(text, at)
        if number >= limit:
            return -1, at
        at += 1
    return (number if at > start else -1), at


@jit
def _parse_value(text: NDArray[np.uint8], at: int) -> tuple[float, int]:
    """A decimal number, or NaN where its 32-bit form is not certain, and where it ends."""
    is_negative, at = _parse_sign(text, at)
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
        is_below_one, at = _parse_sign(text, at + 1)
        exponent, at = _parse_id(text, at, MAX_POWER)
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
def _parse_sign(text: NDArray[np.uint8], at: int) -> tuple[bool, int]:
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
