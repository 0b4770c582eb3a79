"""The report: what its sections show, that names stay text, and that nothing is loaded."""

import dataclasses
import html
import html.parser
import io
import math
import re

import hypothesis
import hypothesis.strategies as st
import jinja2
import numpy as np
import pytest
from rich.console import Console

import small
from evenhand.data import Dataset, Groups, Strings
from evenhand.errors import UserError
from evenhand.evaluation import Difference, score_table
from evenhand.evaluation.certificate import certify
from evenhand.report import rendering, write_report
from evenhand.report.forest_plots import Estimate, ForestRow, make_forest
from evenhand.report.headline import (
    Comparison,
    compare_runs,
    describe_comparisons,
    headline,
    title_of,
)
from evenhand.report.rendering import signed
from evenhand.report.run_set import make_run_set
from evenhand.report.world_map import change_classes, dot_path, draw_dots, recall_classes
from evenhand.result_tables import difference_title, differences_table
from evenhand.run_folder import RunResult
from small import part_of
from test_evaluation import evaluated

NUM_LABELS = 60
EVIL = '<script>alert("x")</script>'
SCRIPTS = ("LATIN", "THAI", "GREEK", f"S {EVIL}", "LAO", "NOBODY")
REGIONS = ("N", "E", f"R {EVIL}", "W")
ATTRIBUTION = "Place names: GeoNames (geonames.org), licensed under CC BY 4.0."
SECTIONS = ["groups", "table", "columns", "slices", "certificate", "map", "examples", "making"]


@pytest.fixture(scope="module")
def dataset():
    """400 queries, some without a positive; LAO has too few to be judged, and NOBODY none."""
    generator = np.random.default_rng(0)
    train = [[label] for label in range(NUM_LABELS) for _ in range(1 + label % 7)]
    sizes = generator.choice([0, 1, 1, 1, 2], size=400)
    lists = [generator.choice(NUM_LABELS, size=size, replace=False).tolist() for size in sizes]
    scripts = generator.choice([0, 0, 0, 1, 2, 3], size=400).astype(np.int32)
    scripts[:5] = 4
    texts = [f"Q {EVIL} & {n}" if n % 2 else f"مدينة {n}" for n in range(400)]
    groups = {"script": Groups(scripts, SCRIPTS)}
    test = part_of(lists, groups=groups, texts=Strings.pack(texts))
    labels = np.arange(NUM_LABELS, dtype=np.int32)
    places = np.stack([np.linspace(-50, 70, NUM_LABELS), np.linspace(-170, 170, NUM_LABELS)], 1)
    return Dataset(
        f"D {EVIL}",
        1,
        NUM_LABELS,
        {"train": part_of(train), "validation": test, "test": test},
        label_names=Strings.pack([f"L {EVIL} {n}" for n in range(NUM_LABELS)]),
        label_groups={
            "region": Groups(labels // 15, REGIONS),
            "country": Groups(labels % 45, tuple(f"Land {n}" for n in range(45))),
        },
        label_coordinates=places.astype(np.float32),
        attribution=ATTRIBUTION,
    )


def result_of(dataset, name="snm", *, share=0.6, is_missed=None, part_name="test", **changes):
    """A run that finds a share of the pairs, of THAI half of it; or all but those missed, first."""
    part, generator = dataset.parts[part_name], np.random.default_rng(len(name))
    sizes = {"num_results": 50, "cutoffs": (1, 10, 50)}
    outcome, _ = evaluated(dataset, part_name, seed=len(name), batch_size=400, **sizes)
    shares = np.full(len(outcome.ranks), share)
    if "script" in part.groups:
        shares[part.groups["script"].ids[outcome.query_ids] == 1] /= 2
    is_found = generator.random(len(shares)) < shares
    ranks = np.where(is_found, generator.integers(1, 11, len(shares)), 0)
    if is_missed is not None:
        ranks = np.where(is_missed, 0, 1)
    outcome = dataclasses.replace(outcome, ranks=ranks.astype(np.int32))
    outcome.retrieved_ids[generator.random(outcome.retrieved_ids.shape) < 0.05] = -1  # empty slots
    values = {
        "about": {"name": name, "method": "s2m", "seed": 7, "is_running": False},
        "config_text": "[mining]\nnum_hard_labels = 10  # <b>",
        "scores": score_table(outcome, dataset, part_name, num_resamples=20),
    }
    return RunResult(name=name, part_name=part_name, outcome=outcome, **{**values, **changes})


class Reader(html.parser.HTMLParser):
    """Collects tags and texts, and checks that what opens is closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


@pytest.fixture
def page_of(tmp_path, dataset):
    def page_of(*runs, dataset=dataset):
        write_report(runs, dataset, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return page_of


@pytest.fixture(scope="module")
def page(dataset, tmp_path_factory):
    """A report of two runs whose names, like all others, would run if they could."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    runs = [result_of(dataset, f"a{EVIL}"), result_of(dataset, "<b>bold", share=0.9)]
    write_report(runs, dataset, path, title=f"T {EVIL}")
    return path.read_text(encoding="utf-8")


def section(page, name):
    return re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)[0]


