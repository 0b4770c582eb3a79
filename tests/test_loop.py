"""The loop logs, validates, keeps the best, stops when asked, and refuses what is not a number."""

import dataclasses
import io
import json
import math

import pytest
import safetensors.torch
import torch
from rich.console import Console

import small
from evenhand.build import build_training
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.losses import softmax_loss
from evenhand.models import MlpEncoder, Retriever, RowGradients
from evenhand.runs import begin_run, evaluate_run, train_run
from evenhand.training.checkpoint import CheckpointManager, load_latest_checkpoint
from evenhand.training.loop import append_line, rewind_metrics, train
from evenhand.training.step import choose_step, clip

CPU = torch.device("cpu")


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def dataset():
    return small.text_dataset()


class Loop:
    """Trains a small data set; settings are named as those of `small.settings`."""

    def __init__(self, folder, dataset):
        self.metrics, self.checkpoints = folder / "metrics.jsonl", folder / "checkpoints"
        self.dataset = dataset

    def __call__(self, *, loss_fn=None, training=None, **settings):
        changes = {name: value for name, value in settings.items() if "__" in name}
        others = {name: value for name, value in settings.items() if "__" not in name}
        built = build_training(small.config("unused", **changes), self.dataset, CPU)
        plan = dataclasses.replace(built.plan, loss_fn=loss_fn or built.plan.loss_fn)
        self.training = training or built.training
        return train(
            self.training,
            plan,
            choose_step(self.training, plan).step,
            metrics_path=self.metrics,
            keeper=CheckpointManager(self.checkpoints),
            **others,
        )

    def rows(self, key="loss"):
        return [row for row in rows_of(self.metrics) if key in row]

    def column(self, key):
        return [row[key] for row in self.rows(key)]

    def saved(self):
        return load_latest_checkpoint(self.checkpoints)


@pytest.fixture
def loop(tmp_path, dataset):
    return Loop(tmp_path, dataset)


# --- what is logged -------------------------------------------------------------------------------


def test_a_row_holds_the_step_and_the_mean_of_the_steps_since_the_last_and_no_time(loop):
    assert loop(training__num_steps=6, training__log_every=1)
    each = loop.column("loss")
    loop.metrics.unlink()
    assert loop(training__num_steps=6, training__log_every=4)
    assert loop.column("step") == [4, 6]
    means = [sum(each[:4]) / 4, sum(each[4:]) / 2]
    assert loop.column("loss") == pytest.approx(means, rel=1e-6)
    figures = {"step", "loss", "zero_loss_share", "learning_rate", "num_hard_examples"}
    assert all(set(row) == figures for row in loop.rows())


def counted(positive, negative):
    """Losses 0, 1, ..., 31 whatever the scores."""
    numbers = torch.arange(len(positive), dtype=positive.dtype)
    return numbers + 0 * positive + 0 * negative.clamp(min=-1).sum(1)


RISKS = {  # of a batch with these losses, with k' = 8 and, of a ranked range, 4 dropped
    "sgd": sum(range(32)) / 32,
    "snm": sum(range(32)) / 32,
    "topk-sgd": sum(range(24, 32)) / 8,
    "s2m": sum(range(24, 32)) / 8,
    "s2m-annealed": sum(range(24, 32)) / 8,
    "ranked-range": sum(range(20, 28)) / 8,
    "cvar": sum(range(24, 32)) / 8,
}


@pytest.mark.parametrize("method", RISKS)
def test_the_logged_loss_is_the_risk_of_the_method(loop, method):
    settings = {"mining__method": method, "mining__anneal_fraction": 0.0, "risk__num_dropped": 4}
    loop(loss_fn=counted, training__num_steps=1, training__log_every=1, **settings)
    assert loop.column("loss") == pytest.approx([RISKS[method]], rel=1e-5)


# --- validation -----------------------------------------------------------------------------------


