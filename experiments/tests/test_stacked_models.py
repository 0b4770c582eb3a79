"""Stacked models: each must be what a plain torch model of its own would have become."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenhand.errors import UserError
from evenhand.risk import top_weights
from evenhand.training.checkpoint import CheckpointManager, load_latest_checkpoint
from experiments import stacked_models
from experiments.counter_random import keys, uniform
from experiments.image_models import STEMS, LeNet, ResNet
from experiments.stacked_models import Member, Pictures, StackedTraining, hardest_weights, objective

CPU = torch.device("cpu")
BATCH, NUM_ROWS = 8, 37  # an epoch of 4 batches, the last one incomplete
ROWS = {1: np.arange(NUM_ROWS), 2: np.arange(5, NUM_ROWS + 5)}
LENET = LeNet(channels=(4, 6), hidden=10)
SLIM = LeNet(channels=(4, 6), hidden=10, padding=2, dropout=0.5)
RESNETS = [ResNet(blocks=(1, 2), width=8, stem=stem) for stem in STEMS]


def pictures(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (NUM_ROWS + 5, *shape), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (NUM_ROWS + 5,), generator=generator)
    return Pictures(pixels, labels, shift=10.0, scale=200.0)


def stacked(classifier, members, *, seed=0, dtype=torch.float64, device=CPU, **more):
    is_lenet = isinstance(classifier, LeNet)
    return StackedTraining(
        classifier,
        pictures((28, 28, 1) if is_lenet else (32, 32, 3), seed),
        members,
        ROWS,
        batch_size=BATCH,
        momentum=0.9,
        device=device,
        precision=dtype,
        state_dtype=dtype,
        **more,
    )


class PlainLeNet(nn.Sequential):
    def __init__(self, lenet, weights, dropout):
        (first, second), hidden, edge = lenet.channels, lenet.hidden, lenet.padding
        side = 7 if edge else 4
        super().__init__(
            nn.Conv2d(1, first, 5, padding=edge), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5, padding=edge), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(side * side * second, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10),
        )  # fmt: skip
        fc = weights["hidden.weight"].view(side, side, second, hidden).permute(3, 2, 0, 1)
        values = [
            weights["conv1.weight"], weights["conv1.bias"],
            weights["conv2.weight"], weights["conv2.bias"],
            fc.flatten(1), weights["hidden.bias"],
            weights["classes.weight"].T, weights["classes.bias"],
        ]  # fmt: skip
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)


class PlainResNet(nn.Module):
    """From nn.Conv2d and nn.BatchNorm2d, the same names as ours."""

    def __init__(self, resnet, weights):
        super().__init__()
        self.resnet, self.layers = resnet, nn.ModuleDict()
        for name, size, inputs, outputs, stride in resnet.convolutions():
            convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
            kernel = weights[f"{name}.weight"].view(size, size, inputs, outputs)
            convolution.weight.data.copy_(kernel.permute(3, 2, 0, 1))
            self.layers[name.replace(".", "_")] = nn.Sequential(
                convolution, nn.BatchNorm2d(outputs)
            )
        self.classes = nn.Linear(*weights["classes.weight"].shape)
        self.classes.weight.data.copy_(weights["classes.weight"].T)
        self.classes.bias.data.copy_(weights["classes.bias"])

    def forward(self, x):
        x = F.relu(self.layers["stem"](x))
        if self.resnet.stem == "imagenet":
            x = F.max_pool2d(x, 3, 2, 1)
        for stage, count in enumerate(self.resnet.blocks):
            for block in range(count):
                name = f"stage{stage}_{block}"
                out = F.relu(self.layers[f"{name}_reduce"](x))
                out = F.relu(self.layers[f"{name}_spatial"](out))
                out = self.layers[f"{name}_expand"](out)
                x = F.relu(out + (x if block else self.layers[f"{name}_shortcut"](x)))
        return self.classes(x.mean((2, 3)))


class PlainDropout(nn.Module):
    """Of a seed's step, number by number."""

    def __init__(self, share, seed):
        super().__init__()
        self.share, self.seed, self.step = share, seed, 0

    def forward(self, x):
        if not self.training or self.share == 0:
            return x
        key = slow_key(self.seed, self.step, purpose=1)
        drawn = torch.tensor([slow_uniform(key, place) for place in range(x.numel())])
        self.step += 1
        return x * (drawn.view(x.shape) >= self.share) / (1 - self.share)


def slow_mixed(word):
    for _ in range(2):
        word = ((word ^ word >> 16) * 0x45D9F3B) % 2**32
    return word ^ word >> 16


def slow_key(seed, step, *, purpose):
    return slow_mixed(slow_mixed(slow_mixed(seed + 0x3C6EF372) ^ step) ^ purpose * 0x3C6EF372)


