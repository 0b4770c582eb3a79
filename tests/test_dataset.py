"""Data sets in memory and on disk: saved whole or not at all, opened the same or refused."""

import dataclasses
import errno
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenhand.data import (
    Dataset,
    Groups,
    Part,
    Rows,
    Strings,
    count_unseen_labels,
    open_dataset,
    padded_rows,
    pairs_of,
    save_dataset,
    taken_rows,
)
from evenhand.data.dataset import ABOUT, _fingerprint, arrays_of
from evenhand.data.parts import rows_of
from evenhand.errors import UserError

lists_of_ids = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6)


def small_dataset() -> Dataset:
    sparse = Rows(
        np.array([0, 2, 2, 3]), np.array([4, 1, 0], dtype=np.int32), np.float32([0.5, 1, 2])
    )
    train = Part(
        sparse,
        rows_of([[0, 2], [], [1]]),
        {"a/b": Groups(np.array([0, -1, 1], dtype=np.int32), ("x", "ÿ"))},
        Strings.pack(["eins", "", "三"]),
    )
    test = Part(np.float32([[1, 2, 3, 4, 5]]), rows_of([[3, 2]]))
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
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {
            field.name: contents(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return value


def without_fingerprint(dataset):
    return contents(dataclasses.replace(dataset, fingerprint=""))


# --- in memory ----------------------------------------------------------------------------------


@given(lists_of_ids, st.data())
def test_taken_rows_are_those_rows_in_that_order(lists, data):
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=5))
    rows = rows_of(lists)
    rows = Rows(rows.offsets, rows.ids, rows.ids.astype(np.float32) / 2)
    taken = taken_rows(rows, np.array(chosen, dtype=np.int64))
    assert [taken.row(index).tolist() for index in range(len(taken))] == [lists[i] for i in chosen]
    assert taken.values.tolist() == [item / 2 for i in chosen for item in lists[i]]


@given(lists_of_ids, st.data())
def test_padded_rows_end_in_minus_one(lists, data):
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=5))
    width = data.draw(st.one_of(st.none(), st.integers(1, 6)))
    padded = padded_rows(rows_of(lists), np.array(chosen, dtype=np.int64), width=width)
    longest = width or max([1, *(len(lists[i]) for i in chosen)])
    assert padded.shape == (len(chosen), longest)
    assert padded.tolist() == [(lists[i] + [-1] * longest)[:longest] for i in chosen]


def taken_oracle(rows, row_ids):
    """Every entry by its place, as numpy finds it."""
    starts = rows.offsets[row_ids]
    lengths = rows.offsets[row_ids + 1] - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return offsets, rows.ids[places], None if rows.values is None else rows.values[places]


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_many_rows_from_disk_or_memory_are_those_that_numpy_takes(tmp_path, has_values, id_dtype):
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(0, 90, 3000))])
    ids = generator.integers(0, 10**9, offsets[-1]).astype(id_dtype)
    values = generator.random(offsets[-1], dtype=np.float32) if has_values else None
    np.save(tmp_path / "ids.npy", ids)
    for held in (ids, np.load(tmp_path / "ids.npy", mmap_mode="r")):
        rows = Rows(offsets, held, values)
        row_ids = generator.integers(0, 3000, 500)
        taken = taken_rows(rows, row_ids)
        for array, expected in zip(taken, taken_oracle(rows, row_ids), strict=True):
            assert (array is None) == (expected is None)
            if array is not None:
                assert array.dtype == expected.dtype
                assert np.array_equal(array, expected)
        padded = padded_rows(rows, row_ids)
        assert [row[row >= 0].tolist() for row in padded] == [rows.row(i).tolist() for i in row_ids]


@pytest.mark.parametrize(
    ("offsets", "num_values"), [([0, 3, 2], 3), ([0, 2, 9], 3), ([-1, 2, 3], 3), ([0, 1, 3], 2)]
)
def test_rows_that_reach_beyond_their_ids_are_refused(offsets, num_values):
    values = np.ones(num_values, dtype=np.float32)
    rows = Rows(np.array(offsets), np.arange(3, dtype=np.int32), values)
    for function in (taken_rows, padded_rows):
        with pytest.raises(UserError, match=r"row \d is said to go from .* damaged; make it again"):
            function(rows, np.array([0, 1]))


