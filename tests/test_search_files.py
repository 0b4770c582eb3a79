"""`evenhand search` for other programs: queries from files and pipes, answers as files."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import small
from evenhand.cli import search as search_module
from evenhand.data import load_table, open_dataset, pairs_of, save_dataset
from small import run_main

QUERIES = ["badoki7", "marsaum, 12", '"welor"', "städte\tum"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = small.trained(tmp_path_factory)
    dataset = open_dataset(folder / "data")
    (folder / "queries.txt").write_text("\n\n".join(QUERIES) + "\n \n", "utf-8")
    ids = [f"q{number}" for number in range(len(QUERIES))]
    table = {"text": QUERIES, "query_id": ids, "ignored": range(len(QUERIES))}
    pa.parquet.write_table(pa.table(table), folder / "queries.parquet")
    part = dataset.parts["test"]
    pairs = pairs_of(part.positives)
    named = [(part.texts[query], dataset.label_name(label)) for query, label in zip(*pairs)]  # noqa: B905
    lines = [",".join(pair) for pair in named]
    (folder / "test.csv").write_text("query,label\n" + "\n".join(lines) + "\n", "utf-8")
    (folder / "asked.csv").write_text("text\n" + "\n".join(sorted(set(part.texts))) + "\n")
    return folder


@pytest.fixture
def ask(home, monkeypatch, capsys):
    """Runs `evenhand search` with a text on its standard input."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(search_module, "AT_ONCE", 3)

    def ask(*words, stdin=b""):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
            return run_main(capsys, "search", "runs/a", *words)

    return ask


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def read(path):
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path).to_pylist()
    if path.suffix in (".jsonl", ".txt"):
        return rows_of(path.read_text("utf-8"))
    delimiter = "\t" if path.suffix == ".tsv" else ","
    parse_options = pa.csv.ParseOptions(delimiter=delimiter)
    return pa.csv.read_csv(path, parse_options=parse_options).to_pylist()


def assert_same(found, expected):
    """But for the last digits of scores, which depend on how many queries are asked together."""
    scores = [[row["score"] for row in rows] for rows in (found, expected)]
    assert scores[0] == pytest.approx(scores[1])
    assert [row | {"score": 0} for row in found] == [row | {"score": 0} for row in expected]


def test_every_way_in_and_every_way_out_gives_the_same_answers(ask, tmp_path):
    words = ("--results", 2, "--json")
    expected = rows_of(ask(*QUERIES, *words).output)
    assert [row["query"] for row in expected] == [query for query in QUERIES for _ in range(2)]
    assert [row["rank"] for row in expected] == [1, 2] * len(QUERIES)
    assert expected[0].keys() == {"query", "rank", "label", "score"}
    answer = ask("--input", "queries.txt", *words)
    assert_same(rows_of(answer.out), expected)
    assert answer.err == f"evenhand: blank queries, left out: {len(QUERIES)}\n"
    lines = "\r\n".join(QUERIES).encode()
    for way in (["-"], ["--input", "-"], []):
        assert_same(rows_of(ask(*way, *words, stdin=lines).output), expected)
    with_ids = rows_of(ask("--input", "queries.parquet", "--query", "text", *words).output)
    assert [row.pop("query_id") for row in with_ids] == [f"q{n // 2}" for n in range(8)]
    assert_same(with_ids, expected)
    for name in ("found.jsonl", "found.csv", "found.tsv", "found.parquet"):
        path = tmp_path / name
        out = ask("--input", "queries.txt", "--results", 2, "--output", path).out
        assert f"{len(QUERIES)} queries answered: {path}" in out
        assert_same(read(path), expected)
    ask("--input", "queries.txt", "--results", 2, "--json", "--output", tmp_path / "lines.txt")
    assert_same(read(tmp_path / "lines.txt"), expected)


def test_the_columns_that_a_run_was_trained_on_are_taken_and_named(home, tmp_path, capsys):
    table = {"first": ["bado", "lu"], "second": ["ki7", None], "label": ["a", "b"]}
    dataset = load_table(table, query=["first", "second"], test_fraction=0, validation_fraction=0)
    saved = save_dataset(dataset, tmp_path / "data")
    run = shutil.copytree(home / "runs/a", tmp_path / "run")
    about = json.loads((run / "run.json").read_text("utf-8"))
    about["dataset"]["query_columns"] = list(saved.query_columns)
    (run / "run.json").write_text(json.dumps(about), "utf-8")
    pa.csv.write_csv(pa.table(table), tmp_path / "t.csv")
    words = ("search", run, "--input", tmp_path / "t.csv", "--results", 1, "--json")
    answer = run_main(capsys, *words)
    assert [row["query"] for row in rows_of(answer.output)] == ["bado ki7", "lu"]
    assert answer.err == f"evenhand: queries: first, second of {tmp_path}/t.csv, as in training\n"
    other = run_main(capsys, *words, "--query", "label")
    assert [row["query"] for row in rows_of(other.output)] == ["a", "b"]