def slow_uniform(key, place):
    return (slow_mixed(key ^ slow_mixed(place + 0x3C6EF372)) >> 8) / 2**24


def plain_model(classifier, generator, seed):
    if isinstance(classifier, LeNet):
        dropout = PlainDropout(classifier.dropout, seed)
        return PlainLeNet(classifier, classifier.init(generator), dropout).double()
    return PlainResNet(classifier, classifier.layer_weights(generator)).double()


def seen(images, ids):
    """(B, H, W, C) bytes -> (B, C, H, W), as a model sees them."""
    return ((images.pixels[ids].double() - images.shift) / images.scale).permute(0, 3, 1, 2)


def train_plain(classifier, member, images, num_steps, *, weight_decay=0.0):
    """Autograd, topk and torch.optim.SGD, one model alone."""
    model = plain_model(classifier, torch.Generator().manual_seed(member.seed), member.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=member.learning_rate, momentum=0.9, weight_decay=weight_decay
    )
    rows = ROWS[member.seed]
    for step in range(num_steps):
        epoch, batch = divmod(step, NUM_ROWS // BATCH)
        order = np.random.default_rng([member.seed, epoch]).permutation(NUM_ROWS)
        ids = torch.from_numpy(rows[order][batch * BATCH : (batch + 1) * BATCH])
        losses = F.cross_entropy(model(seen(images, ids)), images.labels[ids], reduction="none")
        optimizer.zero_grad()
        losses.topk(member.num_hard_examples).values.mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("classifier", "weight_decay"),
    [(LENET, 0.0), (SLIM, 0.1), *[(resnet, 0.1) for resnet in RESNETS]],
    ids=["lenet", "lenet-dropout", *STEMS],
)
def test_each_model_is_what_it_would_be_alone(classifier, weight_decay):
    members = [Member(1, 0.05, 3), Member(1, 0.02, BATCH), Member(2, 0.05, 1)]
    training = stacked(classifier, members, weight_decay=weight_decay)
    training.train(6)  # beyond the first epoch
    pixels = training.pictures.pixels
    images = ((pixels.double() - 10) / 200).expand(len(members), -1, -1, -1, -1)
    scores, _ = classifier.scores(training.weights, images, training.running)
    for place, member in enumerate(members):
        model = train_plain(
            classifier, member, training.pictures, 6, weight_decay=weight_decay
        ).eval()
        expected = model(seen(training.pictures, torch.arange(len(pixels))))
        torch.testing.assert_close(scores[place], expected, rtol=1e-7, atol=1e-9)
    assert training.predictions(pixels).equal(scores.argmax(2))


def test_resnet_50_has_the_parameters_of_resnet_50():
    weights = ResNet(num_classes=1000).layer_weights(torch.Generator().manual_seed(0))
    assert sum(value.numel() for value in weights.values()) == 25_557_032


@pytest.mark.parametrize("seed", range(5))
def test_the_weights_are_those_of_top_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randint(0, 4, (7, 9), generator=generator).double()  # full of ties
    losses[1] = math.inf
    losses[2, 3] = math.nan
    counts = [1, 4, 4, 1, 5, 8, 9]
    weights = hardest_weights(losses, models_of(counts))
    for row, own, count in zip(losses, weights, counts, strict=True):
        assert own.equal(top_weights(row, num_hard_examples=count))


def models_of(counts):
    """k' -> the models that have it."""
    return {
        count: torch.tensor([place for place, own in enumerate(counts) if own == count])
        for count in set(counts)
    }


def test_training_weighs_examples_by_top_weights(monkeypatch):
    """The table tests what the package ships: every selection goes through its function."""
    asked = []

    def noted(losses, *, num_hard_examples):
        asked.append(num_hard_examples)
        return top_weights(losses, num_hard_examples=num_hard_examples)

    monkeypatch.setattr(stacked_models, "top_weights", noted)
    stacked(LENET, [Member(1, 0.05, 3), Member(1, 0.02, BATCH), Member(2, 0.05, 3)]).train(2)
    assert asked == [3, BATCH] * 2


def test_a_model_that_diverges_is_reported_and_disturbs_no_other():
    members = [Member(1, 0.01, 4), Member(1, 1e30, 4), Member(2, 0.01, BATCH)]
    training = stacked(LENET, members, dtype=torch.float32)
    training.train(9)
    assert training.diverged() == [False, True, False]
    alone = stacked(LENET, [members[0], members[2]], dtype=torch.float32)
    alone.train(9)
    for name, value in training.weights.items():
        torch.testing.assert_close(value[[0, 2]], alone.weights[name], rtol=0, atol=1e-6)


