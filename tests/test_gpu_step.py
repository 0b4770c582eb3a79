"""The recorded step of the GPU against the step in torch: losses, survivors, gradients, tables.

Without a CUDA device the kernels run in Triton's interpreter, on tiny shapes.
"""

from functools import partial

import pytest
import torch

from evenhand import losses, top_weights
from evenhand.kernels import random as permutation
from evenhand.kernels.gpu import permutation as gpu_permutation
from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.losses import kernel_loss
from evenhand.kernels.gpu.rows import RowTable
from evenhand.kernels.gpu.step import MiningStep
from evenhand.models import MlpEncoder, Retriever
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch
from evenhand.training.optimizers import RowAdagrad, RowAdam
from evenhand.training.step import gradients_of, mine
from gpu_tables import DEVICES, drawn_ids, needs_cuda

LOSSES = {
    "hinge": losses.bowl_loss,
    "squared hinge": partial(losses.bowl_loss, margin_loss=losses.squared_hinge),
    "logistic": partial(losses.bowl_loss, margin_loss=losses.logistic),
    "exponential": partial(losses.bowl_loss, margin_loss=losses.exponential),
    "contrastive 1": partial(losses.contrastive_loss, margin=0.1, power=1.0),
    "contrastive 1.5": partial(losses.contrastive_loss, margin=0.1, power=1.5),
    "contrastive 2": losses.contrastive_loss,
    "softmax": losses.softmax_loss,
}


class Given(torch.nn.Module):
    """An encoder whose vectors are given, and which keeps the gradient it is handed."""

    def __init__(self, vectors):
        super().__init__()
        self.vectors = vectors

    def forward(self, features):
        return self.vectors[features[:, 0].long()]

    def row_gradients(self, features, vector_gradients):
        self.gradients = vector_gradients


