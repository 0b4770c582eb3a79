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
from experiments.augmentation import shift_and_mirror
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
    """Of a seed's step."""

    def __init__(self, share, seed):
        super().__init__()
        self.share, self.seed, self.step = share, seed, 0

    def forward(self, x):
        if not self.training or self.share == 0:
            return x
        key = keys(torch.tensor([self.seed]), torch.tensor(self.step), purpose=1)
        drawn = uniform(key, x.numel())
        self.step += 1
        return x * (drawn.view(x.shape) >= self.share) / (1 - self.share)


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
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    rows = ROWS[member.seed]
    for step in range(num_steps):
        epoch, batch = divmod(step, NUM_ROWS // BATCH)
        order = np.random.default_rng([member.seed, epoch]).permutation(NUM_ROWS)
        ids = torch.from_numpy(rows[order][batch * BATCH : (batch + 1) * BATCH])
        losses = F.cross_entropy(model(seen(images, ids)), images.labels[ids], reduction="none")
        optimizer.zero_grad()
        losses.topk(member.num_hard_examples).values.mean().backward()
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize(
    ("classifier", "weight_decay"),
    [(LENET, 0.0), (SLIM, 0.1), *[(resnet, 0.1) for resnet in RESNETS]],
    ids=["lenet", "lenet-dropout", *STEMS],
)
def test_each_model_is_what_it_would_be_alone(classifier, weight_decay):
    members = [Member(1, 0.05, 3), Member(1, 0.02, BATCH), Member(2, 0.05, 1)]
    training = stacked(classifier, members, weight_decay=weight_decay, decay_steps=7)
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


def test_the_weights_are_those_of_top_weights():
    losses = torch.randint(0, 4, (7, 9)).double()  # full of ties
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiles", [False, True], ids=["recorded", "compiled"])
@pytest.mark.parametrize("classifier", [SLIM, RESNETS[1]], ids=["lenet-dropout", "resnet"])
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


# --- moved and mirrored pictures ------------------------------------------------------------------


def slowly(picture, draws):
    """Padding, cropping and mirroring, as torchvision does them."""
    down, right = (math.floor(draw * 9) for draw in draws[:2].tolist())
    height, width, channels = picture.shape
    padded = np.zeros((height + 8, width + 8, channels), dtype=np.uint8)
    padded[4:-4, 4:-4] = picture
    part = padded[down : down + height, right : right + width]
    return part[:, ::-1] if draws[2] < 0.5 else part


@pytest.mark.parametrize("shape", [(32, 32, 3), (6, 9, 1)])
def test_pictures_are_those_cropped_one_by_one(shape):
    pixels = pictures(shape).pixels
    ids = torch.randint(0, 20, (2, 30), generator=torch.Generator().manual_seed(1))
    key = keys(torch.tensor([1, 7]), torch.tensor(5), purpose=2)
    found = shift_and_mirror(pixels, ids, key)
    draws = uniform(key, 90).view(2, 30, 3)
    for seed in range(2):
        for place in range(30):
            expected = slowly(pixels[ids[seed, place]].numpy(), draws[seed, place])
            assert np.array_equal(found[seed, place].numpy(), expected)


@pytest.mark.parametrize("classifier", [
    LeNet(channels=(4, 6), hidden=10, dropout=0.3, in_channels=3, size=32),
    ResNet(blocks=(1,), width=8, stem="small"),
], ids=["lenet", "resnet"])  # fmt: skip
def test_a_model_is_the_same_alone_and_among_others_and_after_a_stop(classifier):
    def training(members):
        return StackedTraining(
            classifier, pictures((32, 32, 3)), members, {1: np.arange(16), 2: np.arange(4, 20)},
            batch_size=8, momentum=0.9, weight_decay=0.01, decay_steps=6, augments=True, device=CPU,
        )  # fmt: skip

    members = [Member(1, 0.05, 2), Member(2, 0.05, 8), Member(1, 0.1, 4)]
    whole, alone, stopped, second = map(training, (members, members[2:], members, members))
    whole.train(6)
    alone.train(6)
    stopped.train(3)
    second.restore(stopped.checkpoint())
    second.train(6)
    for name, value in whole.weights.items():
        assert second.weights[name].equal(value)
        torch.testing.assert_close(alone.weights[name][0], value[2], rtol=1e-4, atol=1e-6)
