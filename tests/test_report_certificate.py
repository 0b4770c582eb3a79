import dataclasses
import html.parser
import math
import re

import numpy as np
import pytest

from evenhand.data.dataset import Dataset, Groups, Part, Rows, pairs_of
from evenhand.evaluation import Outcome, certify, score_table
from evenhand.report import write_report
from evenhand.report.certificate import _bound_words, _known_groups, certificate_section
from evenhand.report.study import study_of
from evenhand.run_folder import RunResult

EVIL = '<script>alert("x")</script>'
SCRIPTS = ("LATIN", EVIL, "NOBODY")


def part_of(lists, groups):
    offsets = np.cumsum([0, *map(len, lists)])
    ids = np.array([label for row in lists for label in row], dtype=np.int32)
    return Part(np.zeros((len(lists), 1), dtype=np.float32), Rows(offsets, ids), groups)


@pytest.fixture(scope="module")
def dataset():
    """600 queries of 0 to 2 of 40 labels; one script and one country fare badly."""
    generator = np.random.default_rng(0)
    sizes = generator.choice([0, 1, 1, 1, 2], size=600)
    lists = [generator.choice(40, size=size, replace=False).tolist() for size in sizes]
    scripts = Groups(generator.choice([0, 0, 1], size=600).astype(np.int32), SCRIPTS)
    part = part_of(lists, {"script": scripts})
    countries = Groups((np.arange(40) // 10).astype(np.int32), ("A", "B", "C", "D & <b>"))
    return Dataset(
        "toy",
        1,
        40,
        {"train": part_of([[n] for n in range(40)], {}), "validation": part, "test": part},
        label_groups={"country": countries},
    )


def result_of(dataset, name="snm", *, part_name="test", share=0.7):
    part, generator = dataset.parts[part_name], np.random.default_rng(len(name))
    pairs = pairs_of(part.positives)
    num_pairs = len(pairs.label_ids)
    shares = np.full(num_pairs, share)
    if part.groups:
        shares[part.groups["script"].ids[pairs.query_ids] == 1] *= 0.5
    is_found = generator.random(num_pairs) < shares
    outcome = Outcome(
        query_ids=pairs.query_ids,
        label_ids=pairs.label_ids,
        ranks=np.where(is_found, generator.integers(1, 11, num_pairs), 0).astype(np.int32),
        scores=np.zeros(num_pairs, dtype=np.float32),
        retrieved_ids=np.full((len(part), 10), -1, dtype=np.int32),
        retrieved_scores=np.full((len(part), 10), -np.inf, dtype=np.float32),
        query_metrics={"mrr": np.zeros(len(part), dtype=np.float32)},
        query_weights={},
        num_results=50,
        cutoffs=(1, 10, 50),
    )
    scores = score_table(outcome, dataset, part_name, num_resamples=2)
    return RunResult(name, {"name": name}, "", [], part_name, scores, outcome)


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
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def section_of(dataset, *names, **options):
    study = study_of([result_of(dataset, name, **options) for name in names], dataset)
    return certificate_section(study).text


@pytest.mark.parametrize("names", [["snm"], ["snm", "s2m-long"], ["a", "bb", "ccc", "dddd"]])
def test_every_run_has_its_lines_in_both_charts_and_its_rows_in_the_table(dataset, names):
    text = section_of(dataset, *names)
    reader = Reader(text)
    drawings = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert sum(attributes.get("role") == "img" for attributes in drawings) == 2
    for run, name in enumerate(names, start=1):
        assert text.count(f'class="line bound run-{run}"') == 2
        assert text.count(f'class="line estimate run-{run}"') == 2
        assert reader.texts.count(name) == 1 + 1 + 3  # legend, worst known group, three rows
    assert "With a confidence of 95 %" in text


def test_names_cannot_become_markup(dataset):
    text = section_of(dataset, EVIL, "s2m")
    assert "<script" not in text
    assert "D &amp; &lt;b&gt;" in text
    Reader(text)


def test_every_chart_says_in_words_what_it_draws(dataset):
    result = result_of(dataset)
    text = certificate_section(study_of([result], dataset)).text
    for units, title in ("queries", "Any set of queries"), ("whole labels", "Any set of whole"):
        found = certify(result.outcome, dataset, units=units)
        said = re.search(rf"<title>{title}.*?</title>", text).group()
        for percent in (100, 50, 20, 10, 5, 2, 1):
            shown = float(re.search(rf"([\d.]+) for {percent} %", said).group(1))
            bound = float(found.bound_at(percent / 100))
            assert bound - 1e-6 <= shown <= bound + 0.001  # never printed below what it is


def test_the_table_shows_bounds_above_estimates(dataset):
    rows = re.findall(r"<td>([\d.]+)<small>([\d.]+)</small>", section_of(dataset, "snm"))
    assert len(rows) == 3 * 7
    assert all(float(bound) >= float(estimate) - 0.0005 for bound, estimate in rows)


def test_known_groups_are_placed_by_share_and_mean_loss_and_lie_below_the_bound(dataset):
    result = result_of(dataset)
    study, outcome = study_of([result], dataset), result.outcome
    losses = {}  # by query: the best placed of its labels
    for query, rank in zip(outcome.query_ids, outcome.ranks, strict=True):
        loss = 1 - 1 / rank if rank else 1.0
        losses[query] = min(losses.get(query, 1.0), loss)
    members = [query for query in losses if study.part.groups["script"].ids[query] == 1]
    groups = {(g.column, g.name): g for g in _known_groups(study, 0, "queries")}
    assert ("script", "NOBODY") not in groups
    evil = groups["script", EVIL]
    assert math.isclose(evil.share, len(members) / len(losses))
    assert math.isclose(evil.loss, np.mean([losses[query] for query in members]))
    assert math.isclose(sum(g.share for g in groups.values() if g.column == "country"), 1)
    found = certify(outcome, dataset)
    assert all(g.loss <= found.bound_at(g.share) for g in groups.values())


def test_groups_too_small_to_judge_are_no_known_groups(dataset):
    result = result_of(dataset)
    scores = [
        dataclasses.replace(s, is_judged=s.group != EVIL and s.is_judged) for s in result.scores
    ]
    study = study_of([dataclasses.replace(result, scores=scores)], dataset)
    names = {group.name for group in _known_groups(study, 0, "queries")}
    assert EVIL not in names
    assert "LATIN" in names


def test_a_bound_of_one_is_said_to_guarantee_nothing():
    assert _bound_words(0.99951) == "for a group of that size nothing below 1 is guaranteed"
    assert _bound_words(0.9981) == "the bound for that size is 0.999"  # rounded up


def test_labels_that_share_queries_are_said_not_to_be_quite_independent(dataset):
    assert "Labels that share queries are not quite independent" in section_of(dataset, "snm")


def test_whole_labels_are_shown_beside_groups_of_labels_alone(dataset):
    result = result_of(dataset)
    study, outcome = study_of([result], dataset), result.outcome
    groups = _known_groups(study, 0, "whole labels")
    assert {g.column for g in groups} == {"frequency", "country"}
    weights, sums = 0.0, 0.0  # of country A: labels 0 to 9, each counting as ten at most
    for label in range(10):
        ranks = outcome.ranks[outcome.label_ids == label]
        losses = [1 - 1 / rank if rank else 1.0 for rank in ranks]
        weights += min(10, len(ranks))
        sums += min(10, len(ranks)) * np.mean(losses)
    country = next(g for g in groups if g.name == "A")
    assert math.isclose(country.loss, sums / weights)


def test_only_the_test_part_is_called_a_certificate(dataset):
    warning = "This is not a certificate: settings were chosen on the validation part"
    assert warning in section_of(dataset, "snm", part_name="validation")
    assert "not a certificate" not in section_of(dataset, "snm")
    refused = section_of(dataset, "snm", part_name="train")
    assert "nothing can be guaranteed" in refused
    assert "<svg" not in refused


def test_a_part_without_pairs_has_no_section(dataset):
    empty = part_of([[], []], {})
    alone = dataclasses.replace(dataset, parts={**dataset.parts, "test": empty})
    assert section_of(alone, "snm") == ""


def test_the_page_holds_the_section_and_a_link_to_it(tmp_path, dataset):
    write_report([result_of(dataset)], dataset, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="certificate"' in page
    assert '<a href="#certificate">What is guaranteed</a>' in page
