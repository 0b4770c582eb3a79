"""The training loop: a step, then what is due after it: a log line, a validation, a checkpoint."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenhand.distributed.ranks import Ranks, are_any
from evenhand.errors import UserError
from evenhand.files import parse_json, read_text, sync, write_text
from evenhand.tensor_store import all_finite
from evenhand.training.checkpoint import CheckpointManager
from evenhand.training.collapse import CollapseWatch
from evenhand.training.state import Plan, Training
from evenhand.training.step import Step

NAN_REMEDY = (
    "checkpoints before it are sound: try a lower training.learning_rate, training.warmup_steps "
    "or training.max_gradient_norm, and see that no feature value is huge"
)


def train(
    training: Training,
    plan: Plan,
    step: Step,
    *,
    metrics_path: Path | None = None,
    keeper: CheckpointManager | None = None,
    validate_fn: Callable[[], tuple[float, dict[str, float]]] | None = None,
    progress_fn: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
    warn_fn: Callable[[str], None] = warnings.warn,
    should_stop_fn: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
) -> bool:
    """Trains until the plan is done, patience ends or a stop is asked for.

    Args:
        step: see `choose_step`.
        metrics_path: where figures are logged; None: nowhere, as on all ranks but the first.
        keeper: saves the checkpoints; None: there are none.
        validate_fn: the value to select by, and every validation figure to be logged. It is
            called before `training.best_value` changes, so it can keep a model that is better.
        progress_fn: called after each step with its number and the figures logged last.
        warn_fn: told when the encoder has collapsed; see `collapse`.
        ranks: those that train together, all in this loop at the same step.

    Returns:
        Whether training is complete (False: it was asked to stop, and can be resumed).
    """
    figures: dict[str, float] = {}
    watch = CollapseWatch(training, plan)
    if plan.checkpoint_every == 0:
        keeper = None
    if keeper is not None and training.step:
        keeper.clear(step=training.step, best_step=training.best_step, keeps_later=True)
    is_early = validate_fn is not None and _is_out_of_patience(training, plan)  # and was resumed
    while training.step < plan.num_steps and not is_early:
        scheduled = plan.at_step(training.step, batch_size=training.feed.batch_size)
        training.recent.append(step(scheduled))
        training.step += 1
        is_last = training.step == plan.num_steps

        if is_last or _is_due(training.step, plan.log_every):
            _refuse_nan(training)
            loss, zero_loss_share = torch.stack(training.recent).mean(dim=0).tolist()
            training.recent.clear()
            figures = {"loss": loss, "zero_loss_share": zero_loss_share, **scheduled._asdict()}
            figures |= watch.figures()
            if training.labels is not None:
                age = (training.step - 1) % plan.refresh_every
                figures |= {"label_age": age, "label_drift": training.label_drift}
            if warning := watch.warning(figures):
                warn_fn(warning)
            if metrics_path is not None:
                append_line(metrics_path, {"step": training.step, **figures})
        progress_fn(training.step, figures)

        if validate_fn is not None and (is_last or _is_due(training.step, plan.evaluate_every)):
            _refuse_unsound(training, ranks)
            value, validation = validate_fn()
            if metrics_path is not None:
                append_line(metrics_path, {"step": training.step, "validation": validation})
            if value > training.best_value:
                training.best_value, training.best_step = value, training.step

        is_early = validate_fn is not None and _is_out_of_patience(training, plan)
        is_stopped = should_stop_fn()
        is_end = is_last or is_early or is_stopped
        if keeper is not None:
            is_best = keeper.keep_best and training.step == training.best_step
            if is_end or is_best or _is_due(training.step, plan.checkpoint_every):
                _refuse_unsound(training, ranks)
                if metrics_path is not None and metrics_path.exists():
                    sync(metrics_path)  # a checkpoint never knows of lines the disk does not
                keeper.save(training.checkpoint(), step=training.step, best_step=training.best_step)
        if is_last or is_early:
            _refuse_unsound(training, ranks)
        elif is_stopped:
            return False
    return True


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


# --- metrics.jsonl: a line for every logged step and validation, in the order they happened -------


def append_line(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); any checkpoint is "
            f"untouched: free some space, then continue with --resume"
        ) from error


def rewind_metrics(path: Path, *, step: int) -> int:
    """Forgets the lines after a step, and returns how many steps they go beyond it.

    A resumed run will write them again. A last line cut short by a crash is forgotten too.
    """
    if not path.exists():
        return 0
    try:
        *lines, _ = read_text(path).split("\n")
        steps: list[int] = [parse_json(line)["step"] for line in lines]
        kept = [f"{line}\n" for line, own in zip(lines, steps, strict=True) if own <= step]
    except (ValueError, KeyError, TypeError) as error:  # not UTF-8, not JSON, not our JSON
        raise UserError(
            f"{path} is damaged ({error}); restore it, or remove it: --resume then writes the "
            f"lines after step {step} alone"
        ) from error
    write_text(path, "".join(kept))
    return max(0, *steps, step) - step
