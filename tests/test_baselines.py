"""Popularity and the nearest training queries: by loops, on a sample, and beside a run."""

import collections
import dataclasses
import math

import numpy as np
import pytest

import small
from evenhand.data import pairs_of
from evenhand.evaluation import baselines, score_table
from evenhand.evaluation.baselines import (
    compare_with_baselines,
    evaluate_baselines,
    sampled_queries,
)
from evenhand.report.headline import describe_baselines, headline
from evenhand.report.run_set import make_run_set
from evenhand.run_folder import RunResult

CUTOFFS = (1, 10)


def vectors_of(dataset, part_name):
    """The features of every query as a dictionary; n-grams count by tf-idf, dense ones as are."""
    train, part = dataset.parts["train"], dataset.parts[part_name]
    if not dataset.is_sparse:
        return [dict(enumerate(row)) for row in part.features.astype(float)]
    counts = collections.Counter(
        f for q in range(len(train)) for f in {*train.features.row(q).tolist()}
    )
    weight = {f: 1 + math.log((1 + len(train)) / (1 + counts[f])) for f in range(512)}
    rows = [collections.Counter(part.features.row(q).tolist()) for q in range(len(part))]
    return [{f: n * weight[f] for f, n in row.items()} for row in rows]


def cosine(one, other):
    product = sum(value * other.get(feature, 0) for feature, value in one.items())
    return product / math.sqrt(
        sum(v * v for v in one.values()) * sum(v * v for v in other.values())
    )


@pytest.mark.parametrize("make", [small.text_dataset, small.dense_dataset])
def test_both_find_what_loops_find(make):
    dataset = make()
    popularity, nearest = evaluate_baselines(dataset, "test", CUTOFFS).values()
    counts = dataset.label_counts()
    favourites = sorted(range(dataset.num_labels), key=lambda label: (-counts[label], label))
    assert (popularity.retrieved_ids == favourites[:10]).all()
    train, positives = vectors_of(dataset, "train"), dataset.parts["train"].positives
    for query, vector in enumerate(vectors_of(dataset, "test")[:20]):
        similar = [cosine(vector, other) for other in train]
        order, count = (
            sorted(range(len(train)), key=lambda n: -similar[n]),
            baselines.NUM_NEIGHBOURS,
        )
        if math.isclose(similar[order[count - 1]], similar[order[count]]):
            continue  # either may be the last one
        closest = order[:count]
        votes = collections.Counter()
        for n in closest:
            if similar[n] > 0:
                votes.update(dict.fromkeys(positives.row(n).tolist(), similar[n]))
        for label, score in zip(
            nearest.retrieved_ids[query], nearest.retrieved_scores[query], strict=True
        ):
            expected = votes[label] / sum(max(0, similar[n]) for n in closest)
            assert score == pytest.approx(expected, rel=1e-4) or label < 0


def test_of_a_large_part_a_sample_is_evaluated_and_a_run_is_held_to_it_there(monkeypatch):
    dataset = small.text_dataset()
    everywhere = evaluate_baselines(dataset, "test", CUTOFFS)
    monkeypatch.setattr(baselines, "MAX_QUERIES", 50)
    monkeypatch.setattr(baselines, "MAX_ENTRIES", 300)
    found = evaluate_baselines(dataset, "test", CUTOFFS)
    kept = sampled_queries(dataset, "test")
    assert len(set(kept)) == 50 == len(found["popularity"].retrieved_ids)
    whole = everywhere["popularity"]
    rows = compare_with_baselines(whole, found, dataset, "test")["popularity"]
    assert {row.difference for row in rows if row.count} == {0.0}
    is_kept = np.isin(pairs_of(dataset.parts["test"].positives).query_ids, kept)
    assert rows[0].count == is_kept.sum()
    assert rows[0].baseline == (whole.ranks[is_kept] == 1).mean()


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (1.0, {}),
        (0.7, {"nearest queries": "below"}),
        (0.0, {"nearest queries": "below", "popularity": "below"}),
        (None, {"nearest queries": "not clearly above"}),  # the very same outcome
    ],
)
def test_a_run_below_a_baseline_is_said_to_be_so_first(kept, said):
    """A run that finds a share of all pairs, beside neighbours that find nine tenths."""
    dataset = small.text_dataset()
    found = evaluate_baselines(dataset, "test", CUTOFFS)
    popularity, nearest = found.values()
    is_missed = np.arange(len(nearest.ranks)) % 10 == 0
    nearest = dataclasses.replace(nearest, ranks=np.where(is_missed, 0, 1).astype(np.int32))
    outcome = nearest
    if kept is not None:
        is_found = np.arange(len(nearest.ranks)) % 100 < 100 * kept
        outcome = dataclasses.replace(nearest, ranks=is_found.astype(np.int32))
    scores = score_table(outcome, dataset, "test", num_resamples=20)
    given = {"popularity": popularity, "nearest queries": nearest}
    result = RunResult("run", {}, "", "test", scores, outcome, baselines=given)
    runs = make_run_set([result], dataset)
    warning = headline(runs, []).split(". ")[0]
    which = f"{' and '.join(sorted(said, reverse=True))} baseline"
    which += "s, which need" if len(said) > 1 else ", which needs"
    words = f"run is {said.get('nearest queries')} the {which} no training ("
    assert warning.startswith(words) == bool(said)
    assert len(describe_baselines(runs)) == 2
