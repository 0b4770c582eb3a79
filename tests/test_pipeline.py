"""From settings to a run: built as told, checked against the data, kept in a folder."""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

import small
from evenhand import pipeline, training_run
from evenhand.build import build_model, build_training, check_against_data
from evenhand.data import open_dataset, save_dataset
from evenhand.errors import UserError
from evenhand.mining import hardest_labels, mask_positives
from evenhand.models.encoders import BagEncoder, MlpEncoder
from evenhand.pipeline import (
    evaluate_model,
    evaluate_run,
    label_index,
    open_data,
)
from evenhand.sampling import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    LogUniformSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.saved_models import load_model, run_config, save_model
from evenhand.training.optimizers import RowAdagrad, RowAdam
from evenhand.training_run import begin_run, resumable_config, train_run

CPU = torch.device("cpu")
QUIET = Console(quiet=True)
IN_BATCH = {"mining__num_sampled_labels": 50, "mining__in_batch_share": 0.7}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "data"
    save_dataset(small.text_dataset(), folder)
    return folder


@pytest.fixture(scope="module")
def dataset(data_dir):
    return open_dataset(data_dir)


def built(dataset, **changes):
    return build_training(small.config("unused", **changes), dataset, CPU)


# --- building -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ("uniform", UniformSampler),
        ("frequency", Distinct),
        ("log-uniform", Distinct),
        ("in-batch", InBatchSampler),
        ("mixed", MixedSampler),
    ],
)
def test_every_sampler_is_built_for_the_methods_that_draw(dataset, sampler, kind):
    assert isinstance(built(dataset, mining__sampler=sampler, **IN_BATCH).plan.sampler, kind)
    all_labels = built(dataset, mining__sampler=sampler, mining__method="sgd", **IN_BATCH)
    assert isinstance(all_labels.plan.sampler, UniformSampler)


@pytest.mark.parametrize("for_each", [False, True])
@pytest.mark.parametrize("sampler", ["uniform", "frequency", "log-uniform", "in-batch", "mixed"])
def test_no_run_draws_a_label_twice(dataset, sampler, for_each):
    parts = built(dataset, mining__sampler=sampler, **IN_BATCH)
    batch = parts.training.feed.next_batch()
    draw = parts.plan.sampler.sample_for_each if for_each else parts.plan.sampler.sample
    generator = torch.Generator().manual_seed(0)
    num_drawn = parts.plan.num_sampled_labels
    for row in torch.atleast_2d(draw(batch.positive_ids, num_drawn, generator=generator).ids):
        drawn = row[row >= 0]
        assert 0 < len(drawn) == len(drawn.unique())


@pytest.mark.parametrize(("sampler", "kind"), [
    ("frequency", FrequencySampler), ("log-uniform", LogUniformSampler),
])  # fmt: skip
def test_the_hardest_labels_of_a_run_are_different_labels(dataset, sampler, kind):
    """Counted by the inclusion probability, a label drawn many times is one label of the sample."""
    parts = built(dataset, mining__sampler=sampler)
    assert isinstance(parts.plan.sampler.source, kind)
    batch = parts.training.feed.next_batch()
    num_drawn = 4 * dataset.num_labels  # so many that repeats are certain
    sample = parts.plan.sampler.sample(
        batch.positive_ids, num_drawn, generator=torch.Generator().manual_seed(0)
    )
    scores = torch.randn(dataset.num_labels)[sample.ids.clamp(min=0)]
    scores = mask_positives(scores.expand(len(batch.label_ids), -1), sample.ids, batch.positive_ids)
    kept = sample.ids[hardest_labels(scores, 4)]  # (B, 4)
    assert all(len(row.unique()) == 4 for row in kept)
    assert (sample.log_counts <= 0).all()  # a label is in a set at most once


@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_a_cpu_takes_the_step_in_torch_with_tables_in_float32(dataset, precision):
    parts = built(dataset, training__precision=precision)
    chosen = parts.choose_step()
    assert (chosen.kind, chosen.reason, chosen.describe()) == (
        "eager",
        None,
        "training step: eager",
    )
    assert parts.training.model.label_table.dtype == torch.float32


