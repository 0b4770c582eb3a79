"""Votes of neighbours, a handicap for frequent labels and a ranker, added to anyone's scores.

    score' = score + neighbour_weight * votes - frequency_discount * log(1 + training pairs)
           + ranker_weight * score of the ranker, for the first labels by the sum so far

This is the sum that `evenhand.search` makes, over candidates that may come from any system: its
own best labels and those that the neighbours vote for most. A test compares the two.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.data import pad_rows
from evenhand.data.groups import frequency_groups
from evenhand.metrics import pair_ranks
from evenhand.search.neighbours import Neighbours, Votes, count_votes

CUTOFFS = (5, 10, 25, 50)
GROUPINGS = {over: partial(frequency_groups, over=over) for over in ("labels", "pairs")}
NEIGHBOURS = (20, 50, 100)
POWERS = (1.0, 2.0, 4.0, 8.0)
MOST_VOTED = 300  # labels of the neighbours that become candidates
NUM_WIDE, NUM_NEAR = 20, 20  # mixtures tried: anywhere, then around the best so far
SMALLEST = 1e-30  # a probability, before its logarithm is taken


class Scored(NamedTuple):
    """What a system says of the queries of a part."""

    label_ids: Tensor  # (Q, C) distinct candidates, -1 for none
    scores: Tensor  # (Q, C), -inf for none
    ranker_scores: Tensor | None = None  # (Q, C)
    num_ranked: int = 0  # candidates that the ranker sees


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Weights by the names of the settings, and whether scores are taken as logarithms."""

    num_neighbours: int = 0
    neighbour_power: float = 1.0
    neighbour_weight: float = 0.0
    frequency_discount: float = 0.0
    ranker_weight: float = 0.0
    takes_log: bool = False


STAGES = {  # cumulative; what a mixture may use in each
    "alone": (),
    "votes": ("neighbour_weight",),
    "handicap": ("neighbour_weight", "frequency_discount"),
    "ranker": ("neighbour_weight", "frequency_discount", "ranker_weight"),
}
WEIGHTS = STAGES["ranker"]


class Judge:
    """The neighbours of a part's queries, and figures of what is retrieved for them."""

    def __init__(self, dataset, part_name):
        train, part = dataset.parts["train"], dataset.parts[part_name]
        neighbours = Neighbours(
            train.features,
            train.positives,
            num_features=dataset.num_features,
            num_neighbours=max(NEIGHBOURS),
            power=1.0,
        )
        self.neighbours, self.similarities = neighbours.nearest(part.features)
        self._votes = {}
        self.train_positives, self.positives = train.positives, part.positives
        self.counts = dataset.label_counts()
        self.log_counts = torch.log1p(torch.from_numpy(self.counts).float())  # (L,)
        self.wanted = torch.from_numpy(pad_rows(part.positives, np.arange(len(part))))

    def votes(self, num_neighbours, power):
        """Labels of the neighbours and their votes: (Q, C), (Q, C)."""
        key, first = (num_neighbours, power), slice(num_neighbours)
        if key not in self._votes:
            near = self.neighbours[:, first], self.similarities[:, first]
            self._votes[key] = count_votes(*near, self.train_positives, power=power)
        return self._votes[key]

    def most_voted(self):
        """The labels with most votes of all neighbours: (Q, C), -1 where fewer."""
        ids, votes = self.votes(max(NEIGHBOURS), 1.0)
        return ids.gather(1, votes.topk(min(MOST_VOTED, ids.shape[1]), dim=1).indices)

    def figures(self, found):
        """Recall in every cell, by both definitions of head, torso and tail, and P@1."""
        table = pair_ranks(found, self.wanted)  # (Q, R), (Q, P) -> (Q, P)
        ranks = table[table >= 0].numpy()
        queries = np.repeat(np.arange(len(self.positives)), self.positives.lengths())
        is_first = np.zeros(len(self.positives), bool)
        is_first[queries[ranks == 1]] = True
        recall = {}
        for name, groups_fn in GROUPINGS.items():
            groups = groups_fn(self.counts)
            group_ids = groups.ids[self.positives.ids]
            for cutoff in CUTOFFS:
                is_hit = (ranks > 0) & (ranks <= cutoff)
                row = {
                    group: float(is_hit[group_ids == number].mean())
                    for number, group in enumerate(groups.names)
                }
                recall.setdefault(name, {})[str(cutoff)] = {**row, "full": float(is_hit.mean())}
        cells = [list(row.values()) for row in recall["labels"].values()]
        precision = float(is_first[self.positives.lengths() > 0].mean())
        return {"mean": float(np.mean(cells)), "precision@1": precision, "recall": recall}


