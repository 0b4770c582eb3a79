"""The settings that fit a data set: what is chosen, what is given, and that nothing is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import small
from evenhand.build import build_training
from evenhand.config import Config, build_config
from evenhand.data.weighting import weight_features
from evenhand.defaults import (
    DENSE,
    NAMES,
    SPARSE,
    TEXTS,
    Facts,
    choose_settings,
    fit_settings,
)
from evenhand.errors import UserError
from evenhand.methods import METHODS

PLACES = Facts(
    num_labels=34_006, num_queries=236_572, num_pairs=246_000, num_features=2**18, density=0.0001,
    kind=NAMES, is_uneven=False, has_counts=False, num_validation=33_800, is_streamed=False,
    num_ranks=1, is_gpu=False, memory=2**34,
)  # fmt: skip


def chosen(given=None, **facts):
    """The config that the rules make of given settings and of facts that differ from `places`."""
    settings, choices = choose_settings(given or {}, PLACES._replace(**facts))
    config = build_config(settings)
    for name, value, reason in choices:
        section, _, key = name.partition(".")
        assert getattr(getattr(config, section), key) == value
        assert reason
    return config


def test_places_keeps_its_settings_but_for_the_method():
    config, plain = chosen(), Config()
    mining = dataclasses.replace(plain.mining, method="s2m-even")
    training = dataclasses.replace(plain.training, num_steps=config.training.num_steps)
    assert config == dataclasses.replace(plain, mining=mining, training=training)
    assert abs(config.training.num_steps - 1500) < 10


GIVEN = [
    {},
    {"mining": {"for_each_example": True}},
    {"model": {"similarity": "dot"}},
    {"mining": {"batch_size": 8192, "num_sampled_labels": 4096, "num_hard_labels": 512}},
    {"mining": {"sampler": "in-batch"}},
    {"mining": {"sampler": "mixed"}},
]


@pytest.mark.parametrize("kind", [NAMES, TEXTS, SPARSE, DENSE])
def test_no_size_and_no_method_is_refused(kind):
    sizes = itertools.product([1, 2, 50, 5000, 3_000_000], [1, 3, 200, 50_000, 10**7])
    for (num_labels, num_queries), method, given in itertools.product(sizes, METHODS, GIVEN):
        if "sampler" in given.get("mining", {}) and min(num_labels, num_queries) < 50:
            continue  # there is nothing to share between two examples
        mining = {"method": method, **given.get("mining", {})}
        facts = {"num_labels": num_labels, "num_queries": num_queries, "kind": kind}
        config = chosen(
            given | {"mining": mining, "risk": {"group": "script"}},
            num_pairs=3 * num_queries, num_validation=num_queries // 10, **facts,
        )  # fmt: skip
        mining = config.mining
        assert mining.batch_size <= 3 * num_queries
        assert mining.num_sampled_labels <= max(1, num_labels - mining.for_each_example)
        assert config.search.num_neighbours <= num_queries
        assert config.ranker.num_mined_labels <= num_labels
        tables = num_labels + (kind != DENSE) * PLACES.num_features
        assert 8 * tables * config.model.embedding_dim <= 2**32
        columns = mining.num_sampled_labels if mining.draws_labels else num_labels
        assert 4 * mining.batch_size * columns <= 2**30 or "batch_size" in given.get("mining", {})


def test_what_is_given_stays_and_the_rules_follow_it():
    config = chosen({"mining": {"num_hard_examples": 3000}, "model": {"scale": 5.0}})
    assert config.mining.batch_size == 3000
    assert (config.loss.name, config.model.scale) == ("softmax", 5.0)
    assert chosen({"mining": {"num_hard_labels": 6000}}).mining.num_sampled_labels == 6000
    config = chosen({"training": {"evaluate_every": 0}}, num_labels=500)
    assert config.training.patience == 0
    config = chosen({"evaluation": {"cutoffs": [3, 30]}}, num_labels=500)
    assert config.training.select_by == "recall@3"


@pytest.mark.parametrize(
    ("facts", "name", "value"),
    [
        ({"has_counts": True}, "data.weighting", "tf-idf"),
        ({}, "data.weighting", "unit"),
        ({"density": 0.03}, "search.neighbour_power", 8.0),
        ({}, "search.neighbour_power", 2.0),
        ({"num_labels": 5000}, "ranker.weight", 8.0),
        ({"num_labels": 100_000}, "ranker.weight", 2.0),
        ({"is_streamed": True}, "search.num_neighbours", 0),
        ({"is_streamed": True}, "ranker.num_mined_labels", 0),
        ({"is_streamed": True, "num_pairs": 10**6}, "mining.whole_queries", False),
        ({"num_ranks": 2}, "search.num_neighbours", 0),
        ({"num_ranks": 2}, "ranker.num_mined_labels", 0),
        ({"num_pairs": 10**6}, "mining.whole_queries", True),
        ({"num_pairs": 10**6, "is_gpu": True}, "mining.whole_queries", False),
        ({"memory": 2**30}, "model.embedding_dim", 64),
        ({"num_queries": 10**7}, "ranker.num_mined_labels", 0),
        ({"num_validation": 0, "num_labels": 500}, "training.evaluate_every", 0),
    ],
)
def test_a_rule_of_sparse_documents(facts, name, value):
    section, _, key = name.partition(".")
    assert getattr(getattr(chosen(kind=SPARSE, **facts), section), key) == value


def test_columns_of_very_different_width_are_standardized_by_the_encoder():
    even = small.dense_dataset()
    widths = np.where(np.arange(12) == 3, 1e4, 1).astype(np.float32)
    parts = {
        name: dataclasses.replace(part, features=5 + part.features * widths)
        for name, part in even.parts.items()
    }
    dataset = small.with_parts(even, **parts)
    config, _ = fit_settings({}, dataset, device=torch.device("cpu"))
    assert config.data.weighting == "standard"
    encoder = build_training(
        config, weight_features(dataset, "standard"), torch.device("cpu")
    ).training.model.encoder
    vectors = torch.from_numpy(parts["train"].features)
    expected = (vectors - vectors.mean(0)) / vectors.std(0, correction=0)
    torch.testing.assert_close(encoder(vectors), encoder.layers[0](expected), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r'"standard" is for dense features'):
        weight_features(small.text_dataset(), "standard")
