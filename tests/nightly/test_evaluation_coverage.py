"""Intervals cover the truth about as often as they say, on many simulated runs."""

import dataclasses
import math

import numpy as np
import pytest

from evenhand.data import Dataset
from evenhand.evaluation import Difference, Outcome, compare_outcomes, score_table
from test_evaluation import part_of, row


def simulated(generator, num_queries, pairs_a_query, *, chance=None):
    """Outcomes that are right or wrong for a whole query at once (recall@1 has mean 0.6)."""
    is_right = np.repeat(generator.random(num_queries) < (chance or 0.6), pairs_a_query)
    num_pairs = num_queries * pairs_a_query
    part = part_of([list(range(pairs_a_query))] * num_queries)
    outcome = Outcome(
        query_ids=np.repeat(np.arange(num_queries), pairs_a_query),
        label_ids=np.tile(np.arange(pairs_a_query), num_queries),
        ranks=is_right.astype(np.int32),
        scores=np.zeros(num_pairs, dtype=np.float32),
        retrieved_ids=np.full((num_queries, 10), -1, dtype=np.int32),
        retrieved_scores=np.zeros((num_queries, 10), dtype=np.float32),
        query_metrics={"mrr": is_right[::pairs_a_query].astype(np.float32)},
        query_weights={},
        num_results=1,
        cutoffs=(1,),
    )
    parts = {"train": part, "test": part}
    return outcome, Dataset("simulated", 1, pairs_a_query, parts)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator, num_covered = np.random.default_rng(1), 0
    for trial in range(200):
        outcome, dataset = simulated(generator, 150, 2)
        scores = score_table(outcome, dataset, "test", num_resamples=200, seed=trial)
        score = row(scores, "recall@1")
        num_covered += score.low <= 0.6 <= score.high
    assert 0.87 <= num_covered / 200 <= 0.99  # 0.95, and five standard errors below


def test_whole_queries_vary_more_than_single_pairs_would():
    outcome, dataset = simulated(np.random.default_rng(2), 400, 9)
    score = row(score_table(outcome, dataset, "test"), "recall@1")
    of_pairs = 2 * 1.96 * math.sqrt(score.value * (1 - score.value) / score.count)
    assert score.high - score.low == pytest.approx(math.sqrt(9) * of_pairs, rel=0.15)
    queries = row(score_table(outcome, dataset, "test"), "mrr")
    assert (queries.low, queries.high) == pytest.approx((score.low, score.high))


def mended(outcome, generator, chance):
    """The same run with some of its wrong queries put right."""
    is_mended = generator.random(len(outcome.retrieved_ids)) < chance
    ranks = np.where(is_mended[outcome.query_ids], 1, outcome.ranks).astype(np.int32)
    return dataclasses.replace(outcome, ranks=ranks)


def test_pairing_narrows_the_interval_and_it_still_covers():
    generator, num_covered = np.random.default_rng(5), 0
    for trial in range(150):
        before, dataset = simulated(generator, 200, 2)
        after = mended(before, generator, 0.1)  # mends a tenth of the 40 % that are wrong
        (found, *_) = compare_outcomes(
            [before], [after], dataset, "test", num_resamples=150, seed=trial
        )
        assert isinstance(found, Difference)
        num_covered += found.low <= 0.1 * 0.4 <= found.high
    assert 0.86 <= num_covered / 150 <= 0.99
    unpaired = math.sqrt(2 * 0.6 * 0.4 / 200) * 2 * 1.96
    assert found.high - found.low < 0.6 * unpaired
