"""A table becomes a data set: every format and split the same way, and what is wrong is named."""

import datetime
import gzip
import hashlib
import json
import lzma
from bz2 import compress as bzip2
from collections import defaultdict

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from evenhand.data import (
    TableOptions,
    featurizer_from,
    load_table,
    memberships,
    open_dataset,
    pairs_of,
)
from evenhand.data.table import prepare_table
from evenhand.defaults import fit_settings
from evenhand.errors import UserError

ROWS = {
    "query": ["Red  SHOE", "red shoe", "hat;cap, or", "ハット", 'a "b"\nc', "Hat 7"],
    "label": ["Shoes", "Shoes", "Hats", "Hats", "Other", "Hats"],
    "country": ["DE", "FR", "", "JP", "DE", "DE"],
}
EXPECTED = {
    ("red shoe", "Shoes", "DE"), ("red shoe", "Shoes", "FR"), ("hat;cap, or", "Hats", None),
    ("ハット", "Hats", "JP"), ('a "b" c', "Other", "DE"), ("hat 7", "Hats", "DE"),
}  # fmt: skip


def all_train(source, **options):
    return load_table(source, **{"test_fraction": 0.0, "validation_fraction": 0.0, **options})


def lines_of(dataset, part_name="train", column="country"):
    """(query, label, group) of every pair in every group of it; None: in none."""
    part = dataset.parts[part_name]
    pairs = pairs_of(part.positives)
    groups = defaultdict(list)
    if column in part.groups:
        places, ids = memberships(part.groups[column])
        if part.groups[column].sets is None:
            of_query = dict(zip(places.tolist(), ids.tolist(), strict=True))
            places = [n for n, query in enumerate(pairs.query_ids) if query in of_query]
            ids = [of_query[pairs.query_ids[n]] for n in places]
        for place, group in zip(places, ids, strict=True):
            groups[place].append(part.groups[column].names[group])
    return {
        (part.texts[query], dataset.label_name(label), group)
        for n, (query, label) in enumerate(zip(*pairs, strict=True))
        for group in groups[n] or [None]
    }


def csv_text(rows, delimiter=","):
    def quoted(cell):
        return '"' + cell.replace('"', '""') + '"' if set(cell) & set('";\t\n,') else cell

    lines = [rows, *zip(*rows.values(), strict=True)]
    return "".join(delimiter.join(map(quoted, line)) + "\n" for line in lines).encode()


def json_text(rows):
    cells = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in cells).encode()


def arrow_bytes(write_fn, rows=ROWS):
    sink = pa.BufferOutputStream()
    write_fn(pa.table(rows), sink)
    return sink.getvalue().to_pybytes()


def write_ipc(table, sink, kind=pa.ipc.new_file):
    with kind(sink, table.schema) as writer:
        writer.write_table(table)


def zstandard(data):
    return pa.compress(data, "zstd", asbytes=True)


