"""The plan of a training (`Plan`, `Risk`) and its checkpointable state (`Training`)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from evenhand.data import Part
from evenhand.errors import UserError
from evenhand.losses import LossFn
from evenhand.models import Retriever
from evenhand.risk import Memory
from evenhand.sampling import LabelSampler
from evenhand.tensor_store import Table
from evenhand.training.checkpoint import Checkpoint
from evenhand.training.feed import Batch, PairFeed
from evenhand.training.optimizers import Optimizers

TABLES = {
    "labels": "label_table",
    "biases": "label_bias",
    "features": "encoder.weight",
    "label features": "label_tower.weight",
    "label offsets": "label_offsets",
}


class Scheduled(NamedTuple):
    """What the schedules give for one step."""

    learning_rate: float
    num_hard_examples: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What every step does, and when the loop logs, validates and saves."""

    sampler: LabelSampler
    loss_fn: LossFn
    num_steps: int
    num_sampled_labels: int
    num_hard_labels: int
    num_hard_examples: int
    learning_rate: float
    anneal_fraction: float = 0.0  # of the steps, over which k' shrinks from the whole batch
    learning_rate_shape: str = "linear"  # or cosine, constant
    warmup_steps: int = 0
    max_gradient_norm: float = 0.0  # 0: gradients are not clipped
    chunk_size: int = 0  # examples that a dense encoder encodes at once; 0: the batch
    is_mixed: bool = False  # a dense encoder computes in bfloat16 where autocast says so
    refresh_every: int = 100  # steps, after which a label tower encodes all labels again
    draws_for_each: bool = False  # every example has a label sample of its own
    is_log_q_corrected: bool = False
    log_every: int = 50
    evaluate_every: int = 0  # and at the end; 0: only at the end
    checkpoint_every: int = 500  # 0: none at all
    patience: int = 0  # validations without a new best before an early stop; 0: never

    def at_step(self, step: int, *, batch_size: int) -> Scheduled:
        """The learning rate and k' of a step; the first is step 0.

        The rate rises over the warm-up, then falls to 0 at the end, or stays. k' shrinks in a line
        from the whole batch over the first part of the run: too few examples too early teach
        little.
        """
        done = step / self.num_steps
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        shapes = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
        rate = self.learning_rate * warmup * shapes[self.learning_rate_shape]
        if self.anneal_fraction == 0:
            return Scheduled(rate, self.num_hard_examples)
        annealed = min(1.0, step / (self.anneal_fraction * self.num_steps))
        return Scheduled(rate, round(batch_size + annealed * (self.num_hard_examples - batch_size)))


class Risk(NamedTuple):
    """How a step weighs the examples of a batch.

    `weights(losses, batch, num_hard_examples)` are those of the examples: (B,) -> (B,). What is
    known of the examples beside their losses is in the batch. `kernel_kind` says that the GPU's
    kernels can do the same: "hardest" is 1/k' for the k' largest losses, "mean" is 1/B for all,
    "even" is `EvenMining`, which is then the memory.
    """

    weights: Callable[[Tensor, Batch, int], Tensor]
    kernel_kind: Literal["hardest", "mean", "even"] | None = None
    memory: Memory | None = None  # what a checkpoint must keep


@dataclasses.dataclass
class Training:
    """All that changes while training: what a checkpoint holds."""

    model: Retriever
    optimizers: Optimizers
    feed: PairFeed
    generator: torch.Generator  # of the label samples
    risk: Risk
    belongs_to: str = ""  # a digest of the settings and the data
    step: int = 0
    best_value: float = -math.inf
    best_step: int = 0
    recent: list[Tensor] = dataclasses.field(default_factory=list)  # (2,) a step since the last log
    labels: Part | None = None  # what the tower reads, as the features of queries; None: no tower
    label_drift: float = 0.0  # 1 - cosine of a label's vector and the one it was mined by, mean
    # Of tables split over ranks, named as in TABLES: the first row that is here, the rows in all.
    row_ranges: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        """References to all of it, not copies."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tables: dict[str, Table] = {}
        for name, optimizer in self.optimizers.rows.items():
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
        state = {
            "belongs_to": self.belongs_to,
            "step": self.step,
            "best_value": self.best_value if math.isfinite(self.best_value) else None,
            "best_step": self.best_step,
        }
        return Checkpoint(tensors, state, tables)

    def check_belongs(self, state: dict[str, Any]) -> None:
        """Refuses the checkpoint of another configuration or data set."""
        if state["belongs_to"] != self.belongs_to:
            raise UserError(
                f"the checkpoint of step {state['step']} is of another configuration or another "
                f"data set; put back the one of this run, or remove it to begin anew"
            )

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint. Its tables may alias the storage of this training's own."""

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
        for name, optimizer in self.optimizers.rows.items():
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