def test_padded_rows_are_cut_at_the_width():
    rows = rows_of([[1, 2, 3], [], [4, 5, 6]])
    padded = padded_rows(rows, np.arange(3), width=2)
    assert padded.tolist() == [[1, 2], [-1, -1], [4, 5]]


@given(lists_of_ids)
def test_pairs_are_each_query_with_each_of_its_positives(lists):
    query_ids, label_ids = pairs_of(rows_of(lists))
    expected = [(query, label) for query, labels in enumerate(lists) for label in labels]
    assert list(zip(query_ids.tolist(), label_ids.tolist(), strict=True)) == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6))
def test_packed_strings_are_the_strings_in_their_order(strings):
    packed = Strings.pack(strings)
    assert len(packed) == len(strings)
    assert list(packed) == strings
    assert [packed[index - len(strings)] for index in range(len(strings))] == strings
    with pytest.raises(IndexError):
        packed[len(strings)]


def test_labels_are_counted_over_training_pairs_and_unseen_ones_over_a_part():
    dataset = small_dataset()
    assert dataset.label_counts().tolist() == [1, 1, 1, 0]
    assert count_unseen_labels(dataset, "test") == 1
    assert count_unseen_labels(dataset, "train") == 0


def test_a_label_without_a_name_is_called_by_its_id():
    assert small_dataset().label_name(2) == "ç"
    assert dataclasses.replace(small_dataset(), label_names=None).label_name(2) == "label 2"


# --- on disk ------------------------------------------------------------------------------------


def test_a_saved_data_set_opens_the_same_here_and_in_another_folder(tmp_path):
    dataset = small_dataset()
    saved = save_dataset(dataset, tmp_path / "new" / "one")
    assert without_fingerprint(saved) == without_fingerprint(dataset)
    os.rename(tmp_path / "new" / "one", tmp_path / "two")
    assert contents(open_dataset(tmp_path / "two")) == contents(saved)
    assert isinstance(open_dataset(tmp_path / "two").parts["train"].features.ids, np.memmap)


def test_other_users_may_read_what_the_umask_lets_them(tmp_path):
    old_mask = os.umask(0o022)
    try:
        save_dataset(small_dataset(), tmp_path / "one")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o755


def test_the_fingerprint_is_of_the_content_and_not_of_name_or_place(tmp_path):
    dataset = small_dataset()
    one = save_dataset(dataset, tmp_path / "one").fingerprint
    assert _fingerprint(dataset, arrays_of(dataset)) == one
    renamed = dataclasses.replace(dataset, name="other")
    assert save_dataset(renamed, tmp_path / "two").fingerprint == one
    changes = {
        "num_labels": 9,
        "label_names": Strings.pack(["a", "b", "c", "d"]),
        "label_groups": {"kind": dataset.label_groups["kind"]._replace(names=("p", "r"))},
        "featurizer": None,
    }
    for field, value in changes.items():
        changed = dataclasses.replace(dataset, **{field: value})
        assert _fingerprint(changed, arrays_of(changed)) != one


