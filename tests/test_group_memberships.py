"""Groups belong to the lines of a table: whoever is on lines of several groups counts in each.

Everything here starts from a CSV file and is compared with loops over its lines; intervals and
differences of such groups are in test_evaluation.py.
"""

import dataclasses
import random
import re

import numpy as np
import pytest
import torch

import small
from evenhand.build import build_training
from evenhand.data import load_table, open_dataset, pairs_of, save_dataset
from evenhand.errors import UserError
from evenhand.evaluation import (
    score_table,
)
from evenhand.tuning.search import default_group
from evenhand.tuning.space import count_members
from small import run_main
from test_evaluation import evaluated, row

LANGUAGES = ("de", "en", "fr", "it", "th")


def write_table(path, lines, column="language", **options):
    """Writes a table, and returns the data set made of it."""
    path.write_text("\n".join([f"query,label,{column}", *map(",".join, lines)]) + "\n", "utf-8")
    return load_table(path, groups=column.split(","), **options)


@pytest.fixture(scope="module")
def lines():
    """(query, label, language) lines in any order: none, one or several languages for a pair."""
    generator = random.Random(0)
    lines = []
    for query in range(240):
        for label in generator.sample(range(30), generator.choice([1, 1, 2])):
            count = generator.choice([0, 1, 1, 2, 3, 5])
            languages = generator.sample(LANGUAGES, count) or [""]
            lines += [(f"query {query}", f"label {label:02}", one) for one in languages]
    generator.shuffle(lines)
    return lines


@pytest.fixture(scope="module")
def dataset(lines, tmp_path_factory):
    """The table, saved and opened again."""
    folder = tmp_path_factory.mktemp("languages")
    return save_dataset(write_table(folder / "a.csv", lines, test_fraction=0.5), folder / "data")


@pytest.fixture(scope="module")
def outcome(dataset):
    return evaluated(dataset)[0]


def pair_names(dataset, part_name):
    """(query, label) of every pair of a part, in order."""
    part = dataset.parts[part_name]
    pairs = pairs_of(part.positives)
    return [
        (part.texts[query], dataset.label_name(label))
        for query, label in zip(pairs.query_ids, pairs.label_ids, strict=True)
    ]


@pytest.fixture(scope="module")
def of_language(lines, dataset):
    """A function: whether each pair of a part is in a language."""

    def of_language(language, part_name="test"):
        pairs = {(query, label) for query, label, one in lines if one == language}
        return [pair in pairs for pair in pair_names(dataset, part_name)]

    return of_language


# --- figures by group -----------------------------------------------------------------------------


def test_a_query_in_five_languages_counts_in_all_five_and_once_in_all(tmp_path):
    lines = [("hello", "greeting", language) for language in LANGUAGES]
    lines += [(f"query {n}", f"label {n % 5}", "en") for n in range(50)]
    all_train = {"test_fraction": 0.0, "validation_fraction": 0.0}
    dataset = write_table(tmp_path / "table.csv", lines, **all_train)
    dataset = small.with_parts(dataset, test=dataset.parts["train"])
    scores = score_table(evaluated(dataset)[0], dataset, "test", num_resamples=0)
    for metric in ("recall@5", "ndcg@5"):
        counts = {name: row(scores, metric, "language", name).count for name in LANGUAGES}
        assert counts == {"de": 1, "en": 51, "fr": 1, "it": 1, "th": 1}
        assert row(scores, metric).count == 51


def test_sets_of_the_queries_are_refused(dataset, outcome):
    part = dataset.parts["test"]
    groups = part.groups["language"]._replace(ids=np.zeros(len(part), dtype=np.int32))
    wrong = small.with_parts(dataset, test=dataclasses.replace(part, groups={"language": groups}))
    message = f"'language' have sets.* {len(outcome.ranks)} pairs of the test part, got {len(part)}"
    with pytest.raises(UserError, match=message):
        score_table(outcome, wrong, "test")


def test_tuning_counts_every_membership(dataset, of_language):
    settings = small.config("unused", evaluation__min_pairs={"language": 5})
    assert default_group(settings, dataset) == "worst tenth of language"
    for language in LANGUAGES:
        is_member = of_language(language, "train")
        assert count_members(dataset, f"language={language}") == (sum(is_member), len(is_member))


# --- training -------------------------------------------------------------------------------------