def test_a_row_that_is_empty_in_every_column_does_not_shift_the_others(home, tmp_path, capsys):
    run = shutil.copytree(home / "runs/a", tmp_path / "run")
    about = json.loads((run / "run.json").read_text("utf-8"))
    about["dataset"]["query_columns"] = ["first", "second"]
    (run / "run.json").write_text(json.dumps(about), "utf-8")
    table = {"query_id": ["1", "2", "3"], "first": ["bado", None, "lu"], "second": [None, None, ""]}
    pa.parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    words = ("search", run, "--input", tmp_path / "t.parquet", "--results", 1, "--json")
    rows = rows_of(run_main(capsys, *words).output)
    assert [(row["query_id"], row["query"]) for row in rows] == [("1", "bado"), ("3", "lu")]


def test_labels_that_are_no_answer_are_left_out_and_the_next_move_up(ask, tmp_path):
    words = ("--input", tmp_path / "t.parquet", "--query", "text", "--results", 3, "--json")
    pa.parquet.write_table(pa.table({"text": QUERIES}), tmp_path / "t.parquet")
    found = rows_of(ask(*words, "--results", 5).output)
    answers = [[row["label"] for row in found if row["query"] == query] for query in QUERIES]
    for taken in (
        [[labels[0], labels[3], "unknown"][: n + 1] for n, labels in enumerate(answers)],
        [f"{labels[0]} | {labels[3]}" * (n != 1) for n, labels in enumerate(answers)],
    ):
        pa.parquet.write_table(pa.table({"text": QUERIES, "taken": taken}), tmp_path / "t.parquet")
        rows = rows_of(ask(*words, "--without", "taken").output)
        for labels, without, query in zip(answers, taken, QUERIES, strict=True):
            expected = [label for label in labels if label not in without][:3]
            of_query = [row for row in rows if row["query"] == query]
            assert [row["label"] for row in of_query] == expected
            assert [row["rank"] for row in of_query] == [1, 2, 3]


BAD = [  # words, standard input, what the sentence must hold
    ([], b"", ["standard input holds no query"]),
    (["-"], b"\n \n", ["standard input holds no query"]),
    (["-"], b"ba\n\xff\n", ["standard input, line 2", "UTF-8"]),
    ([" "], b"", ["more than white space"]),
    (["x", "--input", "queries.txt"], b"", ["as words or from --input", "queries.txt"]),
    (["--input", "none.txt"], b"", ["none.txt does not exist"]),
    (["--input", "queries.parquet"], b"", ["no column 'query'", "'text'", "--query"]),
    (["--input", "queries.txt", "--without", "taken"], b"", ["--without taken: only for a table"]),
    (["--input", "asked.csv", "--without", "taken"], b"", ["no column 'taken'", "'text'"]),
    (["--input", "queries.txt", "--output", "found.xlsx"], b"", [".parquet", "--json"]),
    (["--input", "queries.txt", "--output", "queries.txt/x.csv"], b"", ["queries.txt"]),
    (["--input", "asked.csv", "--output", "asked.csv"], b"", ["asked.csv is the file of the qu"]),
    (["--input", "queries.txt", "--output", ".", "--json"], b"", [". is a folder, not a file"]),
]


@pytest.mark.parametrize(("words", "stdin", "says"), BAD)
def test_wrong_words_are_answered_in_one_sentence(ask, words, stdin, says):
    ask(*words, stdin=stdin).says(*says)


def test_an_output_is_there_once_it_is_whole(ask, home, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"badoki\n" * 5 + b"\xff\n")
    path = tmp_path / "found.csv"
    assert "UTF-8" in ask("--input", tmp_path / "bad.txt", "--output", path).sentence
    assert sorted(tmp_path.iterdir()) == [tmp_path / "bad.txt"]


def test_a_terminal_is_asked_for_a_query(home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "name a query" in run_main(capsys, "search", home / "runs/a").sentence
