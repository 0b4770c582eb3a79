import dataclasses
import html.parser
import math
import re
import types

import numpy as np
import pytest

from evenhand.data.dataset import Dataset, Groups, Part, Rows, Strings, pairs_of
from evenhand.errors import UserError
from evenhand.evaluation import Outcome, Score, score_table
from evenhand.report import write_report
from evenhand.report.charts import Line, line_chart
from evenhand.report.curves import _recalls
from evenhand.report.examples import _gaps, _is_right, _largest
from evenhand.report.maps import _change_classes, _dots, _paths, _recall_classes
from evenhand.report.markup import Html, element, interval, listed, percent, user_text
from evenhand.report.study import study_of
from evenhand.report.tables import _members
from evenhand.report.verdict import comparison, verdict
from evenhand.run_folder import RunResult

NUM_LABELS = 60
SCRIPTS = ("LATIN", "THAI", "GREEK", "ARABIC", "LAO", "NOBODY")
EVIL = '<script>alert("x")</script>'
ATTRIBUTION = "Place names: GeoNames (geonames.org), licensed under CC BY 4.0."
VOID = {"meta", "input"}


def rows_of(lists):
    offsets = np.cumsum([0, *map(len, lists)])
    return Rows(offsets, np.array([i for row in lists for i in row], dtype=np.int32))


def part_of(lists, groups=None, texts=None):
    return Part(np.zeros((len(lists), 1), dtype=np.float32), rows_of(lists), groups or {}, texts)


@pytest.fixture(scope="module")
def dataset():
    """400 queries, some without a positive; LAO has too few to be judged and NOBODY none."""
    generator = np.random.default_rng(0)
    train = [[label] for label in range(NUM_LABELS) for _ in range(1 + label % 7)]
    sizes = generator.choice([0, 1, 1, 1, 2], size=400)
    test = [generator.choice(NUM_LABELS, size=size, replace=False).tolist() for size in sizes]
    scripts = generator.choice([0, 0, 0, 1, 2, 3], size=400).astype(np.int32)
    scripts[:5] = 4
    texts = [f"{EVIL} & {n}" if n % 2 else f"مدينة {n}" for n in range(400)]
    countries = (np.arange(NUM_LABELS) % 45).astype(np.int32)
    places = np.stack([np.linspace(-50, 70, NUM_LABELS), np.linspace(-170, 170, NUM_LABELS)], 1)
    return Dataset(
        "places <b>",
        1,
        NUM_LABELS,
        {
            "train": part_of(train),
            "test": part_of(test, {"script": Groups(scripts, SCRIPTS)}, Strings.pack(texts)),
        },
        label_names=Strings.pack([f"City <i>{n}" for n in range(NUM_LABELS)]),
        label_groups={"country": Groups(countries, tuple(f"Land {n}" for n in range(45)))},
        label_coordinates=places.astype(np.float32),
        attribution=ATTRIBUTION,
    )


def outcome_of(dataset, *, seed=0, share=0.6):
    """THAI is found half as often as the other scripts."""
    part, generator = dataset.parts["test"], np.random.default_rng(seed)
    pairs = pairs_of(part.positives)
    num_pairs, num_queries = len(pairs.label_ids), len(part)
    shares = np.full(num_pairs, share)
    if "script" in part.groups:
        shares[part.groups["script"].ids[pairs.query_ids] == 1] /= 2
    ranks = np.where(
        generator.random(num_pairs) < shares, generator.integers(1, 11, num_pairs), 0
    ).astype(np.int32)
    return Outcome(
        query_ids=pairs.query_ids,
        label_ids=pairs.label_ids,
        ranks=ranks,
        scores=generator.normal(size=num_pairs).astype(np.float32),
        retrieved_ids=generator.integers(-1, NUM_LABELS, (num_queries, 10)).astype(np.int32),
        retrieved_scores=generator.normal(1, 1, (num_queries, 10)).astype(np.float32),
        query_metrics={"mrr": np.zeros(num_queries, dtype=np.float32)},
        query_weights={},
        num_results=50,
        cutoffs=(1, 10, 50),
    )


