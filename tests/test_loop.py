"""The loop logs, validates, keeps the best, stops when asked, and refuses what is not a number."""

import dataclasses
import json
import math

import pytest
import safetensors.torch
import torch

import risk_oracles
import small
from evenhand.building import build_training
from evenhand.errors import UserError
from evenhand.losses import softmax_loss
from evenhand.models.encoders import MlpEncoder, RowGradients
from evenhand.models.retriever import Retriever
from evenhand.run_folder import read_metrics
from evenhand.runs import evaluate_run, train_run
from evenhand.training.checkpoint import load_latest_checkpoint
from evenhand.training.loop import Places, clipped, train
from evenhand.training.metrics_file import append_line, rewind_metrics
from evenhand.training.step import Gradients

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset():
    return small.text_dataset()


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path / "metrics.jsonl", tmp_path / "checkpoints")


@pytest.fixture
def loop(dataset, places):
    """Trains the small data set; settings are named as those of `small.settings`."""

    def loop(*, loss_fn=None, training=None, validate_fn=None, **settings):
        changes = {name: value for name, value in settings.items() if "__" in name}
        others = {name: value for name, value in settings.items() if "__" not in name}
        built = build_training(small.config("unused", **changes), dataset, CPU)
        training = training or built.training
        loop.training = training
        return train(
            training,
            built.plan,
            sampler=built.sampler,
            loss_fn=loss_fn or built.loss_fn,
            places=places,
            validate_fn=validate_fn,
            **others,
        )

    return loop


def rows_of(places, key="loss"):
    return [row for row in read_metrics(places.metrics_path) if key in row]


# --- what is logged -------------------------------------------------------------------------------


def test_a_row_holds_the_step_and_four_figures_and_no_time(loop, places):
    assert loop(training__num_steps=12, training__log_every=5)
    rows = rows_of(places)
    assert [row["step"] for row in rows] == [5, 10, 12]
    for row in rows:
        assert set(row) == {
            "step", "loss", "zero_loss_share", "learning_rate", "num_hard_examples",
        }  # fmt: skip


def test_a_row_is_the_mean_of_the_steps_since_the_last(loop, places):
    loop(training__num_steps=6, training__log_every=1)
    each = [row["loss"] for row in rows_of(places)]
    places.metrics_path.unlink()
    loop(training__num_steps=6, training__log_every=4)
    means = [row["loss"] for row in rows_of(places)]
    assert means == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 2], rel=1e-6)


def test_an_annealed_number_of_hard_examples_is_logged(loop, places):
    settings = {"mining__method": "s2m-annealed", "mining__anneal_fraction": 0.5}
    loop(training__num_steps=20, training__log_every=1, **settings)
    batch_size, num_hard = 32, 8
    expected = [
        round(batch_size - min(1, step / (0.5 * 20)) * (batch_size - num_hard))
        for step in range(20)
    ]
    assert [row["num_hard_examples"] for row in rows_of(places)] == expected
    assert expected[0] == 32
    assert expected[-1] == 8


@pytest.mark.parametrize(
    ("method", "expected"), [("sgd", 32), ("snm", 32), ("s2m", 8), ("topk-sgd", 8), ("max", 1)]
)
def test_the_number_of_hard_examples_of_a_method(loop, places, method, expected):
    loop(training__num_steps=3, training__log_every=1, mining__method=method)
    assert {row["num_hard_examples"] for row in rows_of(places)} == {expected}


@pytest.mark.parametrize(("period", "share"), [(1, 1.0), (2, 0.5), (4, 0.25)])
def test_the_share_of_examples_without_loss_is_logged(loop, places, period, share):
    def every_so_often_zero(positive, negative):
        is_zero = torch.arange(len(positive)) % period == 0
        return softmax_loss(positive, negative) * ~is_zero

    loop(loss_fn=every_so_often_zero, training__num_steps=2, training__log_every=1)
    assert [row["zero_loss_share"] for row in rows_of(places)] == [share, share]


def counted(positive, negative):
    """Losses 0, 1, ..., 31 whatever the scores."""
    numbers = torch.arange(len(positive), dtype=positive.dtype)
    return numbers + 0 * positive + 0 * negative.clamp(min=-1).sum(1)


