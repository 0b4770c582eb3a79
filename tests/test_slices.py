"""Slices against loops over rows and conditions, and the test against all permutations."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import small
from evenhand.data import Dataset, Groups, Strings, pairs_of, save_dataset
from evenhand.data.csr import rows_from_lists
from evenhand.evaluation import Outcome, checked_slices, find_slices, findings_json, slices_of
from evenhand.evaluation.slice_attributes import attributes_of, nominal, ordinal, text_attributes
from evenhand.evaluation.slice_search import (
    is_in_slice,
    largest_score,
    permute_losses,
    scorer_of,
    slabs_of,
    slices_to_look_at,
    strata_of,
)
from evenhand.evaluation.slices import loss_interval
from evenhand.result_tables import slice_notes
from evenhand.run_folder import save_result
from evenhand.runs import begin_run
from small import part_of, run_main

# --- oracles: loops over rows ---------------------------------------------------------------------


def fulfils(attribute, condition, row):
    """Read from the words alone."""
    words, code = attribute.conditions[condition], int(attribute.codes[row])
    if code < 0:
        return False
    if attribute.name == "size":  # the only column of numbers here, divided at 1 and 3
        number = int(re.search(r"\d+", words).group())
        return code <= (1, 3).index(number) if "most" in words else code > (1, 3).index(number - 1)
    return words == f"{attribute.name} = {code}"


def rows_of_slice(attributes, conditions, num_rows):
    return [
        row for row in range(num_rows) if all(fulfils(attributes[a], c, row) for a, c in conditions)
    ]


def all_slices(attributes, num_rows, *, max_conditions, min_pairs):
    """The sets of rows of all conjunctions that hold enough rows and at most half, each once."""
    sets = {}
    for size in range(1, max_conditions + 1):
        for chosen in itertools.combinations(range(len(attributes)), size):
            ranges = [range(len(attributes[a].conditions)) for a in chosen]
            for conditions in itertools.product(*ranges):
                named = tuple(zip(chosen, conditions, strict=True))
                rows = tuple(rows_of_slice(attributes, named, num_rows))
                if min_pairs <= len(rows) <= num_rows / 2:
                    sets.setdefault(rows, size)  # the fewest conditions come first
    return sets


def all_arrangements(losses, query_ids):
    """Every way to move whole queries among those of as many pairs, and pairs within a query."""
    rows = {q: np.flatnonzero(query_ids == q) for q in sorted(set(query_ids))}
    moves = []
    for length in sorted({len(places) for places in rows.values()}):
        members = [q for q, places in rows.items() if len(places) == length]
        orders = list(itertools.permutations(range(length)))
        moves.append(
            [
                list(zip(members, donors, chosen, strict=True))
                for donors in itertools.permutations(members)
                for chosen in itertools.product(orders, repeat=len(members))
            ]
        )
    for combination in itertools.product(*moves):
        arranged = [math.nan] * len(losses)
        for q, donor, order in itertools.chain.from_iterable(combination):
            for place, source in enumerate(order):
                arranged[rows[q][place]] = losses[rows[donor][source]]
        yield arranged


def divergence(rate, expected):
    """KL of two coins."""
    value = 0.0
    for observed, wanted in ((rate, expected), (1 - rate, 1 - expected)):
        if observed > 0:
            value += observed * math.log(observed / wanted)
    return value


def score_oracle(rows, num_conditions, losses, query_ids, *, num_singles):
    """The formula of the module, with the variance over all arrangements."""
    totals = [sum(arranged[r] for r in rows) for arranged in all_arrangements(losses, query_ids)]
    expected = sum(totals) / len(totals)
    variance = sum((total - expected) ** 2 for total in totals) / len(totals)
    n, total = len(rows), sum(losses[r] for r in rows)
    baseline = max(expected, n * sum(losses) / len(losses))
    price = (num_conditions - 1) * math.log(num_singles)
    if total <= baseline + 1e-9 or variance < 1e-12:
        return -price
    scale = expected * (1 - expected / n) / variance
    return scale * n * divergence(total / n, baseline / n) - price


# --- small problems -------------------------------------------------------------------------------

# Queries of 1, 1, 1, 2 and 2 pairs: 3! * (2! * 2! * 2!) arrangements.
TINY_QUERIES = np.array([0, 1, 2, 3, 3, 4, 4])


def tiny_attributes(generator, num_pairs):
    return [
        nominal("colour", generator.integers(-1, 2, num_pairs), ["colour = 0", "colour = 1"]),
        nominal("shape", generator.integers(0, 3, num_pairs), [f"shape = {n}" for n in range(3)]),
        ordinal("size", generator.integers(0, 6, num_pairs), (1, 3)),
    ]


@st.composite
def problems(draw):
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    attributes = tiny_attributes(generator, len(TINY_QUERIES))
    losses = generator.random(len(TINY_QUERIES))
    return attributes, losses.round() if draw(st.booleans()) else losses


def looks_of(attributes, num_pairs, *, max_conditions=2, min_pairs=1):
    looks = slices_to_look_at(attributes, max_conditions=max_conditions, min_pairs=min_pairs)
    return looks.among(np.arange(num_pairs), min_pairs=min_pairs) if looks.conditions else looks


def first_strata(query_ids):
    return strata_of(query_ids, np.zeros(len(query_ids), dtype=np.int64))


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5))
def test_every_slice_with_enough_pairs_is_looked_at_once_and_no_other(
    seed, max_conditions, min_pairs
):
    generator = np.random.default_rng(seed)
    num_pairs = int(generator.integers(4, 40))
    attributes = tiny_attributes(generator, num_pairs)
    limits = {"max_conditions": max_conditions, "min_pairs": min_pairs}
    looks = looks_of(attributes, num_pairs, **limits)
    found = {
        tuple(rows_of_slice(attributes, conditions, num_pairs)): len(conditions)
        for conditions in looks.conditions
    }
    assert found == all_slices(attributes, num_pairs, **limits)
    assert len(looks.conditions) == len(found)


@given(st.integers(0, 2**31))
def test_totals_and_members_match_a_loop_over_rows(seed):
    generator = np.random.default_rng(seed)
    attributes = tiny_attributes(generator, 30)
    values = generator.random((30, 2))
    looks = looks_of(attributes, 30, max_conditions=3)
    for conditions, totals in zip(looks.conditions, looks.totals(values), strict=True):
        rows = rows_of_slice(attributes, conditions, 30)
        assert np.flatnonzero(is_in_slice(attributes, conditions)).tolist() == rows
        for column in range(2):
            assert totals[column] == pytest.approx(sum(values[row, column] for row in rows))


@given(problems())
def test_scores_match_the_formula_with_the_variance_over_all_arrangements(problem):
    attributes, losses = problem
    looks = looks_of(attributes, len(losses))
    if not looks.conditions:
        return
    slabs = slabs_of(TINY_QUERIES, first_strata(TINY_QUERIES))
    scorer = scorer_of(losses, looks, slabs, mean_loss=float(losses.mean()))
    scores = scorer.scores(looks.totals(losses[:, None]))[:, 0]
    for conditions, score in zip(looks.conditions, scores, strict=True):
        rows = rows_of_slice(attributes, conditions, len(losses))
        expected = score_oracle(
            rows, len(conditions), losses, TINY_QUERIES, num_singles=looks.num_singles
        )
        assert score == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_that_of_all_permutations(seed):
    attributes = tiny_attributes(np.random.default_rng(seed), len(TINY_QUERIES))
    losses = np.array([1.0, 0, 1, 1, 1, 0, 0])
    looks, mean_loss = looks_of(attributes, len(losses)), float(losses.mean())
    slabs = slabs_of(TINY_QUERIES, first_strata(TINY_QUERIES))
    scorer = scorer_of(losses, looks, slabs, mean_loss=mean_loss)
    sets = [rows_of_slice(attributes, c, len(losses)) for c in looks.conditions]

    def scores_of(arranged):
        return scorer.scores(np.array([[sum(arranged[row] for row in rows)] for rows in sets]))

    largest = scores_of(losses).max()
    everything = [scores_of(arranged).max() for arranged in all_arrangements(losses, TINY_QUERIES)]
    exact = np.mean([value >= largest - 1e-6 for value in everything])
    options = {"num_permutations": 4000, "generator": np.random.default_rng(1)}
    found = largest_score(losses, looks, slabs, mean_loss=mean_loss, **options)
    if largest <= 0:
        assert found.p_value == 1
    else:
        assert found.p_value == pytest.approx(exact, abs=5 * math.sqrt(0.25 / 4000))
        assert found.place == scores_of(losses).argmax()


def test_every_arrangement_is_drawn_equally_often_and_no_other():
    losses = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    slabs = slabs_of(TINY_QUERIES, first_strata(TINY_QUERIES))
    drawn = permute_losses(losses, slabs, 9600, np.random.default_rng(0)).T
    known = {tuple(np.round(a, 3)) for a in all_arrangements(losses, TINY_QUERIES)}
    assert len(known) == 6 * 8
    seen, counts = np.unique(np.round(drawn, 3), axis=0, return_counts=True)
    assert {tuple(row) for row in seen} == known
    assert np.abs(counts - 200).max() < 5 * math.sqrt(200)


def test_queries_change_places_only_with_queries_that_lost_as_many_pairs():
    earlier = np.array([0, 0, 0, 1, 1, 1])
    strata = strata_of(np.array([0, 1, 2, 3, 3, 4]), earlier)
    assert strata[0] == strata[1] == strata[2]
    assert strata[3] == strata[4]
    assert len({strata[0], strata[3], strata[5]}) == 3


# --- what is found --------------------------------------------------------------------------------


def made(seed, num_queries):
    """Columns of groups of very different sizes, some of labels, and queries of 1 to 3 pairs."""
    generator = np.random.default_rng(seed)
    lengths = generator.choice([1, 1, 1, 2, 3], size=num_queries)
    query_ids = np.repeat(np.arange(num_queries), lengths)
    scripts = np.minimum(generator.geometric(0.4, num_queries) - 1, 6)[query_ids]
    styles = generator.choice(4, p=[0.55, 0.25, 0.15, 0.05], size=num_queries)[query_ids]
    countries = np.minimum(generator.geometric(0.1, len(query_ids)) - 1, 19)
    attributes = [
        nominal("script", scripts, [f"script = {n}" for n in range(7)]),
        nominal("style", styles, [f"style = {n}" for n in range(4)]),
        nominal("country", countries, [f"country = {n}" for n in range(20)]),
        ordinal("length", generator.poisson(6, num_queries)[query_ids], (3, 6, 9)),
    ]
    return generator, query_ids, attributes


def test_two_bad_slices_are_found_one_after_the_other_and_figures_are_of_the_rows():
    generator, query_ids, attributes = made(5, 3000)
    is_first, is_second = attributes[0].codes == 2, attributes[2].codes == 3
    chances = np.where(is_first, 0.7, np.where(is_second, 0.5, 0.1))
    losses = (generator.random(len(query_ids)) < chances).astype(float)
    found, again = (
        find_slices(losses, query_ids, attributes, num_permutations=99) for _ in range(2)
    )
    assert found == again
    assert [s.conditions for s in found.slices] == [("script = 2",), ("country = 3",)]
    first, second = found.slices
    assert first.num_pairs == first.num_new_pairs == is_first.sum()
    assert first.value == pytest.approx(1 - losses[is_first].mean())
    assert first.rest == pytest.approx(1 - losses[~is_first].mean())
    assert second.num_pairs == is_second.sum()
    is_new = is_second & ~is_first
    assert second.num_new_pairs == is_new.sum() < second.num_pairs
    assert second.new_value == pytest.approx(1 - losses[is_new].mean())
    assert second.excess == pytest.approx(losses[is_new].sum() - is_new.sum() * losses.mean())
    assert second.num_queries == len(set(query_ids[is_second]))
    assert first.p_value == pytest.approx(1 / 100)
    assert first.p_value <= second.p_value <= 0.05
    for s, is_member in ((first, is_first), (second, is_new)):
        assert len(set(query_ids[list(s.examples)])) == 3
        assert all(is_member[pair] and losses[pair] == 1 for pair in s.examples)
        assert s.low < s.value < s.high


def test_nothing_is_claimed_where_all_fare_alike_or_without_a_column_or_a_pair():
    _, query_ids, attributes = made(9, 200)
    for loss in (0.0, 1.0):
        found = find_slices(np.full(len(query_ids), loss), query_ids, attributes)
        assert found.slices == ()
    (note,) = slice_notes(found, found_on="test", shown_on="test")
    assert note.startswith("no slice is worse than chance explains: ")
    assert find_slices(np.ones(50), np.arange(50), []).slices == ()
    empty = nominal("c", np.zeros(0, dtype=np.int64), ["c = 0"])
    found = find_slices(np.zeros(0), np.zeros(0, dtype=np.int64), [empty])
    assert found.slices == ()
    assert math.isnan(found.value)


def test_an_interval_is_wilsons_and_wider_where_the_pairs_of_a_query_are_alike():
    losses = np.repeat([1.0, 0.0], [20, 60])
    low, high = loss_interval(losses, np.arange(80))
    z, n, p = 1.959964, 80, 0.25
    for bound in (low, high):  # Wilson: where |p - bound| is z standard errors of the bound
        assert abs(p - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n))
    of_queries = loss_interval(losses, np.repeat(np.arange(20), 4))
    of_fewer = loss_interval(losses[::4], np.arange(20))
    assert of_queries == pytest.approx(of_fewer)
    assert of_queries[1] - of_queries[0] > high - low
    assert all(math.isnan(bound) for bound in loss_interval(losses[:0], np.arange(0)))


# --- attributes -----------------------------------------------------------------------------------

TEXTS = ["Bad-Ems 2", "กรุงเทพ", "", "東京タワー", "a b  c", "é", "x" * 40]


def fulfilled(attributes, row):
    """The conditions that a row fulfils, in words."""
    return {
        words
        for attribute in attributes
        for c, words in enumerate(attribute.conditions)
        if attribute.codes[row] >= 0 and attribute.members.toarray()[c, attribute.codes[row]]
    }


def test_texts_are_described_by_length_words_script_digits_and_signs():
    attributes = text_attributes(Strings.pack(TEXTS))
    described = [fulfilled(attributes, row) for row in range(len(TEXTS))]
    expected = [
        {"length 9 or more", "length at most 12", "words 2 or more", "words at most 2",
         "has a digit", "has a sign such as - or '", "script = LATIN"},
        {"script = THAI", "length at most 8", "words at most 1", "has no digit",
         "has no sign such as - or '"},  # vowel signs are marks
        {"length at most 1", "words at most 1"},
        {"script = CJK", "letters of several scripts"},
        {"words at most 3", "words 3 or more", "letters of one script"},
        {"length at most 1", "script = LATIN"},
        {"length 33 or more", "length at most 64"},
    ]  # fmt: skip
    assert all(words <= found for words, found in zip(expected, described, strict=True))
    assert not any("script = " in words for words in described[2])


def test_a_data_set_is_described_by_its_groups_its_labels_and_its_features():
    train = part_of([[0], [0], [0], [1]], rows_from_lists([[0, 1], [0, 1], [0, 2], [3]]))
    script = {"script": Groups(np.array([0, 1, 1], dtype=np.int32), ("LATIN", "THAI "))}
    test = part_of(
        [[0], [1, 2], [2]],
        rows_from_lists([[0, 1], [2, 9], []]),
        groups=script,
        texts=Strings.pack("abc"),
    )
    kind = {"kind": Groups(np.array([0, -1, 1], dtype=np.int32), ("old", "new"))}
    dataset = Dataset("d", 10, 3, {"train": train, "test": test}, label_groups=kind)
    attributes = attributes_of(dataset, "test")
    described = [fulfilled(attributes, pair) for pair in range(4)]
    expected = [
        {"script = LATIN", "kind = old", "training pairs of the label at most 3",
         "rarest feature in training 2 or more", "features unseen in training at most 0 %"},
        {"features unseen in training over 25 %", "rarest feature in training at most 0",
         "script = THAI"},
        {"training pairs of the label at most 0"},
    ]  # fmt: skip
    assert all(words <= found for words, found in zip(expected, described[:3], strict=True))
    assert not any("kind" in words for words in described[1])
    assert not any("feature" in words for words in described[3])  # it has none
    assert [a.name for a in attributes].count("script") == 1  # the data set's own goes first


# --- of an evaluated run --------------------------------------------------------------------------


def outcome_of(dataset, part_name, is_missed):
    part = dataset.parts[part_name]
    pairs = pairs_of(part.positives)
    ranks = np.where(is_missed, 0, 1 + np.arange(len(pairs.label_ids)) % 10).astype(np.int32)
    shown = np.zeros((len(part), 10), dtype=np.int32)
    scores = ranks.astype(np.float32), shown, shown.astype(np.float32)
    return Outcome(*pairs, ranks, *scores, {}, {}, num_results=10, cutoffs=(1, 5, 10))


def region_missed(dataset, part_name, region):
    labels = dataset.parts[part_name].positives.ids
    return dataset.label_groups["region"].ids[labels] == region


def test_slices_of_a_run_are_named_and_their_figures_of_another_part_are_of_that_part():
    dataset = small.text_dataset()
    outcome = outcome_of(dataset, "test", region_missed(dataset, "test", 2))
    for units in ("labels", "queries"):
        found = slices_of(outcome, dataset, "test", num_permutations=39, units=units)
        assert [s.conditions for s in found.slices] == [("region = S",)]
    with pytest.raises(ValueError, match="units must be 'queries' or 'labels', got 'pairs'"):
        slices_of(outcome, dataset, "test", units="pairs")
    assert (found.slices[0].value, found.slices[0].rest) == (0, 1)
    members = region_missed(dataset, "validation", 2)
    other = members & (np.arange(150) % 2 == 0)
    judge = outcome_of(dataset, "validation", other)
    [s] = checked_slices(found, judge, dataset, "validation", metric="recall@10").slices
    assert (s.conditions, s.num_pairs) == (("region = S",), members.sum())
    assert s.value == pytest.approx(1 - other.sum() / s.num_pairs)
    assert s.p_value == found.slices[0].p_value
    unknown = dataclasses.replace(found.slices[0], conditions=("region = elsewhere",))
    found_there = dataclasses.replace(found, slices=(unknown,))
    [s] = checked_slices(found_there, outcome, dataset, "test", metric="recall@10").slices
    assert s.num_pairs == 0
    assert math.isnan(s.value)
    told = findings_json(found, outcome, dataset, "test")
    example = told["slices"][0]["examples"][0]
    assert example["query"] == dataset.parts["test"].texts[example["query_id"]]
    assert example["label"] == dataset.label_name(example["label_id"])
    assert example["rank"] is None


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run that misses all of one region, evaluated on two parts, with texts that look odd."""
    folder = tmp_path_factory.mktemp("slices")
    dataset = small.text_dataset()
    groups = dataset.label_groups["region"]._replace(names=("N", "E", "[b]S :smile:", "W"))
    dataset = dataclasses.replace(dataset, label_groups={"region": groups})
    dataset = save_dataset(dataset, folder / "data")
    begin_run(folder / "run", small.config(folder / "data"), dataset, device=torch.device("cpu"))
    for part_name in ("validation", "test"):
        outcome = outcome_of(dataset, part_name, region_missed(dataset, part_name, 2))
        save_result(folder / "run", part_name, outcome, [])
    return folder / "run"