def result_of(dataset, name="snm", **changes):
    outcome = outcome_of(dataset, seed=len(name), share=changes.pop("share", 0.6))
    metrics = [
        {"step": s, "loss": 1 / s, "zero_loss_share": 0.1, "learning_rate": 0.1} for s in (1, 2, 3)
    ]
    metrics.append({"step": 3, "validation": {"recall@10": 0.5, "broken": None}})
    values = {
        "name": name,
        "about": {"name": name, "method": "s2m", "seed": 7, "training_seconds": 3671.0},
        "config_text": "[mining]\nnum_hard_labels = 10  # <b>",
        "metrics": metrics,
        "part_name": "test",
        "scores": score_table(outcome, dataset, "test", num_resamples=20),
        "outcome": outcome,
    }
    return RunResult(**{**values, **changes})


def page_of(tmp_path, results, dataset, **options):
    write_report(results, dataset, tmp_path / "report.html", **options)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


class Reader(html.parser.HTMLParser):
    """Collects tags and checks that each one is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def sections_of(page):
    return [attributes["id"] for tag, attributes in read(page).tags if tag == "section"]


ALL_SECTIONS = [
    "summary", "groups", "slices", "certificate", "map", "cutoffs", "training", "examples", "making"
]  # fmt: skip


@pytest.mark.parametrize("names", [["snm"], ["snm", "s2m-long"], ["snm", "s2m-long", "sgd"]])
def test_a_page_of_one_two_or_three_runs_has_every_section(tmp_path, dataset, names):
    page = page_of(tmp_path, [result_of(dataset, name) for name in names], dataset)
    assert sections_of(page) == ALL_SECTIONS
    assert ("Change from" in page) == (len(names) == 2)
    assert ("Repaired" in page) == (len(names) > 1)
    assert ("<code>evenhand compare</code> pairs their queries" in page) == (len(names) > 1)
    assert page.count('class="map"') == len(names) + (len(names) == 2)
    assert page.count(ATTRIBUTION) == 2  # beside the map and in the footer


def test_the_page_loads_nothing_and_its_policy_allows_nothing(tmp_path, dataset):
    page = page_of(tmp_path, [result_of(dataset), result_of(dataset, "s2m")], dataset)
    tags = read(page).tags
    assert not {"link", "img", "iframe", "object", "image", "base"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        assert "src" not in attributes
        assert "style" not in attributes  # the policy would ignore it
        assert attributes.get("href", "#").startswith("#")
        assert not any(key.startswith("on") for key in attributes)
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_what_users_typed_never_becomes_markup(tmp_path, dataset):
    runs = [result_of(dataset, f"a{EVIL}"), result_of(dataset, "<b>bold", share=0.9)]
    page = page_of(tmp_path, runs, dataset, title=f"T {EVIL}")
    reader = read(page)
    assert sum(tag == "script" for tag, _ in reader.tags) == 1  # our own
    assert "i" not in {tag for tag, _ in reader.tags}
    assert "<b>bold" not in page
    assert "City <i>" not in page
    assert "&lt;script&gt;alert" in page
    assert any(EVIL in text for text in reader.texts)  # and it is shown as it was typed


def test_text_from_right_to_left_is_kept_apart(tmp_path, dataset):
    page = page_of(tmp_path, [result_of(dataset)], dataset)
    assert re.search(r'<bdi dir="auto">مدينة \d+</bdi>', page)


def test_groups_too_small_to_judge_are_said_to_be_so(tmp_path, dataset):
    page = page_of(tmp_path, [result_of(dataset)], dataset)
    assert re.search(
        r"Too small to judge \(pairs\): LAO \(\d+\)\. Without any pair: 1 group\.", page
    )
    row = re.search(r'<tr class="grey"><th scope="row"><bdi dir="auto">NOBODY.*?</tr>', page)
    assert row is not None
    assert ">–<" in row[0]
    assert "too small to judge" in row[0]


def test_nan_is_shown_as_a_dash_and_never_as_a_word(tmp_path, dataset):
    run = result_of(dataset)
    nothing = [
        dataclasses.replace(s, value=math.nan, low=math.nan, high=math.nan) for s in run.scores
    ]
    page = page_of(tmp_path, [dataclasses.replace(run, scores=nothing)], dataset)
    shown = " ".join(read(re.sub(r"<script>.*?</script>", "", page, flags=re.S)).texts)
    assert "–" in shown
    assert not re.search(r"\bnan\b", shown, re.IGNORECASE)
    assert "holds no pair to judge by" in shown


def test_without_intervals_the_page_is_still_whole(tmp_path, dataset):
    run = result_of(dataset)
    bare = score_table(run.outcome, dataset, "test", num_resamples=0)
    page = page_of(tmp_path, [dataclasses.replace(run, scores=bare)] * 2, dataset)
    assert sections_of(page) == ALL_SECTIONS
    assert "nan" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S).lower()


def test_a_bare_data_set_has_no_map_and_numbers_for_names(tmp_path, dataset):
    test = dataclasses.replace(dataset.parts["test"], texts=None, groups={})
    bare = dataclasses.replace(
        dataset,
        parts={**dataset.parts, "test": test},
        label_names=None,
        label_groups={},
        label_coordinates=None,
        attribution="",
    )
    page = page_of(tmp_path, [result_of(bare), result_of(bare, "other", share=0.9)], bare)
    assert sections_of(page) == [name for name in ALL_SECTIONS if name != "map"]
    assert re.search(r"query \d+", page)
    assert re.search(r"label \d+", page)
    assert "tail labels" in page  # the verdict falls back to them


def test_empty_metrics_and_an_empty_about_are_borne(tmp_path, dataset):
    run = result_of(dataset, metrics=[], about={}, config_text="")
    page = page_of(tmp_path, [run], dataset)
    assert "left no record of their training" in page
    assert sections_of(page) == ALL_SECTIONS
    page = page_of(tmp_path, [run, result_of(dataset, "s2m")], dataset)
    assert "No record of the training of snm." in page


def test_about_and_settings_are_shown_for_people(tmp_path, dataset):
    about = {
        "started": "2025-11-15T09:06:11+00:00",
        "versions": {"torch": "2.11", "numpy": None},
        "num_steps": 20000,
        "training_seconds": 3671.0,
        "step": {"kind": "eager", "reason": "loss.log_q is true"},
        "command": ["evenhand", "train"],
        "odd": "kept",
    }
    page = page_of(tmp_path, [result_of(dataset, about=about)], dataset)
    for shown in ("2025-11-15 09:06 UTC", "torch 2.11, numpy –", "20,000", "1 h 1 min 11 s"):
        assert f"<td>{shown}</td>" in page
    assert "<td>evenhand train</td>" in page
    assert "<td>kept</td>" in page
    assert "<td>eager (no CUDA graph: loss.log_q is true)</td>" in page
    assert "num_hard_labels = 10  # &lt;b&gt;" in page


def test_what_an_interruption_cost_is_told(tmp_path, dataset):
    times = {"at": "2025-11-15T09:06:11+00:00", "damaged_checkpoints": []}
    about = {
        "num_ranks": 2,
        "is_running": False,
        "interruptions": [
            {"resumed_at_step": 0, "lost_steps": 0, **times},
            {"resumed_at_step": 50, "lost_steps": 20, **times, "damaged_checkpoints": ["<b> gone"]},
        ],
    }
    page = page_of(tmp_path, [result_of(dataset, about=about)], dataset)
    told = "resumed at step 0, 2025-11-15 09:06 UTC; resumed at step 50 (20 steps trained again), "
    assert f"<td>{told}2025-11-15 09:06 UTC; &lt;b&gt; gone</td>" in page
    assert "is_running" not in page


def test_runs_of_one_name_are_told_apart(dataset):
    run = result_of(dataset)
    assert study_of([run, run, run], dataset).run_names == ("snm", "snm (2)", "snm (3)")


def test_runs_that_do_not_belong_together_are_refused(tmp_path, dataset):
    run = result_of(dataset)
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], dataset, tmp_path / "r.html")
    with pytest.raises(UserError, match="different parts"):
        study_of([run, dataclasses.replace(run, part_name="train")], dataset)
    with pytest.raises(UserError, match="was not evaluated on this data set"):
        study_of([dataclasses.replace(run, part_name="train")], dataset)
    with pytest.raises(UserError, match="no part 'nowhere'"):
        study_of([dataclasses.replace(run, part_name="nowhere")], dataset)
    other = dataclasses.replace(run.outcome, cutoffs=(3,))
    with pytest.raises(UserError, match="no cutoff in common"):
        study_of([run, dataclasses.replace(run, outcome=other)], dataset)
    assert list(tmp_path.iterdir()) == []


# --- the verdict ----------------------------------------------------------------------------------


def score(value, low, high):
    return Score("recall@10", "script", "worst", value, low, high, 100, True, ("THAI",))


@pytest.mark.parametrize(
    ("scores", "leader", "is_clear"),
    [
        ([score(0.4, 0.3, 0.5), score(0.7, 0.6, 0.8)], 1, True),
        ([score(0.5, 0.3, 0.7), score(0.4, 0.2, 0.6)], 0, False),
        ([score(0.5, 0.4, 0.6), score(0.5001, 0.4, 0.6)], None, False),
        ([score(0.1, 0.0, 0.2), score(0.7, 0.6, 0.8), score(0.65, 0.5, 0.7)], 1, False),
        ([score(0.7, 0.65, 0.75), score(0.5, 0.45, 0.55), score(0.4, 0.1, 0.7)], 0, False),
        ([score(0.4, math.nan, math.nan), score(0.7, math.nan, math.nan)], 1, False),
    ],
)
def test_a_run_is_clearly_ahead_when_no_other_interval_reaches_its_own(scores, leader, is_clear):
    compared = comparison("somewhere", scores)
    assert (compared.leader, compared.is_clear) == (leader, is_clear)


def with_values(run, values):
    """The run, with every recall of some (column, group) set, and an interval of +-0.01."""
    scores = []
    for row in run.scores:
        value = values.get((row.column, row.group), row.value)
        scores.append(dataclasses.replace(row, value=value, low=value - 0.01, high=value + 0.01))
    return dataclasses.replace(run, scores=scores)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (0.3, 0.5, "s2m serves the worst groups better than snm. Over all pairs no difference"),
        (0.5, 0.3, "snm serves the worst groups better than s2m."),
        (0.400, 0.405, "s2m is ahead of snm on the worst groups, but not clearly"),
        (0.4, 0.4, "On the worst groups no difference can be seen. Over all pairs no difference"),
    ],
)
def test_the_verdict_is_no_stronger_than_the_numbers(dataset, first, second, said):
    dataset = dataclasses.replace(dataset, label_groups={})
    runs = [
        with_values(result_of(dataset, name), {("script", "worst"): value, ("all", "all"): 0.8})
        for name, value in (("snm", first), ("s2m", second))
    ]
    sentence, figures = verdict(study_of(runs, dataset))
    assert sentence.startswith(said)
    assert figures[0].startswith(f"recall@10 on worst script: snm {percent(first)} %")


def test_the_verdict_on_one_run_names_its_lowest_groups(dataset):
    run = with_values(result_of(dataset), {("script", "worst"): 0.2, ("all", "all"): 0.8})
    sentence, _ = verdict(study_of([run], dataset))
    assert "80.0 % of all pairs, and for 20.0 % on the worst script" in sentence


# --- pieces ---------------------------------------------------------------------------------------


def test_an_element_escapes_all_but_finished_markup():
    made = element("a", {"title": '"<', "hidden": None, "x": 1.50}, "<&", Html("<br>"))
    assert made.text == '<a title="&quot;&lt;" x="1.5">&lt;&amp;<br></a>'
    assert len(user_text("x" * 1000).text) < 200


def test_numbers_are_written_for_people():
    assert [percent(x) for x in (0.41234, 1.0, math.nan)] == ["41.2", "100.0", "–"]
    assert interval(0.1, 0.2) == "10.0–20.0"
    assert interval(math.nan, 0.2) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


def test_the_gap_is_to_the_best_wrong_result():
    outcome = Outcome(
        query_ids=np.array([0, 0, 1]),
        label_ids=np.array([1, 2, 0]),
        ranks=np.array([1, 0, 0], dtype=np.int32),
        scores=np.array([9.0, 1.0, 2.0], dtype=np.float32),
        retrieved_ids=np.array([[1, 5, 6], [0, -1, -1]], dtype=np.int32),
        retrieved_scores=np.array([[9.0, 4.0, 3.0], [7.0, -np.inf, -np.inf]], dtype=np.float32),
        query_metrics={},
        query_weights={},
        num_results=3,
        cutoffs=(1,),
    )
    is_right = _is_right(outcome, 10)
    assert is_right.tolist() == [[True, False, False], [True, False, False]]
    assert _gaps(outcome, is_right).tolist() == [4 - 9, 4 - 1, -math.inf]
    gaps, query_ids = np.array([3.0, 5.0, 4.0, 9.0]), np.array([0, 0, 1, 2])
    is_candidate = np.array([True, True, True, False])
    assert _largest(gaps, is_candidate, query_ids, 5).tolist() == [1, 2]  # one a query


def test_repaired_and_broken_are_counted(tmp_path, dataset):
    first, last = result_of(dataset), result_of(dataset, "s2m-long", share=0.9)
    before, after = first.outcome.ranks > 0, last.outcome.ranks > 0
    page = page_of(tmp_path, [first, last], dataset)
    assert (
        f"{(~before & after).sum()} pairs are repaired and {(before & ~after).sum()} broken" in page
    )


def test_labels_fall_into_the_classes_of_the_maps():
    recalls = np.array([np.nan, 0, 1 / 3, 0.5, 0.9, 1])
    assert _recall_classes(recalls).tolist() == [-1, 0, 1, 2, 3, 4]
    changes = np.array([np.nan, -1, -0.1, 0, 0.1, 0.5])
    assert _change_classes(changes).tolist() == [-1, 0, 1, 2, 3, 4]


def test_dots_are_relative_and_drawn_once():
    assert _dots(np.array([7, 5, 5]), np.array([1, 9, 9])) == "m5 9h0m2-8h0"


def test_north_is_up_and_east_is_right_on_a_map():
    places = np.array([[60.0, -120.0], [-30.0, 150.0]])  # 5 units a degree, from 80 N and 180 W
    (drawn,) = _paths(places, np.array([-1, -1]), 5, "recall")
    assert f"m{60 * 5} {20 * 5}h0m{270 * 5} {90 * 5}h0" in drawn.text


def test_the_curve_of_recall_counts_what_is_among_the_first_r_and_no_miss(dataset):
    run = result_of(dataset)
    ranks = run.outcome.ranks
    curve = _recalls(study_of([run], dataset), 0, "all", ("all",))
    expected = [sum(1 <= rank <= r for rank in ranks) / len(ranks) for r in range(1, 51)]
    np.testing.assert_allclose(curve, expected, rtol=1e-12)


@pytest.mark.slow
def test_a_map_of_many_labels_stays_small(tmp_path, dataset):
    generator = np.random.default_rng(0)
    places = np.stack([generator.uniform(-55, 75, 34_000), generator.uniform(-180, 180, 34_000)], 1)
    places[0] = np.nan, 0  # a label without a place
    parts = {
        "train": dataset.parts["train"],
        "test": part_of([[n] for n in generator.integers(34_000, size=60_000)]),
    }
    many = Dataset("many", 1, 34_000, parts, label_coordinates=places.astype(np.float32))
    page = page_of(tmp_path, [result_of(many), result_of(many, "s2m")], many)
    assert len(page) < 2_000_000


@pytest.mark.parametrize("ys", [[0.0, 0.0], [5.0, 5.0], [1e-9, 3e-9], [-2.0, 1e6]])
def test_a_line_chart_stays_inside_its_frame(ys):
    text = line_chart("t", [Line(0, [1, 1], ys)], x_title="x").text
    numbers = [float(n) for n in re.findall(r'd="M([\d.]+) ([\d.]+)L', text)[0]]
    assert min(numbers) >= 0
    assert max(numbers) <= 360
    assert "nan" not in text


def test_the_members_of_worst_rows_are_named_beside_few_runs_and_below_many():
    def scores(*names):
        return [Score("recall@10", "script", "worst", 0.5, 0.4, 0.6, 9, True, (n,)) for n in names]

    def shown(*names):
        study = types.SimpleNamespace(run_names=[f"run {n}" for n in range(len(names))])
        return " ".join(part.text for part in _members(study, scores(*names)))

    assert "THAI" in shown("THAI", "CJK", "THAI")
    assert shown("THAI", "CJK", "THAI", "LATIN").count("see below") == 1
    assert "THAI" not in shown("THAI", "CJK", "THAI", "LATIN")
    assert "THAI" in shown("THAI", "THAI", "THAI", "THAI")  # one list is short enough
