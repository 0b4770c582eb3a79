"""The fast step against the obvious formula: full tables, full scores, autograd.

Nothing here is shared with `training/step.py` but the loss functions, which have oracles of
their own: the formula gathers scores from a (B, L) matrix, masks with Python loops, mines with
torch.topk and lets autograd differentiate the whole tables.
"""

import copy
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import pytest
import torch

from evenhand.kernels import selection
from evenhand.losses import (
    averaged_loss,
    bowl_loss,
    contrastive_loss,
    crammer_singer_loss,
    exponential,
    hinge,
    logistic,
    softmax_loss,
    squared_hinge,
)
from evenhand.models import BagEncoder, Bags, MlpEncoder, Retriever
from evenhand.risk import mean_weights, top_weights
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch, map_tensors
from evenhand.training.step import gradients_of, mine

BATCH_SIZE, NUM_FEATURES, WIDTH = 6, 9, 4
LOSSES = {
    "bowl hinge": partial(bowl_loss, margin_loss=hinge),
    "bowl squared hinge": partial(bowl_loss, margin_loss=squared_hinge),
    "bowl logistic": partial(bowl_loss, margin_loss=logistic),
    "bowl exponential": partial(bowl_loss, margin_loss=exponential),
    "crammer-singer": crammer_singer_loss,
    "averaged": averaged_loss,
    "softmax": softmax_loss,
    "softmax log Q": softmax_loss,
    "contrastive 1": partial(contrastive_loss, margin=0.1, power=1.0),
    "contrastive 2": partial(contrastive_loss, margin=0.1, power=2.0),
}
SIMILARITIES = {
    "cosine": {"is_cosine": True, "scale": 2.5},
    "dot": {"is_cosine": False},
    "scaled dot and bias": {"is_cosine": False, "scale": 0.7, "has_label_bias": True},
}
ENCODERS = ["mean bags", "valued bags", "linear", "mlp"]
MASKS = ["drawn positive", "all positives", "whole queries"]
QUERY_ROWS = [0, 0, 0, 2, 3, 3, 5]  # of whole queries: some have no example, some have several


class Size(NamedTuple):
    """How many labels there are and are drawn, and (k, k') to try; each takes another path."""

    num_labels: int
    num_sampled: int
    counts: list[tuple[int, int]]


SIZES = {
    "product": Size(11, 7, [(7, 6), (3, 6), (7, 2), (3, 4), (1, 1)]),  # every label is scored
    "gather": Size(70, 5, [(2, 3)]),  # L > 8 M: label vectors are gathered
    "fold": Size(30, 40, [(2, 3), (40, 6)]),  # M >= 16 k: rows are folded to find the hardest
    "every": Size(9, 9, [(9, 6), (9, 2), (3, 4)]),  # M = L; where k is too, coefficients are dense
}


# A problem


def random_bags(generator, *, has_values, has_empty_bag):
    """One bag names a feature twice and one may be empty."""
    rows = [[3, 3, 1], [] if has_empty_bag else [6], [0], [8, 2, 5, 1], [7, 3], [2, 0, 4]]
    ids = torch.tensor([feature for row in rows for feature in row])
    offsets = torch.tensor([0, *[len(row) for row in rows]]).cumsum(0)
    values = torch.randn(len(ids), generator=generator, dtype=torch.float64)
    return Bags(ids, offsets, values if has_values else None)


def random_model(encoder_name, similarity, num_labels, generator, *, has_empty_bag=True):
    if encoder_name.endswith("bags"):
        encoder = BagEncoder(NUM_FEATURES, WIDTH, generator=generator)
        features = random_bags(
            generator, has_values=encoder_name == "valued bags", has_empty_bag=has_empty_bag
        )
    else:
        widths = (5, 3) if encoder_name == "mlp" else ()
        encoder = MlpEncoder(NUM_FEATURES, WIDTH, hidden_widths=widths, generator=generator)
        shape = (BATCH_SIZE, NUM_FEATURES)
        features = torch.randn(shape, generator=generator, dtype=torch.float64)
    model = Retriever(
        encoder, num_labels, WIDTH, generator=generator, **SIMILARITIES[similarity]
    ).double()
    for name, parameter in model.named_parameters():
        if "bias" in name:  # they begin at 0, which would hide them
            parameter.data.normal_(generator=generator)
    return model, features


