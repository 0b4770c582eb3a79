"""The training of pictures: against a loop of its own, and the models against their papers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.image_training import (
    Job,
    ResNet,
    build_model,
    count_at,
    has_diverged,
    move_and_mirror,
    train_models,
    weights_fn,
)
from experiments.imbalanced_images import Pictures
from experiments.table2_rows import STEMS, table_rows

CPU = torch.device("cpu")
LENET = dataclasses.replace(
    table_rows("table2-mnist")[1], batch_size=8, num_hard_examples=3, widths=(4, 6, 10)
)
RESNET = dataclasses.replace(
    table_rows("table2-cifar10")[1], batch_size=8, num_hard_examples=3, schedule="cosine",
    weight_decay=0.1, augments=False,
)  # fmt: skip


def pictures(shape):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, *shape), generator=generator, dtype=torch.uint8)
    return Pictures(pixels, torch.randint(0, 10, (40,), generator=generator), 10.0, 200.0)


@pytest.mark.parametrize(
    ("row", "shape"), [(LENET, (28, 28, 1)), (RESNET, (32, 32, 3))], ids=["lenet", "resnet"]
)
def test_a_training_is_momentum_sgd_on_the_mean_of_the_largest_losses(row, shape):
    data, ids = pictures(shape), np.arange(3, 37)
    job = Job(row, ids, 5)
    (model,) = train_models([job], data, num_steps=6, device=CPU, is_small=row is RESNET)
    assert not model.training
    torch.manual_seed(5)
    expected = build_model(row, is_small=row is RESNET)
    velocity = [torch.zeros_like(parameter) for parameter in expected.parameters()]
    order = []
    for step in range(6):
        if len(order) < 8:  # 34 rows: four batches an epoch
            order = torch.randperm(34).tolist()
        batch, order = ids[order[:8]], order[8:]
        images = (data.pixels[batch].float() - 10) / 200
        losses = F.cross_entropy(
            expected(images.permute(0, 3, 1, 2)), data.labels[batch], reduction="none"
        )
        loss = losses.topk(3).values.mean()
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        is_cosine = row.schedule == "cosine"
        rate = row.learning_rate * (0.5 * (1 + math.cos(math.pi * step / 6)) if is_cosine else 1)
        with torch.no_grad():
            for value, speed, gradient in zip(
                expected.parameters(), velocity, gradients, strict=True
            ):
                speed.mul_(row.momentum).add_(gradient + row.weight_decay * value)
                value.sub_(rate * speed)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_models_of_a_seed_see_the_same_whatever_k_is_and_the_caller_draws_as_before():
    row, data = dataclasses.replace(LENET, dropout=0.5, augments=True), pictures((28, 28, 1))
    how = {"num_steps": 4, "device": CPU}
    torch.manual_seed(1)
    first, again = train_models([Job(row, np.arange(40), 5)] * 2, data, **how)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    still = train_models(  # at no learning rate, models of all k' are the first weights
        [
            Job(
                dataclasses.replace(row, num_hard_examples=k, learning_rate=1e-30), np.arange(40), 5
            )
            for k in (1, 8)
        ],
        data,
        **how,
    )
    for one, other in zip(*(model.parameters() for model in still), strict=True):
        assert torch.equal(one, other)


def test_an_even_handed_row_is_weighed_as_a_run_is():
    row = dataclasses.replace(LENET, is_even=True)
    labels = torch.tensor([0] * 64 + [1] * 4 + [2])  # class 2 is never held out
    weigh_fn = weights_fn(row, labels, seed=1, device=CPU)
    ids = torch.tensor([0, 1, 2, 3, 4, 64, 65, 68])
    losses = torch.tensor([0.9, 0.8, 0.1, 0.1, 0.1, 0.7, 0.7, 0.75])
    k = [count_at(row, progress) for progress in (0, 0.25, 0.5, 0.75, 0.999)]
    counts = [int((weigh_fn(losses, ids, count) > 0).sum()) for count in k]
    assert k[-1] == row.num_hard_examples
    assert counts[0] == 8  # k' is the batch size at first, and shrinks
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 8
    # Nothing is held out of so few, so the gap is .2/sqrt(n): .2 for class 2, .1 and .025.
    assert weigh_fn(losses, ids, k[-1])[7] > 0


def test_a_model_that_diverges_is_seen():
    row = dataclasses.replace(LENET, learning_rate=1e30)
    job = Job(row, np.arange(40), 1)
    (model,) = train_models([job], pictures((28, 28, 1)), num_steps=5, device=CPU)
    assert has_diverged(model)
    assert not has_diverged(build_model(LENET))


def test_models_have_the_sizes_of_their_papers():
    def count(model):
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(ResNet("imagenet", (3, 4, 6, 3), 64, num_classes=1000)) == 25_557_032
    model = ResNet("imagenet", (2, 2, 2, 2), 64, is_bottleneck=False, num_classes=1000)
    assert count(model) == 11_689_512
    assert count(build_model(table_rows("table2-mnist")[0])) == 431_080
    for stem in STEMS:
        assert ResNet(stem, (1, 1), 8)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    for padding in (0, 2):
        model = build_model(dataclasses.replace(LENET, padding=padding))
        assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 6, 9)])
def test_pictures_are_those_padded_cropped_and_mirrored_one_by_one(shape):
    images = torch.rand(50, *shape)
    all_draws = torch.rand(50, 3)
    found = move_and_mirror(images, all_draws)
    for picture, draws, moved in zip(images, all_draws.tolist(), found, strict=True):
        down, right = (math.floor(9 * draw) for draw in draws[:2])
        part = F.pad(picture, (4, 4, 4, 4))[:, down : down + shape[1], right : right + shape[2]]
        assert torch.equal(moved, part.flip(2) if draws[2] < 0.5 else part)