class Mixer:
    """Mixtures of one system's scores with the votes of one part's neighbours."""

    def __init__(self, scored, judge):
        self.judge = judge
        self.scored = scored
        self.logs = scored.scores.clamp(min=SMALLEST).log()
        self.logs[scored.label_ids < 0] = -torch.inf
        self.log_counts = judge.log_counts[scored.label_ids.clamp(min=0)]  # (Q, C)
        self._votes = {}

    def found(self, mixture):
        """The best labels of the mixture: (Q, R)."""
        ids = self.scored.label_ids
        totals = self.logs if mixture.takes_log else self.scored.scores
        if mixture.frequency_discount:
            totals = totals - mixture.frequency_discount * self.log_counts
        if mixture.neighbour_weight:
            votes = self.votes(mixture.num_neighbours, mixture.neighbour_power)
            totals = totals + mixture.neighbour_weight * votes
        count = min(max(CUTOFFS), ids.shape[1])
        if mixture.ranker_weight:
            width = min(max(count, self.scored.num_ranked), ids.shape[1])
            totals, first = totals.topk(width, dim=1)  # (Q, C) -> (Q, width)
            ids = ids.gather(1, first)
            ranker_scores = self.scored.ranker_scores.gather(1, first)
            totals = totals + mixture.ranker_weight * ranker_scores
        return ids.gather(1, totals.topk(count, dim=1).indices)

    def figures(self, mixture):
        return self.judge.figures(self.found(mixture))

    def votes(self, num_neighbours, power):
        key = num_neighbours, power
        if key not in self._votes:
            self._votes[key] = self.judge.votes(*key).of(self.scored.label_ids)
        return self._votes[key]  # (Q, C)

    def best(self, weights, *, may_take_logs):
        """The best mixture that uses these weights, its figures, and the means of all tried.

        Every system and stage has the same draws, in units of the spread of its scores.
        """
        if not weights:
            return Mixture(), self.figures(Mixture()), []
        rng = np.random.default_rng(0)
        units = {False: spread(self.scored.scores), True: spread(self.logs)}
        ranker_unit = 1.0
        if "ranker_weight" in weights:
            ranker_unit = spread(
                self.scored.ranker_scores.masked_fill(self.logs.isinf(), -torch.inf)
            )
        best, figures, means = None, None, []
        for number in range(NUM_WIDE + NUM_NEAR):
            drawn = drawn_mixture(rng, units, ranker_unit, may_take_logs=may_take_logs)
            if number >= NUM_WIDE:
                drawn = varied_mixture(rng, best)
            unused = {name: 0.0 for name in WEIGHTS if name not in weights}
            mixture = dataclasses.replace(drawn, **unused)
            now = self.figures(mixture)
            means.append(now["mean"])
            if best is None or now["mean"] > figures["mean"]:
                best, figures = mixture, now
        return best, figures, means


def drawn_mixture(rng, units, ranker_unit, *, may_take_logs):
    takes_log = bool(rng.random() < 0.5) and may_take_logs
    unit = units[takes_log]
    return Mixture(
        num_neighbours=int(rng.choice(NEIGHBOURS)),
        neighbour_power=float(rng.choice(POWERS)),
        neighbour_weight=rounded(unit * 10 ** rng.uniform(0, 1.3)),
        frequency_discount=rounded(unit * rng.uniform(0, 0.4)),
        ranker_weight=rounded(unit / ranker_unit * 10 ** rng.uniform(-0.7, 0.7)),
        takes_log=takes_log,
    )


def varied_mixture(rng, mixture):
    changed = {
        name: rounded(getattr(mixture, name) * 10 ** rng.uniform(-0.25, 0.25)) for name in WEIGHTS
    }
    for name, choices in (("num_neighbours", NEIGHBOURS), ("neighbour_power", POWERS)):
        if rng.random() < 0.3:
            changed[name] = rng.choice(choices).item()
    return dataclasses.replace(mixture, **changed)


def rounded(value):
    return float(f"{value:.3g}")


def spread(scores):
    """Standard deviation of a query's best scores, averaged over queries."""
    best = scores.topk(min(max(CUTOFFS), scores.shape[1]), dim=1).values.numpy()
    return float(np.nanmean(np.nanstd(np.where(np.isfinite(best), best, np.nan), axis=1)))


def with_labels(ids, more):
    """Candidates and the labels of `more`, -1 for those that are among them: (Q, C + M)."""
    is_known = Votes(ids, torch.ones(ids.shape)).of(more) > 0
    return torch.cat([ids, more.masked_fill(is_known, -1)], dim=1)


def with_worst_scores(ids, scores, more):
    """A peer's candidates and labels that it left out, which count as the worst of them."""
    all_ids = with_labels(ids, more)
    worst = scores.masked_fill(ids < 0, torch.inf).amin(1, keepdim=True)  # (Q, 1)
    worst = worst.masked_fill(worst.isinf(), 0.0).expand(-1, more.shape[1])
    scores = torch.cat([scores, worst], dim=1).masked_fill(all_ids < 0, -torch.inf)
    return Scored(all_ids, scores)
