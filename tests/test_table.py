"""A table of pairs becomes a data set; what is wrong with it is named by file, line and column."""

import gzip
import hashlib
from collections import defaultdict
from pathlib import Path

import pytest

from evenhand.data import featurizer_from, load_table, memberships
from evenhand.errors import UserError


def table(tmp_path, text, name="pairs.csv") -> Path:
    path, data = tmp_path / name, text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def all_train(path, **settings):
    return load_table(path, test_fraction=0.0, validation_fraction=0.0, **settings)


def pairs_by_name(dataset):
    """part -> query -> the names of its labels."""
    return {
        part_name: {
            text: {dataset.label_name(label) for label in part.positives.row(index)}
            for index, text in enumerate(part.texts)
        }
        for part_name, part in dataset.parts.items()
    }


def groups_by_query(part, column):
    names = (*part.groups[column].names, None)  # -1 is the last
    return {text: names[part.groups[column].ids[index]] for index, text in enumerate(part.texts)}


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.tsv", "pairs.csv.gz", "pairs.tsv.gz"])
def test_a_table_is_read_as_csv_or_tsv_plain_or_compressed(tmp_path, name):
    text = 'query,label\nred shoe,Shoes\n"a\tb, c",Other\n'
    if ".tsv" in name:
        text = 'query\tlabel\nred shoe\tShoes\n"a\tb, c"\tOther\n'
    dataset = all_train(table(tmp_path, text, name))
    assert dataset.name == "pairs"
    assert list(dataset.label_names) == ["Other", "Shoes"]
    assert pairs_by_name(dataset) == {"train": {"red shoe": {"Shoes"}, "a b, c": {"Other"}}}


def test_lines_with_the_same_query_merge_their_labels(tmp_path):
    text = "label,query\nB,  Red SHOE \nA,red shoe\nB,red  shoe\nC,hat\n"
    dataset = all_train(table(tmp_path, text))
    assert pairs_by_name(dataset) == {"train": {"red shoe": {"A", "B"}, "hat": {"C"}}}
    assert dataset.label_counts().tolist() == [1, 1, 1]
    part = dataset.parts["train"]
    expected = featurizer_from(dataset.featurizer).featurize(list(part.texts))
    assert part.features.ids.tolist() == expected.ids.tolist()


def test_a_pair_is_in_the_groups_of_all_its_lines_and_an_empty_cell_is_none(tmp_path):
    text = (
        "query,label,country,age\nhat,A,,\nhat,B,FR,\nhat,B,DE,\nhat,C,FR,\nhat,C,,\nshoe,A,FR,\n"
    )
    dataset = all_train(table(tmp_path, text), group_columns=["country", "age"])
    part = dataset.parts["train"]
    countries = part.groups["country"]
    pair_ids, group_ids = memberships(countries)
    found = [
        (pair, countries.names[group]) for pair, group in zip(pair_ids, group_ids, strict=True)
    ]
    assert found == [(1, "DE"), (1, "FR"), (2, "FR"), (3, "FR")]  # hat A, hat B, hat C, shoe A
    assert groups_by_query(part, "age") == {"hat": None, "shoe": None}


def test_one_id_a_query_is_kept_only_where_it_says_all(tmp_path):
    cases = {
        "hat,A,DE\nhat,B,DE\nhat,B,\ncap,A,\n": True,
        "hat,A,DE\nhat,B,\n": False,
        "hat,A,DE\nhat,B,FR\n": False,
        "hat,A,DE\nhat,A,FR\n": False,
    }
    for lines, is_enough in cases.items():
        dataset = all_train(table(tmp_path, f"query,label,g\n{lines}"), group_columns=["g"])
        assert (dataset.parts["train"].groups["g"].sets is None) == is_enough, lines


def test_the_split_is_by_the_md5_of_the_query_and_groups_have_the_same_names(tmp_path):
    text = "query,label,g\n" + "".join(f"Query {i},label {i % 7},{i % 50}\n" for i in range(300))
    settings = {"test_fraction": 0.25, "validation_fraction": 0.125, "group_columns": ["g"]}
    dataset = load_table(table(tmp_path, text), **settings)
    expected = defaultdict(set)
    for i in range(300):
        eighth = int(hashlib.md5(f"query {i}".encode()).hexdigest(), 16) * 8 // 2**128
        name = "test" if eighth < 2 else "validation" if eighth < 3 else "train"
        expected[name].add(f"query {i}")
    assert {name: set(part.texts) for name, part in dataset.parts.items()} == expected
    for part in dataset.parts.values():
        assert part.groups["g"].names == tuple(sorted(map(str, range(50))))
        groups = {text: str(int(text.split()[1]) % 50) for text in part.texts}
        assert groups_by_query(part, "g") == groups


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is empty; its first line must name the columns"),
        ("\n\n", r"is empty"),
        ("query,label\n", r"has no line below its column names"),
        ("querry,label\na,b\n", r"line 1: there is no column 'query'; did you mean 'querry'\?"),
        ("text,label\na,b\n", r"no column 'query'; the columns are 'text', 'label'"),
        ("query,query,label\na,b,c\n", r"line 1: two columns are called 'query'"),
        ("query,label\na,b\n ,b\n", r"line 3: column 'query' is empty; fill it or remove"),
        ("query,label\na,b\n\na, \n", r"line 4: column 'label' is empty"),
        ("query,label\na,b,c\n", r"line 2: has 3 cells, the first line has 2"),
        ("query,label\na\n", r"line 2: has 1 cells"),
        ('query,label\n"a"x,b\n', r"line 2: .*double each quote"),
        ('query,label\na,b\n"c,d\ne,f\n', r"line 4: unexpected end of data"),
        (b"query,label\nna\xefve,b\n", r"line 2: .* is not UTF-8 text; save"),
    ],
)
def test_a_wrong_table_is_refused_by_file_line_and_column(tmp_path, text, message):
    with pytest.raises(UserError, match=rf"pairs\.csv.*{message}"):
        all_train(table(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a.csv", {"group_columns": ["county"]}, r"no column 'county'; did you mean 'country'\?"),
        ("pairs.xlsx", {}, r"pairs\.xlsx: the ending must be \.csv or \.tsv"),
        ("pairs.csv", {}, r"pairs\.csv does not exist"),
        ("a.csv", {"test_fraction": 1.0}, "test_fraction must be at least 0 and below 1, got 1.0"),
        ("a.csv", {"validation_fraction": -0.5}, "validation_fraction must be .* got -0.5"),
        ("a.csv", {"test_fraction": 0.9}, "together must be below 1"),
        ("a.csv", {"test_fraction": 0.89}, "none of its 1 queries fell into the training part"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(tmp_path, name, settings, message):
    table(tmp_path, "query,label,country\na,b,DE\n", "a.csv")
    with pytest.raises(UserError, match=message):
        load_table(tmp_path / name, **{"validation_fraction": 0.1, **settings})
