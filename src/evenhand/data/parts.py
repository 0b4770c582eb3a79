"""What the loaders share: the split by hash, groups from values, parts from texts.

A split by the md5 of a key is the same on every machine, and a row or a query keeps its side
when others come or go.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from evenhand.data.dataset import PARTS, Groups, Part, Rows, Strings, pairs_of
from evenhand.data.text import NgramFeaturizer
from evenhand.errors import UserError

# Of a list of queries: the value each has in every group column. None: belongs to no group.
GroupValues = Mapping[str, Sequence[str | None]]


def md5_of(key: str) -> int:
    """The md5 of a key as a number from 0 to 2**128 - 1."""
    return int.from_bytes(hashlib.md5(key.encode("utf-8"), usedforsecurity=False).digest())


def part_of(key: str, *, test_fraction: float, validation_fraction: float) -> str:
    """Train, validation or test: where the md5 of the key lies between 0 and 2**128."""
    position = md5_of(key) / 2**128
    if position < test_fraction:
        return "test"
    return "validation" if position < test_fraction + validation_fraction else "train"


def check_fractions(
    *, test_fraction: float = 0.0, validation_fraction: float, validation_block: int = 1
) -> None:
    fractions = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"{name} must be at least 0 and below 1, got {fraction}")
    if validation_block < 1:
        raise UserError(f"validation_block must be at least 1, got {validation_block}")
    if test_fraction + validation_fraction >= 1:
        raise UserError(
            f"test_fraction and validation_fraction together must be below 1, so that something "
            f"is left to train on, got {test_fraction} + {validation_fraction}"
        )


def groups_of(values: Iterable[str | None], names: Iterable[str] | None = None) -> Groups:
    """A group column from the value of each query or label: (N,). None belongs to no group.

    `names` are those of all parts, so that an id means the same group in each of them.
    """
    values = list(values)
    if names is None:
        names = {value for value in values if value is not None}
    names = sorted(names)
    position = {name: index for index, name in enumerate(names)}
    ids = [-1 if value is None else position[value] for value in values]
    return Groups(np.array(ids, dtype=np.int32), tuple(names))


def shared_groups(values: Mapping[str, GroupValues]) -> dict[str, dict[str, Groups]]:
    """Part -> column -> groups, where a column has the same names in every part."""
    names: dict[str, set[str]] = {}
    for columns in values.values():
        for column, cells in columns.items():
            names.setdefault(column, set()).update(cell for cell in cells if cell is not None)
    return {
        part: {column: groups_of(cells, names[column]) for column, cells in columns.items()}
        for part, columns in values.items()
    }


def groups_by_pair(
    members: Sequence[Collection[str]], positives: Rows, names: Iterable[str]
) -> Groups:
    """A group column from the names of the groups that each pair is in: (N_pairs,).

    One id a query suffices where all its pairs are in one and the same group, or in none.
    """
    query_ids, names = pairs_of(positives).query_ids, sorted(names)
    place_of = {name: place for place, name in enumerate(names)}
    rows = [tuple(sorted(place_of[name] for name in groups)) for groups in members]
    firsts = np.array([row[0] if row else -1 for row in rows], dtype=np.int32)  # (N_pairs,)
    ids = np.full(len(positives), -1, dtype=np.int32)  # (N,)
    ids[query_ids] = firsts
    if all(len(row) <= 1 for row in rows) and (ids[query_ids] == firsts).all():
        return Groups(ids, tuple(names))
    sets = sorted(set(rows) - {()})
    set_ids = {(): -1} | {row: set_id for set_id, row in enumerate(sets)}
    ids = np.array([set_ids[row] for row in rows], dtype=np.int32)  # (N_pairs,)
    return Groups(ids, tuple(names), rows_of(sets))


def parts_of_queries(
    labels_of: Mapping[str, set[int]],
    *,
    part_fn: Callable[[str], str],
    group_fns: Mapping[str, Callable[[tuple[str, int]], Collection[str] | None]],
    featurizer: NgramFeaturizer,
) -> dict[str, Part]:
    """The parts that hold a query, of texts whose positives are known.

    Args:
        labels_of: query -> the labels that are right for it.
        part_fn: query -> train, validation or test.
        group_fns: group column -> the function from a (query, label) pair to its groups, if any.
    """
    queries: dict[str, list[str]] = {part: [] for part in PARTS}
    for query in sorted(labels_of):
        queries[part_fn(query)].append(query)
    queries = {part: texts for part, texts in queries.items() if texts}
    labels = {part: [sorted(labels_of[text]) for text in texts] for part, texts in queries.items()}
    positives = {part: rows_of(rows) for part, rows in labels.items()}
    groups: dict[str, dict[str, Groups]] = {part: {} for part in queries}
    for column, group_fn in group_fns.items():
        members = {
            part: [
                group_fn((text, label_id)) or ()
                for text, row in zip(texts, labels[part], strict=True)
                for label_id in row
            ]
            for part, texts in queries.items()
        }
        names = set().union(*(names for rows in members.values() for names in rows))  # of all parts
        for part, rows in members.items():
            groups[part][column] = groups_by_pair(rows, positives[part], names)
    return {
        part: Part(featurizer.featurize(texts), positives[part], groups[part], Strings.pack(texts))
        for part, texts in queries.items()
    }


def rows_of(lists: Sequence[Sequence[int]]) -> Rows:
    """Lists of ids as CSR rows."""
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Rows(offsets, np.array([item for items in lists for item in items], dtype=np.int32))
