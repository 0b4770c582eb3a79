"""The comparison with PECOS and napkinXC: the same trials for all, and our own sum of scores."""

import json

import numpy as np
import torch

from evenhand.data import Dataset, Part, Rows
from evenhand.search import ExactIndex, HybridIndex, Neighbours
from evenhand.search.reranker import fit_ranker
from experiments.peers import compare, score_mixtures


def test_every_system_has_as_many_settings_to_try():
    for grid, count in ((compare.FEW, 8), (compare.MANY, 3)):
        assert {len(settings) for settings in grid.values()} == {count}
        for settings in grid.values():
            assert len({json.dumps(setting) for setting in settings}) == count


def sparse_dataset():
    """Few rows of features and labels at random: train, and test."""
    generator = np.random.default_rng(0)

    def rows(count, width, share):
        dense = generator.random((count, width)) * (generator.random((count, width)) < share)
        dense[:, 0] += 0.1  # no row is empty
        offsets = np.concatenate([[0], np.cumsum((dense > 0).sum(1))])
        return Rows(offsets, np.nonzero(dense)[1].astype(np.int32), dense[dense > 0].astype("f4"))

    parts = {
        name: Part(rows(count, 9, 0.4), Rows(*rows(count, 30, 0.1)[:2]))
        for name, count in (("train", 120), ("test", 25))
    }
    return Dataset("random", 9, 30, parts)


def test_a_mixture_is_what_the_search_of_a_model_finds(monkeypatch):
    monkeypatch.setattr(score_mixtures, "CUTOFFS", (5, 10))
    dataset, generator = sparse_dataset(), torch.Generator().manual_seed(0)
    train, part = dataset.parts["train"], dataset.parts["test"]
    vectors, table = (torch.randn(count, 4, generator=generator) for count in (25, 30))
    every = np.tile(np.arange(30, dtype=np.int32), (120, 1))
    ranker = fit_ranker(train.features, train.positives, every, num_features=9, num_labels=30)
    mixture = score_mixtures.Mixture(20, 2.0, 3.0, 0.4, 1.5)
    discounts = 0.4 * torch.log1p(torch.from_numpy(dataset.label_counts()).float())
    neighbours = Neighbours(
        train.features, train.positives, num_features=9, num_neighbours=20, power=2.0
    )
    index = HybridIndex(
        ExactIndex(table, label_bias=-discounts), neighbours=neighbours, vote_weight=3.0,
        ranker=ranker, ranker_weight=1.5, num_candidates=12,
    )  # fmt: skip
    wanted = index.search(index.prepare(vectors, part.features), 10)

    judge = score_mixtures.Judge(dataset, "test")
    exact = ExactIndex(table)
    ids = score_mixtures.with_labels(exact.search(vectors, 7).label_ids, judge.most_voted())
    ranker_scores = torch.from_numpy(ranker.scores(part.features, ids.numpy()))
    scored = score_mixtures.Scored(ids, exact.scores_of(vectors, ids), ranker_scores, 12)
    found = score_mixtures.Mixer(scored, judge).found(mixture)
    assert (found == wanted.label_ids).float().mean() > 0.9  # 7 candidates of 30 are few
    whole = score_mixtures.with_labels(exact.search(vectors, 30).label_ids, judge.most_voted())
    ranker_scores = torch.from_numpy(ranker.scores(part.features, whole.numpy()))
    scored = score_mixtures.Scored(whole, exact.scores_of(vectors, whole), ranker_scores, 12)
    assert score_mixtures.Mixer(scored, judge).found(mixture).tolist() == wanted.label_ids.tolist()


def test_labels_that_a_peer_left_out_count_as_its_worst():
    ids, scores = torch.tensor([[3, 1, -1]]), torch.tensor([[0.9, 0.2, -torch.inf]])
    found = score_mixtures.with_worst_scores(ids, scores, torch.tensor([[1, 5, -1]]))
    assert found.label_ids.tolist() == [[3, 1, -1, -1, 5, -1]]
    torch.testing.assert_close(found.scores[0, [0, 1, 4]], torch.tensor([0.9, 0.2, 0.2]))
    assert found.scores[0, [2, 3, 5]].isneginf().all()