# With half of the batch as k' at the last of 2 steps, and k' = 8 without annealing.
RISKS = {
    "sgd": sum(range(32)) / 32,
    "snm": sum(range(32)) / 32,
    "snm-nonzero": sum(range(32)) / 31,
    "topk-sgd": sum(range(24, 32)) / 8,
    "s2m": sum(range(24, 32)) / 8,
    "s2m-annealed": sum(range(24, 32)) / 8,
    "ranked-range": sum(range(20, 28)) / 8,
    "cvar": sum(range(24, 32)) / 8,
    "max": 31.0,
}


@pytest.mark.parametrize("method", RISKS)
def test_the_logged_loss_is_the_risk_of_the_method(loop, places, method):
    settings = {"mining__method": method, "mining__anneal_fraction": 0.0, "risk__num_dropped": 4}
    loop(loss_fn=counted, training__num_steps=1, training__log_every=1, **settings)
    assert [row["loss"] for row in rows_of(places)] == pytest.approx([RISKS[method]])


def test_what_is_dropped_grows_as_the_hard_examples_get_fewer(loop, places):
    """k' goes from 32 by 6 a step to 8, so a quarter of the 4 dropped is added each time."""
    settings = {"mining__method": "ranked-range", "mining__anneal_fraction": 1.0}
    settings |= {"risk__num_dropped": 4, "training__num_steps": 4, "training__log_every": 1}
    loop(loss_fn=counted, **settings)
    expected = [
        sum(range(32 - dropped - count, 32 - dropped)) / count
        for dropped, count in [(0, 32), (1, 26), (2, 20), (3, 14)]
    ]
    assert [row["loss"] for row in rows_of(places)] == pytest.approx(expected)


@pytest.mark.parametrize("method", ["chi-square", "kl"])
def test_a_ball_reaches_as_far_as_the_hard_examples(loop, places, method):
    """Its risk is that of the worst weights, so at least that of equal ones for 8 of 32."""
    settings = {"mining__method": method, "mining__anneal_fraction": 0.0}
    loop(loss_fn=counted, training__num_steps=1, training__log_every=1, **settings)
    losses = [float(loss) for loss in range(32)]
    worst = {
        "chi-square": risk_oracles.worst_chi_square(losses, 32 / 8 - 1),
        "kl": risk_oracles.worst_kl(losses, math.log(32 / 8)),
    }[method]
    assert worst > sum(range(24, 32)) / 8
    assert [row["loss"] for row in rows_of(places)] == pytest.approx([worst], rel=1e-5)


def test_known_groups_are_weighed_by_their_losses(loop, places, dataset):
    """Every group has the loss of its number, so in the end the last group alone counts."""
    settings = {"mining__method": "group-dro", "risk__group": "region", "risk__step_size": 1.0}
    labels = {}

    def of_region(positive, negative):
        return labels["regions"] + 0 * positive + 0 * negative.clamp(min=-1).sum(1)

    built = build_training(small.config("unused", **settings), dataset, CPU)
    next_batch = built.training.feed.next_batch

    def noted():
        batch = next_batch()
        labels["regions"] = batch.label_ids.float() % 4
        assert torch.equal(batch.group_ids, batch.label_ids % 4)
        return batch

    built.training.feed.next_batch = noted
    loop(loss_fn=of_region, training=built.training, training__num_steps=30, training__log_every=1)
    losses = [row["loss"] for row in rows_of(places)]
    assert losses[0] < 3
    assert losses[-1] == pytest.approx(3, abs=1e-3)


def test_with_natural_shares_no_group_is_ever_left_out(dataset):
    settings = {"mining__method": "group-dro", "risk__group": "region", "risk__natural_share": 0.5}
    risk = build_training(small.config("unused", **settings), dataset, CPU).training.risk
    shares = torch.bincount(torch.from_numpy(dataset.parts["train"].positives.ids % 4)) / 525
    assert torch.allclose(risk.memory.mixtures.sum(1), torch.ones(4, dtype=torch.float64))
    off_diagonal = risk.memory.mixtures[0, 1:].float()
    assert torch.allclose(off_diagonal, 0.5 * shares[1:], atol=1e-3)


def test_an_unknown_column_of_groups_is_refused_with_a_hint(dataset):
    settings = {"mining__method": "group-dro", "risk__group": "regoin"}
    with pytest.raises(UserError, match=r"risk\.group.*'regoin'; did you mean 'region'"):
        build_training(small.config("unused", **settings), dataset, CPU)