class Pair:
    """The same data twice: for the kernels, and for the step in torch, in float64."""

    def __init__(
        self, device, *, batch_size=6, num_positives=2, num_labels=50, num_sampled=17, k=4,
        hard_examples=3, width=5, loss="contrastive 1", is_cosine=True, scale=1.0, for_each=False,
        is_adam=False, precision=torch.float32, seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(num_labels, width, generator=generator)
        self.vectors = torch.randn(batch_size, width, generator=generator)
        self.labels = torch.randint(num_labels, (batch_size,), generator=generator)
        self.labels[: batch_size // 3] = self.labels[0]  # some label several times
        self.positives = _positives(self.labels, num_positives, num_labels, generator)
        self.k, self.hard_examples, self.loss_fn = k, hard_examples, LOSSES[loss]
        self.num_sampled, self.num_labels, self.for_each = num_sampled, num_labels, for_each
        keys = torch.randint(2**62, (8,), generator=generator)
        counts = torch.full((8,), hard_examples)
        self.clock = Clock.planned(*(x.to(device) for x in (torch.full((8,), 0.1), counts, keys)))
        momentum = torch.zeros(num_labels, width, device=device) if is_adam else None
        self.rows = RowTable(
            table.to(device, copy=True), torch.zeros(num_labels, device=device), momentum
        )
        self.step = MiningStep(
            self.rows, self.clock, batch_size=batch_size, num_positives=num_positives,
            num_sampled_labels=num_sampled, num_hard_labels=k, loss=kernel_loss(self.loss_fn),
            scale=scale, is_cosine=is_cosine, draws_for_each=for_each, precision=precision,
        )  # fmt: skip
        self.model = Retriever(
            MlpEncoder(1, 1), num_labels, width, is_cosine=is_cosine, scale=scale
        )
        self.model.label_table.data = table.double()
        self.model.encoder = Given(self.vectors.double())
        self.optimizer = (RowAdam if is_adam else RowAdagrad)(self.model.label_table)

    def run_kernels(self):
        self.step.vectors.copy_(self.vectors)
        self.step.label_ids.copy_(self.labels)
        self.step.positive_ids.copy_(self.positives)
        self.clock.tick()
        self.step.mine()
        self.step.update()
        self.step.join()

    def drawn(self):
        if not self.for_each:
            return self.step.column_ids[: self.num_sampled].cpu()
        return drawn_ids(
            self.step.positive_ids,
            key=self.clock.key,
            num_labels=self.num_labels,
            num_sampled=self.num_sampled,
        ).cpu()

    def run_torch(self):
        ids = self.drawn()
        rows = torch.arange(len(self.labels)).unsqueeze(1)
        batch = Batch(rows.double(), self.labels, self.positives)
        queries = self.model.query_vectors(batch.features)
        mined = mine(
            queries, batch, self.model, LabelSample(ids, torch.zeros(ids.shape)),
            num_hard_labels=self.k, loss_fn=self.loss_fn,
            risk_fn=partial(top_weights, num_hard_examples=self.hard_examples),
        )  # fmt: skip
        gradients = gradients_of(mined, queries, batch, self.model)
        self.optimizer.step(gradients["labels"], learning_rate=0.1)
        return mined

    def assert_step_is_that_of_torch(self, *, atol=2e-5, rtol=1e-3):
        def same(ours, expected):
            torch.testing.assert_close(ours.cpu().double(), expected.double(), atol=atol, rtol=rtol)

        self.run_kernels()
        mined = self.run_torch()
        kept, count = self.step.kept, int(self.step.kept.num_survivors)
        same(kept.losses, mined.losses)
        assert count == len(mined.survivors)
        assert kept.survivors[:count].tolist() == mined.survivors.tolist()
        same(self.step.query_gradients[:count], self.model.encoder.gradients)
        same(self.rows.table, self.model.label_table)
        objective = (mined.weights * mined.losses[mined.survivors]).sum()
        zeros = (mined.losses <= 0).double().mean()
        same(self.step.stats[self.clock.step][0], torch.stack([objective, zeros]))


def _positives(labels, num_positives, num_labels, generator):
    """(B, P) the label first, then some others, each once, padded with -1."""
    positives = torch.full((len(labels), num_positives), -1)
    for row, label in enumerate(labels):
        others = torch.randperm(num_labels, generator=generator)
        others = others[others != label][: num_positives - 1]
        count = int(torch.randint(0, len(others) + 1, (), generator=generator))
        positives[row, 0] = label
        positives[row, 1 : 1 + count] = others[:count]
    return positives


SMALL = {
    "num_labels": 20,
    "num_sampled": 7,
    "k": 3,
    "hard_examples": 2,
    "width": 3,
    "batch_size": 3,
}
KINDS = {"shared": False, "for each": True}


def cases(names, *, fast):
    """On a GPU every name, shared and for each example; the slow interpreter takes some.

    All of them in the interpreter: tests/nightly/test_gpu_shapes.py.
    """
    return [
        pytest.param(*device.values, name, for_each, marks=device.marks, id=f"{name}-{kind}")
        for device in DEVICES
        for name in names
        for kind, for_each in KINDS.items()
        if device.values == ("cuda",) or name in fast[kind]
    ]


@pytest.mark.parametrize(
    ("device", "loss", "for_each"),
    cases(LOSSES, fast={"shared": LOSSES, "for each": ["contrastive 1.5"]}),
)
def test_steps_equal_those_in_torch(device, loss, for_each):
    is_adam = loss == "softmax"
    pair = Pair(device, loss=loss, for_each=for_each, is_adam=is_adam, **SMALL)
    for _ in range(1 + is_adam):
        pair.assert_step_is_that_of_torch()


SHAPES = {
    "one example": {"batch_size": 1, "hard_examples": 1},
    "one label kept": {"k": 1},
    "all sampled labels kept": {"k": 17},
    "all examples": {"hard_examples": 6},
    "odd width": {"width": 3},
    "one dimension": {"width": 1, "is_cosine": False},
    "dot product": {"is_cosine": False, "loss": "softmax", "scale": 0.5},
    "scaled cosine": {"scale": 7.0, "loss": "softmax"},
    "all labels sampled": {"num_sampled": 50, "k": 9},
    "many positives": {"num_positives": 12},
    "many labels": {"num_labels": 400, "num_sampled": 5, "k": 3},
    "power of two": {"num_labels": 64, "num_sampled": 16, "batch_size": 8, "width": 16},
    "paper's mask": {"num_positives": 1},
}


@pytest.mark.parametrize(
    ("device", "name", "for_each"),
    cases(
        SHAPES,
        fast={
            "shared": ["one example", "all labels sampled", "dot product"],
            "for each": ["many labels"],
        },
    ),
)
def test_every_shape_equals_torch(device, name, for_each):
    if name == "all labels sampled" and for_each:
        pytest.skip("an example's own positives cannot be drawn for it")
    pair = Pair(device, for_each=for_each, seed=1, **SHAPES[name])
    pair.assert_step_is_that_of_torch()


@pytest.mark.parametrize("device", DEVICES)
def test_zero_vectors_score_zero_and_have_no_gradient_as_in_torch(device):
    # All labels kept, for scores of zero are all alike.
    pair = Pair(device, **SMALL | {"k": 7, "hard_examples": 3})
    pair.vectors[1] = 0
    pair.model.encoder.vectors[1] = 0
    for table in (pair.rows.table, pair.model.label_table):
        table[int(pair.labels[2])] = 0
    pair.assert_step_is_that_of_torch()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-34, 3e9])
