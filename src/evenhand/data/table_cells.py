"""Cells of a table, a batch at a time: as texts, codes, labels, times and vectors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evenhand.data.csr import FloatArray
from evenhand.errors import UserError

NO_GROUP = ("nan", "null", "<na>")  # what other programs write for an empty cell
BLOCK_TEXTS = 2**15  # made strings of Python at once


class Codes(NamedTuple):
    """A column of texts as numbers."""

    ids: NDArray[np.int32]  # (N,), -1: an empty cell
    names: pa.LargeStringArray  # in order, each in use


def as_texts(column: pa.Array, name: str, where: str) -> pa.LargeStringArray:
    """A column as texts, null where a cell is empty."""
    if pa.types.is_dictionary(column.type):
        return as_texts(column.dictionary, name, where).take(column.indices)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        is_of_texts = pa.types.is_string(column.type.value_type)
        if is_of_texts or pa.types.is_large_string(column.type.value_type):
            return pc.binary_join(column, " ").cast(pa.large_string())
    if pa.types.is_nested(column.type):
        remedy = "name a column of texts or numbers"
        if hasattr(column.type, "value_type") and pa.types.is_floating(column.type.value_type):
            remedy = "give a column of vectors as vectors"
        raise UserError(f"{where}: column {name!r} holds {column.type}; {remedy}")
    try:
        return column.cast(pa.large_string())
    except pa.ArrowException as error:
        raise UserError(
            f"{where}: column {name!r} holds {column.type}, which is no text ({error})"
        ) from error


def join_texts(columns: Sequence[pa.LargeStringArray]) -> pa.LargeStringArray:
    """The texts of each row, joined by a space."""
    # Of a row that is null in every column, "skip" makes no row at all: so the first is filled.
    first, *others = columns
    space = pa.scalar(" ", pa.large_string())
    filled = first.fill_null("")
    joined = pc.binary_join_element_wise(filled, *others, space, null_handling="skip")
    return pc.utf8_trim_whitespace(joined)


def encode(texts: pa.LargeStringArray, clean_fn: Callable[[str], str]) -> pa.DictionaryArray:
    """Texts as places in a list of those that differ once they are cleaned; null: left empty."""
    encoded = texts.dictionary_encode()
    values = [
        None if text is None else clean_fn(text) or None for text in encoded.dictionary.to_pylist()
    ]
    cleaned = pa.array(values, pa.large_string()).dictionary_encode()
    return pa.DictionaryArray.from_arrays(cleaned.indices.take(encoded.indices), cleaned.dictionary)


def join_codes(chunks: Sequence[pa.DictionaryArray]) -> Codes:
    """The codes of a column, of whose batches each has a list of its own."""
    column = pa.chunked_array(chunks).unify_dictionaries()
    names = column.chunk(0).dictionary
    ids = np.concatenate([chunk.indices.fill_null(-1).to_numpy() for chunk in column.chunks])
    is_used = np.zeros(len(names) + 1, dtype=bool)
    is_used[ids] = True
    order = pc.sort_indices(names).to_numpy()
    order = order[is_used[order]]
    ranks = np.full(len(names) + 1, -1, dtype=np.int32)  # the last: of -1
    ranks[order] = np.arange(len(order))
    return Codes(ranks[ids], names.take(order))


def iterate_texts(texts: pa.LargeStringArray) -> Iterator[str]:
    """Each text, as Python's; a block of them is converted at a time."""
    for start in range(0, len(texts), BLOCK_TEXTS):
        yield from texts.slice(start, BLOCK_TEXTS).to_pylist()


def is_filled(column: pa.Array) -> NDArray[np.bool_]:
    """(N,) whether a cell is not null."""
    filled: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return filled


def as_labels(
    column: pa.Array, name: str, where: str, *, separator: str | None
) -> tuple[pa.DictionaryArray, NDArray[np.int64]]:
    """All labels of a column, and the row of each."""
    if separator is not None:
        column = pc.split_pattern(as_texts(column, name, where), separator)
    parents = np.arange(len(column))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        parents = pc.list_parent_indices(column).to_numpy()
        column = pc.list_flatten(column)
    labels = encode(as_texts(column, name, where), squeeze)
    return labels.drop_null(), parents[is_filled(labels)]


def as_label_lists(column: pa.Array, name: str, where: str) -> list[set[str]]:
    """The labels of each row, of lists or of texts such as `a|b`."""
    is_text = not pa.types.is_nested(column.type)
    labels, parents = as_labels(column, name, where, separator="|" if is_text else None)
    lists: list[set[str]] = [set() for _ in range(len(column))]
    for row, label in zip(parents.tolist(), labels.to_pylist(), strict=True):
        lists[row].add(label)
    return lists


def as_times(column: pa.Array, name: str, where: str) -> NDArray[np.float64]:
    """A column of numbers, dates or texts of either, as numbers in their order; NaN: empty."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
        column = pc.if_else(pc.equal(column, ""), None, column)
    for kind in (pa.float64(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")):
        try:
            numbers = column.cast(kind, safe=False)
            if pa.types.is_timestamp(numbers.type):
                numbers = numbers.cast(pa.int64()).cast(pa.float64(), safe=False)
            return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)
        except pa.ArrowException:
            continue
    raise UserError(
        f"{where}: column {name!r} does not tell the time; it must hold numbers, or dates such as "
        f"2024-01-31 or 2024-01-31T12:00:00"
    )


def as_vectors(column: pa.Array, name: str, where: str, width: int | None) -> FloatArray:
    """A column of lists of numbers as rows; zeros where a cell is empty: (n, F).

    Args:
        width: F, if it is known; else that of the first, 0 if all cells are empty.
    """
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not (is_list or pa.types.is_fixed_size_list(kind)):
        raise UserError(f"{where}: column {name!r} holds {kind}; vectors must be lists of numbers")
    lengths = pc.list_value_length(column).drop_null().to_numpy()
    widths = sorted({*lengths.tolist(), *([] if width is None else [width])})
    if len(widths) > 1 or widths == [0]:
        raise UserError(
            f"{where}: the vectors of column {name!r} have from {widths[0]} to {widths[-1]} "
            f"numbers; all must have as many, and at least one"
        )
    width = widths[0] if widths else 0
    vectors = np.zeros((len(column), width), dtype=np.float32)
    try:
        numbers = pc.list_flatten(column.drop_null()).cast(pa.float32())
    except pa.ArrowException as error:
        raise UserError(f"{where}: column {name!r} holds no numbers ({error})") from error
    if width:
        numbers = numbers.to_numpy(zero_copy_only=False)
        vectors[is_filled(column)] = numbers.reshape(-1, width)
    return vectors


def check_finite(vectors: NDArray[Any], where: str, *, first_row: int) -> None:
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(vectors.astype(np.float32, copy=False)).all(axis=1)
    if not is_finite.all():
        raise UserError(
            f"{where}, row {first_row + is_finite.argmin()}: its vector holds NaN, infinity or a "
            f"number beyond 32 bits; mend it, or leave the row out"
        )


def squeeze(text: str) -> str:
    """The words of a text, joined by single spaces."""
    return " ".join(text.split())


def group_name(text: str) -> str:
    """What a cell names; "" where another program wrote that it is empty."""
    name = squeeze(text)
    return "" if name.lower() in NO_GROUP else name