def test_tables_in_bfloat16_are_refused_where_no_step_rounds_by_chance(dataset):
    parts = built(dataset, training__precision="bfloat16")
    assert parts.training.model.label_table.dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"training\.precision 'bfloat16' needs .* GPU.*'mixed'"):
        parts.choose_step()


@pytest.mark.parametrize("most_copied", [2**28, 0])
def test_tables_in_bfloat16_are_evaluated_in_float32_and_stay_as_they_are(
    dataset, most_copied, monkeypatch
):
    monkeypatch.setattr(pipeline, "MOST_COPIED", most_copied)
    model = built(dataset, training__precision="bfloat16").training.model
    config = small.config("unused")
    outcome = evaluate_model(model, dataset, "test", config)
    assert model.label_table.dtype == torch.bfloat16
    expected = evaluate_model(copy.deepcopy(model).float(), dataset, "test", config)
    np.testing.assert_array_equal(outcome.ranks, expected.ranks)


def test_the_most_frequent_label_is_the_first_of_the_log_uniform_sampler(dataset):
    sampler = built(dataset, mining__sampler="log-uniform").plan.sampler
    counts = dataset.label_counts()
    assert (np.diff(counts[sampler.source.label_order.numpy()]) <= 0).all()


@pytest.mark.parametrize(
    ("method", "num_sampled", "num_labels", "num_examples", "fraction"),
    [
        ("sgd", 60, 60, 32, 0.0),
        ("snm", 40, 5, 32, 0.0),
        ("topk-sgd", 60, 60, 8, 0.0),
        ("s2m", 40, 5, 8, 0.0),
        ("s2m-annealed", 40, 5, 8, 0.4),
    ],
)
def test_a_method_is_four_numbers_of_the_plan(
    dataset, method, num_sampled, num_labels, num_examples, fraction
):
    plan = built(dataset, mining__method=method, mining__anneal_fraction=0.4).plan
    assert (plan.num_sampled_labels, plan.num_hard_labels) == (num_sampled, num_labels)
    assert (plan.num_hard_examples, plan.anneal_fraction) == (num_examples, fraction)


def test_settings_of_training_reach_the_plan(dataset):
    changes = {
        "num_steps": 7, "learning_rate": 0.25, "learning_rate_shape": "cosine", "warmup_steps": 3,
        "max_gradient_norm": 1.5, "log_every": 2, "evaluate_every": 4, "checkpoint_every": 6,
        "patience": 8,
    }  # fmt: skip
    plan = built(dataset, **{f"training__{name}": value for name, value in changes.items()}).plan
    assert {name: getattr(plan, name) for name in changes} == changes


def test_log_q_and_samples_for_each_are_for_methods_that_draw(dataset):
    changes = {"loss__name": "softmax", "loss__log_q": True, "mining__for_each_example": True}
    plan = built(dataset, **changes).plan
    assert plan.is_log_q_corrected
    assert plan.draws_for_each
    plan = built(dataset, **changes, mining__method="topk-sgd").plan
    assert not plan.is_log_q_corrected
    assert not plan.draws_for_each


def test_sparse_features_have_a_table_and_dense_ones_a_perceptron(dataset):
    sparse = built(dataset).training
    assert isinstance(sparse.model.encoder, BagEncoder)
    assert sparse.optimizers.dense is None
    assert set(sparse.optimizers.rows) == {"labels", "features"}
    dense = built(small.dense_dataset(), model__hidden_widths=[7]).training
    assert isinstance(dense.model.encoder, MlpEncoder)
    assert isinstance(dense.optimizers.dense, torch.optim.Adam)
    assert set(dense.optimizers.rows) == {"labels"}