def test_the_logged_loss_is_that_of_the_hardest_examples(loop, places):
    """With losses 0, 1, ..., 31 whatever the scores, the 8 hardest average 27.5."""

    loop(loss_fn=counted, training__num_steps=1, mining__method="s2m")
    (row,) = rows_of(places)
    assert row["loss"] == sum(range(24, 32)) / 8


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(loop, places):
    def outcome(seed):
        loop(training__num_steps=8, training__seed=seed, training__log_every=2)
        written = places.metrics_path.read_bytes()
        places.metrics_path.unlink()
        return written, loop.training.checkpoint().everything()["model.label_table"].clone()

    first, again, other = outcome(0), outcome(0), outcome(1)
    assert first[0] == again[0]
    assert first[1].equal(again[1])
    assert other[0] != first[0]
    assert not other[1].equal(first[1])


# --- validation -----------------------------------------------------------------------------------


def scripted(values):
    """Validations with these results, one after the other."""
    results = iter(values)

    def validate(model):
        value = next(results)
        return value, {"recall@10": value}

    return validate


def test_the_best_weights_are_kept_and_not_the_last(loop, places):
    kept = []

    def save_best(model):
        kept.append((loop_training().step, model.label_table.clone()))

    def loop_training():
        return loop.training

    loop(
        training__num_steps=10, training__evaluate_every=2, save_best_fn=save_best,
        validate_fn=scripted([0.1, 0.5, 0.3, 0.5, 0.4]),
    )  # fmt: skip
    assert [step for step, _ in kept] == [2, 4]  # an equal value is not a better one
    assert (loop.training.best_value, loop.training.best_step) == (0.5, 4)
    assert not kept[-1][1].equal(loop.training.model.label_table)
    rows = rows_of(places, "validation")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["validation"]["recall@10"] for row in rows] == [0.1, 0.5, 0.3, 0.5, 0.4]


def test_without_a_period_validation_is_at_the_end_alone(loop, places):
    loop(training__num_steps=7, training__evaluate_every=0, validate_fn=scripted([0.5]))
    assert [row["step"] for row in rows_of(places, "validation")] == [7]


@pytest.mark.parametrize(("patience", "expected"), [(1, 6), (2, 12), (3, 14), (0, 20)])
def test_patience_counts_validations_without_a_new_best(loop, places, patience, expected):
    values = [0.1, 0.2, 0.1, 0.3, 0.3, *[0.2] * 5]  # at steps 2, 4, ...; the best at 4, then at 8
    is_complete = loop(
        training__num_steps=20, training__evaluate_every=2, training__patience=patience,
        validate_fn=scripted(values),
    )  # fmt: skip
    assert is_complete
    assert loop.training.step == expected
    checkpoint = load_latest_checkpoint(places.checkpoint_dir)
    assert checkpoint.state["step"] == expected


def test_a_loop_that_stopped_early_takes_no_step_when_it_is_resumed(loop, places):
    settings = {"training__num_steps": 20, "training__evaluate_every": 2, "training__patience": 1}
    loop(validate_fn=scripted([0.5, 0.4]), **settings)
    training = loop.training
    assert training.step == 4
    assert loop(training=training, validate_fn=scripted([]), **settings)
    assert training.step == 4


@pytest.mark.parametrize("select_by", ["recall@1", "recall@10 on worst of style", "mrr"])
def test_a_run_keeps_the_weights_of_the_best_validation(tmp_path, dataset, select_by):
    from rich.console import Console

    from evenhand.data import save_dataset
    from evenhand.runs import begin_run

    data = save_dataset(dataset, tmp_path / "data")
    config = small.config(
        tmp_path / "data",
        training__select_by=select_by,
        training__evaluate_every=5,
        training__learning_rate=2.0,  # so high that the last weights are not the best
        training__learning_rate_shape="constant",
    )
    run, quiet = tmp_path / "run", Console(quiet=True)
    begin_run(run, config, data, device=CPU)
    assert train_run(run, config, data, device=CPU, console=quiet)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "validation" in row]
    values = {row["step"]: row["validation"][select_by] for row in rows}
    about = json.loads((run / "run.json").read_text("utf-8"))
    assert about["best_step"] == max(values, key=values.get)
    scores = evaluate_run(run, data, "validation", device=CPU, console=quiet)
    metric, _, where = select_by.partition(" on ")
    column, group = ("style", "worst") if where else ("all", "all")
    (score,) = [s for s in scores if (s.metric, s.column, s.group) == (metric, column, group)]
    assert score.value == max(values.values())
    kept = safetensors.torch.load_file(run / "model/weights.safetensors")
    final = load_latest_checkpoint(run / "checkpoints").everything()
    is_last = about["best_step"] == 60
    assert kept["label_table"].equal(final["model.label_table"]) == is_last


