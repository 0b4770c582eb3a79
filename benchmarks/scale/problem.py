"""Training problems of any size, and one rank's part of them, made in its own rows alone.

Queries are bags of features under a Zipf law, positives follow a law of their own; the softmax loss
on cosine scores gives every kept label a gradient. A table is drawn for the rows that a rank holds.
"""

import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenhand.data import IntArray, Part, Rows
from evenhand.distributed.ranks import Ranks, Shards
from evenhand.kernels.random import permute
from evenhand.losses import softmax_loss
from evenhand.models import BagEncoder, Retriever
from evenhand.sampling import UniformSampler
from evenhand.training.feed import PairFeed
from evenhand.training.optimizers import Optimizers, RowAdagrad
from evenhand.training.rank_step import RankStep
from evenhand.training.state import Plan, Scheduled, Training
from evenhand.training.step import HARDEST, train_step

sys.path.append(str(Path(__file__).parents[2]))  # for `benchmarks` and `experiments`
from benchmarks.machine import processor
from experiments.scaling_laws import Law, in_bags, uniform_law, zipf_law
from experiments.step_costs import StepShape

SCALE = 20.0
LEARNING_RATE = 1e-4  # labels here are random: trained, all queries would only come to be alike
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    labels: int
    batch_size: int = 2048
    sampled: int = 4096
    hard_labels: int = 64
    hard_examples: int = 512
    dim: int = 128
    features: int = 200_000
    features_a_query: int = 20
    positive_exponent: float = 0.0  # of the Zipf law of positives; 0: uniform
    queries: int = 20_000

    def law_of_positives(self) -> Law:
        if not self.positive_exponent:
            return uniform_law(self.labels)
        return zipf_law(self.labels, exponent=self.positive_exponent)

    def shape(self, num_ranks: int) -> StepShape:
        return StepShape(
            num_ranks=num_ranks,
            num_labels=self.labels,
            batch_size=self.batch_size,
            num_sampled_labels=self.sampled,
            num_hard_labels=self.hard_labels,
            num_hard_examples=self.hard_examples,
            dim=self.dim,
            positives=self.law_of_positives(),
            features=in_bags(zipf_law(self.features), self.features_a_query),
            num_features=self.features,
        )


def zipf_ids(
    generator: np.random.Generator, num_ids: int, size: int, *, exponent: float
) -> IntArray:
    """Ids under a Zipf law, 0 the most frequent, of any number and in no memory.

    A real number under the density x ** -exponent from 1/2 to num_ids + 1/2 is rounded to i. That
    is a little too often, because the density is convex, so some are refused: 9 % of the first.
    """
    low, high, power = 0.5, num_ids + 0.5, 1 - exponent
    accepted = np.empty(0, dtype=np.int64)
    while len(accepted) < size:
        chance = generator.random(size - len(accepted) + 8)
        if power == 0:
            drawn = low * (high / low) ** chance
        else:
            drawn = (low**power + chance * (high**power - low**power)) ** (1 / power)
        numbers = np.clip(np.rint(drawn), 1, num_ids)
        if power == 0:
            mass = np.log1p(1 / (numbers - 0.5))
        else:
            mass = ((numbers + 0.5) ** power - (numbers - 0.5) ** power) / power
        is_kept = generator.random(len(numbers)) * mass < numbers**-exponent
        accepted = np.concatenate([accepted, numbers[is_kept].astype(np.int64) - 1])
    return accepted[:size]


def part_of(problem: Problem, *, shuffles_ids: bool = True, seed: int = 0) -> Part:
    """Training examples; ids in order of frequency, or in a random one."""
    generator = np.random.default_rng(seed)
    count, bag = problem.queries, problem.features_a_query
    feature_ids = zipf_ids(generator, problem.features, count * bag, exponent=1.0)
    if problem.positive_exponent:
        label_ids = zipf_ids(generator, problem.labels, count, exponent=problem.positive_exponent)
    else:
        label_ids = generator.integers(problem.labels, size=count)
    if shuffles_ids:
        feature_ids = shuffled(feature_ids, problem.features)
        label_ids = shuffled(label_ids, problem.labels)
    features = Rows(np.arange(count + 1) * bag, feature_ids.astype(np.int32))
    return Part(features, Rows(np.arange(count + 1), label_ids))


def shuffled(ids: IntArray, num_ids: int) -> IntArray:
    """Each id's place in a fixed random order of all, in no memory."""
    places = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    return permute(places, torch.tensor([[7]]), num_ids)[0].numpy()


def model_of(problem: Problem, *, share: tuple[int, int] = (0, 1)) -> Retriever:
    """Tables of the rows that a rank of so many holds."""
    rank, num_ranks = share
    generator = torch.Generator().manual_seed(0)
    feature_rows = Shards(problem.features, num_ranks).rows_of(rank)
    label_rows = Shards(problem.labels, num_ranks).rows_of(rank)
    encoder = BagEncoder(problem.features, problem.dim, generator=generator, rows=feature_rows)
    return Retriever(
        encoder,
        problem.labels,
        problem.dim,
        scale=SCALE,
        generator=generator,
        label_rows=label_rows,
    )


def training_of(
    problem: Problem,
    part: Part,
    *,
    share: tuple[int, int] = (0, 1),
    model: Retriever | None = None,
) -> Training:
    """What a rank trains, or one process alone: its tables, and a feed of its examples."""
    model = model_of(problem, share=share) if model is None else model
    feed = PairFeed(
        part,
        batch_size=problem.batch_size,
        masks_all_positives=False,
        generator=torch.Generator().manual_seed(1),
        device=CPU,
        share=share,
    )
    return Training(
        model,
        Optimizers(
            {"labels": RowAdagrad(model.label_table), "features": RowAdagrad(model.encoder.weight)},
            None,
        ),
        feed,
        torch.Generator().manual_seed(2),
        HARDEST,
        row_ranges={
            name: (Shards(num_rows, share[1]).rows_of(share[0]).first, num_rows)
            for name, num_rows in (("labels", problem.labels), ("features", problem.features))
        },
    )


def rank_step(
    problem: Problem, part: Part, ranks: Ranks, *, model: Retriever | None = None
) -> RankStep:
    training = training_of(problem, part, share=(ranks.rank, ranks.num_ranks), model=model)
    return RankStep(training, plan_of(problem), ranks)


def scheduled(problem: Problem) -> Scheduled:
    """Of every step."""
    return Scheduled(LEARNING_RATE, problem.hard_examples)


def whole_step(problem: Problem, part: Part) -> Callable[[Scheduled], Tensor]:
    """The step of one process that holds everything."""
    training = training_of(problem, part)
    return partial(train_step, training, plan_of(problem))


def plan_of(problem: Problem) -> Plan:
    return Plan(
        sampler=UniformSampler(problem.labels),
        loss_fn=softmax_loss,
        num_steps=10**6,
        num_sampled_labels=problem.sampled,
        num_hard_labels=problem.hard_labels,
        num_hard_examples=problem.hard_examples,
        learning_rate=LEARNING_RATE,
    )


def about_run() -> dict[str, Any]:
    """Machine, versions and command: what figures need to be read."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "command": " ".join(
            ["python", "benchmarks/scale/" + Path(sys.argv[0]).name, *sys.argv[1:]]
        ),
    }
