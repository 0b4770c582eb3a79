"""Two baselines without training, evaluated as a run is, so that nobody ships a model below them.

- *popularity*: the labels with the most training pairs, the same for every query;
- *nearest queries*: the labels of the most similar training queries, by their votes. Similarity is
  the cosine of the features: dense vectors and sparse values as they are, features without values
  (n-grams of a text, say) by tf-idf.

Their cost is bounded: of a large part a sample of queries is evaluated, and of many training
queries a sample is searched. A run is compared with them on the queries that both have answered.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.data import Dataset, FloatArray, IntArray, Rows, pairs_of, take_rows
from evenhand.data.csr import collect_rows, release_pages
from evenhand.data.weighting import feature_weights, unit_values
from evenhand.evaluation.comparison import Difference, GroupList, compare_outcomes
from evenhand.evaluation.outcome import Outcome, evaluate, load_outcome, save_outcome
from evenhand.models import chosen_features
from evenhand.search.exact import ExactIndex, SearchResult
from evenhand.search.neighbours import Neighbours, Votes, count_votes

BASELINES = ("popularity", "nearest queries")
MAX_QUERIES = 5_000  # evaluated: a recall near one half is then known to 1.4 points
MAX_ENTRIES = 2**24  # features of the training queries searched: some 500 MB in all
NUM_NEIGHBOURS = 20


class PopularityIndex:
    """Answers every query with the labels of the most training pairs."""

    def __init__(self, label_counts: IntArray) -> None:
        self.counts = torch.from_numpy(np.asarray(label_counts, dtype=np.float32))  # (L,)
        self.order = self.counts.argsort(descending=True, stable=True)

    def search(self, queries: Tensor, num_results: int) -> SearchResult:
        label_ids = self.order[:num_results].expand(len(queries), -1)
        return SearchResult(label_ids, self.counts[label_ids])

    def scores_of(self, _: Tensor, label_ids: Tensor) -> Tensor:
        return self.counts[label_ids.clamp(min=0)].masked_fill(label_ids < 0, -torch.inf)


class VotedQueries(NamedTuple):
    """Queries, as the nearest-queries baseline needs them: by their votes."""

    votes: Votes  # of their nearest training queries
    device: torch.device = torch.device("cpu")


class VoteIndex:
    """Answers a query with the labels its nearest training queries have, by their votes."""

    def search(self, queries: VotedQueries, num_results: int) -> SearchResult:
        label_ids, votes = queries.votes  # of equal votes the lower id comes first
        scores, order = votes.masked_fill(label_ids < 0, -torch.inf).sort(
            dim=1, descending=True, stable=True
        )
        return SearchResult(label_ids.gather(1, order)[:, :num_results], scores[:, :num_results])

    def scores_of(self, queries: VotedQueries, label_ids: Tensor) -> Tensor:
        return queries.votes.of(label_ids).masked_fill(label_ids < 0, -torch.inf)


def load_baselines(
    folder: Path, dataset: Dataset, part_name: str, cutoffs: Sequence[int]
) -> dict[str, Outcome]:
    """The outcomes by name: evaluated once, and kept in a folder of a run's evaluation."""
    places = {
        name: folder / name.replace(" ", "-") for name in possible_baselines(dataset, part_name)
    }
    if all((place / "outcome.npz").exists() for place in places.values()):
        found = {name: load_outcome(place) for name, place in places.items()}
        if all(outcome.cutoffs == tuple(cutoffs) for outcome in found.values()):
            return found
    found = evaluate_baselines(dataset, part_name, cutoffs)
    for name, outcome in found.items():
        save_outcome(outcome, places[name])
    return found


def possible_baselines(dataset: Dataset, part_name: str) -> tuple[str, ...]:
    """Those that there is training data for, and for the nearest queries features too.

    None for the train part, whose nearest training queries are the queries themselves.
    """
    features = dataset.parts["train"].features
    if part_name == "train" or not dataset.label_counts().any():
        return ()
    has_features = not isinstance(features, Rows) or len(features.ids) > 0
    return BASELINES if has_features else BASELINES[:1]


def evaluate_baselines(
    dataset: Dataset, part_name: str, cutoffs: Sequence[int]
) -> dict[str, Outcome]:
    """What popularity and the nearest training queries find, for the queries of `sample_part`."""
    names = possible_baselines(dataset, part_name)
    if not names:
        return {}
    row_ids = sampled_queries(dataset, part_name)
    train, part = dataset.parts["train"], dataset.parts[part_name]
    label_counts = dataset.label_counts()
    ways: list[tuple[Callable[[IntArray], Any], Any]] = [
        (lambda rows: torch.empty(len(rows), 0), PopularityIndex(label_counts))
    ]
    if "nearest queries" in names:
        votes_of = _neighbour_votes(dataset)

        def voted(rows: IntArray) -> VotedQueries:
            return VotedQueries(votes_of(chosen_features(part, row_ids[rows])))

        ways.append((voted, VoteIndex()))
    sample = sample_part(dataset, part_name).parts[part_name]
    outcomes = [
        evaluate(
            encode_fn,
            index,
            sample,
            label_counts,
            num_results=max(cutoffs),
            cutoffs=cutoffs,
            batch_size=1024,
            num_train_queries=len(train),
        )
        for encode_fn, index in ways
    ]
    return dict(zip(names, outcomes, strict=True))


