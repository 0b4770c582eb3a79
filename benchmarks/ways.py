"""The ways of training a table of label vectors that `cpu.py` times, each as a step to call.

Every way is given the same queries, positives and label table, all float32, and trains that table
in place. A step samples, scores, mines where the way mines, takes the gradient of the queries and
of the labels, and updates the table. Scores are cosines times SCALE under the softmax loss, so
that every kept label has a gradient; where a way is usually written with the plain dot product it
is written so here, which is less work for it. The plain PyTorch ways use autograd, and Adagrad on
the whole table (`fused`, its fastest form) unless their name says otherwise.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand import UniformSampler, mean_weights, softmax_loss, top_weights
from evenhand.models import Retriever
from evenhand.risk import RiskFn
from evenhand.training.feed import Batch
from evenhand.training.optimizers import RowAdagrad
from evenhand.training.step import gradients_of, mine

SCALE = 20.0  # sentence-transformers' default, and the usual temperature of 0.05
LEARNING_RATE = 0.01
Step = Callable[[], object]
torch.sparse.check_sparse_tensor_invariants.disable()  # the default, which else prints a warning


@dataclasses.dataclass(frozen=True)
class Shape:
    labels: int
    batch_size: int
    sampled: int
    hard_labels: int
    hard_examples: int
    dim: int

    def words(self) -> str:
        return (
            f"batch {self.batch_size:,}, {self.sampled:,} of {self.labels:,} labels sampled, "
            f"k {self.hard_labels}, k' {self.hard_examples}, width {self.dim}"
        )


class Problem:
    """One batch of examples and the table to train; drawn from a fixed seed."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(shape.batch_size, shape.dim, generator=self.generator)
        self.features = F.normalize(self.features, dim=1)  # (B, D)
        self.label_ids = torch.randint(
            shape.labels, (shape.batch_size,), generator=self.generator
        )  # (B,)
        rows = torch.randn(min(shape.labels, 2**16), shape.dim, generator=self.generator)
        rows.mul_(shape.dim**-0.5)  # of length about 1
        # Beyond 2**16 labels the rows repeat: random numbers for 10**7 of them take ten seconds.
        self.table = rows.index_select(0, torch.arange(shape.labels) % len(rows))  # (L, D)

    def draw(self, *size: int) -> Tensor:
        """Label ids with repeats, the cheapest sample there is."""
        return torch.randint(self.shape.labels, size, generator=self.generator)

    def embedding(self, *, is_sparse: bool) -> torch.nn.Embedding:
        """The table as PyTorch users hold it; the same memory, not a copy."""
        return torch.nn.Embedding.from_pretrained(self.table, freeze=False, sparse=is_sparse)


class PassedOn(torch.nn.Module):
    """An encoder that does nothing, so that its time is not part of the step's."""

    def forward(self, features: Tensor) -> Tensor:
        return features


# --- the floor and Evenhand -----------------------------------------------------------------------


def product(problem: Problem) -> Step:
    """The floor: the scores of the sampled labels, written into memory that is already there."""
    shape = problem.shape
    vectors = problem.table[problem.draw(shape.sampled)]  # (M, D)
    scores = torch.empty(shape.batch_size, shape.sampled)
    return lambda: torch.mm(problem.features, vectors.T, out=scores)


def evenhand_step(problem: Problem, *, risk_fn: RiskFn) -> Step:
    shape = problem.shape
    model = Retriever(PassedOn(), 1, shape.dim, scale=SCALE)
    model.label_table.data = problem.table
    optimizer = RowAdagrad(model.label_table)
    sampler = UniformSampler(shape.labels)
    batch = Batch(problem.features, problem.label_ids, problem.label_ids.unsqueeze(1))

    def step() -> None:
        sample = sampler.sample(
            batch.positive_ids, shape.sampled, generator=problem.generator
        )  # (M,)
        queries = model.query_vectors(batch.features)
        mined = mine(
            queries,
            batch,
            model,
            sample,
            num_hard_labels=shape.hard_labels,
            loss_fn=softmax_loss,
            risk_fn=risk_fn,
        )
        gradients = gradients_of(mined, queries, batch, model)
        optimizer.step(gradients["labels"], learning_rate=LEARNING_RATE)

    return step


def evenhand_s2m(problem: Problem) -> Step:
    return evenhand_step(
        problem, risk_fn=partial(top_weights, num_hard_examples=problem.shape.hard_examples)
    )


def evenhand_snm(problem: Problem) -> Step:
    return evenhand_step(problem, risk_fn=mean_weights)


# --- plain PyTorch --------------------------------------------------------------------------------


def hardest(positive_scores: Tensor, negative_scores: Tensor, shape: Shape) -> Tensor:
    """The S2M objective as one writes it with autograd: (B,), (B, M) -> ()."""
    kept = negative_scores.topk(shape.hard_labels, dim=1).values  # (B, k)
    scores = torch.cat([positive_scores.unsqueeze(1), kept], dim=1)  # (B, 1 + k)
    losses = scores.logsumexp(dim=1) - positive_scores
    return losses.topk(shape.hard_examples).values.mean()


def trained(optimizer: torch.optim.Optimizer, loss: Tensor, queries: Tensor) -> None:
    queries.grad = None
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gathered(problem: Problem) -> Step:
    """The obvious form: every example's own labels as one (B, M, D) tensor."""
    shape, labels = problem.shape, problem.label_ids
    embedding = problem.embedding(is_sparse=False)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=LEARNING_RATE, fused=True)
    queries = problem.features.clone().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.batch_size, shape.sampled)
        vectors = embedding(ids)  # (B, M, D)
        scores = SCALE * (vectors @ queries.unsqueeze(2)).squeeze(2)  # (B, M)
        scores = scores.masked_fill(ids == labels.unsqueeze(1), -torch.inf)
        positive_scores = SCALE * (queries * embedding(labels)).sum(dim=1)
        trained(optimizer, hardest(positive_scores, scores, shape), queries)

    return step