def test_dropout_is_of_the_seed_and_the_step_and_of_the_share_asked_for():
    seeds = torch.tensor([1, 2, 1])
    first, second = (uniform(keys(seeds, torch.tensor(t), purpose=1), 40_000) for t in (0, 1))
    assert first[0].equal(first[2])
    for a, b in ((first[0], first[1]), (first[0], second[0]), (first[0, :-1], first[0, 1:])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02  # 4 deviations
    assert (first[:2].mean(1) - 0.5).abs().max() < 0.006
    assert (first >= 0).all()
    assert (first < 1).all()
    other = uniform(keys(seeds, torch.tensor(0), purpose=2), 40_000)
    assert not other[0].equal(first[0])


@pytest.mark.parametrize(
    "classifier",
    [LENET, SLIM, RESNETS[1]],
    ids=["lenet", "lenet-dropout", "resnet"],
)
def test_resume_is_exact(classifier, tmp_path):
    members = [Member(1, 0.05, 3), Member(2, 0.02, BATCH)]
    whole = stacked(classifier, members, dtype=torch.float32)
    whole.train(7)
    first = stacked(classifier, members, dtype=torch.float32)
    first.train(5)  # in the middle of the second epoch
    CheckpointManager(tmp_path).save(first.checkpoint(), step=5)
    second = stacked(classifier, members, dtype=torch.float32)
    second.restore(load_latest_checkpoint(tmp_path))
    assert second.step == 5
    second.train(7)
    for name, value in whole.weights.items():
        assert second.weights[name].equal(value)
        assert second.velocity[name].equal(whole.velocity[name])
    assert second.running.equal(whole.running)


def test_what_cannot_be_trained_together_is_refused(tmp_path):
    for count in (0, BATCH + 1):
        with pytest.raises(UserError, match="between 1 and the batch size 8"):
            stacked(LENET, [Member(1, 0.1, count)])
    CheckpointManager(tmp_path).save(stacked(LENET, [Member(1, 0.05, 3)]).checkpoint(), step=0)
    with pytest.raises(UserError, match="other seeds, learning rates or k'"):
        stacked(LENET, [Member(1, 0.06, 3)]).restore(load_latest_checkpoint(tmp_path))
    with pytest.raises(UserError, match="3 training pictures do not fill a batch of 8"):
        StackedTraining(
            LENET, pictures((28, 28, 1)), [Member(1, 0.1, 1)], {1: np.arange(3)},
            batch_size=8, momentum=0.9, device=CPU,
        )  # fmt: skip


def test_an_infinite_loss_outside_the_chosen_leaves_the_gradient_finite():
    scores = torch.tensor([[[0.0, 0.0], [0.0, 1.0]]], dtype=torch.float64, requires_grad=True)

    class Fixed:
        def scores(self, weights, images, running, keys=None):
            return weights["scores"], torch.zeros(1, 2, 0)

    labels, counts = torch.zeros(1, 2, dtype=torch.long), models_of([1])
    total, losses, _ = objective(Fixed(), {"scores": scores}, scores, labels, counts)
    assert total.item() == pytest.approx(losses.max().item())
    total.backward()
    assert (scores.grad[0, 0] == 0).all()
    assert (scores.grad[0, 1] != 0).all()


def test_training_calls_back_stops_and_continues():
    training = stacked(LENET, [Member(1, 0.05, 3)])
    steps, seen_at = [], []
    training.train(6, on_step_fn=steps.append, every=2, every_fn=lambda: seen_at.append(1))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert len(seen_at) == 3
    training.train(9, should_stop_fn=lambda: training.step >= 7)
    assert training.step == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiles", [False, True], ids=["recorded", "compiled"])
@pytest.mark.parametrize(
    "classifier",
    [LENET, SLIM, RESNETS[1]],
    ids=["lenet", "lenet-dropout", "resnet"],
)
@pytest.mark.filterwarnings("default")  # those of a compiler are not ours
def test_recorded_steps_are_the_plain_ones(classifier, compiles, monkeypatch):
    monkeypatch.setattr(stacked_models, "WORTH_COMPILING", 0.0)
    members = [Member(1, 0.005, 3), Member(1, 0.002, BATCH), Member(2, 1e300, 1)]
    plain, recorded = (
        stacked(classifier, members, device=device) for device in (CPU, torch.device("cuda"))
    )
    plain.train(100)
    way = recorded.train(100, compiles=compiles)
    assert way.startswith(("recorded", "compiled"))
    assert ("compiled and recorded" in way) == compiles
    assert recorded.diverged() == plain.diverged() == [False, False, True]
    for name, value in plain.weights.items():
        torch.testing.assert_close(
            recorded.weights[name][:2].cpu(), value[:2], rtol=1e-5, atol=1e-7
        )
