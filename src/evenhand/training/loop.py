"""The training loop: sample, mine, differentiate the survivors, update their rows; again."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenhand.distributed.ranks import Ranks, are_any
from evenhand.errors import UserError
from evenhand.files import sync
from evenhand.losses import LossFn
from evenhand.models.encoders import RowGradients
from evenhand.models.retriever import Retriever
from evenhand.risk import Memory, mean_weights, top_weights
from evenhand.sampling import LabelSampler
from evenhand.store import Table, all_finite
from evenhand.training.checkpoint import Checkpoint, Keeper
from evenhand.training.feed import PairFeed
from evenhand.training.metrics_file import append_line
from evenhand.training.optimizers import RowOptimizer
from evenhand.training.schedules import learning_rate_at, num_hard_examples_at
from evenhand.training.step import Batch, Gradients, gradients_of, mine

NAN_REMEDY = (
    "checkpoints before it are sound: try a lower training.learning_rate, training.warmup_steps "
    "or training.max_gradient_norm, and see that no feature value is huge"
)
TABLES = {"labels": "label_table", "biases": "label_bias", "features": "encoder.weight"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the loop does, in numbers."""

    num_steps: int
    num_sampled_labels: int
    num_hard_labels: int
    num_hard_examples: int
    learning_rate: float
    anneal_fraction: float = 0.0  # of the steps, over which k' shrinks from the whole batch
    learning_rate_shape: str = "linear"
    warmup_steps: int = 0
    max_gradient_norm: float = 0.0  # 0: gradients are not clipped
    draws_for_each: bool = False  # every example has a label sample of its own
    is_log_q_corrected: bool = False
    log_every: int = 50
    evaluate_every: int = 0  # and at the end; 0: only at the end
    checkpoint_every: int = 500  # 0: none at all
    patience: int = 0  # validations without a new best before an early stop; 0: never


@dataclasses.dataclass
class Optimizers:
    label_rows: RowOptimizer
    bias_rows: RowOptimizer | None
    feature_rows: RowOptimizer | None
    dense: torch.optim.Adam | None

    def step(self, gradients: Gradients, *, learning_rate: float) -> None:
        self.label_rows.step(gradients.label_rows, learning_rate=learning_rate)
        if self.bias_rows is not None and gradients.bias_rows is not None:
            self.bias_rows.step(gradients.bias_rows, learning_rate=learning_rate)
        if self.feature_rows is not None and gradients.feature_rows is not None:
            self.feature_rows.step(gradients.feature_rows, learning_rate=learning_rate)
        if self.dense is not None:
            for group in self.dense.param_groups:
                group["lr"] = learning_rate
            self.dense.step()
            self.dense.zero_grad(set_to_none=True)

    def row_optimizers(self) -> dict[str, RowOptimizer]:
        named = {
            "labels": self.label_rows,
            "biases": self.bias_rows,
            "features": self.feature_rows,
        }
        return {name: optimizer for name, optimizer in named.items() if optimizer is not None}


class StepRisk(NamedTuple):
    """How a step weighs its examples, and what of that a checkpoint must keep."""

    weigh_fn: Callable[[Tensor, Batch, int], Tensor]  # losses (B,), batch, k' -> weights (B,)
    memory: Memory | None = None


def hardest_of_batch(losses: Tensor, batch: Batch, num_hard_examples: int) -> Tensor:
    return top_weights(losses, num_hard_examples=num_hard_examples)


def whole_batch(losses: Tensor, batch: Batch, num_hard_examples: int) -> Tensor:
    return mean_weights(losses)


