"""The section "Who is failed": whose slices, which figures, and that names stay text."""

import dataclasses
import re

import numpy as np
import pytest

from evenhand.data.dataset import Strings, pairs_of
from evenhand.evaluation import Outcome, score_table
from evenhand.report import write_report
from evenhand.report.slices import chance, slices_section
from evenhand.report.study import study_of
from evenhand.run_folder import RunResult
from small import text_dataset

EVIL = "<script>alert(1)</script>"


def result_of(dataset, name, is_missed):
    """A run that misses these of the test pairs and finds all others first."""
    part = dataset.parts["test"]
    pairs = pairs_of(part.positives)
    outcome = Outcome(
        query_ids=pairs.query_ids,
        label_ids=pairs.label_ids,
        ranks=np.where(is_missed, 0, 1).astype(np.int32),
        scores=np.zeros(len(is_missed), dtype=np.float32),
        retrieved_ids=np.zeros((len(part), 10), dtype=np.int32),
        retrieved_scores=np.zeros((len(part), 10), dtype=np.float32),
        query_metrics={"mrr": np.zeros(len(part), dtype=np.float32)},
        query_weights={},
        num_results=50,
        cutoffs=(1, 10),
    )
    scores = score_table(outcome, dataset, "test", num_resamples=5)
    return RunResult(name, {"name": name}, "", [], "test", scores, outcome)


@pytest.fixture(scope="module")
def dataset():
    """Region S has a name that would run, if it could; so have its labels and queries."""
    made = text_dataset()
    region = made.label_groups["region"]._replace(names=("N", "E", EVIL, "W"))
    test = made.parts["test"]
    texts = Strings.pack([f"{EVIL}{n}" for n in range(len(test))])
    return dataclasses.replace(
        made,
        label_groups={"region": region},
        label_names=Strings.pack([f"{EVIL}{n}" for n in range(made.num_labels)]),
        parts={**made.parts, "test": dataclasses.replace(test, texts=texts)},
    )


def is_south(dataset):
    return dataset.label_groups["region"].ids[dataset.parts["test"].positives.ids] == 2


def section_of(dataset, *misses):
    results = [result_of(dataset, f"run {n}", is_missed) for n, is_missed in enumerate(misses)]
    return slices_section(study_of(results, dataset)).text


def rows_of(html):
    """The text of the cells of every row."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, flags=re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_failed_are_named_with_their_figures(dataset):
    missed = is_south(dataset)
    html = section_of(dataset, missed)
    share, pairs = missed.mean(), int(missed.sum())
    head, everyone, failed = rows_of(html)[:3]
    assert [cell for n, cell in enumerate(head) if n != 1] == [
        "Slice", "recall@10, %", "pairs", "excess failures", "chance",
    ]  # fmt: skip
    assert everyone[2:4] == [f"{100 * (1 - share):.1f}", f"{len(missed)}"]
    excess = round(pairs - pairs * share)
    assert failed[2:] == ["0.0", f"{pairs}", f"{excess}", "at most 1 in 100"]
    assert f"{100 * share:.1f} % of the pairs and 100.0 % of its failures" in html


def test_other_runs_are_seen_in_the_slices_of_the_first(dataset):
    missed = is_south(dataset)
    half = missed & (np.arange(len(missed)) % 2 == 0)
    html = section_of(dataset, missed, half)
    share = 100 * (1 - half[missed].mean())
    assert rows_of(html)[2][2] == f"0.0 / {share:.1f}"


def test_names_and_queries_stay_text(dataset):
    html = section_of(dataset, is_south(dataset))
    assert EVIL not in html
    assert "region = &lt;script&gt;alert(1)" in html
    assert html.count("&lt;script&gt;") >= 1 + 2 * 3  # the slice, and three failures


def test_where_nothing_stands_out_one_sentence_says_so(dataset):
    nothing = np.zeros(len(is_south(dataset)), dtype=bool)
    html = section_of(dataset, nothing)
    assert "No slice is worse than chance explains" in html
    assert "<table" not in html


def test_the_page_holds_the_section_and_is_the_same_again(dataset, tmp_path):
    result = result_of(dataset, "run", is_south(dataset))
    pages = []
    for name in ("a.html", "b.html"):
        write_report([result], dataset, tmp_path / name)
        pages.append((tmp_path / name).read_text("utf-8"))
    assert pages[0] == pages[1]
    assert '<section id="slices"' in pages[0]
    assert '<a href="#slices">Who is failed</a>' in pages[0]


@pytest.mark.parametrize(
    ("p_value", "words"),
    [(0.01, "at most 1 in 100"), (0.0101, "at most 2 in 100"), (0.05, "at most 5 in 100")],
)
def test_a_p_value_is_told_in_words_and_never_rounded_down(p_value, words):
    assert chance(p_value) == words
