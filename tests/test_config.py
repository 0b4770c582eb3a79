"""Settings are read strictly, changed by words, and written so that they can be read again."""

import dataclasses
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenhand.config import (
    LEARNING_RATE_SHAPES,
    LOSSES,
    MARGIN_LOSSES,
    METHODS,
    OPTIMIZERS,
    SAMPLERS,
    SECTIONS,
    Config,
    LossConfig,
    MiningConfig,
    build_config,
    preset_names,
    read_preset,
    read_settings,
    to_toml,
    toml_value,
    with_assignments,
)
from evenhand.errors import UserError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(min_value=1e-300, max_value=1e300)
counts = st.integers(1, 2**40)


@st.composite
def settings(draw):
    """Settings of every section that are all valid."""
    num_sampled_labels, batch_size = draw(counts), draw(counts)
    loss = draw(st.sampled_from(LOSSES))
    is_contrastive = loss == "contrastive"  # for plain cosines alone
    similarity = "cosine" if is_contrastive else draw(st.sampled_from(["cosine", "dot"]))
    method, num_hard_examples = (
        draw(st.sampled_from(sorted(METHODS))),
        draw(st.integers(1, batch_size)),
    )
    room = batch_size - num_hard_examples  # for what ranked-range drops
    return {
        "data": {"dataset": draw(texts), "num_buckets": draw(st.integers(1, 2**31 - 1))},
        "model": {
            "embedding_dim": draw(counts),
            "similarity": similarity,
            "scale": 1.0 if is_contrastive else draw(numbers),
            "label_bias": similarity == "dot" and draw(st.booleans()),
            "hidden_widths": draw(st.lists(counts, max_size=3)),
        },
        "loss": {
            "name": loss,
            "margin": draw(st.floats(-1, 1)),
            "power": draw(st.floats(1, 1e6)),
            "margin_loss": draw(st.sampled_from(sorted(MARGIN_LOSSES))),
            "log_q": loss == "softmax" and draw(st.booleans()),
        },
        "mining": {
            "method": method,
            "batch_size": batch_size,
            "num_sampled_labels": num_sampled_labels,
            "num_hard_labels": draw(st.integers(1, num_sampled_labels)),
            "num_hard_examples": num_hard_examples,
            "sampler": draw(st.sampled_from(["uniform", "frequency", "log-uniform"])),
            "for_each_example": draw(st.booleans()),
        },
        "risk": {
            "num_dropped": draw(st.integers(0, room)),
            "window": draw(counts),
            "step_size": draw(numbers),
            "mixing": draw(st.floats(1e-6, 1)),
            "natural_share": draw(st.floats(0, 1)),
            "group": draw(texts.filter(bool)),
        },
        "training": {
            "learning_rate": draw(st.one_of(numbers, counts)),
            "learning_rate_shape": draw(st.sampled_from(LEARNING_RATE_SHAPES)),
            "optimizer": draw(st.sampled_from(OPTIMIZERS)),
            "seed": draw(st.integers(0, 2**62 - 1)),
            "select_by": draw(texts),
        },
        "evaluation": {
            "cutoffs": draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=4)),
            "min_pairs": draw(st.dictionaries(texts, counts, max_size=3)),
        },
    }


@given(settings())
def test_what_is_written_reads_back_as_the_same_settings(values):
    config = build_config(values)
    assert build_config(tomllib.loads(to_toml(config))) == config


@given(settings())
def test_every_value_given_is_the_value_of_its_setting(values):
    config = build_config(values)
    for section, keys in values.items():
        for key, value in keys.items():
            actual = getattr(getattr(config, section), key)
            assert actual == (tuple(value) if isinstance(value, list) else value)


@given(st.one_of(texts, st.booleans(), st.integers(), st.floats(allow_nan=False), st.lists(texts)))
def test_any_value_survives_its_notation(value):
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


@given(texts)
def test_a_quoted_word_is_that_word_even_if_it_looks_like_a_number(word):
    changed = with_assignments({}, [f"data.dataset={toml_value(word)}"])
    assert changed == {"data": {"dataset": word}}


def test_nothing_given_is_every_default():
    assert build_config({}) == Config()


def test_every_setting_is_written(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config()), "utf-8")
    written = read_settings(path)
    assert list(written) == list(SECTIONS)
    for section, kind in SECTIONS.items():
        assert list(written[section]) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_setting_that_does_not_exist_is_refused_in_every_section(section):
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


def test_assignments_do_not_change_the_settings_they_start_from():
    before = {"training": {"seed": 1}}
    with_assignments(before, ["training.seed=2", "loss.name=bowl"])
    assert before == {"training": {"seed": 1}}


def test_a_whole_number_is_taken_for_a_fraction_and_kept_as_one():
    rate = build_config({"training": {"learning_rate": 1}}).training.learning_rate
    assert rate == 1.0
    assert isinstance(rate, float)


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


def test_k_may_be_all_sampled_labels_and_all_of_the_batch():
    config = MiningConfig(
        batch_size=4, num_sampled_labels=3, num_hard_labels=3, num_hard_examples=4
    )
    assert config.draws_labels
    with pytest.raises(UserError, match=r"between 1 and mining\.num_sampled_labels \(3\), got 4"):
        dataclasses.replace(config, num_hard_labels=4)
    with pytest.raises(UserError, match=r"between 1 and mining\.batch_size \(4\), got 5"):
        dataclasses.replace(config, num_hard_examples=5)
    with pytest.raises(UserError, match="got 0"):
        dataclasses.replace(config, num_hard_labels=0)


