"""Data sets on disk: saved whole or not at all, opened the same or refused.

Any other change of a byte or a value: the targets dataset-json and dataset-array of tests/fuzz.
"""

import dataclasses
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.data import (
    Dataset,
    Groups,
    Part,
    Rows,
    Strings,
    open_dataset,
    save_dataset,
)
from evenhand.data.csr import rows_from_lists
from evenhand.data.dataset import ABOUT
from evenhand.errors import UserError


def small_dataset() -> Dataset:
    sparse = Rows(
        np.array([0, 2, 2, 3]), np.array([4, 1, 0], dtype=np.int32), np.float32([0.5, 1, 2])
    )
    train = Part(
        sparse,
        rows_from_lists([[0, 2], [], [1]]),
        {"a/b": Groups(np.array([0, -1, 1], dtype=np.int32), ("x", "ÿ"))},
        Strings.pack(["eins", "", "三"]),
    )
    test = Part(np.float32([[1, 2, 3, 4, 5]]), rows_from_lists([[3, 2]]))
    return Dataset(
        name="small",
        num_features=5,
        num_labels=4,
        parts={"train": train, "test": test},
        label_names=Strings.pack(["a", "b", "ç", "d"]),
        label_groups={"kind": Groups(np.array([0, 0, 1, 1], dtype=np.int32), ("p", "q"))},
        label_coordinates=np.zeros((4, 2), dtype=np.float32),
        featurizer={"kind": "ngrams"},
        attribution="by nobody",
    )


def contents(value):
    """Everything a data set holds, as something that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, Rows | Groups):
        return [contents(field) for field in tuple(value)]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    return value


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6))
def test_packed_strings_are_the_strings_in_their_order(strings):
    packed = Strings.pack(strings)
    assert len(packed) == len(strings)
    assert list(packed) == strings
    assert [packed[index - len(strings)] for index in range(len(strings))] == strings
    with pytest.raises(IndexError):
        packed[len(strings)]


def test_a_saved_data_set_opens_the_same_here_and_in_another_folder(tmp_path):
    dataset = small_dataset()
    old_mask = os.umask(0o022)
    try:
        saved = save_dataset(dataset, tmp_path / "new" / "one")
    finally:
        os.umask(old_mask)
    assert contents(dataclasses.replace(saved, fingerprint="")) == contents(dataset)
    os.rename(tmp_path / "new" / "one", tmp_path / "two")
    assert stat.S_IMODE((tmp_path / "two").stat().st_mode) == 0o755  # others may read it
    assert contents(open_dataset(tmp_path / "two")) == contents(saved)
    assert isinstance(open_dataset(tmp_path / "two").parts["train"].features.ids, np.memmap)
    with pytest.raises(UserError, match="two exists already; choose another folder"):
        save_dataset(dataset, tmp_path / "two")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        save_dataset(dataset, tmp_path / "file" / "one")


def test_the_fingerprint_is_of_the_content_and_the_same_in_every_version(tmp_path):
    dataset = small_dataset()
    one = save_dataset(dataset, tmp_path / "one").fingerprint
    # Fixed: where it changes, no run could be evaluated on the data set it was trained on.
    assert one == "86127364ca6da74c81fde0be146427c4610323d945729670652edd03c795b650"
    renamed = dataclasses.replace(dataset, name="other")
    assert save_dataset(renamed, tmp_path / "two").fingerprint == one
    changes = {
        "label_names": Strings.pack(["a", "b", "c", "d"]),
        "label_groups": {"kind": dataset.label_groups["kind"]._replace(names=("p", "r"))},
        "featurizer": None,
        "label_coordinates": None,
    }
    for field, value in changes.items():
        changed = dataclasses.replace(dataset, **{field: value})
        assert save_dataset(changed, tmp_path / field).fingerprint != one


@pytest.mark.parametrize("column", ["..", "../../out", "/tmp/out", "a\\b", "a\x00b", "."])
def test_a_group_column_never_leaves_its_folder(tmp_path, column):
    groups = {column: Groups(np.zeros(2, np.int32), ("x",))}
    part = Part(rows_from_lists([[0], [0]]), rows_from_lists([[0], [0]]))
    dataset = Dataset("one", 1, 2, {"train": part}, label_groups=groups)
    assert list(save_dataset(dataset, tmp_path / "home/one").label_groups) == [column]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["one"]
    assert all(path.is_file() for path in (tmp_path / "home/one").iterdir())


@pytest.fixture
def folder(tmp_path):
    save_dataset(small_dataset(), tmp_path / "one")
    return tmp_path / "one"


def assert_refused(folder, match):
    with pytest.raises(UserError, match=match) as caught:
        open_dataset(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dataset_json_that_is_something_else_or_not_there_is_refused(folder):
    for empty in (folder.parent, folder / "absent"):
        assert_refused(empty, r"is not an Evenhand data set: it holds no dataset.json")
    path = folder / "dataset.json"
    kept = json.loads(path.read_text())
    for text in ("", "{", "\xff", "[]", "3", '{"format": "other"}'):
        path.write_bytes(text.encode("latin-1"))
        assert_refused(folder, r"dataset.json (is damaged|does not describe)")
    path.write_text(json.dumps(kept | {"version": 99}))
    assert_refused(
        folder, "version 99, this Evenhand reads 1 to 3; remove .* and make the data set again"
    )
    for key in ABOUT:
        path.write_text(json.dumps(kept | {key: 1.5}))
        assert_refused(folder, rf"dataset.json is damaged \('{key}' is 1.5\)")
        path.write_text(json.dumps({name: kept[name] for name in kept if name != key}))
        assert_refused(folder, rf"dataset.json is damaged \('{key}' is missing\)")