# --- what is not a number -------------------------------------------------------------------------


def test_a_loss_that_is_nan_names_its_step_and_what_to_try(loop, places):
    def broken(positive, negative):
        losses = softmax_loss(positive, negative)
        return losses * math.nan if loop.training.step == 16 else losses  # the 17th step

    with pytest.raises(UserError) as caught:
        loop(
            loss_fn=broken, training__num_steps=60, training__log_every=10,
            training__checkpoint_every=5,
        )  # fmt: skip
    message = str(caught.value)
    assert message.startswith("the loss of step 17 is nan; checkpoints before it are sound")
    for remedy in ("training.learning_rate", "training.warmup_steps", "training.max_gradient_norm"):
        assert remedy in message
    checkpoint = load_latest_checkpoint(places.checkpoint_dir)
    assert checkpoint.state["step"] == 15
    for name, tensor in checkpoint.everything().items():
        assert tensor.double().isfinite().all(), name
    assert [row["step"] for row in rows_of(places)] == [10]
    assert "NaN" not in places.metrics_path.read_text("utf-8")


def test_an_infinite_loss_is_refused_too(loop):
    def broken(positive, negative):
        return softmax_loss(positive, negative) * (math.inf if loop.training.step == 2 else 1)

    with pytest.raises(UserError, match="the loss of step 3 is inf"):
        loop(loss_fn=broken, training__num_steps=10, training__log_every=4)


def test_weights_that_are_not_finite_are_neither_checkpointed_nor_kept_as_the_best(loop, places):
    """The gradient of a finite loss may overflow; the next loss would come too late."""
    kept = []

    def poisoned(positive, negative):
        if loop.training.step == 9:
            loop.training.model.label_table[0, 0] = math.inf
        return softmax_loss(positive.clamp(-1, 1).nan_to_num(), negative.nan_to_num())

    def validate(model):
        return float(loop.training.step), {}

    with pytest.raises(UserError, match=r"label_table holds .* not finite after step 10; c"):
        loop(
            loss_fn=poisoned, training__num_steps=20, training__evaluate_every=5,
            training__checkpoint_every=5, validate_fn=validate,
            save_best_fn=lambda model: kept.append(loop.training.step),
        )  # fmt: skip
    assert kept == [5]
    assert load_latest_checkpoint(places.checkpoint_dir).state["step"] == 5


def test_a_model_of_nan_is_not_validated(loop):
    def broken(positive, negative):
        return softmax_loss(positive, negative) * (math.nan if loop.training.step == 5 else 1)

    def validate(model):
        assert loop.training.step < 6
        return 1.0, {}

    with pytest.raises(UserError, match="the loss of step 6 is nan"):
        loop(
            loss_fn=broken, training__num_steps=20, training__log_every=100,
            training__evaluate_every=4, validate_fn=validate,
        )  # fmt: skip


# --- checkpoints and stopping ---------------------------------------------------------------------


def test_checkpoints_come_at_their_period_and_at_the_end(loop, places):
    seen = []

    def look(step, figures):
        seen.append(sorted(path.name for path in places.checkpoint_dir.glob("*")))

    loop(training__num_steps=11, training__checkpoint_every=4, progress_fn=look)
    assert [names[-1:] for names in seen] == [
        *[[]] * 4, *[["step-00000004"]] * 4, *[["step-00000008"]] * 3,
    ]  # fmt: skip
    assert [path.name for path in places.checkpoint_dir.iterdir()] == ["step-00000011"]


def test_a_period_of_0_writes_no_checkpoint_at_all(loop, places):
    loop(training__num_steps=5, training__checkpoint_every=0)
    assert not places.checkpoint_dir.exists()
    assert not loop(
        training__num_steps=5, training__checkpoint_every=0, should_stop_fn=lambda: True
    )
    assert not places.checkpoint_dir.exists()


def test_a_stop_ends_the_step_with_a_checkpoint(loop, places):
    is_complete = loop(training__num_steps=20, should_stop_fn=lambda: loop.training.step >= 7)
    assert not is_complete
    assert loop.training.step == 7
    assert load_latest_checkpoint(places.checkpoint_dir).state["step"] == 7