def random_batch(features, mask, num_labels, generator):
    positives = torch.randint(num_labels, (BATCH_SIZE, 3), generator=generator)
    positives[torch.tensor([1, 2, 2]), torch.tensor([2, 1, 2])] = -1
    if mask == "whole queries":
        rows = torch.tensor(QUERY_ROWS)
        label_ids = positives[rows, torch.tensor([0, 1, 2, 0, 1, 2, 0])]
        return Batch(features, label_ids, positives, query_rows=rows)
    label_ids = positives[:, 0].clone()
    return Batch(features, label_ids, positives[:, :1] if mask == "drawn positive" else positives)


def random_sample(kind, batch, size, generator):
    """With repeats, empty slots, an example without negatives, and positives not taken out."""
    shape = (size.num_sampled,) if kind == "shared" else (BATCH_SIZE, size.num_sampled)
    ids = torch.randint(-1, size.num_labels, shape, generator=generator)
    ids[..., 0] = batch.label_ids[3]
    ids[..., 1] = -1
    ids[..., 3] = ids[..., 2]
    if kind == "for each":
        ids[4] = -1
    log_counts = torch.randn(size.num_labels, generator=generator)[ids.clamp(min=0)]
    return LabelSample(ids, log_counts.masked_fill(ids < 0, 0))


# The obvious formula


def dense_features(features):
    """(B, F): what a bag sums, as a matrix."""
    if isinstance(features, torch.Tensor):
        return features
    matrix = torch.zeros(BATCH_SIZE, NUM_FEATURES, dtype=torch.float64)
    for b in range(BATCH_SIZE):
        start, stop = features.offsets[b].item(), features.offsets[b + 1].item()
        for entry in range(start, stop):
            value = 1 / (stop - start) if features.values is None else features.values[entry]
            matrix[b, features.ids[entry]] += value
    return matrix


def obvious_queries(parameters, features):
    vectors = dense_features(features)
    if "encoder.weight" in parameters:
        return vectors @ parameters["encoder.weight"]
    num_layers = sum(name.endswith("weight") for name in parameters)
    for layer in range(num_layers):
        weight, bias = (parameters[f"encoder.layers.{layer}.{name}"] for name in ("weight", "bias"))
        vectors = vectors @ weight.T + bias
        if layer < num_layers - 1:
            vectors = vectors.clamp(min=0)
    return vectors


def obvious_scores(model, parameters, features):
    """(B, L) scores of every label."""
    queries, labels = obvious_queries(parameters, features), parameters["label_table"]
    if model.is_cosine:
        # The vector of an empty bag is 0: it has no direction, and its cosines are 0.
        queries = queries / queries.norm(dim=1, keepdim=True).clamp(min=1e-12)
        labels = labels / labels.norm(dim=1, keepdim=True)
    scores = model.scale * (queries @ labels.T)
    return scores + parameters["label_bias"].T if "label_bias" in parameters else scores


def obvious_losses(model, parameters, batch, sample, num_hard_labels, loss_name):
    """(B,); the examples of a whole query are scored each for itself."""
    scores = obvious_scores(model, parameters, batch.features)
    ids = sample.ids.expand(BATCH_SIZE, -1)
    is_masked = [
        [label == -1 or label in positives for label in row]
        for row, positives in zip(ids.tolist(), batch.positive_ids.tolist(), strict=True)
    ]
    negatives = scores.gather(1, ids.clamp(min=0))  # (B, M)
    negatives = negatives.masked_fill(torch.tensor(is_masked), -torch.inf)
    kept_scores, kept = negatives.topk(num_hard_labels, dim=1)
    if loss_name == "softmax log Q":
        kept_scores = kept_scores - sample.log_counts.expand(BATCH_SIZE, -1).gather(1, kept)
    rows = range(BATCH_SIZE) if batch.query_rows is None else batch.query_rows.tolist()
    positives = torch.stack(
        [scores[row, label] for row, label in zip(rows, batch.label_ids.tolist(), strict=True)]
    )
    return LOSSES[loss_name](positives, torch.stack([kept_scores[row] for row in rows]))


def obvious_step(model, batch, sample, num_hard_labels, num_hard_examples, loss_name):
    """Losses (B,), and the gradient of every parameter, whole."""
    parameters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    losses = obvious_losses(model, parameters, batch, sample, num_hard_labels, loss_name)
    losses.topk(num_hard_examples).values.mean().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in parameters.items()}


# The fast step