def compare_with_baselines(
    outcome: Outcome,
    baselines: Mapping[str, Outcome],
    dataset: Dataset,
    part_name: str,
    groups: Mapping[str, GroupList] | None = None,
    *,
    metric: str | None = None,
) -> dict[str, list[Difference]]:
    """A run minus each baseline, paired, on the queries that the baselines have answered.

    Groups and metric are those of `compare_outcomes`.
    """
    sample = sample_part(dataset, part_name)
    row_ids = sampled_queries(dataset, part_name)
    is_kept = np.isin(outcome.query_ids, row_ids)  # (N,)
    own = dataclasses.replace(
        outcome,
        query_ids=np.searchsorted(row_ids, outcome.query_ids[is_kept]),
        retrieved_ids=outcome.retrieved_ids[row_ids],
        retrieved_scores=outcome.retrieved_scores[row_ids],
        query_metrics={name: v[row_ids] for name, v in outcome.query_metrics.items()},
        query_weights={name: v[row_ids] for name, v in outcome.query_weights.items()},
        **{name: getattr(outcome, name)[is_kept] for name in ("label_ids", "ranks", "scores")},
    )
    return {
        name: compare_outcomes([found], [own], sample, part_name, groups, metric=metric)
        for name, found in baselines.items()
    }


def sampled_queries(dataset: Dataset, part_name: str) -> IntArray:
    """The queries of a part on which the baselines are evaluated, in order; always the same."""
    return _sample(len(dataset.parts[part_name]), MAX_QUERIES)


def sample_part(dataset: Dataset, part_name: str) -> Dataset:
    """The data set with those queries alone in a part, without their features and texts."""
    part, row_ids = dataset.parts[part_name], sampled_queries(dataset, part_name)
    is_kept = np.isin(pairs_of(part.positives).query_ids, row_ids)  # (N,)
    groups = {
        name: g._replace(ids=g.ids[row_ids if g.sets is None else is_kept])
        for name, g in part.groups.items()
    }
    sample = dataclasses.replace(
        part,
        features=np.empty((len(row_ids), 0), dtype=np.float32),
        positives=take_rows(part.positives, row_ids),
        groups=groups,
        texts=None,
    )
    return dataclasses.replace(dataset, parts={**dataset.parts, part_name: sample})


def _sample(size: int, most: int) -> IntArray:
    """All of so many rows, or `most` of them drawn at random, in order."""
    if size <= most:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False))


def _neighbour_votes(dataset: Dataset) -> Callable[[Rows | FloatArray], Votes]:
    """A function from features of queries to the votes of their nearest training queries."""
    train = dataset.parts["train"]
    size = len(train.features.ids) if isinstance(train.features, Rows) else train.features.size
    row_ids = _sample(len(train), max(1, len(train) * MAX_ENTRIES // max(1, size)))
    features, positives = chosen_features(train, row_ids), take_rows(train.positives, row_ids)
    if isinstance(train.features, Rows):
        release_pages(train.features.ids)
    count = min(NUM_NEIGHBOURS, len(row_ids))

    if not isinstance(features, Rows):

        def unit(vectors: Rows | FloatArray) -> Tensor:
            assert not isinstance(vectors, Rows)
            return torch.nn.functional.normalize(torch.from_numpy(vectors).float())

        index = ExactIndex(unit(features))

        def dense_votes(queries: Rows | FloatArray) -> Votes:
            ids, similarities = index.search(unit(queries), count)
            return count_votes(ids.numpy(), similarities.numpy(), positives, power=1)

        return dense_votes

    weights = feature_weights(
        features, dataset.num_features, "tf-idf" if features.values is None else "unit"
    )

    def weigh(rows: Rows | FloatArray) -> Rows:
        assert isinstance(rows, Rows)
        return collect_rows(map(weigh_block, rows.blocks())) if len(rows) else rows

    def weigh_block(rows: Rows) -> Rows:
        if rows.values is None:  # what occurs twice in a text counts twice
            counts = rows.to_merged(dataset.num_features)
            rows = Rows(counts.indptr, counts.indices, counts.data.astype(np.float32))
        return rows.with_values(unit_values(rows, weights))

    neighbours = Neighbours(
        weigh(features),
        positives,
        num_features=dataset.num_features,
        num_neighbours=count,
        power=1,
    )
    return lambda rows: neighbours.votes(weigh(rows))