def rows_of(text):
    """The text of the cells of every row, without markup and runs of white space."""
    rows = re.findall(r"<tr.*?</tr>", text, flags=re.DOTALL)
    cells = [re.findall(r"<t[hd]\b.*?</t[hd]>", row, flags=re.DOTALL) for row in rows]
    return [[" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in row] for row in cells]


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_page_of_one_two_or_three_runs_has_every_section(page_of, dataset, num_runs):
    runs = [result_of(dataset, n, share=0.95) for n in ("snm", "s2m-long", "sgd2")[:num_runs]]
    page = page_of(*runs)
    assert page == page_of(*runs)
    assert [a["id"] for tag, a in Reader(page).tags if tag == "section"] == SECTIONS
    for words in ("Repaired", "Change from snm", "same\nqueries for both runs", "minus snm"):
        assert (words in page) == (num_runs > 1)
    assert page.count('class="map"') == 1
    assert page.count(ATTRIBUTION) == 2  # beside the map and in the footer
    drawings = re.findall(r'<svg[^>]*role="img">(<title>)?', page)
    assert len(drawings) >= 20
    assert all(drawings)


def test_north_is_up_and_east_is_right_on_a_map_and_its_dots_are_small():
    places = np.array([[60.0, -120.0], [-30.0, 150.0], [np.nan, 0]])  # 5 units a degree
    (drawn,) = draw_dots(places, np.array([-1, -1, -1]), 5, "recall")
    assert drawn == ("none", f"m{60 * 5} {20 * 5}h0m{270 * 5} {90 * 5}h0")  # from 80 N and 180 W
    assert dot_path(np.array([7, 5, 5]), np.array([1, 9, 9])) == "m5 9h0m2-8h0"  # each once
    xs, ys = np.random.default_rng(0).integers([[1800], [700]], size=(2, 34_000))
    assert len(dot_path(xs, ys)) < 9 * 34_000
    for classes, values in (
        (recall_classes, [np.nan, 0, 1 / 3, 0.5, 0.9, 1]),
        (change_classes, [np.nan, -1, -0.1, 0, 0.1, 0.5]),
    ):
        assert classes(np.array(values)).tolist() == [-1, 0, 1, 2, 3, 4]


def test_the_page_loads_nothing_and_its_policy_allows_nothing(page):
    tags = Reader(page).tags
    assert not {"link", "img", "iframe", "object", "image", "base"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        assert not {"src", "style"} & set(attributes)  # the policy would ignore a style
        assert attributes.get("href", "#").startswith("#")
        assert not any(key.startswith("on") for key in attributes)
    for forbidden in ("http://", "https://", "url(", "@import"):
        assert forbidden not in page
    policy = next(a["content"] for _, a in tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_what_users_typed_never_becomes_markup(page):
    reader = Reader(page)
    assert sum(tag == "script" for tag, _ in reader.tags) == 1  # our own
    assert "<script>alert" not in page
    assert "<b>bold" not in page
    shown = "".join(reader.texts)  # as it was typed: title, run, data set, groups, label, query
    for name in ("T ", "a", "D ", "S ", "R ", "L ", "Q "):
        assert f"{name}{EVIL}" in shown
    for name in ("groups", "table", "columns", "slices", "certificate", "examples"):
        assert "&lt;script&gt;alert" in section(page, name)
    assert "num_hard_labels = 10  # &lt;b&gt;" in page
    assert re.search(r'<bdi dir="auto">مدينة \d+</bdi>', page)  # kept apart from its surroundings


def test_templates_leave_nothing_unescaped_but_style_and_script_and_nothing_undefined():
    environment = rendering._environment()
    sources = [
        environment.loader.get_source(environment, name)[0] for name in environment.list_templates()
    ]
    marked = re.findall(r"\{\{[^}]*\|\s*safe|autoescape|Markup", "".join(sources))
    assert marked == ["{{ style|safe", "{{ script|safe"]
    with pytest.raises(jinja2.UndefinedError):
        environment.from_string("{{ nowhere }}").render()


@pytest.mark.parametrize("kind", ["without figures", "without intervals"])
def test_what_is_missing_is_a_dash_and_never_a_word(page_of, dataset, kind):
    run, names = result_of(dataset), ["low", "high"] + ["value"] * (kind == "without figures")
    nan = dict.fromkeys(names, math.nan)
    run = dataclasses.replace(run, scores=[dataclasses.replace(s, **nan) for s in run.scores])
    page = page_of(run, run)
    shown = " ".join(Reader(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)).texts)
    assert not re.search(r"\bnan\b", shown, re.IGNORECASE)
    assert ("holds no pair to judge by" in shown) == (kind == "without figures")
    assert "–" in shown


def test_runs_that_do_not_belong_together_are_refused(tmp_path, dataset):
    run = result_of(dataset)
    assert make_run_set([run, run, run], dataset).run_names == ("snm", "snm (2)", "snm (3)")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], dataset, tmp_path / "r.html")
    other = dataclasses.replace(run.outcome, cutoffs=(3,))
    for runs, message in (
        ([run, dataclasses.replace(run, part_name="train")], "different parts"),
        ([dataclasses.replace(run, part_name="train")], "run snm: .* not of the train part"),
        ([dataclasses.replace(run, part_name="nowhere")], "no part 'nowhere'"),
        ([run, dataclasses.replace(run, outcome=other)], "no cutoff in common"),
    ):
        with pytest.raises(UserError, match=message):
            write_report(runs, dataset, tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


# --- the headline ---------------------------------------------------------------------------------


def difference(low, high, group="all", metric="recall@10"):
    value = (low + high) / 2
    return Difference(metric, group, 0.5, 0.5 + value, value, low, high, math.nan, math.nan, 9)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([difference(0.01, 0.03), difference(-0.01, 0.02, "tail")],
         "s2m finds more than snm: +2.00 points of recall@10 over all pairs (+1.00 to +3.00); no "
         "row of the table is significantly worse."),
        ([difference(-0.01, 0.01), difference(0.01, 0.03, "worst 3 of script"),
          difference(-0.03, -0.01, "tail")],
         "s2m finds as much as snm: +0.00 points of recall@10 over all pairs (−1.00 to +1.00), but "
         "more on worst 3 scripts (+2.00); significantly worse: tail labels (−2.00)."),
        ([difference(0.01, 0.03), difference(-0.03, -0.01, "tail", "recall@1")],
         "s2m finds more than snm: +2.00 points of recall@10 over all pairs (+1.00 to +3.00); "
         "significantly worse: tail labels (−2.00 in recall@1)."),
        ([difference(-0.03, -0.01), difference(0.01, 0.03, metric="recall@1")],
         "s2m finds less than snm: −2.00 points of recall@10 over all pairs (−3.00 to −1.00); "
         "significantly worse: all pairs (−2.00)."),
        ([difference(0.0, 0.01), difference(-0.01, 0.0, "head"),
          difference(math.nan, math.nan, "torso")],
         "s2m finds as much as snm: +0.50 points of recall@10 over all pairs (+0.00 to +1.00); no "
         "row of the table is significantly worse."),
    ],
)  # fmt: skip
def test_the_headline_is_no_stronger_than_the_differences(dataset, rows, said):
    runs = make_run_set([result_of(dataset), result_of(dataset, "s2m")], dataset)
    assert describe_comparisons(runs, [Comparison(1, rows, {}, {}, "test")]) == said


