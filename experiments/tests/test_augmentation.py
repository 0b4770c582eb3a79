"""Moved and mirrored pictures, against the same written picture by picture and point by point."""

import math

import numpy as np
import pytest
import torch

from experiments.augmentation import shift_and_mirror
from experiments.counter_random import keys, uniform
from experiments.image_models import LeNet, ResNet
from experiments.stacked_models import Member, Pictures, StackedTraining

CPU = torch.device("cpu")
SEEDS = torch.tensor([1, 7])


def pictures(count=20, shape=(32, 32, 3)):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (count, *shape), generator=generator, dtype=torch.uint8)
    return Pictures(pixels, torch.randint(0, 10, (count,), generator=generator))


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
    pixels = pictures(shape=shape).pixels
    ids = torch.randint(0, 20, (2, 30), generator=torch.Generator().manual_seed(1))
    key = keys(SEEDS, torch.tensor(5), purpose=2)
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
            classifier, pictures(), members, {1: np.arange(16), 2: np.arange(4, 20)},
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


def test_the_rate_falls_as_a_cosine_to_nothing():
    classifier, rate = LeNet(channels=(2, 2), hidden=3), 0.1
    training = StackedTraining(
        classifier, pictures(shape=(28, 28, 1)), [Member(1, rate, 4)], {1: np.arange(20)},
        batch_size=4, momentum=0.0, decay_steps=4, device=CPU,
    )  # fmt: skip
    ratios = []
    for step in range(1, 6):
        before = {name: value.clone() for name, value in training.weights.items()}
        training.train(step)
        moved = training.weights["classes.bias"] - before["classes.bias"]
        speed = training.velocity["classes.bias"]
        ratios.append((-moved / speed).mean().item())
    expected = [rate * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert ratios == pytest.approx([*expected, 0.0], abs=1e-6)
