"""What is told of a data set before training, against loops over its pairs."""

from collections import Counter

import numpy as np
import pytest

from evenhand.data import Dataset, Part, load_table, save_dataset
from evenhand.data.csr import rows_from_lists
from evenhand.data.overview import (
    find_repeats,
    group_sizes,
    label_frequencies,
)
from evenhand.result_tables import unseen_notes
from small import run_main


def rows_of(kind, lists):
    """Features that are the same for the same list."""
    if kind == "dense":
        return np.array([[*row, *[0] * (3 - len(row))] for row in lists], dtype=np.float32)
    rows = rows_from_lists(lists)
    return rows.with_values(rows.ids.astype(np.float32)) if kind == "values" else rows


@pytest.mark.parametrize("kind", ["dense", "ids", "values"])
def test_repeats_and_leaks_are_found_by_features(kind):
    def part(queries, positives):
        return Part(rows_of(kind, queries), rows_from_lists(positives))

    dataset = Dataset("d", 9, 5, {
        "train": part([[1], [2, 3], [1], [4]], [[0], [1, 2], [3], [0]]),
        "test": part([[2, 3], [1], [5], [3, 2]], [[2, 4], [4], [0], [1]]),
    })  # fmt: skip
    assert [tuple(row) for row in find_repeats(dataset)] == [
        ("train", 1, 0, 0),
        ("test", 0, 2, 1),  # [2, 3] and [1]; the label 2 of the first
    ]


LOG = {
    "query": [f"user {n % 7}" for n in range(60)],
    "label": [f"item {n * n % 11}" for n in range(60)],
    "when": list(range(60)),
    "device": [("phone", "desk", "")[n % 3] for n in range(60)],
}
ITEMS = {"id": [f"item {n}" for n in range(11)], "colour": ["red", "blue", None] * 3 + ["red"] * 2}


def test_a_log_that_is_split_by_time_repeats_queries_and_its_groups_are_counted(capsys, tmp_path):
    dataset = load_table(LOG, split_time="when", groups="device", labels=ITEMS)
    lines = list(zip(LOG["query"], LOG["label"], LOG["device"], strict=True))
    parts = {"train": lines[:42], "validation": lines[42:48], "test": lines[48:]}
    trained = {line[:2] for line in parts["train"]}
    for row in find_repeats(dataset):
        pairs = {line[:2] for line in parts[row.part]}
        assert row.within == 0
        if row.part != "train":
            assert row.queries_in_train == len({query for query, _ in pairs})
            assert row.pairs_in_train == len(pairs & trained)
            told = f"note: {len(pairs & trained)} of the {len(pairs)} {row.part} pairs are in the"
            assert any(note.startswith(told) for note in unseen_notes(dataset)) == bool(
                pairs & trained
            )
    counts = Counter(label for _, label in trained)
    bins = Counter(
        "0" if not n else f"{n}" if n <= 2 else "3-4" if n <= 4 else "5-8"
        for n in (counts[name] for name in dataset.label_names)
    )
    assert {row.counts: row.num_labels for row in label_frequencies(dataset)} == bins
    assert sum(row.num_pairs for row in label_frequencies(dataset)) == len(trained)
    device, colour = group_sizes(dataset)
    expected = Counter(group for *_, group in set(parts["train"]) if group)
    assert dict(device.largest) == expected
    assert [count for _, count in device.largest] == sorted(expected.values(), reverse=True)
    colours = dict(zip(ITEMS["id"], ITEMS["colour"], strict=True))
    by_colour = Counter(colours[label] for _, label in trained)
    assert colour.num_without == by_colour.pop(None)
    assert dict(colour.largest) == by_colour
    save_dataset(dataset, tmp_path / "log")
    shown = run_main(capsys, "data", "show", tmp_path / "log").out
    assert "what to expect of mining: a gain for small groups" in shown
    assert "desk" in shown