def test_the_optimizer_and_the_bias_are_those_of_the_settings(dataset):
    training = built(
        dataset,
        loss__name="softmax",
        model__similarity="dot",
        model__label_bias=True,
        training__optimizer="row-adagrad",
    ).training
    optimizers = training.optimizers.rows
    assert set(optimizers) == {"labels", "biases", "features"}
    assert all(isinstance(optimizer, RowAdagrad) for optimizer in optimizers.values())
    assert optimizers["labels"].table is training.model.label_table
    assert isinstance(built(dataset).training.optimizers.rows["labels"], RowAdam)


def test_a_seed_fixes_weights_order_and_samples_and_each_differs(dataset):
    first, again, other = (built(dataset, training__seed=seed).training for seed in (0, 0, 1))
    assert first.model.label_table.equal(again.model.label_table)
    assert first.feed.place.key.equal(again.feed.place.key)
    assert first.generator.get_state().equal(again.generator.get_state())
    assert not first.model.label_table.equal(other.model.label_table)
    assert not first.feed.place.key.equal(other.feed.place.key)
    assert not first.generator.get_state().equal(other.generator.get_state())
    assert first.feed.generator.initial_seed() != first.generator.initial_seed()


def test_the_model_has_the_scale_and_similarity_of_the_settings():
    config = small.config("unused", loss__name="softmax", model__similarity="dot", model__scale=3)
    model = build_model(config, 10, 6, is_sparse=True)
    assert model.scale == 3
    assert not model.is_cosine
    assert model.label_table.shape == (6, 8)


# --- checks ---------------------------------------------------------------------------------------


def test_settings_the_data_cannot_meet_are_refused(dataset):
    for changes, words in (
        ({"mining__batch_size": 526}, r"mining\.batch_size must be at most 525"),
        ({"mining__num_sampled_labels": 61}, "must be at most 60 .*, got 61"),
        (
            {"mining__num_sampled_labels": 60, "mining__for_each_example": True},
            "must be at most 59 .*, got 60",
        ),
        ({"training__select_by": "recall@7"}, "did you mean 'recall@"),
        ({"training__select_by": "recall@10 on worst of stile"}, "did you mean 'style'"),
    ):
        with pytest.raises(UserError, match=words):
            check_against_data(small.config("unused", **changes), dataset)


def test_settings_at_the_limit_are_accepted(dataset):
    for changes in (
        {"mining__batch_size": 525},
        {"mining__num_sampled_labels": 60},
        {"mining__num_sampled_labels": 59, "mining__for_each_example": True},
        {"mining__num_sampled_labels": 61, "mining__method": "sgd"},
        {"training__select_by": "recall@5 on style=rare"},
    ):
        check_against_data(small.config("unused", **changes), dataset)


def test_without_validation_what_to_select_by_does_not_matter(dataset):
    config = small.config("unused", training__select_by="nonsense")
    with pytest.raises(UserError, match="nonsense"):
        check_against_data(config, dataset)
    with pytest.raises(UserError, match="needs a validation part"):
        check_against_data(config, small.with_parts(dataset, validation=None))
    never = {"training__select_by": "nonsense", "training__evaluate_every": 0}
    check_against_data(small.config("unused", **never), dataset)


# --- run folders ----------------------------------------------------------------------------------