@dataclasses.dataclass
class Training:
    """All that changes while training: what a checkpoint holds."""

    model: Retriever
    optimizers: Optimizers
    feed: PairFeed
    generator: torch.Generator  # of the label samples
    risk: StepRisk
    belongs_to: str = ""  # a digest of the settings and the data
    step: int = 0
    best_value: float = -math.inf
    best_step: int = 0
    recent: list[Tensor] = dataclasses.field(default_factory=list)  # (2,) a step since the last log
    # Of tables split over ranks, named as in TABLES: the first row that is here, the rows in all.
    row_ranges: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tables: dict[str, Table] = {}
        for name, optimizer in self.optimizers.row_optimizers().items():
            place = self.row_ranges.get(name, (0, None))
            table_name = f"model.{TABLES[name]}"
            tables[table_name] = Table(tensors.pop(table_name), *place)
            for key, value in optimizer.state().items():
                if value.dim():  # a value for each row
                    tables[f"optimizer.{name}.{key}"] = Table(value, *place)
                else:
                    tensors[f"optimizer.{name}.{key}"] = value
        if self.optimizers.dense is not None:
            for index, slots in self.optimizers.dense.state_dict()["state"].items():
                tensors |= {f"dense.{index}.{key}": value for key, value in slots.items()}
        tensors |= {f"feed.{name}": tensor for name, tensor in self.feed.state().items()}
        if self.risk.memory is not None:
            tensors |= {f"risk.{name}": value for name, value in self.risk.memory.state().items()}
        tensors["generator"] = self.generator.get_state()
        tensors["recent"] = torch.stack(self.recent) if self.recent else torch.zeros(0, 2)
        best = self.best_value if math.isfinite(self.best_value) else None
        state = {
            "belongs_to": self.belongs_to,
            "step": self.step,
            "best_value": best,
            "best_step": self.best_step,
        }
        return Checkpoint(tensors, state, tables)

    def check_belongs(self, state: dict[str, Any]) -> None:
        if state["belongs_to"] != self.belongs_to:
            raise UserError(
                f"the checkpoint of step {state['step']} is of another configuration or another "
                f"data set; put back the one of this run, or remove it to begin anew"
            )

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Takes over a checkpoint, whose tables may be the own ones, filled already."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in checkpoint.tensors.items()
                if name.startswith(prefix)
            }

        self.check_belongs(checkpoint.state)
        tables = self.checkpoint().tables
        for name, table in tables.items():
            rows = checkpoint.tables[name].rows
            if rows.shape != table.rows.shape:
                raise ValueError(f"{name} is {tuple(rows.shape)}, not {tuple(table.rows.shape)}")
            if rows.data_ptr() != table.rows.data_ptr():
                table.rows.copy_(rows)
        left = self.model.load_state_dict(under("model."), strict=False)
        wrong = {f"model.{name}" for name in left.missing_keys} - tables.keys()
        wrong |= set(left.unexpected_keys)
        if wrong:
            raise ValueError(f"{min(wrong)} is missing, or unknown")
        for name, optimizer in self.optimizers.row_optimizers().items():
            held = {key: value for key, value in optimizer.state().items() if value.dim()}
            optimizer.load(held | under(f"optimizer.{name}."))
        if self.optimizers.dense is not None:
            slots: dict[int, dict[str, Tensor]] = {}
            for name, tensor in under("dense.").items():
                index, key = name.split(".", 1)
                slots.setdefault(int(index), {})[key] = tensor
            groups = self.optimizers.dense.state_dict()["param_groups"]
            self.optimizers.dense.load_state_dict({"state": slots, "param_groups": groups})
        self.feed.load(under("feed."))
        if self.risk.memory is not None:
            memory = under("risk.").items()
            self.risk.memory.load({name: tensor.to(self.feed.device) for name, tensor in memory})
        self.generator.set_state(checkpoint.tensors["generator"])
        self.recent = list(checkpoint.tensors["recent"].to(self.feed.device))
        self.step = checkpoint.state["step"]
        best = checkpoint.state["best_value"]
        self.best_value = -math.inf if best is None else best
        self.best_step = checkpoint.state["best_step"]


class Places(NamedTuple):
    """Where the loop writes."""

    metrics_path: Path | None  # None: another rank writes them
    checkpoint_dir: Path