def test_a_stop_at_the_last_step_is_the_end(loop):
    assert loop(training__num_steps=4, should_stop_fn=lambda: loop.training.step >= 4)


def test_the_steps_between_two_rows_survive_a_checkpoint(loop, places, dataset):
    settings = {"training__num_steps": 10, "training__log_every": 10}
    loop(**settings)
    expected = rows_of(places)
    places.metrics_path.unlink()
    loop(**settings, should_stop_fn=lambda: loop.training.step == 6)
    built = build_training(small.config("unused", **settings), dataset, CPU)
    built.training.load(load_latest_checkpoint(places.checkpoint_dir))
    assert built.training.step == 6
    assert len(built.training.recent) == 6
    loop(training=built.training, **settings)
    assert rows_of(places) == expected


def test_rewinding_forgets_later_lines_and_half_of_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rewind_metrics(path, step=3)
    assert not path.exists()
    for step in (1, 2, 2, 3, 4):
        append_line(path, {"step": step})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 1')
    rewind_metrics(path, step=2)
    assert path.read_text("utf-8") == '{"step": 1}\n{"step": 2}\n{"step": 2}\n'
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        rewind_metrics(path, step=2)


# --- clipping -------------------------------------------------------------------------------------


@pytest.fixture
def dense_gradients():
    """A perceptron with gradients in .grad, and rows beside them, one of them of biases."""
    model = Retriever(
        MlpEncoder(3, 4, hidden_widths=(5,)), 6, 4, is_cosine=False, has_label_bias=True
    )
    for weight in model.encoder.parameters():
        weight.grad = torch.randn_like(weight)
    ids = torch.tensor([1, 4])
    gradients = Gradients(
        RowGradients(ids, torch.randn(2, 4)), RowGradients(ids, torch.randn(2, 1)), None
    )
    return model, gradients


def all_numbers(model, gradients):
    dense = [weight.grad for weight in model.encoder.parameters()]
    rows = [row.values for row in gradients if row is not None]
    return [number for tensor in [*dense, *rows] for number in tensor.flatten().tolist()]


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_rows_and_dense_weights_are_scaled_down_together(dense_gradients, share):
    model, gradients = dense_gradients
    before = all_numbers(model, gradients)
    length = math.sqrt(sum(number**2 for number in before))
    after = all_numbers(model, clipped(gradients, model, max_norm=share * length))
    assert after == pytest.approx([share * number for number in before], rel=1e-5)


def test_gradients_short_enough_are_left_alone(dense_gradients):
    model, gradients = dense_gradients
    before = all_numbers(model, gradients)
    length = math.sqrt(sum(number**2 for number in before))
    result = clipped(gradients, model, max_norm=1.01 * length)
    assert all_numbers(model, result) == before
    assert result.label_rows.ids.equal(gradients.label_rows.ids)
    assert result.feature_rows is None


def test_gradients_of_zero_stay_zero(dense_gradients):
    model, gradients = dense_gradients
    for weight in model.encoder.parameters():
        weight.grad.zero_()
    zero = Gradients(*(row and row._replace(values=0 * row.values) for row in gradients))
    assert set(all_numbers(model, clipped(zero, model, max_norm=1.0))) == {0.0}


def test_clipping_changes_training_only_when_it_is_asked_for(loop):
    def table(max_norm):
        settings = {"training__optimizer": "row-adagrad", "training__num_steps": 3}
        loop(training__max_gradient_norm=max_norm, **settings)
        return loop.training.model.label_table.clone()

    assert table(0.0).equal(table(1e6))
    assert not table(0.0).equal(table(1e-9))


def test_the_dense_weights_follow_the_learning_rate_of_the_step(tmp_path):
    dataset = small.dense_dataset()
    config = small.config("unused", training__num_steps=4, training__warmup_steps=2)
    built = build_training(config, dataset, CPU)
    rates = []

    def look(step, figures):
        rates.append(built.training.optimizers.dense.param_groups[0]["lr"])

    train(
        built.training, dataclasses.replace(built.plan, checkpoint_every=0),
        sampler=built.sampler, loss_fn=built.loss_fn,
        places=Places(tmp_path / "metrics.jsonl", tmp_path), progress_fn=look,
    )  # fmt: skip
    assert rates == pytest.approx([0.05 * 0.5, 0.05 * 0.75, 0.05 * 0.5, 0.05 * 0.25])
    assert all(weight.grad is None for weight in built.training.model.parameters())