def test_a_vector_without_direction_keeps_no_more_than_k(device, size, for_each):
    """Scores all 0, of which k are kept; or tiny, or huge, where differences might be lost."""
    if device == "cpu" and for_each:
        pytest.skip("the interpreter is slow, and the search is that of the shared sample")
    sizes = SMALL | {"batch_size": 4, "k": 4}
    pair = Pair(device, for_each=for_each, loss="softmax", is_cosine=False, **sizes)
    pair.vectors[1:3] *= size
    if size:
        pair.vectors[0] *= 0
    pair.run_kernels()
    kept, scores = pair.step.kept, pair.step.scores
    columns = torch.arange(scores.shape[1], device=scores.device)
    threshold, last_tie = kept.thresholds.unsqueeze(1), kept.last_ties.unsqueeze(1)
    is_kept = (scores > threshold) | ((scores == threshold) & (columns <= last_tie))
    assert is_kept.sum(1).tolist() == [4] * 4
    lowest_kept = scores.masked_fill(~is_kept, torch.inf).amin(1)
    highest_left = scores.masked_fill(is_kept, -torch.inf).amax(1)
    assert (lowest_kept >= highest_left).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_negative_score_that_is_no_number_shows_in_the_losses_of_all_who_see_it(device, for_each):
    pair = Pair(device, for_each=for_each, **SMALL | {"num_sampled": 14})
    label = next(y for y in range(20) if y not in pair.positives)  # nobody's positive
    pair.rows.table[label] = torch.nan
    pair.model.label_table.data[label] = torch.nan
    pair.run_kernels()
    sees = (torch.atleast_2d(pair.drawn()) == label).any(dim=1).expand(len(pair.labels))
    assert sees.any()
    assert torch.equal(pair.step.kept.losses.isnan().cpu(), sees)
    assert torch.equal(pair.run_torch().losses.isnan(), sees)
    assert pair.step.stats[0, 0].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_the_order_is_that_of_the_other_forms(device):
    keys = torch.tensor([[0], [7], [2**62 - 1], [-(2**63)]])
    sizes = torch.tensor([[50], [60], [99], [101]])
    places = torch.arange(37).expand(4, 37)
    bits = permutation.num_bits(101)
    expected = permutation.permute_in_torch(places, keys, sizes, bits)
    ours = gpu_permutation.apply(*(x.to(device) for x in (places, keys, sizes)), bits)
    assert ours.tolist() == expected.tolist()
    rows = permutation.row_keys(torch.tensor([[2**61 + 5]]), 6)[:, 0]
    assert len(set(rows.tolist())) == 6


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_labels", [3000, 100_003])
@pytest.mark.parametrize("loss", ["contrastive 1", "softmax"])
def test_a_large_step_equals_torch(loss, num_labels, for_each):
    pair = Pair(
        "cuda", batch_size=333, num_positives=3, num_labels=num_labels, num_sampled=1031, k=33,
        hard_examples=100, width=130, loss=loss, for_each=for_each,
        scale=5.0 if loss == "softmax" else 1.0,
    )  # fmt: skip
    for _ in range(2):
        pair.assert_step_is_that_of_torch(atol=1e-4, rtol=2e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
def test_a_step_in_bfloat16_is_near_and_has_the_same_bits_each_time(for_each):
    def after(num_steps):
        pair = Pair(
            "cuda", batch_size=512, num_labels=5000, num_sampled=1024, k=32, hard_examples=128,
            width=128, for_each=for_each, precision=torch.bfloat16,
        )  # fmt: skip
        for _ in range(num_steps):
            pair.run_kernels()
        return pair

    first, second, pair = after(3), after(3), after(1)
    assert torch.equal(first.rows.table, second.rows.table)
    assert torch.equal(first.step.query_gradients, second.step.query_gradients)
    mined = pair.run_torch()
    difference = pair.step.kept.losses.cpu().double() - mined.losses
    assert difference.norm() / mined.losses.norm() < 1e-2