def test_runs_are_compared_query_by_query(dataset):
    """Their intervals overlap by far, yet of every hundred pairs the second finds three more."""
    pairs = np.arange(len(dataset.parts["test"].positives.ids))
    first, second = (
        result_of(dataset, name, is_missed=pairs % 100 < 40 - more)
        for name, more in (("snm", 0), ("s2m", 3))
    )
    own = [run.scores[0] for run in (first, second)]
    assert own[1].low < own[0].high
    (found,) = compare_runs(make_run_set([first, second], dataset))
    everyone = next(row for row in found.rows if row.metric == "recall@10")
    assert everyone.low > 0
    assert everyone.difference == pytest.approx(0.03, abs=0.002)
    regions = {row.group: row.value for row in first.scores if row.metric == "recall@10"}
    best = max(REGIONS, key=regions.get)
    is_best = dataset.label_groups["region"].ids[first.outcome.label_ids] == REGIONS.index(best)
    fails_best = result_of(dataset, is_missed=is_best).outcome
    known = dataclasses.replace(first, validation=fails_best)
    found, _ = compare_runs(make_run_set([known, second, first], dataset))
    assert found.chosen_on == "validation"
    assert found.worst_lists["worst of region"].names == (best,)
    (worst,) = [r for r in found.rows if (r.group, r.metric) == ("worst of region", "recall@10")]
    assert worst.baseline == pytest.approx(regions[best])


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    shares=st.lists(st.sampled_from([0.0, 0.02, 0.5, 0.55, 0.9, 1.0]), min_size=2, max_size=3),
    metric=st.sampled_from(["recall@1", "recall@10"]),
)
def test_headline_chart_table_and_compare_never_disagree(
    dataset, tmp_path_factory, seed, shares, metric
):
    """The same figures everywhere, and words, sides and colours that fit them."""
    generator, results = np.random.default_rng(seed), []
    path = tmp_path_factory.getbasetemp() / "disagree.html"
    for n, share in enumerate(shares):
        ranks = np.where(
            generator.random(len(dataset.parts["test"].positives.ids)) < share,
            generator.integers(1, 51, len(dataset.parts["test"].positives.ids)),
            0,
        )
        run = result_of(dataset, f"run{n}", is_missed=ranks == 0)
        outcome = dataclasses.replace(run.outcome, ranks=ranks.astype(np.int32))
        scores = score_table(outcome, dataset, "test", num_resamples=0)
        results.append(dataclasses.replace(run, outcome=outcome, scores=scores))
    # What `evenhand compare` prints.
    runs = make_run_set(results, dataset, metric)
    comparisons = compare_runs(runs)
    sentence, printed = headline(runs, comparisons), []
    for found in comparisons:
        console = Console(file=io.StringIO(), width=200)
        console.print(differences_table(found.rows, baseline="0", contender="1", metric=metric))
        lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines()]
        rows = [[cell.strip() for cell in line] for line in lines if line]
        printed.append({row[0]: re.findall(r"[+-][\d.]+", " ".join(row[4:])) for row in rows})
    # What the page shows.
    write_report(results, dataset, path, metric=metric)
    page = html.unescape(path.read_text("utf-8"))
    assert f'<p class="verdict">{sentence}</p>' in page
    titles = {title_of(row): difference_title(row) for row in comparisons[0].rows}
    chart = section(page, "groups").split("</table>")[0].split("<tbody>")[1]
    drawn = re.findall("<tr>.*?</tr>", chart, flags=re.DOTALL)
    assert len(drawn) == len(printed[0])
    for row in drawn:
        title = titles[re.search(r'<bdi dir="auto">(.*?)</bdi>', row)[1]]
        zero = float(re.search(r'x1="([\d.]+)%"[^>]*class="zero"', row)[1])
        places = [float(x) for x in re.findall(r'<svg x="([\d.]+)%"', row)]
        figures = re.findall(r'<span class="(\w+)">(.*?)</span>\s*<small>(.*?)</small>', row)
        for place, (kind, shown, around), expected in zip(
            places, figures, (table[title] for table in printed), strict=True
        ):
            numbers = re.findall(r"[+−][\d.]+", f"{shown} {around}")
            of_page = [float(x.replace("−", "-")) / 100 for x in numbers]
            assert of_page == pytest.approx([float(x) for x in expected], abs=1e-9)
            value, low, high = of_page
            assert (place > zero) >= (value > 0.01)
            assert (place < zero) >= (value < -0.01)
            assert (low >= 0) >= (kind == "gain")
            assert (high <= 0) >= (kind == "loss")
            assert (low <= 0 <= high) >= (kind == "level")
    assert sentence.count(". ") == 0
    for found in comparisons:
        everyone = next(row for row in found.rows if (row.group, row.metric) == ("all", metric))
        around = f"{signed(everyone.low)} to {signed(everyone.high)}"
        if len(comparisons) == 1:
            said = f": {signed(everyone.difference)} points of {metric} over all pairs ({around})"
        else:
            over = "" if found is not comparisons[0] else f" points of {metric} over all pairs"
            said = f"({signed(everyone.difference)}{over}, {around})"
        assert said in sentence
        lost = [r for r in found.rows if r.high < 0 and r.metric in runs.shown_metrics]
        worse = sentence.partition("significantly worse: ")[2]
        assert (f"{runs.run_names[found.run]} on " in worse or len(comparisons) == 1) >= bool(lost)
        assert ("no row of the table is significantly worse" in sentence) <= (not lost)
        table = section(page, "table")
        assert (table.count('class="number loss"') > 0) >= bool(lost)