def fast_step(
    model, batch, sample, num_hard_labels, num_hard_examples, loss_name, raw_vectors=None
):
    """The same two, and what the step says it touched."""
    model.zero_grad()
    queries = model.query_vectors(batch.features)
    mined = mine(
        queries,
        batch,
        model,
        sample,
        num_hard_labels=num_hard_labels,
        loss_fn=LOSSES[loss_name],
        risk_fn=partial(top_weights, num_hard_examples=num_hard_examples),
        is_log_q_corrected=loss_name == "softmax log Q",
    )
    gradients = gradients_of(mined, queries, batch, model, raw_vectors=raw_vectors)
    rows = {
        "label_table": gradients.get("labels"),
        "label_bias": gradients.get("biases"),
        "encoder.weight": gradients.get("features"),
    }
    rows = {name: row_gradients for name, row_gradients in rows.items() if row_gradients}
    dense = {name: parameter.grad for name, parameter in model.encoder.named_parameters("encoder")}
    for name, (ids, values) in rows.items():
        assert len(ids.unique()) == len(ids)
        assert values.shape[0] == len(ids)
        dense[name] = torch.zeros_like(model.get_parameter(name)).index_copy(0, ids, values)
    return mined, dense, rows


def worst_difference(actual, expected):
    """The largest difference, as a share of the largest entry."""
    size = max(1e-3, expected.abs().max().item())
    return (actual - expected).abs().max().item() / size


def problems(similarity, kind, size_name, *, seed, has_empty_bag=True):
    """A model, a batch, a sample and (k, k'), for every encoder under every mask."""
    size, generator = SIZES[size_name], torch.Generator().manual_seed(seed)
    kinds = zip(product(ENCODERS, MASKS), cycle(size.counts), strict=False)
    for (encoder_name, mask), counts in kinds:
        model, features = random_model(
            encoder_name, similarity, size.num_labels, generator, has_empty_bag=has_empty_bag
        )
        batch = random_batch(features, mask, size.num_labels, generator)
        yield model, batch, random_sample(kind, batch, size, generator), counts


@pytest.mark.parametrize("size_name", SIZES)
@pytest.mark.parametrize("kind", ["shared", "for each"])
@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_fast_gradient_is_that_of_the_obvious_formula(similarity, loss_name, kind, size_name):
    # The labels of an empty bag tie, at 0: which are kept is anyone's choice, and with log-counts
    # it is one that shows.
    has_empty_bag = loss_name != "softmax log Q"
    worst, largest = 0.0, 0.0
    for *problem, counts in problems(
        similarity, kind, size_name, seed=11, has_empty_bag=has_empty_bag
    ):
        losses, expected = obvious_step(*problem, *counts, loss_name)
        mined, actual, rows = fast_step(*problem, *counts, loss_name)
        torch.testing.assert_close(mined.losses, losses, rtol=1e-12, atol=1e-13)
        assert actual.keys() == expected.keys()
        worst = max(worst, *(worst_difference(actual[name], expected[name]) for name in expected))
        largest = max(largest, float(expected["label_table"].abs().max()))
        for name, (ids, _) in rows.items():
            untouched = expected[name].index_fill(0, ids, 0)
            assert (untouched == 0).all(), f"{name} has a gradient the step left out"
    assert worst < 1e-12
    assert largest > 0.01  # there was something to compare


def in_float32(model, batch):
    """The same numbers for the compiled loops: float32 on a CPU."""
    features = batch.features
    if isinstance(features, torch.Tensor):
        features = features.float()
    elif features.values is not None:
        features = features._replace(values=features.values.float())
    return copy.deepcopy(model).float(), batch._replace(features=features)