def scripted(values):
    """Validations with these results, one after the other."""
    results = iter(values)

    def validate():
        value = next(results)
        return value, {"recall@10": value}

    return validate


@pytest.mark.parametrize(
    ("every", "values", "steps"),
    [(2, [0.1, 0.5, 0.3, 0.5, 0.4], [2, 4, 6, 8, 10]), (0, [0.5], [10])],
)
def test_validations_come_at_their_period_and_at_the_end(loop, every, values, steps):
    validate_fn = scripted(values)
    loop(training__num_steps=10, training__evaluate_every=every, validate_fn=validate_fn)
    rows = loop.rows("validation")
    assert [row["step"] for row in rows] == steps
    assert [row["validation"]["recall@10"] for row in rows] == values
    first_best = steps[values.index(0.5)]  # an equal value is not a better one
    assert (loop.training.best_value, loop.training.best_step) == (0.5, first_best)


@pytest.mark.parametrize(("patience", "expected"), [(1, 6), (2, 12), (3, 14), (0, 20)])
def test_patience_counts_validations_without_a_new_best(loop, patience, expected):
    values = [0.1, 0.2, 0.1, 0.3, 0.3, *[0.2] * 5]  # at steps 2, 4, ...; the best at 4, then at 8
    settings = {"training__num_steps": 20, "training__evaluate_every": 2}
    settings |= {"training__patience": patience}
    assert loop(validate_fn=scripted(values), **settings)
    training = loop.training
    assert training.step == loop.saved().state["step"] == expected
    assert loop(training=training, validate_fn=scripted([]), **settings)  # it takes no step more
    assert training.step == expected


@pytest.mark.parametrize("select_by", ["recall@1", "recall@10 on worst of style", "mrr"])
def test_a_run_keeps_the_weights_of_the_best_validation(tmp_path, dataset, select_by):
    data = save_dataset(dataset, tmp_path / "data")
    config = small.config(
        tmp_path / "data",
        training__select_by=select_by,
        training__evaluate_every=5,
        training__learning_rate=50.0,  # so high that the last weights are not the best
        training__learning_rate_shape="constant",
    )
    run, quiet, screen = tmp_path / "run", Console(quiet=True), Console(file=io.StringIO())
    begin_run(run, config, data, device=CPU)
    assert train_run(run, config, data, device=CPU, console=screen, keeps_checkpoints=True)
    assert "training step: eager\n" in screen.file.getvalue()  # of a CPU: no reason is given
    rows = [row for row in rows_of(run / "metrics.jsonl") if "validation" in row]
    values = {row["step"]: row["validation"][select_by] for row in rows}
    about = json.loads((run / "run.json").read_text("utf-8"))
    assert about["step"] == {"kind": "eager"}
    assert about["best_step"] == max(values, key=values.get)
    assert (
        f"the model is that of step {about['best_step']}, the best look\n" in screen.file.getvalue()
    )
    scores = evaluate_run(run, data, "validation", device=CPU, console=quiet)
    metric, _, where = select_by.partition(" on ")
    column, group = ("style", "worst") if where else ("all", "all")
    (score,) = [s for s in scores if (s.metric, s.column, s.group) == (metric, column, group)]
    assert score.value == max(values.values())
    kept = safetensors.torch.load_file(small.weights_file(run))
    final = load_latest_checkpoint(run / "checkpoints").everything()
    is_last = about["best_step"] == 60
    assert kept["label_table"].equal(final["model.label_table"]) == is_last


# --- what is not a number -------------------------------------------------------------------------


