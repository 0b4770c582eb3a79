"""Groups belong to the lines of a table: whoever is on lines of several groups counts in each.

Everything here starts from a CSV file and is compared with loops over its lines; intervals and
differences of such groups are in test_evaluation.py.
"""

import random

import pytest

import small
from evenhand.data import load_table, pairs_of, save_dataset
from evenhand.evaluation import (
    score_table,
)
from evenhand.tuning.search import default_group
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


def test_tuning_counts_every_membership(dataset):
    settings = small.config("unused", evaluation__min_pairs={"language": 5})
    assert default_group(settings, dataset) == "worst tenth of language"


# --- on disk --------------------------------------------------------------------------------------


def test_a_table_with_one_group_a_query_is_stored_as_it_always_was(tmp_path):
    lines = [(f"query {i}", f"label {i % 7}", "AB"[i % 2] if i % 5 else "") for i in range(60)]
    made = write_table(tmp_path / "a.csv", lines, "country", num_buckets=2**18)
    saved = save_dataset(made, tmp_path / "data")
    assert saved.fingerprint.startswith("2318c705a4011c2c165e8c84beec91fa")
    assert all(part.groups["country"].sets is None for part in saved.parts.values())