def test_a_folder_that_exists_is_never_written_to(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(UserError, match="one exists already; choose another folder"):
        save_dataset(small_dataset(), tmp_path / "one")
    assert list((tmp_path / "one").iterdir()) == []


@pytest.mark.parametrize("place", ["numpy.save", "json.dump", "os.fsync", "os.rename", "os.mkdir"])
def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch, place):
    def no_space(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place, no_space)
        with pytest.raises(UserError, match=r"one could not be written \(No space left"):
            save_dataset(small_dataset(), tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("json.dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_dataset(small_dataset(), tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        save_dataset(small_dataset(), tmp_path / "file" / "one")


# --- damaged ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    save_dataset(small_dataset(), tmp_path / "one")
    return tmp_path / "one"


def change_about(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_without_dataset_json_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            UserError, match=r"is not an Evenhand data set: it holds no dataset.json"
        ):
            open_dataset(folder)


@pytest.mark.parametrize("text", ["", "{", "\xff", "[]", "3", '{"format": "other"}'])
def test_a_dataset_json_that_is_something_else_is_refused(folder, text):
    (folder / "dataset.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"dataset.json (is damaged|does not describe)"):
        open_dataset(folder)


@pytest.mark.parametrize("key", sorted(ABOUT))
def test_a_dataset_json_with_a_value_of_another_type_is_refused_by_key(folder, key):
    change_about(folder, **{key: 1.5})
    with pytest.raises(UserError, match=rf"dataset.json is damaged \('{key}' is 1.5\)"):
        open_dataset(folder)


def test_another_format_version_is_refused_with_both_numbers(folder):
    change_about(folder, version=99)
    with pytest.raises(
        UserError, match="version 99, this Evenhand reads 1 to 3; make the data set again"
    ):
        open_dataset(folder)


def test_each_missing_file_is_refused_by_name(folder):
    for path in sorted(folder.glob("*.npy")):
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError) as caught:
            open_dataset(folder)
        assert str(path) in str(caught.value)
        path.write_bytes(kept)
    open_dataset(folder)


def test_each_file_cut_short_is_refused_wherever_it_is_cut(folder):
    for path in sorted(folder.glob("*.npy")):
        kept = path.read_bytes()
        for length in (0, 5, 20, 127, len(kept) - 1):
            path.write_bytes(kept[:length])
            with pytest.raises(UserError, match=r"missing or damaged|holds"):
                open_dataset(folder)
        path.write_bytes(kept)


def test_an_array_of_another_shape_or_type_is_refused(folder):
    for array in (np.zeros(7, dtype=np.int32), np.zeros(3, dtype=np.int64)):
        np.save(folder / "train.features.ids.npy", array)
        with pytest.raises(UserError, match=r"features.ids.npy holds int.* of shape \[3\]; make"):
            open_dataset(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_changed_header_byte_is_refused_or_harmless(folder, data):
    path = folder / "train.features.ids.npy"
    kept = path.read_bytes()
    position, byte = data.draw(st.integers(0, 127)), data.draw(st.integers(0, 255))
    path.write_bytes(kept[:position] + bytes([byte]) + kept[position + 1 :])
    outcome = opened_or_refused(folder)
    path.write_bytes(kept)
    assert outcome in ("opened", "refused")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_dataset_json_with_a_wrong_or_missing_value_is_refused_or_harmless(folder, data):
    path = folder / "dataset.json"
    kept = path.read_text()
    about = json.loads(kept)
    holder = data.draw(st.sampled_from([about, about["arrays"], about["group_names"]]))
    key = data.draw(st.sampled_from(sorted(holder)))
    if data.draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = data.draw(st.sampled_from([None, 3, -1, "x", [], ["x"], {}, {"x": 1}, [0]]))
    path.write_text(json.dumps(about))
    outcome = opened_or_refused(folder)
    path.write_text(kept)
    assert outcome in ("opened", "refused")


def opened_or_refused(folder) -> str:
    try:
        open_dataset(folder)
    except UserError as error:
        return "refused" if str(folder) in str(error) else str(error)
    return "opened"


@pytest.mark.parametrize("column", ["..", "../../out", "/tmp/out", "a\\b", "a\x00b", "."])
def test_a_group_column_never_leaves_its_folder(tmp_path, column):
    groups = {column: Groups(np.zeros(2, np.int32), ("x",))}
    part = Part(
        Rows(np.arange(3), np.zeros(2, np.int32)), Rows(np.arange(3), np.zeros(2, np.int32))
    )
    dataset = Dataset("one", 1, 2, {"train": part}, label_groups=groups)
    assert list(save_dataset(dataset, tmp_path / "home/one").label_groups) == [column]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["one"]
    assert all(path.is_file() for path in (tmp_path / "home/one").iterdir())
