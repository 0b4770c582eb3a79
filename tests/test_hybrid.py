"""Votes of neighbours and a ranker added to a model's scores: against loops over all labels."""

import numpy as np
import pytest
import torch

from evenhand.data import Rows
from evenhand.search import ExactIndex, HybridIndex, LinearRanker, Neighbours
from test_ranker import dense_weights, rows_of

NUM_LABELS, NUM_FEATURES = 12, 6


class Problem:
    """Training queries and their labels, a random ranker, and queries, as arrays."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)

        def features(count):
            dense = generator.random((count, NUM_FEATURES))
            return (dense * (generator.random(dense.shape) < 0.5)).astype(np.float32)

        self.train, self.queries = features(15), features(5)
        self.has_label = generator.random((15, NUM_LABELS)) < 0.3
        weights = generator.standard_normal((NUM_LABELS, NUM_FEATURES))
        biases = generator.standard_normal(NUM_LABELS).astype(np.float32)
        self.ranker = LinearRanker(rows_of(weights), biases, NUM_FEATURES)
        self.vectors, table = (
            torch.from_numpy(generator.standard_normal((count, 4))).float()
            for count in (5, NUM_LABELS)
        )
        self.exact = ExactIndex(table)

    def neighbours(self, count, power=3.0):
        labels = Rows(*rows_of(self.has_label)[:2])
        return Neighbours(
            rows_of(self.train), labels,
            num_features=NUM_FEATURES, num_neighbours=count, power=power,
        )  # fmt: skip

    def scores(self, *, count=0, power=3.0, vote_weight=0.0):
        """(Q, L) of the model and the votes: every label, every training query, in loops."""
        scores = (self.vectors @ self.exact.label_vectors.T).double().numpy()
        for place, query in enumerate(self.queries):
            similarities = self.train @ query
            order = sorted(range(len(self.train)), key=lambda row: (-similarities[row], row))
            nearest = [row for row in order[:count] if similarities[row] > 0]
            total = sum(float(similarities[row]) ** power for row in nearest)
            for row in nearest:
                share = float(similarities[row]) ** power / total
                scores[place] += self.has_label[row] * vote_weight * share
        return scores


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [0, 1, 3, 15])
@pytest.mark.parametrize("num_candidates", [0, 1, 6, 100])  # 0: no ranker
@pytest.mark.parametrize("num_results", [1, 4])
def test_search_and_scores_are_those_of_the_loops(seed, count, num_candidates, num_results):
    problem = Problem(seed)
    index = HybridIndex(
        problem.exact,
        neighbours=problem.neighbours(count) if count else None,
        vote_weight=2.5,
        ranker=problem.ranker if num_candidates else None,
        ranker_weight=1.7,
        num_candidates=max(1, num_candidates),
    )
    asked = index.prepare(problem.vectors, rows_of(problem.queries))
    assert (len(index), len(asked), asked.device) == (NUM_LABELS, 5, problem.vectors.device)
    before = problem.scores(count=count, vote_weight=2.5)
    after = before
    if num_candidates:
        weights = dense_weights(problem.ranker)
        after = before + 1.7 * (problem.queries @ weights[:, :-1].T + weights[:, -1])
    found = index.search(asked, num_results)
    for query in range(5):
        candidates = np.argsort(-before[query])
        if num_candidates:
            candidates = candidates[: max(num_candidates, num_results)]
        best = sorted(candidates, key=lambda label: -after[query, label])[:num_results]
        assert found.label_ids[query].tolist() == best
        np.testing.assert_allclose(found.scores[query], after[query, best], rtol=1e-4, atol=1e-4)
    every = torch.arange(NUM_LABELS).expand(5, -1)
    np.testing.assert_allclose(index.scores_of(asked, every), after, rtol=1e-4, atol=1e-4)
    assert index.scores_of(asked, torch.full((5, 2), -1)).isneginf().all()
    for row in range(5):  # a query's answer does not depend on those asked with it
        one = slice(row, row + 1)
        alone = index.prepare(problem.vectors[one], rows_of(problem.queries[one]))
        assert (
            index.search(alone, num_results).label_ids[0].tolist() == found.label_ids[row].tolist()
        )


def three_nearest(train, power):
    """Of training queries with a label each, and the query (1, 0)."""
    labels = Rows(np.arange(len(train) + 1), np.arange(len(train), dtype=np.int32))
    sizes = {"num_features": 2, "num_neighbours": 3, "power": power}
    query = rows_of(np.array([[1, 0]], np.float32))
    return Neighbours(rows_of(np.array(train, np.float32)), labels, **sizes), query


def test_of_equally_similar_queries_the_first_are_the_neighbours():
    neighbours, query = three_nearest([[1, 0], [2, 0], [1, 0], [1, 0], [0, 1]], 1.0)
    ids, similarities = neighbours.nearest(query)
    assert ids.tolist() == [[1, 0, 2]]
    assert similarities.tolist() == [[2, 1, 1]]


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_training_queries_without_a_feature_in_common_have_no_vote(power):
    neighbours, query = three_nearest([[0, 1], [1, 0], [0, 1]], power)
    assert neighbours.votes(query).of(torch.arange(3).unsqueeze(0)).tolist() == [[0, 1, 0]]