def train(
    training: Training,
    plan: Plan,
    *,
    sampler: LabelSampler,
    loss_fn: LossFn,
    places: Places,
    step_fn: Callable[[], Tensor] | None = None,
    validate_fn: Callable[[Retriever], tuple[float, dict[str, float]]] | None = None,
    save_best_fn: Callable[[Retriever], None] | None = None,
    progress_fn: Callable[[int, dict[str, float]], None] | None = None,
    should_stop_fn: Callable[[], bool] = lambda: False,
    keeper: Keeper | None = None,
    ranks: Ranks | None = None,
) -> bool:
    """Trains until the plan is done, patience ends or a stop is asked for.

    Args:
        step_fn: takes the next step instead of `train_step` (see `recorded`).
        validate_fn: the value to select by, and every validation figure to be logged.
        save_best_fn: called with the model whenever that value is the best so far.
        progress_fn: called after each step with the step and the last logged figures.
        keeper: saves the checkpoints; without it, they are saved at once and the last is kept.
        ranks: those that train together, all in this loop at the same step.

    Returns:
        Whether training is complete (False: it was asked to stop, and can be resumed).
    """
    figures: dict[str, float] = {}
    keeper = keeper or Keeper(places.checkpoint_dir)
    if plan.checkpoint_every and training.step:
        keeper.clear(step=training.step, best_step=training.best_step, keeps_later=True)
    if validate_fn is not None and _is_out_of_patience(training, plan):
        return True  # it had stopped early, and was resumed
    while training.step < plan.num_steps:
        learning_rate, num_hard_examples = pace_at(training, plan)
        if step_fn is not None:
            stats = step_fn()
        else:
            stats = train_step(
                training,
                plan,
                sampler=sampler,
                loss_fn=loss_fn,
                learning_rate=learning_rate,
                num_hard_examples=num_hard_examples,
            )
        training.step += 1
        training.recent.append(stats)
        is_last = training.step == plan.num_steps

        if training.step % plan.log_every == 0 or is_last:
            figures = _logged(training, learning_rate, num_hard_examples)
            _log(places, {"step": training.step, **figures})
        if progress_fn is not None:
            progress_fn(training.step, figures)
        if validate_fn is not None and (_is_due(training.step, plan.evaluate_every) or is_last):
            _refuse_unsound(training, ranks)
            value, validation = validate_fn(training.model)
            _log(places, {"step": training.step, "validation": validation})
            if value > training.best_value:
                training.best_value, training.best_step = value, training.step
                if save_best_fn is not None:
                    save_best_fn(training.model)
        is_early = validate_fn is not None and _is_out_of_patience(training, plan)
        is_stopped = should_stop_fn()
        is_end = is_last or is_early or is_stopped
        is_kept = is_end or (keeper.keep_best and training.step == training.best_step)
        if _is_due(training.step, plan.checkpoint_every) or (plan.checkpoint_every and is_kept):
            _refuse_unsound(training, ranks)
            if places.metrics_path is not None and places.metrics_path.exists():
                sync(places.metrics_path)  # a checkpoint never knows of lines the disk does not
            keeper.save(training.checkpoint(), step=training.step, best_step=training.best_step)
        if is_end:
            keeper.wait()
        if is_early or is_last:
            _refuse_unsound(training, ranks)
            return True
        if is_stopped:
            return False
    return True


class Pace(NamedTuple):
    """What the schedules say for the next step."""

    learning_rate: float
    num_hard_examples: int


def pace_at(training: Training, plan: Plan) -> Pace:
    return Pace(
        learning_rate_at(
            training.step,
            num_steps=plan.num_steps,
            peak=plan.learning_rate,
            warmup_steps=plan.warmup_steps,
            shape=plan.learning_rate_shape,
        ),
        num_hard_examples_at(
            training.step,
            num_steps=plan.num_steps,
            batch_size=training.feed.batch_size,
            num_hard_examples=plan.num_hard_examples,
            anneal_fraction=plan.anneal_fraction,
        ),
    )