def gathered_bytes(shape: Shape) -> int:
    """What `gathered` needs at least: the vectors and their gradient."""
    return 2 * 4 * shape.batch_size * shape.sampled * shape.dim


def shared(problem: Problem, *, is_sparse: bool, optimizer_fn: Callable[..., object]) -> Step:
    """One sample for the batch: a product instead of a gather, then autograd."""
    shape, labels = problem.shape, problem.label_ids
    embedding = problem.embedding(is_sparse=is_sparse)
    optimizer = optimizer_fn(embedding.parameters(), lr=LEARNING_RATE)
    queries = problem.features.clone().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.sampled)
        units = F.normalize(queries, dim=1)
        scores = SCALE * units @ F.normalize(embedding(ids), dim=1).T  # (B, M)
        scores = scores.masked_fill(ids == labels.unsqueeze(1), -torch.inf)
        positive_scores = SCALE * (units * F.normalize(embedding(labels), dim=1)).sum(dim=1)
        trained(optimizer, hardest(positive_scores, scores, shape), queries)

    return step


def mined_first(problem: Problem, *, optimizer_fn: Callable[..., object]) -> Step:
    """What a good engineer writes in an hour: S2M mined without gradient, autograd over the rest.

    The survivors are scored once more, against the whole sample: a product and a pick of the kept
    scores take less time than gathering the vectors of (k', k) labels.
    """
    shape, labels = problem.shape, problem.label_ids
    embedding = problem.embedding(is_sparse=True)
    optimizer = optimizer_fn(embedding.parameters(), lr=LEARNING_RATE)
    queries = problem.features.clone().requires_grad_()

    def step() -> None:
        ids = problem.draw(shape.sampled)
        with torch.no_grad():
            units = F.normalize(queries, dim=1)
            scores = SCALE * units @ F.normalize(embedding(ids), dim=1).T  # (B, M)
            scores.masked_fill_(ids == labels.unsqueeze(1), -torch.inf)
            positive_scores = SCALE * (units * F.normalize(embedding(labels), dim=1)).sum(dim=1)
            kept = scores.topk(shape.hard_labels, dim=1, sorted=False)  # (B, k)
            losses = softmax_loss(positive_scores, kept.values)
            survivors = losses.topk(shape.hard_examples, sorted=False).indices  # (k',)
            columns = kept.indices[survivors]  # (k', k)
        units = F.normalize(queries[survivors], dim=1)
        scores = SCALE * units @ F.normalize(embedding(ids), dim=1).T  # (k', M)
        positives = F.normalize(embedding(labels[survivors]), dim=1)
        positive_scores = SCALE * (units * positives).sum(dim=1)
        loss = softmax_loss(positive_scores, scores.gather(1, columns)).mean()
        trained(optimizer, loss, queries)

    return step


def full_softmax(problem: Problem, *, is_compiled: bool = False) -> Step:
    """Cross-entropy over all labels: nothing is sampled and nothing is mined."""
    weights = problem.embedding(is_sparse=False).weight
    optimizer = torch.optim.Adagrad([weights], lr=LEARNING_RATE, fused=True)
    queries = problem.features.clone().requires_grad_()

    def loss_fn(queries: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(SCALE * queries @ weights.T, problem.label_ids)

    if is_compiled:
        loss_fn = torch.compile(loss_fn)
    return lambda: trained(optimizer, loss_fn(queries, weights), queries)


def full_softmax_bytes(shape: Shape) -> int:
    """What `full_softmax` needs at least: scores, their softmax and their gradient."""
    return 3 * 4 * shape.batch_size * shape.labels


class Way(NamedTuple):
    build: Callable[[Problem], Step]
    least_bytes: Callable[[Shape], int] = lambda shape: 0  # beside table and batch
    is_swept: bool = True  # timed over numbers of labels too
    needs_compiler: bool = False
    packages: tuple[str, ...] = ()  # that must be installed, and whose versions are reported


def tables(count: int) -> Callable[[Shape], int]:
    """The bytes of so many tensors of the table's size, such as an optimiser's state."""
    return lambda shape: count * 4 * shape.labels * shape.dim


PRODUCT, GATHERED = "score product alone", "PyTorch gathering (B, M, D)"
DENSE_ADAGRAD = partial(torch.optim.Adagrad, fused=True)
WAYS: dict[str, Way] = {
    PRODUCT: Way(product),
    "evenhand S2M step": Way(evenhand_s2m),
    "evenhand SNM step": Way(evenhand_snm),
    GATHERED: Way(gathered, gathered_bytes, is_swept=False),
    "PyTorch mined first, then autograd over the survivors": Way(
        partial(mined_first, optimizer_fn=torch.optim.Adagrad), tables(1)
    ),
    "PyTorch shared negatives, sparse Adagrad": Way(
        partial(shared, is_sparse=True, optimizer_fn=torch.optim.Adagrad), tables(1)
    ),
    "PyTorch shared negatives, SparseAdam": Way(
        partial(shared, is_sparse=True, optimizer_fn=torch.optim.SparseAdam), tables(2)
    ),
    "PyTorch shared negatives, Adagrad": Way(
        partial(shared, is_sparse=False, optimizer_fn=DENSE_ADAGRAD), tables(2)
    ),
    "PyTorch full softmax": Way(full_softmax, full_softmax_bytes),
    "PyTorch full softmax, compiled": Way(
        partial(full_softmax, is_compiled=True),
        full_softmax_bytes,
        is_swept=False,
        needs_compiler=True,
    ),
}