def test_an_axis_of_scores_ends_at_all_and_says_where_bars_go_on(page_of, dataset):
    pairs = np.arange(len(dataset.parts["test"].positives.ids))
    page = page_of(result_of(dataset, is_missed=pairs < 0))
    ticks = re.findall(r'text-anchor="middle">(\d+)</text>', section(page, "groups"))
    assert set(ticks) == {"0", "25", "50", "75", "100"}
    assert "goes on beyond" not in page
    assert "finds the right label for 100.0 % of all pairs.</p>" in page  # and no "but"
    wide = ForestRow("all", "", [Estimate(0, 0.01, -0.5, 0.5, "+1", "−50 to +50")], 9)
    forest = make_forest("", [wide], reference=0.0, is_of_differences=True)
    assert forest.is_cut


# --- figures --------------------------------------------------------------------------------------


# --- what is guaranteed ---------------------------------------------------------------------------


def test_a_guarantee_is_of_the_metric_rounded_down_and_shown_only_where_it_says_something(
    page_of, dataset
):
    pairs = np.arange(len(dataset.parts["test"].positives.ids))
    run = result_of(dataset, is_missed=pairs % 4 == 0)
    found = certify(run.outcome, dataset, loss="miss@10")
    rows = {row[0]: row[1:] for row in rows_of(section(page_of(run, run), "certificate"))}
    assert "20 % of any queries" not in rows  # of which all may be failures
    guaranteed = 100 * (1 - float(found.bounds(0.5)))
    bound, seen = re.fullmatch(
        r"≥ ([\d.]+) seen: ([\d.]+)", rows["50 % of any queries"][0]
    ).groups()
    assert 0 <= guaranteed - float(bound) < 0.1
    num_queries = len(np.unique(run.outcome.query_ids))
    assert f"these\nvery {num_queries} queries" in page_of(run, run)
    assert float(bound) < float(seen)
    assert len(set(rows["50 % of any queries"])) == 1  # the same run twice
    everything = result_of(dataset, is_missed=pairs < 0)
    for share in (5, 10, 20, 50):
        assert f"{share} % of any queries" in section(page_of(everything), "certificate")
    for silent in (result_of(dataset, share=0.1), result_of(dataset, part_name="validation")):
        assert 'id="certificate"' not in page_of(silent)
    nothing = small.with_parts(dataset, test=part_of([[], []]))
    assert 'id="certificate"' not in page_of(result_of(nothing), dataset=nothing)


# --- who is failed --------------------------------------------------------------------------------


def test_the_failed_are_those_of_the_last_run_with_the_first_beside_it(page_of, dataset):
    missed = dataset.label_groups["region"].ids[dataset.parts["test"].positives.ids] == 2
    half = missed & (np.arange(len(missed)) % 2 == 0)
    runs = [result_of(dataset, f"run {n}", is_missed=m) for n, m in enumerate((half, missed))]
    text = section(page_of(*runs), "slices")
    head, failed = rows_of(text)[:2]
    assert head[2:] == ["%", "change", "pairs"]
    assert failed[0] == "region = R &lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;"
    change = signed(-(1 - half[missed].mean()))
    assert failed[2:] == ["0.0 0.0–3.3", f"{change} vs run 0", f"{missed.sum()}"]
    words = " ".join(re.sub(r"<[^>]*>", "", text).split())
    assert f"{100 * missed.mean():.1f} % of the pairs and 100.0 % of the failures of run 1" in words
    assert text.count("Q &lt;script&gt;") + text.count("مدينة") >= 3  # failures are shown
    text = section(page_of(result_of(dataset, is_missed=0 * missed)), "slices")
    assert "No slice is worse than chance explains" in text
    assert "<table" not in text