@torch.no_grad()
def train_step(
    training: Training,
    plan: Plan,
    *,
    sampler: LabelSampler,
    loss_fn: LossFn,
    learning_rate: float,
    num_hard_examples: int,
) -> Tensor:
    """Takes one step; (2,): the objective, and the share of examples without any loss."""
    model = training.model
    batch = training.feed.next_batch()
    draw_fn = sampler.sample_for_each if plan.draws_for_each else sampler.sample
    sample = draw_fn(batch.positive_ids, plan.num_sampled_labels, generator=training.generator)
    raw_vectors: Tensor = model.encoder(batch.features)  # (B, D)
    query_vectors = model.as_queries(raw_vectors)
    mined = mine(
        query_vectors,
        batch,
        model,
        sample,
        num_hard_labels=plan.num_hard_labels,
        loss_fn=loss_fn,
        risk_fn=lambda losses: training.risk.weigh_fn(losses, batch, num_hard_examples),
        is_log_q_corrected=plan.is_log_q_corrected,
    )
    gradients = gradients_of(mined, query_vectors, batch, model, raw_vectors=raw_vectors)
    if plan.max_gradient_norm:
        gradients = clipped(gradients, model, max_norm=plan.max_gradient_norm)
    training.optimizers.step(gradients, learning_rate=learning_rate)
    objective = (mined.weights * mined.losses[mined.survivors]).sum()
    return torch.stack([objective, (mined.losses <= 0).to(objective.dtype).mean()])


@torch.no_grad()
def clipped(gradients: Gradients, model: Retriever, *, max_norm: float) -> Gradients:
    """The gradients, scaled down together where their common length exceeds `max_norm`."""
    dense = [weight.grad for weight in model.parameters() if weight.grad is not None]
    rows = [row.values for row in gradients if row is not None]
    norm = torch.stack([values.norm() for values in [*rows, *dense]]).norm()
    factor = (max_norm / norm.clamp(min=1e-12)).clamp(max=1)
    for values in dense:
        values.mul_(factor)
    return Gradients(
        *(row and RowGradients(row.ids, row.values * factor) for row in gradients)  # type: ignore[arg-type]
    )


def _log(places: Places, row: dict[str, Any]) -> None:
    if places.metrics_path is not None:
        append_line(places.metrics_path, row)


def _logged(training: Training, learning_rate: float, num_hard_examples: int) -> dict[str, float]:
    _refuse_nan(training)
    loss, zero_loss_share = torch.stack(training.recent).mean(dim=0).tolist()
    training.recent.clear()
    return {
        "loss": loss,
        "zero_loss_share": zero_loss_share,
        "learning_rate": learning_rate,
        "num_hard_examples": num_hard_examples,
    }


def _refuse_nan(training: Training) -> None:
    """Losses wait on the device and are looked at a few steps late, but the step is named."""
    if not training.recent:
        return
    is_bad = ~torch.stack(training.recent)[:, 0].isfinite()
    if is_bad.any():
        first = int(is_bad.int().argmax())
        step = training.step - len(training.recent) + 1 + first
        raise UserError(
            f"the loss of step {step} is {float(training.recent[first][0])}; {NAN_REMEDY}"
        )


def _refuse_unsound(training: Training, ranks: Ranks | None) -> None:
    """Before anything is kept: a finite loss may still have had a gradient that is not."""
    _refuse_nan(training)
    weights = training.model.state_dict().items()
    name = next((name for name, tensor in weights if not all_finite(tensor)), None)
    if are_any(ranks, name is not None, device=training.feed.device):
        raise UserError(
            f"{name or 'a table of another rank'} holds a number that is not finite after step "
            f"{training.step}; {NAN_REMEDY}"
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_out_of_patience(training: Training, plan: Plan) -> bool:
    if not plan.patience or not plan.evaluate_every:
        return False
    return training.step - training.best_step >= plan.patience * plan.evaluate_every
