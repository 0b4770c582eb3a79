"""Groups belong to the lines of a table: whoever is on lines of several groups counts in each.

Everything here starts from a CSV file and is compared with loops over its lines.
"""

import dataclasses
import random
import re
from collections import defaultdict

import numpy as np
import pytest
import safetensors.torch
import torch

import metric_oracles as oracles
import small
from evenhand.build import build_training
from evenhand.data import Groups, load_table, open_dataset, pairs_of, save_dataset
from evenhand.data.csr import rows_from_lists
from evenhand.errors import UserError
from evenhand.evaluation import (
    GroupList,
    compare_outcomes,
    group_columns,
    score_table,
    slices_of,
    worst_groups,
    worst_members,
)
from evenhand.evaluation.slice_attributes import attributes_of
from evenhand.evaluation.slice_search import is_in_slice, slices_to_look_at
from evenhand.report import write_report
from evenhand.report.bounds import known_groups
from evenhand.report.run_set import make_run_set
from evenhand.run_folder import RunResult
from evenhand.tuning.space import count_members
from evenhand.tuning.study import default_criterion
from small import run_main
from test_evaluation import evaluated, row

LANGUAGES = ("de", "en", "fr", "it", "th")
CUTOFFS = (1, 5, 10)


def made_lines(num_queries=240, num_labels=30):
    """(query, label, language) lines in any order: none, one or several languages for a pair."""
    generator = random.Random(0)
    lines = []
    for query in range(num_queries):
        for label in generator.sample(range(num_labels), generator.choice([1, 1, 2])):
            count = generator.choice([0, 1, 1, 2, 3, 5])
            languages = generator.sample(LANGUAGES, count) or [""]
            lines += [(f"query {query}", f"label {label:02}", one) for one in languages]
    generator.shuffle(lines)
    return lines