def test_a_run_begins_as_a_whole_or_not_at_all(dataset, tmp_path, monkeypatch):
    config = small.config("unused")
    begin_run(tmp_path / "a/run", config, dataset, device=CPU)
    assert sorted(path.name for path in (tmp_path / "a/run").iterdir()) == [
        "config.toml", "run.json",
    ]  # fmt: skip
    assert run_config(tmp_path / "a/run") == config
    with pytest.raises(UserError, match="exists already"):
        begin_run(tmp_path / "a/run", config, dataset, device=CPU)

    def broken(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(training_run, "about_run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        begin_run(tmp_path / "b/run", config, dataset, device=CPU)
    assert not list((tmp_path / "b").iterdir())


def test_a_run_is_resumed_with_its_own_settings_alone(dataset, tmp_path):
    config, run = small.config("unused"), tmp_path / "run"
    begin_run(run, config, dataset, device=CPU)
    assert resumable_config(run, None) == config
    assert resumable_config(run, config, dataset) == config
    other = small.config("unused", evaluation__cutoffs=[1, 10])
    with pytest.raises(
        UserError, match=r"evaluation\.cutoffs = \(1, 5, 10\), and now it is \(1, 1"
    ):
        resumable_config(run, other)


def test_a_saved_model_is_loaded_to_the_bit(dataset, tmp_path):
    config, run = small.config("unused"), tmp_path / "run"
    begin_run(run, config, dataset, device=CPU)
    with pytest.raises(UserError, match="no trained model yet"):
        load_model(run, dataset, device=CPU)
    model = built(dataset, training__seed=9).training.model
    save_model(run, model)
    loaded = load_model(run, dataset, device=CPU)
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor), name
    assert [path.name for path in (run / "model").iterdir()] == ["weights"]


def test_a_model_of_other_settings_does_not_fit(dataset, tmp_path):
    run = tmp_path / "run"
    begin_run(run, small.config("unused"), dataset, device=CPU)
    save_model(run, built(dataset, model__embedding_dim=9).training.model)
    with pytest.raises(UserError, match="model/weights does not fit"):
        load_model(run, dataset, device=CPU)


def test_a_checkpoint_of_another_run_is_refused(dataset, tmp_path):
    data = save_dataset(dataset, tmp_path / "data")
    for name, seed in (("one", 1), ("two", 2)):
        config = small.config(tmp_path / "data", training__num_steps=6, training__seed=seed)
        begin_run(tmp_path / name, config, data, device=CPU)
        train_run(tmp_path / name, config, data, device=CPU, console=QUIET)
    shutil.rmtree(tmp_path / "one/checkpoints")
    shutil.copytree(tmp_path / "two/checkpoints", tmp_path / "one/checkpoints")
    config = run_config(tmp_path / "one")
    with pytest.raises(UserError, match=r"step 6 is of another configuration or another data set"):
        train_run(tmp_path / "one", config, data, device=CPU, console=QUIET)


@pytest.mark.parametrize(("validation", "every"), [(None, 0), ("validation", 0)])
def test_a_run_without_validation_keeps_its_last_weights(dataset, tmp_path, validation, every):
    validation = validation and dataset.parts[validation]
    data = save_dataset(small.with_parts(dataset, validation=validation), tmp_path / "data")
    changes = {"training__num_steps": 6, "training__evaluate_every": every}
    config, run = small.config(tmp_path / "data", **changes), tmp_path / "run"
    begin_run(run, config, data, device=CPU)
    assert train_run(run, config, data, device=CPU, console=QUIET)
    last = build_training(config, data, CPU).training
    last.load(training_run.load_latest_checkpoint(run / "checkpoints"))
    assert last.step == 6
    kept = load_model(run, data, device=CPU)
    assert kept.label_table.equal(last.model.label_table)
    assert json.loads((run / "run.json").read_text("utf-8"))["best_step"] == 6


def test_training_time_adds_up_over_resumptions(dataset, tmp_path, monkeypatch):
    """With a clock of one second a glance: each stretch takes one second."""
    config, run = small.config("unused", training__num_steps=8), tmp_path / "run"
    begin_run(run, config, dataset, device=CPU)
    seconds = iter(range(100))
    monkeypatch.setattr(training_run.time, "monotonic", lambda: float(next(seconds)))
    stretch = {"device": CPU, "console": Console(quiet=True, get_time=lambda: 0.0)}
    abouts = []
    for should_stop in (True, False, False):
        train_run(run, config, dataset, **stretch, should_stop_fn=lambda stop=should_stop: stop)
        abouts.append(json.loads((run / "run.json").read_text("utf-8")))
    assert [about["is_complete"] for about in abouts] == [False, True, True]
    assert [about["training_seconds"] for about in abouts] == [1.0, 2.0, 2.0]
    assert [about["milliseconds_a_step"] for about in abouts] == [1000, 142.86, 142.86]


def test_an_evaluation_asks_for_the_largest_cutoff(dataset):
    config = small.config("unused", evaluation__cutoffs=[2, 3])
    model = build_model(config, 512, 60, is_sparse=True)
    outcome = evaluate_model(model, dataset, "test", config)
    assert outcome.cutoffs == (2, 3)
    assert outcome.num_results == 3


def test_a_cutoff_above_the_number_of_labels_is_fine(dataset, tmp_path):
    config = small.config("unused", evaluation__cutoffs=[1, 500], training__select_by="recall@500")
    run = tmp_path / "run"
    begin_run(run, config, dataset, device=CPU)
    save_model(run, build_model(config, 512, 60, is_sparse=True))
    scores = evaluate_run(run, dataset, "test", device=CPU, console=QUIET)
    (score,) = [s for s in scores if (s.metric, s.group) == ("recall@500", "all")]
    assert score.value == 1.0


# --- data and demonstration -----------------------------------------------------------------------


def test_places_are_prepared_once(tmp_path, monkeypatch):
    calls = []

    def load(**settings):
        calls.append(settings)
        return small.text_dataset()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "load_places", load)
    config = dataclasses.replace(small.config("places").data, num_buckets=512)
    first, second = open_data(config, QUIET), open_data(config, QUIET)
    assert calls == [{"min_population": 15000, "num_buckets": 512}]
    assert first.fingerprint == second.fingerprint
    assert (tmp_path / "datasets/places-15000-512/dataset.json").is_file()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_frequency_discount_takes_the_logarithm_of_its_pairs_off_every_label(has_bias):
    dataset = small.text_dataset()
    changes = {"loss__name": "softmax", "model__similarity": "dot", "model__label_bias": has_bias}
    plain = small.config("unused", **changes)
    config = small.config("unused", search__frequency_discount=0.7, **changes)
    model = build_training(plain, dataset, CPU).training.model
    if has_bias:
        torch.nn.init.normal_(model.label_bias)
    vectors = torch.randn(5, model.label_table.shape[1], generator=torch.manual_seed(0))
    labels = torch.arange(dataset.num_labels).expand(5, -1)
    before = label_index(model, dataset, plain).scores_of(vectors, labels)
    after = label_index(model, dataset, config).scores_of(vectors, labels)
    num_pairs = [0] * dataset.num_labels
    for label in dataset.parts["train"].positives.ids.tolist():
        num_pairs[label] += 1
    taken = torch.tensor([0.7 * np.log(1 + count) for count in num_pairs])
    torch.testing.assert_close(before - after, taken.expand(5, -1).float(), rtol=1e-4, atol=1e-5)
    first = evaluate_model(model, dataset, "test", plain).ranks
    assert not np.array_equal(first, evaluate_model(model, dataset, "test", config).ranks)


def test_a_frequency_discount_below_nothing_is_refused():
    with pytest.raises(UserError, match=r"search.frequency_discount must be at least 0, got -1"):
        small.config("unused", search__frequency_discount=-1)


def test_a_model_of_a_range_of_rows_is_that_part_of_the_whole():
    config = small.config("unused", training__seed=5)
    whole = build_model(config, 20, 11, is_sparse=True)
    part = build_model(config, 20, 11, is_sparse=True, label_rows=(4, 9), feature_rows=(15, 20))
    assert torch.equal(part.label_table, whole.label_table[4:9])
    assert torch.equal(part.encoder.weight, whole.encoder.weight[15:])
    halved = build_model(config, 20, 11, is_sparse=True, dtype=torch.bfloat16)
    assert torch.equal(halved.label_table, whole.label_table.bfloat16())
    assert torch.equal(halved.encoder.weight, whole.encoder.weight.bfloat16())


def test_a_model_on_the_meta_device_holds_nothing():
    config = small.config(
        "unused", loss__name="softmax", model__similarity="dot", model__label_bias=True
    )
    for is_sparse in (True, False):
        model = build_model(config, 20, 10**9, is_sparse=is_sparse, device="meta")
        assert all(weight.is_meta for weight in model.parameters())