def test_the_command_names_the_failed_and_writes_them_down(run_folder, capsys):
    out = run_main(capsys, "slices", run_folder).output
    written = run_folder / "evaluation/test/slices.json"
    for words in (
        "region = [b]S :smile:",
        "recall@10 on the test part",
        "p allows for every one of these looks",
        "expect them to be less bad on others",
        f"written to {written}",
    ):
        assert words in out
    before = written.read_bytes()
    told = json.loads(before)
    assert told["metric"] == "recall@10"
    assert told["slices"][0]["conditions"] == ["region = [b]S :smile:"]
    assert told["slices"][0]["value"] == 0
    run_main(capsys, "slices", run_folder)
    assert written.read_bytes() == before


def test_the_command_takes_its_figures_from_a_part_that_did_not_choose(run_folder, capsys):
    words = "--part validation --check-on test --metric recall@5 --conditions 1 --top 1"
    out = run_main(capsys, "slices", run_folder, *words.split(), "--min-pairs", 10).output
    assert "recall@5 on the test part" in out
    assert "which did not choose the slices" in out
    assert "pairs of the validation part" in out
    out = run_main(capsys, "slices", run_folder, "--min-pairs", 100).output
    assert "nothing to look at: no slice holds 100 pairs of the test part" in out
    for words, sentence in (
        (["--metric", "recall@7"], "--metric must be one of"),
        (["--permutations", "5"], "--permutations must be at least 19, got 5"),
        (["--part", "train"], "has not been evaluated on the train part"),
        (["--check-on", "test"], "--check-on must be another part than the one searched"),
    ):
        assert sentence in run_main(capsys, "slices", run_folder, *words).sentence