def write_table(path, lines, columns="query,label,language"):
    path.write_text("\n".join([columns, *map(",".join, lines)]) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def lines():
    return made_lines()


@pytest.fixture(scope="module")
def dataset(lines, tmp_path_factory):
    """The table, saved and opened again."""
    folder = tmp_path_factory.mktemp("languages")
    path = write_table(folder / "table.csv", lines)
    table = load_table(path, group_columns=["language"], test_fraction=0.5)
    return save_dataset(table, folder / "data")


@pytest.fixture(scope="module")
def outcome(dataset):
    return evaluated(dataset)[0]


@pytest.fixture(scope="module")
def languages_of(lines):
    """(query, label) -> its languages."""
    found = defaultdict(set)
    for query, label, language in lines:
        found[query, label] |= {language} - {""}
    return found


def pair_names(dataset, part_name):
    """(query, label) of every pair of a part, in order."""
    part = dataset.parts[part_name]
    pairs = pairs_of(part.positives)
    return [
        (part.texts[query], dataset.label_name(label))
        for query, label in zip(pairs.query_ids, pairs.label_ids, strict=True)
    ]


def of_language(dataset, part_name, languages_of, language):
    """Whether each pair is in a language."""
    return [language in languages_of[pair] for pair in pair_names(dataset, part_name)]


# --- figures by group -----------------------------------------------------------------------------


def test_a_query_with_a_line_in_each_of_two_countries_counts_in_both(tmp_path):
    lines = [(f"query {n}", f"label {n % 9}", c) for n in range(400) for c in ("US", "AU")]
    path = write_table(tmp_path / "table.csv", lines, "query,label,country")
    dataset = load_table(path, group_columns=["country"], test_fraction=0.5)
    assert all(part.groups["country"].names == ("AU", "US") for part in dataset.parts.values())
    outcome, _ = evaluated(dataset)
    scores = score_table(outcome, dataset, "test", num_resamples=20)
    num_queries = len(dataset.parts["test"])
    for metric in ("recall@5", "query recall@5", "mrr"):
        everyone = row(scores, metric)
        assert everyone.count == num_queries
        for country in ("AU", "US"):
            score = row(scores, metric, "country", country)
            assert dataclasses.replace(score, column="all", group="all") == everyone


def test_a_query_in_five_languages_counts_in_all_five_and_once_in_all(tmp_path):
    lines = [("hello", "greeting", language) for language in LANGUAGES]
    lines += [(f"query {n}", f"label {n % 5}", "en") for n in range(50)]
    path = write_table(tmp_path / "table.csv", lines)
    all_train = {"test_fraction": 0.0, "validation_fraction": 0.0}
    dataset = load_table(path, group_columns=["language"], **all_train)
    dataset = dataclasses.replace(dataset, parts={**dataset.parts, "test": dataset.parts["train"]})
    scores = score_table(evaluated(dataset)[0], dataset, "test", num_resamples=0)
    for metric in ("recall@5", "ndcg@5"):
        counts = {name: row(scores, metric, "language", name).count for name in LANGUAGES}
        assert counts == {"de": 1, "en": 51, "fr": 1, "it": 1, "th": 1}
        assert row(scores, metric).count == 51


def test_scores_by_group_match_a_loop_over_the_lines(dataset, outcome, languages_of):
    scores = score_table(outcome, dataset, "test", num_resamples=50)
    part = dataset.parts["test"]
    for language in LANGUAGES:
        is_member = of_language(dataset, "test", languages_of, language)
        for cutoff in CUTOFFS:
            expected, count = oracles.pair_recall(outcome.ranks.tolist(), cutoff, is_member)
            score = row(scores, f"recall@{cutoff}", "language", language)
            assert (score.value, score.count) == (pytest.approx(expected, rel=1e-12), count)
            assert score.low <= score.value <= score.high
        queries = {int(outcome.query_ids[pair]) for pair in np.flatnonzero(is_member)}
        places = [0 if query in queries else -1 for query in range(len(part))]
        for metric in ("query recall@5", "ndcg@10", "mrr"):
            (mean,), (count,) = oracles.group_means(
                outcome.query_metrics[metric].tolist(), places, 1
            )
            score = row(scores, metric, "language", language)
            assert (score.value, score.count) == (pytest.approx(mean, rel=1e-6), count)
    assert row(scores, "recall@5").count == len(set(pair_names(dataset, "test")))


def test_a_summary_of_groups_counts_a_pair_in_several_of_them_once(dataset, outcome, languages_of):
    scores = score_table(outcome, dataset, "test", num_resamples=0)
    summary = row(scores, "recall@5", "language", "worst 3")
    members = [of_language(dataset, "test", languages_of, name) for name in summary.members]
    assert summary.count == sum(map(any, zip(*members, strict=True)))
    values = [row(scores, "recall@5", "language", name).value for name in summary.members]
    assert summary.value == pytest.approx(sum(values) / 3)
    queries = row(scores, "mrr", "language", "worst 3")
    assert queries.count <= len(dataset.parts["test"])


def test_differences_by_group_match_a_loop_over_the_lines(dataset, outcome, languages_of):
    other, _ = evaluated(dataset, seed=1)
    chosen = {"two": GroupList("language", ("it", "th"))}
    found = compare_outcomes([outcome], [other], dataset, "test", chosen, num_resamples=50)
    (difference,) = [d for d in found if (d.metric, d.group) == ("recall@5", "two")]
    members = [of_language(dataset, "test", languages_of, name) for name in ("it", "th")]
    sides = [
        [oracles.pair_recall(one.ranks.tolist(), 5, is_member)[0] for is_member in members]
        for one in (outcome, other)
    ]
    assert difference.baseline == pytest.approx(sum(sides[0]) / 2, rel=1e-12)
    assert difference.contender == pytest.approx(sum(sides[1]) / 2, rel=1e-12)
    assert difference.count == sum(map(any, zip(*members, strict=True)))
    assert difference.low <= difference.difference <= difference.high


def test_the_interval_of_a_group_resamples_whole_queries(dataset, outcome, languages_of):
    """The same draws, one by one, in loops."""
    is_member = of_language(dataset, "test", languages_of, "th")
    num_queries = len(dataset.parts["test"])
    hits, counts = [0] * num_queries, [0] * num_queries
    for query, rank, counted in zip(outcome.query_ids, outcome.ranks, is_member, strict=True):
        counts[query] += counted
        hits[query] += counted and 1 <= rank <= 5
    generator, values = np.random.default_rng(0), []
    for _ in range(100):
        drawn = generator.integers(num_queries, size=num_queries).tolist()
        values.append(sum(hits[q] for q in drawn) / sum(counts[q] for q in drawn))
    scores = score_table(outcome, dataset, "test", num_resamples=100)
    score = row(scores, "recall@5", "language", "th")
    assert score.low == pytest.approx(oracles.percentile(values, 0.025), rel=1e-12)
    assert score.high == pytest.approx(oracles.percentile(values, 0.975), rel=1e-12)


def test_sets_of_the_queries_are_refused(dataset, outcome):
    part = dataset.parts["test"]
    groups = part.groups["language"]._replace(ids=np.zeros(len(part), dtype=np.int32))
    part = dataclasses.replace(part, groups={"language": groups})
    wrong = dataclasses.replace(dataset, parts={**dataset.parts, "test": part})
    message = f"'language' have sets.* {len(outcome.ranks)} pairs of the test part, got {len(part)}"
    with pytest.raises(UserError, match=message):
        score_table(outcome, wrong, "test")


def test_labels_may_be_in_several_groups_too(dataset, outcome):
    """Every label is in a group of its number modulo 3; the even ones are in `even` as well."""
    numbers = np.arange(dataset.num_labels)
    sets = rows_from_lists([[0], [1], [2], [0, 3], [1, 3], [2, 3]])
    kinds = Groups(numbers % 3 + 3 * (numbers % 2 == 0), ("0", "1", "2", "even"), sets)
    grouped = dataclasses.replace(dataset, label_groups={"kind": kinds})
    scores = score_table(outcome, grouped, "test", num_resamples=0)
    for group in kinds.names:
        is_member = [
            label % 2 == 0 if group == "even" else label % 3 == int(group)
            for label in outcome.label_ids
        ]
        expected, count = oracles.pair_recall(outcome.ranks.tolist(), 5, is_member)
        score = row(scores, "recall@5", "kind", group)
        assert (score.value, score.count) == (pytest.approx(expected, rel=1e-12), count)


def test_the_worst_groups_are_chosen_among_all_groups(dataset, outcome):
    scores = score_table(outcome, dataset, "test", min_pairs={"language": 1}, num_resamples=0)
    assert sorted(worst_members(scores, "language", "recall@5", count=5)) == list(LANGUAGES)
    chosen = worst_groups(
        outcome, dataset, chosen_on="test", compared_on="test", metric="recall@5",
        min_pairs={"language": 1},
    )  # fmt: skip
    assert len(chosen["worst 3 of language"].names) == 3


def test_tuning_counts_every_membership(dataset, languages_of):
    settings = small.config("unused", evaluation__min_pairs={"language": 5})
    assert default_criterion(settings, dataset) == "recall@10 on worst tenth of language"
    for language in LANGUAGES:
        is_member = of_language(dataset, "train", languages_of, language)
        assert count_members(dataset, f"language={language}") == (sum(is_member), len(is_member))


def test_no_column_is_lost_by_its_name(dataset, outcome):
    """Not one that begins like a column of ours, nor one whose new name is taken as well."""
    columns = ["frequency", "frequency of queries", "frequency of visits"]
    languages = dataset.parts["test"].groups["language"]
    part = dataclasses.replace(dataset.parts["test"], groups=dict.fromkeys(columns, languages))
    renamed = dataclasses.replace(dataset, parts={**dataset.parts, "test": part})
    own = ["frequency of queries", "frequency of queries of queries", "frequency of visits"]
    names = [column.name for column in group_columns(renamed, "test")]
    assert names == ["all", "frequency", "frequency over pairs", *own]
    lists = worst_groups(
        outcome, renamed, chosen_on="test", compared_on="test", metric="recall@5",
        min_pairs=dict.fromkeys(own, 1),
    )  # fmt: skip
    assert {chosen.column for chosen in lists.values()} == set(own)


# --- slices and the report ------------------------------------------------------------------------


def test_conditions_of_slices_hold_for_every_group_of_a_pair(dataset, languages_of):
    attributes = attributes_of(dataset, "test")
    (place,) = [n for n, attribute in enumerate(attributes) if attribute.name == "language"]
    for condition, language in enumerate(attributes[place].conditions):
        is_member = is_in_slice(attributes, ((place, condition),))
        name = language.removeprefix("language = ")
        assert is_member.tolist() == of_language(dataset, "test", languages_of, name)
    looks = slices_to_look_at(attributes, max_conditions=2, min_pairs=5)
    totals = looks.totals(np.ones((len(is_member), 1)))[:, 0]
    for conditions, total in zip(looks.conditions, totals, strict=True):
        assert is_in_slice(attributes, conditions).sum() == total
    assert any(len(c) == 2 and place in dict(c) for c in looks.conditions)


def test_a_slice_is_found_that_only_second_lines_name(tmp_path):
    """Every query is on a line of `web`; those that also are on one of `app` fail."""
    lines = [(f"query {n}", f"label {n % 9}", "web") for n in range(600)]
    lines += [(f"query {n}", f"label {n % 9}", "app") for n in range(0, 600, 4)]
    path = write_table(tmp_path / "table.csv", lines, "query,label,channel")
    dataset = load_table(path, group_columns=["channel"], test_fraction=0.8)
    part = dataset.parts["test"]
    outcome, _ = evaluated(dataset)
    is_app = np.array([int(text.split()[1]) % 4 == 0 for text in part.texts])  # a pair a query
    outcome = dataclasses.replace(outcome, ranks=np.where(is_app, 0, 1).astype(np.int32))
    found = slices_of(outcome, dataset, "test", metric="recall@5", num_permutations=19)
    assert found.slices[0].conditions == ("channel = app",)
    assert found.slices[0].num_pairs == is_app.sum()
    assert found.slices[0].value == 0


def result_of(outcome, dataset):
    scores = score_table(outcome, dataset, "test", min_pairs={"language": 5}, num_resamples=20)
    about = {"name": "run", "method": "s2m", "seed": 7, "training_seconds": 1.0}
    return RunResult("run", about, "", [], "test", scores, outcome)


def test_a_known_group_of_the_certificate_holds_every_query_that_is_in_it(
    dataset, outcome, languages_of
):
    runs = make_run_set([result_of(outcome, dataset)], dataset)
    losses = defaultdict(lambda: 1.0)  # by query: the best placed of its labels
    for query, rank in zip(outcome.query_ids, outcome.ranks, strict=True):
        losses[query] = min(losses[query], 1 - 1 / rank if rank else 1.0)
    groups = {g.name: g for g in known_groups(runs, 0, "queries") if g.column == "language"}
    assert sorted(groups) == list(LANGUAGES)
    for language, group in groups.items():
        is_member = of_language(dataset, "test", languages_of, language)
        queries = set(outcome.query_ids[is_member])
        assert group.share == pytest.approx(len(queries) / len(losses))
        assert group.loss == pytest.approx(np.mean([losses[query] for query in queries]))


def test_the_report_shows_every_group_and_all_groups_of_an_example(dataset, outcome, tmp_path):
    write_report([result_of(outcome, dataset)], dataset, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert all(re.search(rf">{language}</bdi>", page) for language in LANGUAGES)
    one = f"({'|'.join(LANGUAGES)})"
    examples = page[page.index("The hardest misses of") :]
    assert re.search(rf"<td>({one}, )+{one}</td>", examples)  # what an example belongs to


# --- training -------------------------------------------------------------------------------------

SIZES = ("batch_size=16", "num_sampled_labels=20", "num_hard_labels=5", "num_hard_examples=8")
TINY = [word for size in SIZES for word in ("--set", f"mining.{size}")]
TINY += ["--set", "model.embedding_dim=8", "--set", "evaluation.num_resamples=10", "--steps", 20]


@pytest.fixture
def user(tmp_path, lines, monkeypatch, capsys):
    """Runs a command that must succeed, in a folder with the table, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "table.csv", lines)

    def user(*arguments):
        answer = run_main(capsys, *arguments)
        assert answer.code == 0, answer.err
        return answer.out

    return user


def test_training_is_the_same_bit_for_bit_with_and_without_group_columns(user, tmp_path):
    user("data", "table", "table.csv", "--out", "plain")
    user("data", "table", "table.csv", "--group", "language", "--out", "grouped")
    for name in ("plain", "grouped"):
        user("train", "--data", name, "--run", f"runs/{name}", *TINY)
    plain, grouped = (
        safetensors.torch.load_file(small.weights_file(tmp_path / f"runs/{name}"))
        for name in ("plain", "grouped")
    )
    assert plain.keys() == grouped.keys()
    assert all(torch.equal(plain[name], grouped[name]) for name in plain)


def test_a_user_sees_all_languages_in_every_command(user, tmp_path):
    user("data", "table", "table.csv", "--group", "language")
    for name, method in {"first": "s2m", "second": "snm"}.items():
        words = ("--data", "datasets/table", "--method", method, "--run", f"runs/{name}")
        user("train", *words, *TINY, "--set", "evaluation.min_pairs={language=5}")
    assert "worst 3 languages" in user("evaluate", "runs/first")
    assert "worst 3 languages" in user(
        "compare", "runs/first", "runs/second", "--metric", "recall@1"
    )
    user("slices", "runs/first", "--min-pairs", 5, "--permutations", 19)
    user("report", "runs/first", "runs/second")
    page = (tmp_path / "runs/first/report.html").read_text("utf-8")
    assert all(f">{language}</bdi>" in page for language in LANGUAGES)


def test_group_dro_weighs_an_example_by_all_of_its_groups(dataset, languages_of):
    """A batch names sets of groups; those without a group are one too."""
    settings = {"mining__method": "group-dro", "risk__group": "language"}
    built = build_training(
        small.config("unused", mining__num_sampled_labels=20, **settings),
        dataset,
        torch.device("cpu"),
    )
    batch = built.training.feed.next_batch()
    losses = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = built.training.risk.weights(losses, batch, 8)
    names = pair_names(dataset, "train")
    members = [languages_of[names[pair]] or {None} for pair in batch.pair_ids.tolist()]
    groups = [*LANGUAGES, None]
    of_group = {g: [loss for loss, m in zip(losses.tolist(), members, strict=True) if g in m]
                for g in groups}  # fmt: skip
    means = {g: sum(values) / len(values) if values else 0.0 for g, values in of_group.items()}
    shares = {g: np.exp(0.01 * means[g]) for g in groups}
    expected = np.array([sum(shares[g] / len(of_group[g]) for g in m) for m in members])
    assert weights.tolist() == pytest.approx((expected / expected.sum()).tolist())
    assert any(len(groups) > 1 for groups in members)
    assert any(groups == {None} for groups in members)


# --- what the command says ------------------------------------------------------------------------


def test_whatever_is_merged_is_counted_and_printed(user, tmp_path):
    lines = [
        ("Red shoe", "Shoes", "US", "old"),
        ("red  SHOE", "Shoes", "US", "old"),  # the same line once more
        ("red shoe", "Shoes", "AU", "old"),  # the same pair in another country
        ("red shoe", "Red", "AU", ""),  # the same query with another label
        ("hat", "Hats", "", "new"),
        ("cap", "Hats", "US", "new"),
    ]
    write_table(tmp_path / "shop.csv", lines, "query,label,country,age")
    words = ("--group", "country", "--group", "age", "--test-fraction", 0)
    out = user("data", "table", "shop.csv", *words, "--validation-fraction", 0)
    said = [
        "lines read: 6; merged, since another has the same query, label and groups: 1",
        "queries: 3, on several lines: 1; (query, label) pairs: 4, on several lines: 1",
        "empty cells of country, in no group: 1",
        "empty cells of age, in no group: 1",
    ]
    several = [
        "in several groups of country, and counted in each: queries 1, (query, label) pairs 1",
        "in several groups of age, and counted in each: queries 0, (query, label) pairs 0",
    ]
    assert out.splitlines()[:4] == said
    assert "country (2)" in out
    for printed in (out, user("data", "show", "datasets/shop")):
        assert [line for line in printed.splitlines() if line.startswith("in several")] == several


# --- on disk --------------------------------------------------------------------------------------


def test_memberships_survive_the_disk_and_move_the_fingerprint(lines, tmp_path):
    path = write_table(tmp_path / "table.csv", lines)
    table = load_table(path, group_columns=["language"])
    saved = save_dataset(table, tmp_path / "one")
    for name, part in table.parts.items():
        groups, again = part.groups["language"], saved.parts[name].groups["language"]
        assert again.names == groups.names
        assert again.ids.tolist() == groups.ids.tolist()
        assert [again.sets.row(n).tolist() for n in range(len(again.sets))] == [
            groups.sets.row(n).tolist() for n in range(len(groups.sets))
        ]
    shuffled = write_table(tmp_path / "table.csv", lines[::-1])
    same = save_dataset(load_table(shuffled, group_columns=["language"]), tmp_path / "two")
    assert same.fingerprint == saved.fingerprint
    query, label, _ = next(line for line in lines if line[2] == "de")
    fewer = write_table(tmp_path / "table.csv", [m for m in lines if m != (query, label, "de")])
    other = save_dataset(load_table(fewer, group_columns=["language"]), tmp_path / "three")
    assert other.fingerprint != saved.fingerprint


def test_a_table_with_one_group_a_query_is_stored_as_it_always_was(tmp_path):
    lines = [(f"query {i}", f"label {i % 7}", "AB"[i % 2] if i % 5 else "") for i in range(60)]
    path = write_table(tmp_path / "table.csv", lines, "query,label,country")
    saved = save_dataset(load_table(path, group_columns=["country"]), tmp_path / "data")
    assert saved.fingerprint.startswith("2318c705a4011c2c165e8c84beec91fa")
    assert all(part.groups["country"].sets is None for part in saved.parts.values())


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("train.group_sets.language.offsets", lambda a: a[1:], "arrays of|must go from 0"),
        (
            "train.group_sets.language.offsets",
            lambda a: a[[0, 2, 1, *range(3, len(a))]],
            "in order",
        ),
        ("train.group_sets.language.ids", lambda a: a + 1, "must be from 0 to 4, got 1 to 5"),
        ("train.group_sets.language.ids", lambda a: a * 0, "each once and in order"),
        ("train.groups.language", lambda a: a + 99, "must be from -1 to"),
        ("train.groups.language", lambda a: a[1:], "must be of shape"),
    ],
)
def test_damaged_memberships_are_refused_when_opened(dataset, tmp_path, array, change, message):
    folder = tmp_path / "data"
    save_dataset(dataset, folder)
    path = folder / f"{array}.npy"
    changed = np.ascontiguousarray(change(np.load(path)))
    np.save(path, changed)
    about = (folder / "dataset.json").read_text("utf-8")
    about = re.sub(rf'("{re.escape(array)}": \[\s*)\d+', rf"\g<1>{len(changed)}", about)
    (folder / "dataset.json").write_text(about, "utf-8")
    with pytest.raises(UserError, match=rf"dataset\.json is damaged .*({message})"):
        open_dataset(folder)