SIZES = ("batch_size=16", "num_sampled_labels=20", "num_hard_labels=5", "num_hard_examples=8")
TINY = [word for size in SIZES for word in ("--set", f"mining.{size}")]
TINY += ["--set", "model.embedding_dim=8", "--set", "evaluation.num_resamples=10"]
TINY += ["--set", "model.similarity=cosine", "--steps", 20]


@pytest.fixture
def user(tmp_path, lines, monkeypatch, capsys):
    """Runs a command that must succeed, in a folder with the table, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "table.csv", lines)
    return lambda *arguments: run_main(capsys, *arguments).output


def test_group_dro_weighs_an_example_by_all_of_its_groups(dataset, of_language):
    """A batch names sets of groups; those without a group are one too."""
    method = {"mining__method": "group-dro", "risk__group": "language"}
    config = small.config("unused", mining__num_sampled_labels=20, **method)
    training = build_training(config, dataset, torch.device("cpu")).training
    batch = training.feed.next_batch()
    losses = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = training.risk.weights(losses, batch, 8)
    pair_ids = training.feed.order.pairs_at(0, 32, training.feed.place.key).numpy()
    is_member = np.array([of_language(name, "train") for name in LANGUAGES])[:, pair_ids]
    is_member = np.vstack([is_member, ~is_member.any(axis=0)])  # (groups, examples)
    assert is_member[-1].any()
    assert (is_member.sum(axis=0) > 1).any()
    counts = is_member.sum(axis=1).clip(1)
    shares = np.exp(0.01 * (is_member @ losses.numpy()) / counts)
    expected = (shares / counts) @ is_member
    assert weights.tolist() == pytest.approx((expected / expected.sum()).tolist())


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
    write_table(tmp_path / "shop.csv", lines, "country,age")
    words = ("--group", "country", "--group", "age", "--test-fraction", 0)
    out = user("data", "table", "shop.csv", *words, "--validation-fraction", 0)
    assert out.splitlines()[:4] == [
        "rows: 6, (query, label) pairs in them: 6; merged, since another has "
        "the same query, label and groups: 1",
        "different queries: 3, with several pairs: 1; different pairs: 4, repeated: 1",
        "empty cells of country, in no group: 1",
        "empty cells of age, in no group: 1",
    ]
    assert "country (2)" in out
    for printed in (out, user("data", "show", "datasets/shop")):
        assert [line for line in printed.splitlines() if line.startswith("in several")] == [
            "in several groups of country, and counted in each: queries 1, (query, label) pairs 1",
            "in several groups of age, and counted in each: queries 0, (query, label) pairs 0",
        ]


# --- on disk --------------------------------------------------------------------------------------


def test_a_table_with_one_group_a_query_is_stored_as_it_always_was(tmp_path):
    lines = [(f"query {i}", f"label {i % 7}", "AB"[i % 2] if i % 5 else "") for i in range(60)]
    made = write_table(tmp_path / "a.csv", lines, "country", num_buckets=2**18)
    saved = save_dataset(made, tmp_path / "data")
    assert saved.fingerprint.startswith("2318c705a4011c2c165e8c84beec91fa")
    assert all(part.groups["country"].sets is None for part in saved.parts.values())


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("_sets.language.offsets", lambda a: a[1:], "arrays of|must go from 0"),
        ("_sets.language.offsets", lambda a: a[[0, 2, 1, *range(3, len(a))]], "in order"),
        ("_sets.language.ids", lambda a: a + 1, "must be from 0 to 4, got 1 to 5"),
        ("_sets.language.ids", lambda a: a * 0, "each once and in order"),
        ("s.language", lambda a: a + 99, "must be from -1 to"),
        ("s.language", lambda a: a[1:], "must be of shape"),
    ],
)
def test_damaged_memberships_are_refused_when_opened(dataset, tmp_path, array, change, message):
    save_dataset(dataset, tmp_path / "data")
    array, about = f"train.group{array}", tmp_path / "data/dataset.json"
    path = tmp_path / f"data/{array}.npy"
    changed = np.ascontiguousarray(change(np.load(path)))
    np.save(path, changed)
    length = re.compile(rf'("{re.escape(array)}": \[\s*)\d+')
    about.write_text(length.sub(rf"\g<1>{len(changed)}", about.read_text("utf-8")), "utf-8")
    with pytest.raises(UserError, match=rf"dataset\.json is damaged .*({message})"):
        open_dataset(tmp_path / "data")
