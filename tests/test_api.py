"""From a table to a report in Python: the runs of the command, and errors in one sentence."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import evenhand
import small
from evenhand.data import open_dataset, save_dataset

FEW = {
    "training.num_steps": 12,
    "mining.batch_size": 32,
    "model.embedding_dim": 8,
    "evaluation.num_resamples": 20,
    "evaluation.cutoffs": (1, 10),
}
COLUMNS = {"query": "title", "label": "town", "groups": ["style"]}


def cells():
    """The training texts of `small.text_dataset`, two of them said twice."""
    dataset = small.text_dataset()
    part = dataset.parts["train"]
    towns = [dataset.label_name(part.positives.ids[start]) for start in part.positives.offsets[:-1]]
    styles = [part.groups["style"].names[group] for group in part.groups["style"].ids]
    return {"title": list(part.texts), "town": towns, "style": styles}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two runs on one table, and the table."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pd.DataFrame(cells()).to_parquet("towns.parquet")
        for name, method in (("first", "snm"), ("second", "s2m-even")):
            evenhand.train(
                "towns.parquet", **COLUMNS, run=f"runs/{name}", method=method, settings=FEW,
                progress=False,
            )  # fmt: skip
    return folder


@pytest.fixture
def second(home, monkeypatch):
    monkeypatch.chdir(home)
    return evenhand.load("runs/second", progress=False)


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table, dict])
def test_a_table_in_memory_trains_the_model_that_its_file_trains(home, tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    runs = [
        evenhand.train(make(cells()), **COLUMNS, method="s2m-even", settings=FEW, progress=False)
        for _ in range(1 + (make is dict))
    ]
    assert [str(run.folder) for run in runs][:1] == ["runs/table-s2m-even-seed0"]
    assert make is not dict or str(runs[1].folder) == "runs/table-s2m-even-seed0-2"
    assert len(list(Path("datasets").iterdir())) == 1
    for run in runs:
        assert small.bytes_of(run.folder / "model/weights") == small.bytes_of(
            home / "runs/second/model/weights"
        )


def test_the_command_trains_on_a_table_as_python_does(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(home)
    values = [f"--set={name}={list(v) if name.endswith('offs') else v}" for name, v in FEW.items()]
    words = ["--query", "title", "--label=town", "--group", "style", "--run", tmp_path / "a"]
    answer = small.run_main(capsys, "train", "towns.parquet", *words, "--method=s2m-even", *values)
    assert "data set: datasets/towns-" in answer.output
    assert small.bytes_of(tmp_path / "a/model") == small.bytes_of(home / "runs/second/model")


def test_a_run_that_lies_elsewhere_still_searches(second, tmp_path, monkeypatch):
    town = second.searcher.label_names([3])[0]
    found = second.search([f"{town}ba", "ba"], 4)
    assert list(found) == ["query", "rank", "label", "score"]
    assert list(found["rank"]) == [1, 2, 3, 4] * 2
    scores = found["score"].to_numpy().reshape(2, 4)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    shutil.copytree(second.folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    copy = evenhand.load("copy", progress=False)
    for queries in (
        [f"{town}ba", "ba"],
        pd.Series([f"{town}ba", "ba"]),
        np.array([f"{town}ba", "ba"]),
    ):
        pd.testing.assert_frame_equal(copy.search(queries, 4), found)
    assert len(copy.search("ba", 4)) == 4
    vectors = copy.encode(["ba", f"{town}ba", "ba"])
    assert vectors.shape[0] == 3
    assert vectors.dtype == np.float32
    assert (vectors[0] == vectors[2]).all()


def test_scores_comparison_report_and_chart_say_the_same(second, home):
    scores = second.scores
    assert set(scores["metric"]) >= {"recall@1", "recall@10"}
    value = scores.query("metric == 'recall@10' and group == 'all'")["value"].item()
    compared = second.compare("runs/first")
    row = compared.table.query("metric == 'recall@10' and group == 'all'").iloc[0]
    assert row["contender"] == pytest.approx(value)
    assert row["difference"] == pytest.approx(row["contender"] - row["baseline"])
    assert row["low"] <= row["difference"] <= row["high"]
    page = second.report("runs/first", path="page.html").read_text("utf-8")
    chart = second.plot("runs/first")
    chart.save("chart.html")
    assert "second finds " in str(compared)
    assert str(compared) in page
    assert str(compared) in Path("chart.html").read_text("utf-8")
    assert "<iframe srcdoc=" in chart._repr_html_()
    assert second.plot().html.count("<h2") == 0
    assert second.report() == Path("runs/second/report.html")
    shown = second._repr_html_()
    assert f"{100 * value:.1f}" in shown
    assert "# rare labels count as they will at test" not in shown  # a given method has no reason
    assert "falls in a line to 0" in shown
    assert second.about["command"] == "in Python"
    assert repr(second) == "<evenhand.Run 'runs/second': s2m-even on towns>"
    assert set(second.evaluate("validation")["group"]) > {"all", "head"}


TABLE = {"title": ["a", None, "c d"], "town": ["x", "y", "x"], "style": ["p", "q", "p"]}
REFUSED = [
    (TABLE, {}, "empty cells of title: 1, the first in row 2.*skip_missing=True"),
    ({"title": ["a"], "town": ["x"]}, {"groups": ()}, "every row has the label 'x'"),
    (TABLE, {"label": "tawn"}, "no column 'tawn'; did you mean 'town'"),
    (TABLE, {"label": "title"}, "named as the query and as the label"),
    (TABLE, {"split_tiem": "day"}, "no option 'split_tiem'; did you mean 'split_time'"),
    (TABLE, {"settings": {"steps": 3}}, "section.key, such as training.num_steps, got 'steps'"),
    (TABLE, {"settings": {"training.num_step": 3}}, "did you mean 'num_steps'"),
    (TABLE, {"settings": "debian"}, "'debian' is no preset"),
    (TABLE, {"method": "s2m-evn"}, "did you mean 's2m-even'"),
    (TABLE, {"run": "."}, r". exists already; open it with evenhand.load\('.'\)"),
    ("none.parquet", {}, "none.parquet does not exist"),
    (3, {}, "int"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "options", "sentence"), REFUSED)
def test_bad_input_is_refused_in_one_sentence(tmp_path, monkeypatch, source, options, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(evenhand.UserError, match=sentence) as refused:
        evenhand.train(source, **COLUMNS | {"progress": False} | options)
    assert "\n" not in str(refused.value)
    assert not Path("runs").exists()


def test_labels_that_are_no_answer_are_left_out(second):
    first = second.search(["ba", "bo"], 3)["label"].tolist()
    found = second.search(["ba", "bo"], 2, without=[first[:1], []])
    assert found["label"].tolist() == [*first[1:3], *first[3:5]]
    assert found["rank"].tolist() == [1, 2, 1, 2]
    for without in ([["a"]], ["a", "b"]):
        with pytest.raises(evenhand.UserError, match="without must hold a list of labels for each"):
            second.search(["ba", "bo"], without=without)


def test_features_are_asked_for_by_their_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_dataset(small.dense_dataset(), Path("dense"))
    run = evenhand.train("dense", settings=FEW, progress=False)
    features = open_dataset(Path("dense")).parts["test"].features[:3]
    found = run.search(np.asarray(features), 2)
    assert found["query_id"].tolist() == ["0", "0", "1", "1", "2", "2"]
    assert run.encode(features).shape == (3, 8)


def test_the_page_of_the_api_lists_every_name_and_no_other():
    page = (Path(__file__).parent.parent / "docs/api.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)", page, re.M)
    assert sorted(listed) == sorted(set(evenhand.__all__) - {"__version__"})
