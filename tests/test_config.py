"""Settings are read strictly, changed by words, and written so that they can be read again."""

import dataclasses
import tomllib

import pytest
import torch

from evenhand.config import (
    LOSSES,
    MARGIN_LOSSES,
    SECTIONS,
    Config,
    LossConfig,
    MiningConfig,
    build_config,
    preset_names,
    read_preset,
    read_settings,
    to_toml,
    with_assignments,
)
from evenhand.errors import UserError


def test_every_setting_is_written_and_no_other_is_read(tmp_path):
    assert build_config({}) == Config()
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config()), "utf-8")
    written = read_settings(path)
    assert list(written) == list(SECTIONS)
    for section, kind in SECTIONS.items():
        assert list(written[section]) == [field.name for field in dataclasses.fields(kind)]
        with pytest.raises(UserError, match=rf"\[{section}\] has no setting 'nonsense_'"):
            build_config({section: {"nonsense_": 1}})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["training.seed=3"], {"training": {"seed": 3}}),
        (["training.seed=3", "training.seed=4"], {"training": {"seed": 4}}),
        (["training.learning_rate=1e-3"], {"training": {"learning_rate": 0.001}}),
        (["mining.method=s2m"], {"mining": {"method": "s2m"}}),
        (['mining.method="s2m"'], {"mining": {"method": "s2m"}}),
        (["loss.log_q=true"], {"loss": {"log_q": True}}),
        (["evaluation.cutoffs=[1, 5]"], {"evaluation": {"cutoffs": [1, 5]}}),
        (["evaluation.min_pairs={ a = 3 }"], {"evaluation": {"min_pairs": {"a": 3}}}),
        (["data.dataset=a=b"], {"data": {"dataset": "a=b"}}),
        (["data.dataset="], {"data": {"dataset": ""}}),
        (
            ["training.select_by=recall@10 on tail"],
            {"training": {"select_by": "recall@10 on tail"}},
        ),
        ([" training.seed = 3"], {"training": {"seed": 3}}),
    ],
)
def test_words_on_the_command_line_become_settings(words, expected):
    assert with_assignments({}, words) == expected


@pytest.mark.parametrize("word", ["seed=3", "training.seed", "=3", "training.=3", ""])
def test_a_word_that_is_no_assignment_is_refused(word):
    with pytest.raises(UserError, match=r"--set takes section.key=value, got "):
        with_assignments({}, [word])


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "seed", True),
        ("training", "seed", 1.0),
        ("training", "seed", "1"),
        ("training", "learning_rate", "1"),
        ("training", "learning_rate", True),
        ("training", "select_by", 3),
        ("model", "label_bias", 1),
        ("model", "hidden_widths", 8),
        ("model", "hidden_widths", [8, True]),
        ("model", "hidden_widths", [8.5]),
        ("evaluation", "min_pairs", [3]),
        ("evaluation", "min_pairs", {"script": 2.5}),
    ],
)
def test_a_value_of_another_type_is_refused(section, key, value):
    with pytest.raises(UserError, match=rf"{section}\.{key}.* must be of type"):
        build_config({section: {key: value}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 10**400])
def test_a_number_that_is_not_finite_is_refused(value):
    for section, key in (("training", "learning_rate"), ("loss", "margin"), ("model", "scale")):
        with pytest.raises(UserError, match=rf"{section}\.{key} must be a finite number"):
            build_config({section: {key: value}})


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.25, 3), (0.3, 4), (1.0, 12), (0.01, 1), (0.1, 2), (1 / 12, 1)]
)
def test_a_fraction_of_the_batch_stands_for_the_number_of_hard_examples(fraction, count):
    config = MiningConfig(batch_size=12, tail_fraction=fraction, num_hard_examples=7)
    assert config.num_counting == count
    assert dataclasses.replace(config, tail_fraction=0.0).num_counting == 7
    # The number that it stands for may then be anything, such as a default for larger batches.
    assert dataclasses.replace(config, num_hard_examples=512).num_counting == count
    with pytest.raises(UserError, match=r"between 1 and mining\.batch_size \(12\), got 512"):
        dataclasses.replace(config, tail_fraction=0.0, num_hard_examples=512)