PARQUET = arrow_bytes(pyarrow.parquet.write_table)
FILES = {
    "a.csv": csv_text(ROWS),
    "semicolons.csv": csv_text(ROWS, ";"),
    "a.tsv": csv_text(ROWS, "\t"),
    "mark.csv": b"\xef\xbb\xbf" + csv_text(ROWS),
    "returns.csv": csv_text(ROWS).replace(b"\n", b"\r"),
    "windows.csv": csv_text(ROWS).replace(b"\n", b"\r\n"),
    "a.csv.gz": gzip.compress(csv_text(ROWS)),
    "a.csv.xz": lzma.compress(csv_text(ROWS)),
    "a.tsv.bz2": bzip2(csv_text(ROWS, "\t")),
    "a.csv.zst": zstandard(csv_text(ROWS)),
    "a.jsonl": json_text(ROWS),
    "a.ndjson.gz": gzip.compress(json_text(ROWS)),
    "a.parquet": PARQUET,
    "a.parquet.zst": zstandard(PARQUET),
    "a.arrow": arrow_bytes(write_ipc),
    "stream.arrow": arrow_bytes(lambda table, sink: write_ipc(table, sink, pa.ipc.new_stream)),
    "a.feather": arrow_bytes(pyarrow.feather.write_feather),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_kind_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    dataset = all_train(tmp_path / name, groups="country")
    assert dataset.name == name.split(".")[0]
    assert lines_of(dataset) == EXPECTED
    assert list(dataset.label_names) == ["Hats", "Other", "Shoes"]
    assert dataset.label_counts().tolist() == [3, 1, 1]
    part = dataset.parts["train"]
    assert list(part.texts) == sorted(part.texts)
    expected = featurizer_from(dataset.featurizer).featurize(list(part.texts))
    assert part.features.ids.tolist() == expected.ids.tolist()
    assert part.features.offsets.tolist() == expected.offsets.tolist()


WITH_GAPS = {name: [cell or None for cell in cells] for name, cells in ROWS.items()}
FRAMES = {
    "pandas": pd.DataFrame({**WITH_GAPS, "odd": [1, "x", None, [], {}, 2.5]}),
    "pandas, NaN": pd.DataFrame({**ROWS, "country": ["DE", "FR", float("nan"), "JP", "DE", "DE"]}),
    "pandas, categories": pd.DataFrame(WITH_GAPS).astype("category"),
    "polars": pl.DataFrame(WITH_GAPS),
    "polars, categories": pl.DataFrame(WITH_GAPS).cast(pl.Categorical),
    "pyarrow": pa.table(WITH_GAPS),
    "pyarrow, views": pa.table({n: pa.array(c, pa.string_view()) for n, c in WITH_GAPS.items()}),
    "dict": WITH_GAPS,
    "dict of arrays": {name: np.array(cells) for name, cells in ROWS.items()},
    "empty words": {**ROWS, "country": ["DE", "FR", "NaN", "JP", "DE", "DE"]},
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_table_in_memory_is_read(kind):
    assert lines_of(all_train(FRAMES[kind], groups=["country"])) == EXPECTED


def test_a_folder_of_files_is_one_table_whose_folders_may_be_columns(tmp_path):
    for number, country in enumerate(["DE", "FR"]):
        folder = tmp_path / "table" / f"country={country}"
        folder.mkdir(parents=True)
        rows = {"query": [f"q {number}", "both"], "label": ["a", "b"]}
        (folder / "part-0.parquet").write_bytes(arrow_bytes(pyarrow.parquet.write_table, rows))
        (folder / "_metadata.parquet").write_bytes(b"none")
    assert lines_of(all_train(tmp_path / "table", groups=["country"])) == {
        ("q 0", "a", "DE"), ("q 1", "a", "FR"), ("both", "b", "DE"), ("both", "b", "FR"),
    }  # fmt: skip


def test_numbers_lists_and_several_columns_are_texts():
    table = {
        "title": ["Shoe", "hat", "cap"],
        "colour": ["red", None, "blue"],
        "words": [["a", "b"], ["c"], ["a"]],
        "id": [7, 8, 8],
        "year": [2001.0, 2001.5, None],
        "labels": [["x", "y", "x"], ["y"], ["z", None]],
        "joined": ["x|y|", "y", " z"],
    }
    first = all_train(table, query=["title", "colour", "words"], label="labels", groups="year")
    assert lines_of(first, column="year") == {
        ("shoe red a b", "x", "2001"), ("shoe red a b", "y", "2001"),
        ("hat c", "y", "2001.5"), ("cap blue a", "z", None),
    }  # fmt: skip
    again = all_train(table, query="title", label="joined", label_separator="|")
    assert {line[:2] for line in lines_of(again)} == {
        ("shoe", "x"), ("shoe", "y"), ("hat", "y"), ("cap", "z"),
    }  # fmt: skip
    assert list(all_train(table, query="words", label="id").label_names) == ["7", "8"]


def test_one_id_a_query_is_kept_only_where_it_says_all():
    cases = {
        (("hat", "A", "DE"), ("hat", "B", "DE"), ("hat", "B", ""), ("cap", "A", "")): True,
        (("hat", "A", "DE"), ("hat", "B", "")): False,
        (("hat", "A", "DE"), ("hat", "B", "FR")): False,
        (("hat", "A", "DE"), ("hat", "A", "FR"), ("cap", "B", "FR")): False,
    }
    for rows, is_enough in cases.items():
        table = dict(zip(("query", "label", "g"), zip(*rows, strict=True), strict=True))
        groups = all_train(table, groups=["g"]).parts["train"].groups["g"]
        assert (groups.sets is None) == is_enough, rows


def test_fields_of_objects_are_columns(tmp_path):
    """A field's name follows its object's; a text that looks like a date stays a text."""
    rows = [
        {"doc": {"title": title, "by": {"day": "2024-01-31"}}, "label": label, "other": {"a": 1}}
        for title, label in (("red shoe", "x"), ("hat", "y"))
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for source in (tmp_path / "a.jsonl", tmp_path / "a.parquet", pa.Table.from_pylist(rows)):
        dataset = all_train(source, query="doc.title", groups="doc.by.day")
        assert list(dataset.parts["train"].texts) == ["hat", "red shoe"]
        assert dataset.parts["train"].groups["doc.by.day"].names == ("2024-01-31",)
        with pytest.raises(UserError, match=r"no column 'doc'; the columns are 'doc.title'"):
            all_train(source, query="doc")


def test_vectors_come_from_a_column_or_a_file(tmp_path):
    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    vectors[3] = vectors[0]
    np.save(tmp_path / "v.npy", vectors)
    table = {"id": ["b", "a", "c", "b"], "label": ["x", "y", "x", "y"], "v": vectors.tolist()}
    for how in ("v", str(tmp_path / "v.npy")):
        for folder in (None, tmp_path / f"data {len(how)}"):
            dataset = all_train(table, query="id", vectors=how, folder=folder)
            part = dataset.parts["train"]
            assert list(part.texts) == ["a", "b", "c"]
            assert part.features.tolist() == vectors[[1, 0, 2]].tolist()
            assert part.positives.lengths().tolist() == [1, 2, 1]
        alone = all_train(table, vectors=how).parts["train"]  # who is alike is one query
        assert alone.texts is None
        assert sorted(alone.features.tolist()) == vectors[:3].tolist()
        assert sorted(alone.positives.lengths()) == [1, 1, 2]


def test_a_second_table_tells_names_texts_and_groups_of_labels(tmp_path):
    table = {"query": ["a", "b", "c", "d"], "label": [7, 8, 9, 10]}
    labels = {
        "id": [9, 8, 5, 7, None, None],
        "name": ["Hat", "Shoe", "Bag", "Hat", "", ""],
        "text": ["worn on the head", None, "", "of felt", "", ""],
        "colour": ["red", None, "blue", "green", "", ""],
    }
    notes = []
    dataset = all_train(table, labels=labels, folder=tmp_path / "data", note_fn=notes.append)
    assert list(dataset.label_names) == ["10", "Hat (7)", "Shoe", "Hat (9)"]
    assert list(dataset.label_texts) == ["", "of felt", "", "worn on the head"]
    groups = dataset.label_groups["colour"]
    assert [(*groups.names, None)[i] for i in groups.ids] == [None, "green", None, "red"]
    assert "describes 3 of the 4 labels, and 1 that no row has, which are left out" in notes[-1]
    for wrong, message in (
        ({"label": [7]}, "the table of labels: there is no column 'id'"),
        ({"id": ["7", " 7"]}, "the id '7' is on several rows; keep one"),
    ):
        with pytest.raises(UserError, match=message):
            all_train(table, labels=wrong)


def test_features_fit_the_texts_unless_they_are_given():
    words = np.array(
        ["red", "blue", "old", "new", "shoe", "hat", "bag", "for", "of", "with", "wool"]
    )
    places = np.random.default_rng(0).integers(len(words), size=(300, 6))
    sentences = [" ".join(row) for row in words[places]]
    names = [f"{a}{n} {b}{n}" for n, (a, b) in enumerate(words[places[:, :2]])]

    def chosen(queries, **options):
        table = {"query": queries, "label": [str(n % 7) for n in range(300)]}
        return all_train(table, **options)

    assert chosen(sentences).featurizer["kind"] == "words"
    assert chosen(sentences).num_features == 2**14  # of 300 sentences of 25 characters
    assert chosen(names).featurizer["kind"] == "ngrams"
    assert chosen(sentences, features="ngrams").featurizer["kind"] == "ngrams"
    assert chosen(sentences, max_length=3).featurizer["kind"] == "ngrams"
    assert chosen(names, max_words=1).featurizer["kind"] == "words"
    assert fit_settings({}, chosen(sentences))[0].data.weighting == "tf-idf"


# --- splits ---------------------------------------------------------------------------------------


def test_the_split_is_by_the_md5_of_the_query_and_groups_have_the_same_names():
    rows = {
        "query": [f"Query {i}" for i in range(300)],
        "label": [f"label {i % 7}" for i in range(300)],
        "g": [str(i % 50) for i in range(300)],
    }
    dataset = load_table(rows, test_fraction=0.25, validation_fraction=0.125, groups=["g"])
    expected = defaultdict(set)
    for i in range(300):
        eighth = int(hashlib.md5(f"query {i}".encode()).hexdigest(), 16) * 8 // 2**128
        name = "test" if eighth < 2 else "validation" if eighth < 3 else "train"
        expected[name].add((f"query {i}", f"label {i % 7}", str(i % 50)))
    assert {name: lines_of(dataset, name, "g") for name in dataset.parts} == expected
    for part in dataset.parts.values():
        assert part.groups["g"].names == tuple(sorted(map(str, range(50))))


LOG = {  # who, what, when; in no order
    "query": ["u1", "u2", "u1", "u1", "u2", "u3", "u1", "u4", "u4"],
    "label": ["c", "b", "a", "d", "a", "a", "b", "a", "b"],
    "when": [30, 21, 10, 40, 20, 5, 20, 50, 50],
    "who": ["1", "2", "1", "1", "2", "3", "1", "4", "4"],
    "part": ["test", "train", "train", "test", "Train", "train", "val", "train", "train"],
}


@pytest.mark.parametrize(
    ("options", "held_out"),
    [
        ({"split_time": "when", "test_fraction": 0.25}, {"test": ["u4a", "u4b"], "val": ["u1d"]}),
        ({"split_time": "when", "test_fraction": 0.1}, {"test": [], "val": ["u4a", "u4b"]}),
        (
            {"split_entity": "who", "split_time": "when"},
            {"test": ["u1d", "u2b", "u4b"], "val": ["u1c"]},
        ),
        ({"split_column": "part"}, {"test": ["u1c", "u1d"], "val": ["u1b"]}),
    ],
)
def test_rows_are_split_as_they_are_told_to_be(options, held_out):
    for when in (
        LOG["when"],
        [f"2024-01-01 00:00:{second:02}" for second in LOG["when"]],
        [f" {second}.5" for second in LOG["when"]],
        [datetime.datetime.fromtimestamp(second, tz=datetime.UTC) for second in LOG["when"]],
    ):
        dataset = load_table({**LOG, "when": when}, validation_fraction=0.12, **options)
        found = {
            name: sorted(query + label for query, label, _ in lines_of(dataset, name))
            for name in dataset.parts
        }
        every = {query + label for query, label in zip(LOG["query"], LOG["label"], strict=True)}
        assert found.get("test", []) == held_out["test"]
        assert found.get("validation", []) == held_out["val"]
        assert found["train"] == sorted(every.difference(*held_out.values()))


def test_separate_files_are_the_parts(tmp_path):
    def write(name, **rows):
        (tmp_path / name).write_bytes(arrow_bytes(pyarrow.parquet.write_table, rows))
        return tmp_path / name

    queries = [f"q {i}" for i in range(50)]
    train = write("train.parquet", query=queries, label=["a", "b"] * 25)
    test = write("test.parquet", query=["q 1", "new"], label=["a", "c"])
    dataset = load_table(train, test=test)
    assert list(dataset.label_names) == ["a", "b", "c"]
    assert set(dataset.parts["test"].texts) == {"q 1", "new"}
    others = [set(dataset.parts[name].texts) for name in ("train", "validation")]
    assert others[0] | others[1] == set(queries)
    assert not others[0] & others[1]
    wrong = write("wrong.parquet", query=["q", " "], label=["a", "b"])
    with pytest.raises(UserError, match="each of its 1 rows has an empty cell"):
        load_table({"query": [""], "label": ["a"]}, skip_missing=True)
    with pytest.raises(UserError, match=r"query: 1, the first in row 2 of .*wrong\.parquet; fill"):
        load_table(train, test=wrong)
    frame = pd.DataFrame({"query": ["q 1", "new"], "label": ["a", "c"]})
    assert set(load_table(train, test=frame).parts["test"].texts) == {"q 1", "new"}
    dataset = load_table(train, validation=test)
    assert set(dataset.parts["validation"].texts) == {"q 1", "new"}
    assert 0 < len(dataset.parts["test"]) < 25


# --- what is merged, left out, kept ---------------------------------------------------------------


def test_what_is_merged_and_left_out_is_counted(tmp_path):
    rows = {
        "query": ["a", "A", "a", "b", "", None, "c", "d"],
        "label": ["x", "x", "y", "y", "x", "y", " ", None],
        "g": ["1", "1", None, "2", "1", "1", "1", "1"],
    }
    notes = []
    with pytest.raises(
        UserError, match=r"the table: empty cells of query: 2, .*; empty cells of la"
    ):
        all_train(rows, groups="g", note_fn=notes.append)
    dataset = all_train(rows, groups="g", skip_missing=True, note_fn=notes.append)
    assert lines_of(dataset, column="g") == {("a", "x", "1"), ("a", "y", None), ("b", "y", "2")}
    assert notes == [
        "empty cells of query: 2, the first in row 5",
        "empty cells of label: 2, the first in row 7",
        "rows left out: 4 of 8",
        "rows: 4, (query, label) pairs in them: 4; merged, since another has "
        "the same query, label and groups: 1",
        "different queries: 2, with several pairs: 1; different pairs: 3, repeated: 1",
        "empty cells of g, in no group: 1",
        "features: n-grams of 1 to 4 characters, in 4,096 buckets",
    ]


def test_a_row_that_is_empty_in_every_query_column_is_left_out():
    rows = {"a": ["x", None, None, "y"], "b": [None, "z", None, "y"], "label": ["1", "2", "3", "4"]}
    with pytest.raises(UserError, match=r"empty cells of a \+ b: 1, the first in row 3"):
        all_train(rows, query=["a", "b"])
    dataset = all_train(rows, query=["a", "b"], skip_missing=True)
    assert list(dataset.parts["train"].texts) == ["x", "y y", "z"]


@pytest.mark.parametrize(("separator", "is_told"), [(" | ", True), (";", True), (" / ", False)])
def test_labels_that_look_like_several_are_told_how_to_split_them(separator, is_told):
    tags, notes = ["red", "blue", "old", "new", "big"], []
    pairs = [separator.join((one, other)) for one in tags for other in tags if one < other]
    rows = {"query": [f"q{n}" for n in range(len(pairs))], "label": pairs}
    all_train(rows, note_fn=notes.append)
    hint = f"--label-separator '{separator.strip()}'"
    assert any(hint in note for note in notes) == is_told
    all_train(rows | {"label": [f"['{pair}']" for pair in pairs]}, note_fn=notes.append)
    assert "look like lists written as text" in notes[-2]
    notes.clear()  # no hint where the parts are no fewer: a town and its state
    rows["label"] = [f"town {n}{separator}state {n}" for n in range(len(pairs))]
    all_train(rows, note_fn=notes.append)
    assert not any("--label-separator" in note for note in notes)


def test_users_as_queries_are_told_that_the_usual_split_tests_new_ones():
    rows = {"user": [f"u{n % 9}" for n in range(90)], "item": [f"i{n % 7}" for n in range(90)]}
    notes, columns = [], {"query": "user", "label": "item"}
    all_train(rows, **columns, note_fn=notes.append)
    assert any(note.startswith("note: 10 pairs a query") for note in notes)
    notes.clear()
    all_train(rows | {"time": range(90)}, **columns, split_time="time", note_fn=notes.append)
    rows["user"] = [f"user {name}" for name in rows["user"]]
    all_train(rows, **columns, note_fn=notes.append)
    assert not any("pairs a query" in note for note in notes)


def test_an_unchanged_table_is_converted_once(tmp_path):
    path, options = tmp_path / "pairs.csv", TableOptions(groups="country", test_fraction=0.0)
    path.write_bytes(csv_text(ROWS))
    notes = []

    def prepare(source, options):
        notes.clear()
        folder = prepare_table(source, options, root=tmp_path / "data", note_fn=notes.append)
        return folder, bool(notes)

    folder, is_new = prepare(path, options)
    assert is_new
    assert folder.name.startswith("pairs-")
    assert lines_of(open_dataset(folder)) <= EXPECTED
    assert prepare(str(path), options) == (folder, False)
    assert prepare(path, TableOptions(groups="country", test_fraction=0.1))[1]
    path.write_bytes(csv_text(ROWS) + b"more,Hats,DE\n")
    assert prepare(path, options)[1]
    folder, is_new = prepare(ROWS, options)
    assert is_new
    assert prepare(FRAMES["pandas"], options) != prepare(FRAMES["pandas"], options)
    assert prepare({name: list(cells) for name, cells in ROWS.items()}, options) == (folder, False)
    assert prepare({**ROWS, "query": ROWS["query"][::-1]}, options)[1]


# --- bad input ------------------------------------------------------------------------------------

LONG = b"query,label\na,b\n" + b"x" * 300_000 + b",c\n"
NESTED = arrow_bytes(pyarrow.parquet.write_table, {"query": [{"a": 1}], "label": ["b"]})
VECTORS = arrow_bytes(pyarrow.parquet.write_table, {"query": [[0.5]], "label": ["b"]})
TWICE = arrow_bytes(
    lambda table, sink: pyarrow.parquet.write_table(
        pa.Table.from_arrays([pa.array(["a"])] * 3, ["query", "query", "label"]), sink
    )
)
NO_ROWS = arrow_bytes(
    pyarrow.parquet.write_table, {"query": pa.array([], pa.string()), "label": pa.nulls(0)}
)
NOT_UTF8 = arrow_bytes(
    lambda table, sink: pyarrow.parquet.write_table(table, sink, use_dictionary=False),
    {"query": ["na\u00efve"] * 9, "label": ["b"] * 9},
).replace("\u00ef".encode(), b"\xefx")
BAD_FILES = [
    ("a.csv", b"", "is empty; its first line must name the columns"),
    ("a.csv", b"\n\n", "is empty"),
    ("a.csv", b"query,label\n", "has no row below its column names"),
    ("a.parquet", NO_ROWS, "has no row below its column names"),
    (
        "a.csv",
        b"querry,label\na,b\n",
        r"first line: there is no column 'query'; did you mean 'quer",
    ),
    ("a.csv", b"text,label\na,b\n", "no column 'query'; the columns are 'text', 'label'"),
    ("a.csv", b"query,query,label\na,b,c\n", "two columns are called 'query'; rename one"),
    ("a.parquet", TWICE, "two columns are called 'query'; rename one"),
    ("a.csv", b"query,label\na,b\n ,b\n", "empty cells of query: 1, the first in row 2; fill them"),
    ("a.csv", b"query,label\na,b\n\na, \n", "empty cells of label: 1, the first in row 2;.*--skip"),
    ("a.csv", b"query,label\na,b,c\n", "line 2: has 3 cells, the first line has 2; a cell that"),
    ("a.csv", b'query,label\n"a\nb",c\na\n', "line 4: has 1 cells"),
    ("a.csv", b'query,label\na,b\n"c,d\ne,f\n', "line 3: a quote opens in this row and never clos"),
    ("a.csv", b'query,label\na,b\nc,"d\ne,f\n', "line 3: a quote opens in this row and never clo"),
    ("a.csv", b"query,label\nna\xefve,b\n", "line 2: .* is not UTF-8 .* iconv -f latin1"),
    ("a.csv", b"qu\xe9ry,label\na,b\n", "line 1: .* is not UTF-8 text; save the file as UTF-8"),
    ("a.csv", "query,label\na,b\n".encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    ("a.csv", b"query,label\na,b\nc,b\n", "every row has the label 'b'; two or more are needed"),
    ("a.csv", b"query,label\na,b\n", "every row has the label 'b'"),
    ("a.csv", b"query,label\n" + b"x" * 2**24 + b",b\n", "a row has more than 8388608 bytes; is a"),
    ("a.jsonl", b"", "has no row below"),
    ("a.jsonl", b"[1]\n", "line 1: '.1.' is no JSON object; write one object a line"),
    ("a.jsonl", b'{"query": "a", "label": "b"}\n{"query\n', "line 2: .* is not JSON"),
    (
        "a.jsonl",
        b'{"query":"a","label":1}\n{"query":"b","label":"x"}\n',
        "line 2: 'label' is a text, and a number",
    ),
    (
        "a.jsonl",
        b'{"query":"a","label":"b"}\n{"query":"a","label":["b"]}\n',
        "line 2: 'label' is a l",
    ),
    (
        "a.jsonl",
        b'{"query":"a","label":%s}\n' % (b"[" * 9999 + b"]" * 9999),
        "line 1: .* no JSON ob",
    ),
    (
        "a.jsonl",
        b'{"query":1,"label":2}\n{"d":%s}\n' % (b'{"a":' * 50_000),
        "nested thousands of l",
    ),
    ("a.jsonl", b'{"query":"a","label":"b"}\n{"label":"%s"}\n' % (b"x" * 2**24), "line has more t"),
    ("a.csv", "query,label\n".encode("utf-16-le"), "holds NUL characters, so it is no UTF-8 text"),
    ("a.csv", b'"query,label\na",b\n', "first line does not name the columns; .* close each quote"),
    ("a.csv", b'query,label\na,"b\nc,d\ne,"f\ng,h\n', "line 4: .*quote the cell and double each"),
    ("a.csv", b"query,label\ra,b\rc\r", "line 3: has 1 cells, the first line has 2"),
    ("a.parquet", NOT_UTF8, "Invalid UTF8"),
    ("a.parquet", PARQUET[:-9], "cannot be read .* fetch or copy the file again"),
    ("a.parquet", PARQUET[:100], "cannot be read .* fetch or copy the file again"),
    ("a.parquet", NESTED, "there is no column 'query'; did you mean 'query.a'"),
    ("a.parquet", VECTORS, "column 'query' holds list<.*>; give a column of vectors as vectors"),
    ("a.arrow", b"ARROW1", "cannot be read"),
    ("a.csv.gz", gzip.compress(LONG)[:-20], "the archive is cut short; fetch or copy the file"),
    ("a.csv.zst", b"query", "cannot be read"),
    ("a.csv.gz", gzip.compress(b"\n" * 2**22), "is empty; its first line must name"),
    ("a.parquet.gz", gzip.compress(bytes(2**20)), "what is compressed is no Parquet"),
    ("a.zip", b"", r"is an archive; name a table in it, such as .*a\.zip/data\.csv"),
    ("a.xlsx", b"", r"a table must end in \.csv, \.tsv, \.jsonl, .*; rename or convert the file"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.\w+.*{message}"):
        all_train(tmp_path / name)


def test_a_long_field_is_no_error(tmp_path):
    (tmp_path / "a.csv").write_bytes(LONG)
    assert max(map(len, all_train(tmp_path / "a.csv").parts["train"].texts)) == 300_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ["county"]}, r"no column 'county'; did you mean 'country'\?"),
        ({"label": "query"}, "'query' is named as the query and as the label; name two columns"),
        ({"test_fraction": 1.0}, "test_fraction must be at least 0 and below 1, got 1.0"),
        ({"validation_fraction": -0.5}, "validation_fraction must be .* got -0.5"),
        ({"test_fraction": 0.9, "validation_fraction": 0.1}, "together must be below 1"),
        ({"test_fraction": 0.999999}, "none of its 5 queries fell into the training part"),
        ({"split_time": "country"}, "column 'country' does not tell the time; it must hold"),
        ({"split_column": "label"}, "column 'label' holds 'Hats'; it must say train, validation"),
        (
            {"split_column": "label", "split_time": "x"},
            "split in one way, got split_time or split_en",
        ),
        ({"vectors": "label"}, "column 'label' holds string; vectors must be lists of numbers"),
        ({"vectors": "none.npy"}, r"none\.npy is no \.npy file of vectors"),
        (
            {"querry": "x"},
            "a table has no option 'querry'; did you mean 'query'?",
        ),
        ({"features": "sounds"}, "features must be one of ngrams, words, got 'sounds'"),
        ({"max_words": 2, "features": "ngrams"}, "max_words is not for .* kind 'ngrams'"),
        ({"label_separator": ""}, "label_separator must not be empty"),
        *(({name: ""}, "name of a column must not be empty") for name in ("query", "split_time")),
        ({"groups": ["country", ""]}, "name of a column must not be empty"),
        ({"test": {"query": [], "label": []}}, "the table has no row below its column names"),
    ],
)
def test_options_that_do_not_fit_the_table_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        all_train(ROWS, **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.csv", r"missing\.csv does not exist; check the path"),
        ({"query": ["a"], "label": []}, "the table cannot be read"),
        (pd.DataFrame({"query": ["a", 1], "label": ["b", "c"]}), "make each column of one type"),
        (7, "a table must be a path, a pandas, polars or pyarrow table, .*, got int"),
        (None, "a table must be a path, .*, got NoneType"),
        (pd.Series(["a"]), "the table cannot be read"),
    ],
)
def test_what_is_no_table_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        all_train(source)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1, 2], [1]], "have from 1 to 2 numbers"),
        ([[1, 2]] * 2**16 + [[1, 2, 3]], "have from 2 to 3 numbers"),  # in another batch
        ([[]], "at least one"),
        ([["a"]], "column 'v' holds no numbers"),
        ([[1], [None]], "row 2: its vector holds NaN"),
        ([None] * 2**16 + [[1], [1e300]], "row 65538: its vector holds .* beyond 32 bits"),
    ],
)
def test_vectors_that_are_wrong_are_refused(vectors, message):
    rows = np.arange(len(vectors))
    table = {"query": rows, "label": rows % 2, "v": pa.array(vectors)}
    with pytest.raises(UserError, match=message):
        all_train(table, query="query", vectors="v", skip_missing=True)