def test_a_loss_that_is_nan_names_its_step_and_what_to_try(loop):
    def broken(positive, negative):
        losses = softmax_loss(positive, negative)
        return losses * math.nan if loop.training.step == 16 else losses  # the 17th step

    settings = {"training__log_every": 10, "training__checkpoint_every": 5}
    with pytest.raises(UserError) as caught:
        loop(loss_fn=broken, training__num_steps=60, **settings)
    message = str(caught.value)
    assert message.startswith("the loss of step 17 is nan; checkpoints before it are sound")
    for remedy in ("training.learning_rate", "training.warmup_steps", "training.max_gradient_norm"):
        assert remedy in message
    assert loop.saved().state["step"] == 15
    for name, tensor in loop.saved().everything().items():
        assert tensor.double().isfinite().all(), name
    assert loop.column("step") == [10]
    assert "NaN" not in loop.metrics.read_text("utf-8")


def test_weights_that_are_not_finite_are_neither_checkpointed_nor_validated(loop):
    """The gradient of a finite loss may overflow; the next loss would come too late."""
    validated = []

    def poisoned(positive, negative):
        if loop.training.step == 9:
            loop.training.model.label_table[0, 0] = math.inf
        return softmax_loss(positive.clamp(-1, 1).nan_to_num(), negative.nan_to_num())

    def validate():
        validated.append(loop.training.step)
        return float(loop.training.step), {}

    settings = {"training__evaluate_every": 5, "training__checkpoint_every": 5}
    with pytest.raises(UserError, match=r"label_table holds .* not finite after step 10; c"):
        loop(loss_fn=poisoned, training__num_steps=20, validate_fn=validate, **settings)
    assert validated == [5]
    assert loop.saved().state["step"] == 5


# --- checkpoints and stopping ---------------------------------------------------------------------


def test_rewinding_forgets_later_lines_and_half_of_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rewind_metrics(path, step=3)
    assert not path.exists()
    for step in (1, 2, 2, 3, 4):
        append_line(path, {"step": step})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 1')
    assert rewind_metrics(path, step=2) == 2
    assert path.read_text("utf-8") == '{"step": 1}\n{"step": 2}\n{"step": 2}\n'
    path.write_text("[1]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        rewind_metrics(path, step=2)


# --- clipping and the learning rate ---------------------------------------------------------------


@pytest.mark.parametrize(("share", "factor"), [(0.1, 0.1), (0.9, 0.9), (1.01, 1), (None, 1)])
def test_rows_and_dense_weights_are_scaled_down_together(share, factor):
    """A perceptron with gradients in .grad, and rows beside them; None: all of them are 0."""
    model = Retriever(
        MlpEncoder(3, 4, hidden_widths=(5,)), 6, 4, is_cosine=False, has_label_bias=True
    )
    size = 0 if share is None else 1
    for weight in model.encoder.parameters():
        weight.grad = size * torch.randn_like(weight)
    ids = torch.tensor([1, 4])
    rows = [RowGradients(ids, size * torch.randn(2, width)) for width in (4, 1)]

    def all_numbers(gradients):
        dense = [weight.grad for weight in model.encoder.parameters()]
        values = [row.values for row in gradients.values()]
        return torch.cat([tensor.flatten() for tensor in [*dense, *values]])

    gradients = dict(zip(("labels", "biases"), rows, strict=True))
    before = all_numbers(gradients).clone()
    clipped = clip(gradients, model, max_norm=(share or 1) * float(before.norm()) or 1.0)
    torch.testing.assert_close(all_numbers(clipped), factor * before, rtol=1e-5, atol=0)
    assert factor < 1 or all_numbers(clipped).equal(before)
    assert clipped["labels"].ids.equal(ids)


def test_the_dense_weights_follow_the_learning_rate_of_the_step(tmp_path):
    loop, rates = Loop(tmp_path, small.dense_dataset()), []

    def look(step, figures):
        rates.append(loop.training.optimizers.dense.param_groups[0]["lr"])

    loop(training__num_steps=4, training__warmup_steps=2, progress_fn=look)
    assert rates == pytest.approx([0.05 * 0.5, 0.05 * 0.75, 0.05 * 0.5, 0.05 * 0.25])
    assert all(weight.grad is None for weight in loop.training.model.parameters())