def test_a_method_that_looks_at_all_labels_does_not_ask_for_k():
    for method in ("sgd", "topk-sgd"):
        MiningConfig(method=method, num_sampled_labels=3, num_hard_labels=64)


# Which methods look at all labels, which have a k', and for which it is annealed.
@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_draws_and_mines(method):
    config = MiningConfig(method=method)
    assert config.draws_labels == (method not in ("sgd", "topk-sgd"))
    counting = {
        "sgd": 2048, "snm": 2048, "snm-nonzero": 2048, "max": 1, "stochastic-max": 2048,
        "group-dro": 2048,
    }  # fmt: skip
    assert config.mines_examples == (method not in counting)
    assert config.num_counting == counting.get(method, 512)


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


@pytest.mark.parametrize(
    ("section", "key", "value", "problem"),
    [
        ("mining", "tail_fraction", 1.5, "between 0 and 1, got 1.5"),
        ("risk", "window", 0, "above 0, got 0"),
        ("risk", "step_size", 0.0, "above 0, got 0.0"),
        ("risk", "mixing", 0.0, "above 0, got 0.0"),
        ("risk", "mixing", 1.5, "between 0 and 1, got 1.5"),
        ("risk", "natural_share", -0.5, "between 0 and 1, got -0.5"),
        ("risk", "num_dropped", -1, "at least 0, got -1"),
    ],
)
def test_a_risk_out_of_range_is_refused(section, key, value, problem):
    with pytest.raises(UserError, match=rf"{section}\.{key} must be {problem}"):
        build_config({section: {key: value}})


def test_no_more_may_be_dropped_than_the_hard_examples_leave():
    mining = {"method": "ranked-range", "batch_size": 600, "num_hard_examples": 500}
    build_config({"mining": mining, "risk": {"num_dropped": 100}})
    with pytest.raises(UserError, match=r"risk\.num_dropped must be at most 100 .*got 101"):
        build_config({"mining": mining, "risk": {"num_dropped": 101}})
    build_config({"mining": mining | {"method": "s2m"}, "risk": {"num_dropped": 101}})


def test_known_groups_must_be_named():
    with pytest.raises(UserError, match=r"needs groups that are known.*risk\.group"):
        build_config({"mining": {"method": "group-dro"}})
    build_config({"mining": {"method": "group-dro"}, "risk": {"group": "country"}})


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"masks_all_positives": False}, "mining.masks_all_positives = false"),
        ({"for_each_example": True}, "mining.for_each_example = true"),
        ({"sampler": "in-batch"}, 'mining.sampler = "in-batch"'),
        ({"sampler": "mixed"}, 'mining.sampler = "mixed"'),
    ],
)
def test_whole_queries_share_their_negatives(other, complaint):
    MiningConfig(whole_queries=True, sampler="frequency")
    with pytest.raises(UserError, match=re.escape(complaint)):
        MiningConfig(whole_queries=True, num_hard_examples=1, **other)


def test_in_batch_samplers_ask_for_room():
    room = {
        "batch_size": 10,
        "num_sampled_labels": 10,
        "num_hard_labels": 1,
        "num_hard_examples": 1,
    }
    MiningConfig(**room, sampler="in-batch")
    with pytest.raises(UserError, match=r"between 2 and 5 .* got 10"):
        MiningConfig(**room, sampler="mixed", in_batch_share=0.5)
    MiningConfig(**{**room, "batch_size": 5}, sampler="mixed", in_batch_share=0.5)
    with pytest.raises(UserError, match="leave one to draw"):
        MiningConfig(**room, sampler="mixed", in_batch_share=0.99)
    with pytest.raises(UserError, match="got 1"):
        MiningConfig(**{**room, "batch_size": 1}, sampler="in-batch")
    MiningConfig(**{**room, "batch_size": 20}, sampler="in-batch", method="sgd")  # draws none


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("margin_loss", MARGIN_LOSSES)
def test_every_loss_can_be_built(name, margin_loss):
    import torch

    loss_fn = LossConfig(name=name, margin_loss=margin_loss).build()
    losses = loss_fn(torch.tensor([0.5, -0.5]), torch.tensor([[0.1], [0.4]]))
    assert losses.shape == (2,)
    assert losses[1] > losses[0]


def test_the_margin_reaches_the_loss():
    import torch

    positive, negative = torch.tensor([1.0]), torch.tensor([[0.5]])
    loss_fn = LossConfig(name="contrastive", margin=0.2, power=2).build()
    assert loss_fn(positive, negative).item() == pytest.approx((0.5 - 0.2) ** 2)


def test_patience_without_validations_to_count_is_refused():
    with pytest.raises(UserError, match=r"training\.patience .* needs training\.evaluate_every"):
        build_config({"training": {"patience": 2}})


def test_all_samplers_are_known():
    assert set(SAMPLERS) == {"uniform", "frequency", "log-uniform", "in-batch", "mixed"}


@pytest.mark.parametrize("model", [{"similarity": "dot"}, {"scale": 16.0}])
def test_the_contrastive_loss_is_refused_for_scores_that_are_no_cosines(model):
    with pytest.raises(UserError, match=r"for cosines.*softmax"):
        build_config({"model": model})
    build_config({"model": model, "loss": {"name": "softmax"}})


def test_a_method_that_keeps_every_example_does_not_ask_for_fewer_of_them():
    build_config({"mining": {"method": "snm", "batch_size": 256}})
    with pytest.raises(UserError, match="num_hard_examples"):
        build_config({"mining": {"method": "s2m", "batch_size": 256}})


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_config(name):
    settings = read_preset(name)
    assert dataclasses.asdict(build_config(settings)).keys() >= settings.keys()
