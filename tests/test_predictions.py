"""Predictions of other models: the same figures as a run's, and one sentence for what is wrong."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import small
from evenhand import evaluate_predictions
from evenhand.data import open_dataset, pairs_of
from evenhand.errors import UserError
from evenhand.evaluation import evaluate
from evenhand.predictions import (
    evaluate_columns,
    read_columns,
    sorted_ids,
    truth_of_tables,
)
from evenhand.run_folder import load_result
from evenhand.search import ExactIndex
from small import run_main


def dense(part):
    """Features of a part as another library takes them."""
    return np.asarray(part.features.to_scipy(512).todense(), dtype=np.float32)


def neighbours(dataset, part_name="test", num_results=10):
    """The other library: the labels of the nearest training queries, found with numpy alone."""
    train, part = dataset.parts["train"], dataset.parts[part_name]
    unit = [m / np.maximum(1e-9, np.linalg.norm(m, axis=1, keepdims=True))
            for m in (dense(train), dense(part))]  # fmt: skip
    similarities = unit[1] @ unit[0].T  # (Q, N)
    queries, labels, scores = [], [], []
    for query, row in enumerate(similarities):
        best: dict = {}
        for place in np.argsort(-row)[:20]:
            for label in train.positives.row(place):
                best[int(label)] = max(best.get(int(label), 0.0), float(row[place]))
        for label in sorted(best, key=best.get, reverse=True)[:num_results]:
            queries.append(query)
            labels.append(label)
            scores.append(best[label])
    return queries, labels, scores


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data set, a run on it, its truth as tables, and what the other library predicts."""
    folder = small.trained(tmp_path_factory, {"ours": []})
    dataset = open_dataset(folder / "data")
    for name in ("train", "test"):
        part = dataset.parts[name]
        pairs = pairs_of(part.positives)
        columns = {
            "query_id": [f"{name} {query}" for query in pairs.query_ids],
            "label_id": pairs.label_ids,
            "style": [part.groups["style"].names[i] for i in part.groups["style"].ids[pairs[0]]],
            "query": [part.texts[query] for query in pairs.query_ids],
        }
        pa.parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    queries, labels, scores = neighbours(dataset)
    lines = zip(queries, labels, scores, strict=True)
    rows = [{"query_id": f"test {q}", "label_id": l, "score": s} for q, l, s in lines]  # noqa: E741
    (folder / "theirs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_data = {"query_id": queries, "label_id": labels, "score": scores}
    pa.parquet.write_table(pa.table(of_data), folder / "by-number.parquet")
    return folder


@pytest.fixture
def user(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    return lambda *words: run_main(capsys, *words).output


# --- figures --------------------------------------------------------------------------------------


def test_our_own_results_handed_in_as_predictions_have_the_figures_of_our_search():
    """Ties, labels that nothing finds and queries without an answer included."""
    generator = np.random.default_rng(0)
    dataset = small.text_dataset()
    part, counts = dataset.parts["test"], dataset.label_counts()
    queries = generator.integers(0, 3, (len(part), 4)).astype(np.float32)  # many equal scores
    index = ExactIndex(small_tensor(generator.integers(0, 3, (small.NUM_LABELS, 4))))
    expected = evaluate(
        lambda rows: small_tensor(queries[rows]), index, part, counts, num_train_queries=420
    )
    found = index.search(small_tensor(queries), 50)
    rows, order = np.repeat(np.arange(len(part)), 50), generator.permutation(len(part) * 50)
    pairs, train = pairs_of(part.positives), pairs_of(dataset.parts["train"].positives)
    actual = evaluate_predictions(
        rows[order],
        found.label_ids.flatten().numpy()[order],
        found.scores.flatten().numpy()[order],
        truth=(pairs.query_ids, pairs.label_ids),
        train=(train.query_ids + 10**6, train.label_ids),
    ).outcome
    by_label = np.lexsort((pairs.label_ids, pairs.query_ids))
    np.testing.assert_array_equal(actual.ranks, expected.ranks[by_label])
    for name in ("retrieved_ids", "retrieved_scores"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), name)
    for name, values in expected.query_metrics.items():
        np.testing.assert_array_equal(actual.query_metrics[name], values, name)


def small_tensor(array):
    import torch

    return torch.from_numpy(np.asarray(array, dtype=np.float32))


def test_lists_may_be_short_absent_in_any_order_and_name_labels_that_are_unknown():
    found = evaluate_predictions(
        ["b", "b", "a", "a", "x", "a"],
        ["2", "30", "4", "?", "2", "3"],
        [0.5, 0.5, 0.1, 9.0, 1.0, 0.1],
        truth={"query_id": ["a", "a", "b", "c"], "label_id": [3, 4, 2, 1], "sex": list("ffm ")},
    )
    # a: ?, 3, 4 (a tie: the lower number); b: 2, 30 (unknown, and after 2); c: nothing
    assert found.outcome.ranks.tolist() == [2, 3, 1, 0]
    assert found.outcome.retrieved_ids[:, :3].tolist() == [[-1, 2, 3], [1, -1, -1], [-1] * 3]
    values = {(s.metric, s.group): s.value for s in found.scores if s.column in ("all", "sex")}
    assert values["recall@1", "all"] == 0.25
    assert values["recall@5", "f"] == values["recall@5", "m"] == 1
    assert [note.split(":")[0] for note in found.notes()] == [
        "queries without predictions",
        "predictions for queries that the truth lacks",
        "predictions of labels that the truth lacks",
        "the longest list has 3",
        "head, torso, tail and the popularity baseline are left out",
    ]
    assert found.notes()[0].startswith("queries without predictions: 1 of 3;")
    assert not [score for score in found.scores if score.column.startswith("frequency")]


def test_ids_are_ordered_as_numbers_and_then_as_texts():
    ids = ["10", "9", "b", "010", "-3", "9", "a", "99999999999999999999"]
    ordered = ["-3", "9", "10", "010", "99999999999999999999", "a", "b"]
    assert sorted_ids(pa.array(ids, pa.large_string())).to_pylist() == ordered


def test_tables_are_read_as_pandas_writes_them(tmp_path):
    """An index without a name, whole numbers that became floats, categories, other columns."""
    pandas = pytest.importorskip("pandas")
    predictions = pandas.DataFrame(GOOD | {"model": "m"})
    truth = pandas.DataFrame(TRUTH | {"country": ["DE", None]})
    expected = evaluate_predictions(*map(predictions.get, GOOD), truth=truth)
    floats = predictions.astype({"label_id": float})
    coded = predictions.astype({"query_id": "category", "label_id": "Int64"})
    files = [tmp_path / name for name in ("a.csv", "b.csv", "c.parquet", "d.parquet")]
    predictions.to_csv(files[0])
    floats.to_csv(files[1], index=False)
    floats.set_index(pandas.Index([4, 7, 9])).to_parquet(files[2])
    coded.set_index("query_id").to_parquet(files[3])
    truth.to_csv(tmp_path / "truth.csv")
    for file in files:
        known = truth_of_tables(tmp_path / "truth.csv")
        found = evaluate_columns(read_columns(file, "theirs"), known)
        assert found.outcome.ranks.tolist() == expected.outcome.ranks.tolist() == [1, 0]
        assert {score.column for score in found.scores} == {"all", "country"}


# --- the command ----------------------------------------------------------------------------------


def test_a_file_and_a_run_are_evaluated_on_the_same_data_and_compared(user, home):
    """By the numbers that queries and labels have in the data set of the run."""
    out = user("evaluate", "--predictions", "by-number.parquet", "--truth", "runs/ours",
               "--run", "runs/numbers")  # fmt: skip
    assert "queries without predictions: 0 of 120" in out
    assert "worst 3 region" in out
    ours, theirs = (load_result(home / "runs" / name) for name in ("ours", "numbers"))
    np.testing.assert_array_equal(theirs.outcome.label_ids, ours.outcome.label_ids)
    for first, last in (("ours", "numbers"), ("numbers", "ours")):
        out = user("compare", f"runs/{first}", f"runs/{last}")
        assert f"recall@10: {last} minus {first}" in out
        assert "│ head" in out
    user("report", "runs/ours", "runs/numbers", "--out", "both.html")
    again = user("evaluate", "--predictions", "by-number.parquet", "--truth", "data",
                 "--part", "validation", "--run", "runs/numbers")  # fmt: skip
    assert "pair recall on the validation part" in again


def test_another_library_is_evaluated_from_a_file_with_slices_and_certificate(user, home):
    words = ("evaluate", "--predictions", "theirs.jsonl", "--truth", "test.parquet")
    out = user(*words, "--train", "train.parquet")
    assert "report: runs/theirs/report.html" in out
    assert "│ head" in out
    page = (home / "runs/theirs/report.html").read_text("utf-8")
    assert "What is guaranteed" in page
    assert "popularity" in page
    out = user("slices", "runs/theirs", "--permutations", 19)
    assert "slices of at least 30 pairs" in out
    assert (home / "runs/theirs/evaluation/test/slices.json").exists()
    out = user(*words, "--run", "runs/untrained")
    assert "head, torso, tail and the popularity baseline are left out" in out
    assert "│ head" not in out
    user("compare", "runs/untrained", "runs/untrained")


# --- bad input ------------------------------------------------------------------------------------

GOOD = {"query_id": ["a", "a", "b"], "label_id": [1, 2, 1], "score": [0.9, 0.1, 0.5]}
TRUTH = {"query_id": ["a", "b"], "label_id": [1, 2]}
BAD = [  # what is changed of the predictions, of the truth, what the sentence must hold
    ({"score": [0.9, float("nan"), 0.5]}, {}, ["row 2", "score nan cannot be ranked"]),
    ({"score": [0.9, None, 0.5]}, {}, ["row 2", "score"]),
    ({"score": ["1", "high", "2"]}, {}, ["'score' must hold numbers", "high"]),
    ({"score": None}, {}, ["no column 'score'", "add one"]),
    ({"score": None, "Score": [1, 2, 3]}, {}, ["no column 'score'", "'Score'; rename one"]),
    ({"label_id": [1, 1, 1]}, {}, ["'a'", "'1'", "more than once", "one score for each pair"]),
    ({"label_id": [1, None, 1]}, {}, ["row 2", "label_id is empty"]),
    ({"label_id": [1.5, 2.0, 1.0]}, {}, ["'label_id' holds double", "whole numbers"]),
    ({"label_id": [[1], [2], [1]]}, {}, ["'label_id' holds list", "whole numbers"]),
    ({"query_id": ["a", "", "b"]}, {}, ["row 2", "query_id is empty"]),
    ({"query_id": None}, {}, ["no column 'query_id', nor 'query'", "'label_id', 'score'"]),
    ({"score": [0.9, float("inf"), 0.5]}, {}, ["row 2", "inf"]),
    ({"score": [0.9, -1e39, 0.5]}, {}, ["row 2", "-1e+39", "below 3e38"]),
    ({"query_id": list("xyz")}, {}, ["no query", "'x'", "'a'", "same ids"]),
    ({"label_id": [7, 8, 9]}, {}, ["no label", "'7'", "'1'", "same ids"]),
    ({"query_id": None, "query": list("aab")}, {}, ["column 'query'", "'query_id'", "same column"]),
    ({name: [] for name in GOOD}, {}, ["no rows"]),
    ({}, {"label_id": None}, ["truth", "no column 'label_id', nor 'label'"]),
    ({}, {name: [] for name in TRUTH}, ["truth", "no rows"]),
    ({}, {"label_id": [1, None]}, ["truth", "row 2", "label_id is empty"]),
    ({}, {"where": [[1], [2]]}, ["'where' holds list", "texts or numbers"]),
]  # fmt: skip


def write(path, columns, changes):
    table = {name: values for name, values in (columns | changes).items() if values is not None}
    pa.parquet.write_table(pa.table(table), path)
    return path


@pytest.mark.parametrize(("changes", "of_truth", "says"), BAD, ids=lambda _: "")
def test_bad_predictions_are_answered_in_one_sentence(tmp_path, capsys, changes, of_truth, says):
    predictions = write(tmp_path / "p.parquet", GOOD, changes)
    truth = write(tmp_path / "truth.parquet", TRUTH, of_truth)
    out = tmp_path / "out"
    words = ("evaluate", "--predictions", predictions, "--truth", truth, "--run", out)
    run_main(capsys, *words).says(*says)
    assert not out.exists()


WORDS = [  # words, what the sentence must hold
    ("evaluate", ["name the folder of a run; or --predictions, and --truth"]),
    ("evaluate --predictions theirs.jsonl", ["--truth for their right", "got --predictions"]),
    ("evaluate runs/ours --predictions a --truth b", ["a run, or --predictions", "runs/ours"]),
    ("evaluate --run runs/new", ["--predictions", "got --run"]),
    ("evaluate --predictions none.csv --truth test.parquet", ["none.csv does not exist"]),
    ("evaluate --predictions theirs.jsonl --truth test.parquet --part train", ["--part train"]),
    (
        "evaluate --predictions by-number.parquet --truth data --train train.parquet",
        ["--train out"],
    ),
    ("evaluate --predictions by-number.parquet --truth data --run runs/ours", ["exists already"]),
    ("evaluate --predictions x.txt --truth test.parquet", ["x.txt", "must end in"]),
]


@pytest.mark.parametrize(("words", "says"), WORDS)
def test_wrong_words_are_answered_in_one_sentence(home, capsys, monkeypatch, words, says):
    monkeypatch.chdir(home)
    run_main(capsys, *words.split()).says(*says)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_ids": [1, 2]}, "must be of one length"),
        ({"scores": None}, "score cannot be read"),
        ({"query_ids": [["a"]]}, "'query_id' holds list"),
        ({"query_ids": np.zeros((1, 1))}, "query_id cannot be read"),
        ({"truth": (["a", "b"], [1, 2]), "groups": {"kind": ["x"]}}, "must be of one length"),
        ({"groups": {"kind": ["x", "y"]}}, "a table has its own"),
        ({"truth": (["a"],)}, r"truth must be a table or a tuple \(query_ids, label_ids\)"),
        ({"train": [1, 2]}, "train must be a table or a tuple"),
        ({"truth": 5}, "a table must be a path"),
        ({"cutoffs": []}, "cutoffs must lie between 1 and"),
    ],
)
def test_arrays_that_do_not_fit_are_a_wrong_call(changes, message):
    call = {"query_ids": ["a"], "label_ids": [1], "scores": [0.5], "truth": TRUTH, **changes}
    with pytest.raises((ValueError, UserError), match=message):
        evaluate_predictions(**call)