IN_BATCH = {
    "batch_size": 10,
    "num_sampled_labels": 10,
    "num_hard_labels": 1,
    "num_hard_examples": 1,
}
FULL = {"batch_size": 4, "num_sampled_labels": 3, "num_hard_labels": 3, "num_hard_examples": 4}
RANGE = {"method": "ranked-range", "batch_size": 600, "num_hard_examples": 500}
WHOLE = {"whole_queries": True, "num_hard_examples": 1}
GOOD = [  # at the end of what is allowed, or not looked at
    {"mining": FULL},
    {"mining": {"method": "sgd", "num_sampled_labels": 3, "num_hard_labels": 64}},
    {"mining": {"method": "topk-sgd", "num_sampled_labels": 3, "num_hard_labels": 64}},
    {"mining": {"method": "snm", "batch_size": 256}},
    {"mining": {"method": "group-dro"}, "risk": {"group": "country"}},
    {"mining": RANGE, "risk": {"num_dropped": 100}},
    {"mining": RANGE | {"method": "s2m"}, "risk": {"num_dropped": 101}},
    {"mining": {"whole_queries": True, "sampler": "frequency"}},
    {"mining": IN_BATCH | {"sampler": "in-batch"}},
    {"mining": IN_BATCH | {"batch_size": 5, "sampler": "mixed", "in_batch_share": 0.5}},
    {"mining": IN_BATCH | {"batch_size": 20, "sampler": "in-batch", "method": "sgd"}},
    {"model": {"similarity": "dot"}, "loss": {"name": "softmax"}},
    {"model": {"scale": 16.0}, "loss": {"name": "softmax"}},
]
BAD = [  # settings, what the sentence must hold
    ({"mining": FULL | {"num_hard_labels": 4}}, "and mining.num_sampled_labels (3), got 4"),
    ({"mining": FULL | {"num_hard_examples": 5}}, "between 1 and mining.batch_size (4), got 5"),
    ({"mining": FULL | {"num_hard_labels": 0}}, "mining.num_hard_labels", "got 0"),
    ({"mining": {"method": "s2m", "batch_size": 256}}, "mining.num_hard_examples"),
    ({"mining": {"tail_fraction": 1.5}}, "mining.tail_fraction must be between 0 and 1, got 1.5"),
    ({"risk": {"window": 0}}, "risk.window must be above 0, got 0"),
    ({"risk": {"step_size": 0.0}}, "risk.step_size must be above 0, got 0.0"),
    ({"mining": {"method": "max"}}, "'max' is no longer there: use", "num_hard_examples = 1"),
    ({"mining": {"sampler": "log-uniform"}}, 'is no longer there: use "frequency"'),
    ({"risk": {"natural_share": -0.5}}, "risk.natural_share must be between 0 and 1, got -0.5"),
    ({"risk": {"num_dropped": -1}}, "risk.num_dropped must be at least 0, got -1"),
    ({"mining": RANGE, "risk": {"num_dropped": 101}}, "must be at most 100", "got 101"),
    ({"mining": {"method": "group-dro"}}, "needs groups that are known", "risk.group"),
    ({"mining": WHOLE | {"masks_all_positives": False}}, "mining.masks_all_positives = false"),
    ({"mining": WHOLE | {"for_each_example": True}}, "mining.for_each_example = true"),
    ({"mining": WHOLE | {"sampler": "in-batch"}}, 'mining.sampler = "in-batch"'),
    ({"mining": WHOLE | {"sampler": "mixed"}}, 'mining.sampler = "mixed"'),
    ({"mining": IN_BATCH | {"sampler": "mixed", "in_batch_share": 0.5}}, "2 and 5 (", "got 10"),
    ({"mining": IN_BATCH | {"sampler": "mixed", "in_batch_share": 0.99}}, "leave one to draw"),
    ({"mining": IN_BATCH | {"batch_size": 1, "sampler": "in-batch"}}, "got 1"),
    ({"model": {"similarity": "dot"}}, "for cosines", "softmax"),
    ({"model": {"scale": 16.0}}, "for cosines", "softmax"),
    ({"training": {"patience": 2}}, "training.patience", "needs training.evaluate_every"),
    ({"search": {"neighbour_power": -0.5}}, "search.neighbour_power must be at least 0, got -0.5"),
    ({"ranker": {"positive_cost": 0.0}}, "ranker.positive_cost must be above 0, got 0.0"),
    ({"ranker": {"weight": -1.0}}, "ranker.weight must be at least 0, got -1.0"),
    ({"mining": {"method": "s2m-aneal"}}, "'s2m-aneal'; did you mean 's2m-annealed'?"),
    ({"mining": {"sampler": "unifrom"}}, "mining.sampler", "did you mean 'uniform'?"),
    ({"mining": {"num_hard_label": 3}}, "[mining]", "did you mean 'num_hard_labels'?"),
    ({"mining": {"in_batch_share": 1.0}}, "mining.in_batch_share", "exclusive, got 1.0"),
    ({"minning": {"method": "s2m"}}, "[minning]", "did you mean 'mining'?"),
    ({"optimiser": {"name": "adam"}}, "[optimiser]", "known: data, model"),
    ({"loss": {"name": "sofmax"}}, "loss.name", "'sofmax'", "did you mean 'softmax'?"),
    ({"loss": {"margin": 3}}, "loss.margin must be between -1 and 1, got 3"),
    ({"loss": {"power": 0.5}}, "loss.power must be at least 1, got 0.5"),
    ({"loss": {"log_q": True}}, "loss.log_q", "softmax", "contrastive"),
    ({"training": {"learning_rate": 0}}, "training.learning_rate must be above 0, got 0.0"),
    ({"training": {"seed": -1}}, "training.seed must be at least 0, got -1"),
    ({"training": {"seed": 2**62}}, "training.seed must be below 2**62"),
    ({"training": {"optimizer": "adam"}}, "training.optimizer", "'adam'", "row-adam"),
    ({"model": {"label_bias": True}}, "model.label_bias", "dot"),
    ({"model": {"hidden_widths": [0]}}, "model.hidden_widths must be above 0, got 0"),
    ({"evaluation": {"cutoffs": []}}, "evaluation.cutoffs", "[]"),
    ({"evaluation": {"cutoffs": [5, 0]}}, "evaluation.cutoffs", "[5, 0]"),
    ({"evaluation": {"num_resamples": -1}}, "evaluation.num_resamples", "-1"),
    ({"data": {"num_buckets": 0}}, "data.num_buckets must be between 1 and", "got 0"),
]


@pytest.mark.parametrize("settings", [*GOOD, *map(read_preset, preset_names())])
def test_settings_are_read_back_as_they_are_written(settings):
    """Values at the end of their range, and every preset."""
    config = build_config(settings)
    assert build_config(tomllib.loads(to_toml(config))) == config


def test_values_beyond_their_range_are_refused():
    for settings, *fragments in BAD:
        with pytest.raises(UserError) as caught:
            build_config(settings)
        assert all(fragment in str(caught.value) for fragment in fragments), (settings, caught)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("margin_loss", MARGIN_LOSSES)
def test_every_loss_can_be_built(name, margin_loss):
    loss_fn = LossConfig(name=name, margin_loss=margin_loss).build()
    losses = loss_fn(torch.tensor([0.5, -0.5]), torch.tensor([[0.1], [0.4]]))
    assert losses.shape == (2,)
    assert losses[1] > losses[0]


def test_the_margin_reaches_the_loss():
    positive, negative = torch.tensor([1.0]), torch.tensor([[0.5]])
    loss_fn = LossConfig(name="contrastive", margin=0.2, power=2).build()
    assert loss_fn(positive, negative).item() == pytest.approx((0.5 - 0.2) ** 2)
