"""Slow, obvious parsers, written from the formats and not from the code. None: refused."""

import csv
import re

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
BOM = b"\xef\xbb\xbf"


def text_lines(data: bytes) -> list[bytes]:
    """Lines as every reader of texts sees them: ended by \\n or \\r\\n, the last one by nothing."""
    if not data:
        return []
    if data.endswith(b"\r"):
        data = data[:-1]
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return lines[:-1] if lines[-1] == b"" and len(lines) > 1 else lines


def unicode_lines(data: bytes) -> list[str] | None:
    lines = text_lines(data)
    if lines and lines[0].startswith(BOM):
        lines[0] = lines[0][3:]
    try:
        return [line.decode("utf-8") for line in lines]
    except UnicodeDecodeError:
        return None


# --- the Extreme Classification format ------------------------------------------------------------


def extreme(data: bytes) -> list | None:
    """[num_features, num_labels, [(labels, features, values) of each row]]"""
    lines = text_lines(data)
    if not lines:
        return None
    header = lines[0][3:] if lines[0].startswith(BOM) else lines[0]
    numbers = header.rstrip(b" ").split(b" ")
    numbers = [numbers[0]] + [number for number in numbers[1:] if number]
    if len(numbers) != 3 or not all(_is_whole(number, 18) for number in numbers):
        return None
    num_rows, num_features, num_labels = map(int, numbers)
    if not all(1 <= count < 2**31 for count in (num_rows, num_features, num_labels)):
        return None
    if len(lines) - 1 != num_rows:
        return None
    rows = [_extreme_row(line, num_features, num_labels) for line in lines[1:]]
    return None if None in rows else [num_features, num_labels, rows]


def _extreme_row(line: bytes, num_features: int, num_labels: int) -> tuple | None:
    if line == b"":
        return None
    labels, features, values = [], [], []
    before, _, after = line.partition(b" ")
    for item in before.split(b",") if before else []:
        if not _is_whole(item, 4000) or int(item) >= num_labels:
            return None
        if int(item) not in labels:
            labels.append(int(item))
    for item in after.split(b" "):
        if item == b"":
            continue
        feature, colon, value = item.partition(b":")
        if not colon or not _is_whole(feature, 4000) or int(feature) >= num_features:
            return None
        number = _decimal(value)
        if number is None or abs(number) > LARGEST:
            return None
        features.append(int(feature))
        values.append(float(np.float32(number)))
    return labels, features, values


def _is_whole(text: bytes, most_digits: int) -> bool:
    return 0 < len(text) <= most_digits and all(byte in b"0123456789" for byte in text)


def _decimal(text: bytes) -> float | None:
    """A number of digits, with one dot at most and one exponent at most."""
    if not text or any(byte not in b"0123456789.+-eE" for byte in text):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def split_rows(train: bytes, test: bytes, num_rows: int) -> list | None:
    """The rows of both parts, from 0."""
    both = []
    for data in (train, test):
        lines = unicode_lines(data)
        if not lines:
            return None
        words = [line.split()[:1] for line in lines]
        if not all(word and _is_whole(word[0].encode("utf-8", "replace"), 18) for word in words):
            return None
        both.append([int(word[0]) for word in words])
    everything = both[0] + both[1]
    base = 0 if 0 in everything else 1
    if len(set(everything)) < len(everything):
        return None
    if not all(base <= number < num_rows + base for number in everything):
        return None
    return [[number - base for number in numbers] for numbers in both]


def group_values(data: bytes, num_rows: int) -> dict | None:
    lines = unicode_lines(data)
    if lines is None:
        return None
    names, rows = ["id", "group"], [line.split("\t") for line in lines]
    if len(rows) == num_rows + 1 and rows[0][0].strip().lower() == "id":
        names, rows = rows[0], rows[1:]
    if len(rows) != num_rows or any(len(row) != len(names) for row in rows):
        return None
    if len(set(names)) < len(names) or "" in names:
        return None
    return {name: [row[place] or None for row in rows] for place, name in enumerate(names) if place}


# --- tables ---------------------------------------------------------------------------------------


def table(data: bytes, delimiter: str) -> list[list[str]] | None:
    """The rows that are not blank, by the strict rules of quoting."""
    lines = unicode_lines(data)
    if lines is None:
        return None
    try:
        rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True))
    except csv.Error:
        return None
    return [row for row in rows if any(cell.strip() for cell in row)]


# --- text -----------------------------------------------------------------------------------------


def ngram_buckets(text: str, *, min_length: int, max_length: int, num_buckets: int) -> list[int]:
    """Of a text that is normalised already."""
    points = [2, *map(ord, text), 3]
    buckets = []
    for length in range(1, max_length + 1):
        for start in range(len(points) - length + 1):
            word = 0
            for number, point in enumerate(points[start : start + length], start=1):
                word = (word * 0x9E3779B97F4A7C15 + point + number) % 2**64
            if length < min_length or (length == 1 and points[start] <= 3):
                continue
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            buckets.append((word ^ (word >> 31)) % num_buckets)
    return buckets


def json_lines(text: str) -> list[str]:
    """The lines that are whole."""
    return re.split("\n", text)[:-1]