@pytest.mark.parametrize("size_name", SIZES)
@pytest.mark.parametrize("kind", ["shared", "for each"])
@pytest.mark.parametrize("loss_name", ["softmax log Q", "contrastive 2"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_compiled_step_is_that_of_the_obvious_formula(
    monkeypatch, similarity, loss_name, kind, size_name
):
    num_sampled = SIZES[size_name].num_sampled
    monkeypatch.setattr(selection, "SCORES_AT_ONCE", 3 * num_sampled)  # blocks of 3 examples
    for model, batch, sample, counts in problems(
        similarity, kind, size_name, seed=12, has_empty_bag=False
    ):
        losses, expected = obvious_step(model, batch, sample, *counts, loss_name)
        model, batch = in_float32(model, batch)
        with torch.no_grad():
            raw_vectors = model.encoder(batch.features)
        mined, actual, _ = fast_step(model, batch, sample, *counts, loss_name, raw_vectors)
        assert mined.losses.dtype == torch.float32
        torch.testing.assert_close(mined.losses.double(), losses, rtol=1e-5, atol=1e-5)
        assert actual.keys() == expected.keys()
        for name in expected:
            assert worst_difference(actual[name].double(), expected[name]) < 3e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size_name", SIZES)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_on_a_gpu_the_step_is_that_of_the_obvious_formula(similarity, size_name):
    for model, batch, sample, counts in problems(similarity, "shared", size_name, seed=13):
        losses, expected = obvious_step(model, batch, sample, *counts, "softmax")
        batch = map_tensors(batch, torch.Tensor.cuda)
        sample = LabelSample(*(tensor.cuda() for tensor in sample))
        mined, actual, _ = fast_step(model.cuda(), batch, sample, *counts, "softmax")
        torch.testing.assert_close(mined.losses.cpu(), losses, rtol=1e-10, atol=1e-11)
        for name in expected:
            assert worst_difference(actual[name].cpu(), expected[name]) < 1e-10


@pytest.mark.parametrize("kind", ["shared", "for each"])
@pytest.mark.parametrize("num_hard_labels", [2, 7])
def test_a_label_that_is_no_number_shows_in_the_losses_that_meet_it(kind, num_hard_labels):
    for model, batch, sample in (small_problem(kind=kind), float32_problem(kind=kind)):
        broken = int(sample.ids.flatten().max())
        model.label_table.data[broken] = torch.nan
        mined = mined_with(
            model, batch, sample, risk_fn=mean_weights, num_hard_labels=num_hard_labels
        )
        ids = sample.ids.expand(BATCH_SIZE, -1)
        meets = [
            broken == positives[0] or (broken in row and broken not in positives)
            for row, positives in zip(ids.tolist(), batch.positive_ids.tolist(), strict=True)
        ]
        assert any(meets)
        assert mined.losses.isnan().tolist() == meets
        gradients_of(mined, model.query_vectors(batch.features), batch, model)  # it ends


# What the step touches


def small_problem(encoder_name="mean bags", kind="shared"):
    generator, size = torch.Generator().manual_seed(5), SIZES["product"]
    model, features = random_model(encoder_name, "cosine", size.num_labels, generator)
    batch = random_batch(features, "all positives", size.num_labels, generator)
    return model, batch, random_sample(kind, batch, size, generator)


def float32_problem(**settings):
    model, batch, sample = small_problem(**settings)
    return *in_float32(model, batch), sample


def mined_with(model, batch, sample, *, risk_fn, num_hard_labels=2, loss_fn=softmax_loss):
    return mine(
        model.query_vectors(batch.features),
        batch,
        model,
        sample,
        num_hard_labels=num_hard_labels,
        loss_fn=loss_fn,
        risk_fn=risk_fn,
    )


def test_any_weights_may_be_given_to_the_examples():
    model, batch, sample = small_problem()

    def risk_fn(losses):
        return torch.tensor([0, 0.7, 0, 0, 0.2, 0.1], dtype=losses.dtype)

    mined = mined_with(model, batch, sample, risk_fn=risk_fn)
    assert mined.survivors.tolist() == [1, 4, 5]
    assert mined.weights.tolist() == [0.7, 0.2, 0.1]
    queries = model.query_vectors(batch.features)
    ids, values = gradients_of(mined, queries, batch, model)["labels"]
    table = model.label_table.detach().clone().requires_grad_()
    parameters = {**dict(model.named_parameters()), "label_table": table}
    losses = obvious_losses(model, parameters, batch, sample, 2, "softmax")
    (risk_fn(losses) * losses).sum().backward()
    actual = torch.zeros_like(table).index_copy(0, ids, values)
    torch.testing.assert_close(actual, table.grad, rtol=1e-12, atol=1e-14)


def test_a_batch_whose_sample_is_empty_trains_on_its_positives_alone():
    model, batch, sample = small_problem()
    nothing = LabelSample(torch.full_like(sample.ids, -1), sample.log_counts)
    mined = mined_with(model, batch, nothing, risk_fn=mean_weights, loss_fn=LOSSES["bowl logistic"])
    assert set(mined.label_ids.tolist()) == set(batch.label_ids.tolist())
    assert mined.losses.isfinite().all()


def test_a_batch_without_loss_touches_no_row():
    model, batch, sample = small_problem()
    mined = mined_with(
        model, batch, sample, risk_fn=mean_weights, loss_fn=lambda p, n: 0 * (p + n.exp().sum(1))
    )
    gradients = gradients_of(mined, model.query_vectors(batch.features), batch, model)
    assert len(gradients["labels"].ids) == 0
    assert gradients["labels"].values.shape == (0, WIDTH)
    assert (gradients["features"].values == 0).all()


def test_more_hard_labels_than_were_sampled_are_all_of_them():
    problem, risk_fn = small_problem(), partial(top_weights, num_hard_examples=3)
    every = mined_with(*problem, risk_fn=risk_fn, num_hard_labels=7)
    more = mined_with(*problem, risk_fn=risk_fn, num_hard_labels=100)
    assert torch.equal(more.losses, every.losses)
    assert torch.equal(more.label_ids, every.label_ids)
