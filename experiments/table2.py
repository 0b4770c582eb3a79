"""Table 2 of the paper: the average of the k' largest losses, on pictures with rare classes.

All rows, and all seeds of each, are trained together. A folder holds what was done so far, so the
same command continues after a stop:

    tuning.json       every trial on validation, and the learning rates chosen
    checkpoints/      the weights of all models
    result.json       every figure of every seed, rewritten at each evaluation
"""

import dataclasses
import math
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from rich.console import Console

from evenhand.config import check_positive, to_type
from evenhand.errors import UserError
from evenhand.files import read_json, write_json
from evenhand.progress import count_bar
from evenhand.training.checkpoint import CheckpointManager, load_latest_checkpoint
from evenhand.version import __version__
from experiments.image_data import ImageData
from experiments.image_models import Classifier, LeNet, ResNet
from experiments.imbalanced_images import accuracies, held_out, pictures_of, training_rows
from experiments.seed_statistics import PARTS, add_summaries, format_table
from experiments.stacked_models import Member, StackedTraining
from experiments.table2_rows import Row

SAVE_SECONDS = 180.0  # between checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how a table is run."""

    table: str
    folder: Path
    command: str
    device: torch.device
    console: Console
    every: int  # steps between evaluations
    compiles: bool = True
    saves: bool = True
    should_stop_fn: Callable[[], bool] = lambda: False


def classifier_of(row: Row, *, is_small: bool = False) -> Classifier:
    """The model of the paper's row; a small one of its kind for the quick look."""
    if row.model == "lenet":
        first, second, hidden = (4, 8, 16) if is_small else row.widths or (20, 50, 500)
        return LeNet(
            channels=(first, second), hidden=hidden, padding=row.padding, dropout=row.dropout
        )
    size: dict[str, Any] = {"blocks": (1, 1), "width": 8} if is_small else {}
    return ResNet(stem=row.stem, **size)


# --- learning rates, on validation ----------------------------------------------------------------


def tune(rows: list[Row], data: ImageData, classifier: Classifier, run: Run) -> list[Row] | None:
    """The rows with the learning rates that validation prefers; None where it was stopped."""
    path = run.folder / "tuning.json"
    if not path.exists():
        trials = _trials(rows, data, classifier, run)
        if trials is None:
            return None
        write_json(path, trials)
    chosen = chosen_rates(path, [row.name for row in rows])
    for name, rate in chosen.items():
        run.console.print(f"learning rate of {name}, chosen on validation: {rate:g}")
    return [dataclasses.replace(row, learning_rate=chosen[row.name]) for row in rows]


def chosen_rates(path: Path, names: Sequence[str]) -> dict[str, float]:
    """The learning rate of each row, from tuning.json."""
    try:
        rates = {choice["name"]: choice["learning_rate"] for choice in read_json(path)["chosen"]}
        for name in names:
            check_positive(name, learning_rate=to_type("learning_rate", rates[name], float))
    except (KeyError, TypeError, UserError) as error:  # JSON, but not what `tune` wrote
        raise UserError(
            f"{path} does not hold the learning rates of this table ({error}); remove it, and "
            f"--tune chooses them again"
        ) from error
    return {name: float(rates[name]) for name in names}


def earlier_result(path: Path) -> dict[str, Any]:
    """The result.json that a run continues."""
    result = read_json(path)
    is_whole = isinstance(result, dict) and isinstance(result.get("curve"), list)
    if not is_whole or not isinstance(result.get("seconds"), int | float):
        raise UserError(
            f"{path} is damaged (it lacks 'seconds' or 'curve'); begin in another --out"
        )
    result["seconds"] = to_type("seconds", result["seconds"], float)
    return result  # type: ignore[no-any-return]


def _trials(
    rows: list[Row], data: ImageData, classifier: Classifier, run: Run
) -> dict[str, Any] | None:
    first = rows[0]
    labels = data.train_labels
    parts = {
        seed: held_out(labels, training_rows(labels, first, seed), first, seed)
        for seed in first.tuning_seeds
    }
    members = [
        Member(seed, rate, row.num_hard_examples)
        for row in rows
        for rate in row.learning_rates
        for seed in first.tuning_seeds
    ]
    rows_of_seed = {seed: part[0] for seed, part in parts.items()}
    training = _training(classifier, data, members, rows_of_seed, first, run, first.tuning_steps)
    seconds = _train(training, first.tuning_steps, run, title=f"tuning {len(members)} models")
    if training.step < first.tuning_steps:
        return None
    looked_at = np.unique(np.concatenate([part[1] for part in parts.values()]))
    predicted = training.predictions(training.pictures.pixels[torch.from_numpy(looked_at)])
    diverged = training.diverged()
    figures = []
    for place, member in enumerate(members):
        own = np.isin(looked_at, parts[member.seed][1])
        found = accuracies(predicted[place].numpy()[own], labels[looked_at[own]], first)
        value = math.nan if diverged[place] else balanced(found)
        figures.append({**member._asdict(), **found, "balanced": value})
    return {
        "what": "accuracy on validation pictures held out of each seed's training rows; the choice "
        "is by the mean of head and tail accuracy, because the test part is balanced",
        "num_steps": first.tuning_steps,
        "seconds": seconds,
        "chosen": [_chosen(row, figures) for row in rows],
        "trials": figures,
        **about(run),
    }


def balanced(found: dict[str, float]) -> float:
    """Head and tail count the same, as in the test part, whatever validation has of each."""
    return (found["head"] + found["tail"]) / 2


def _chosen(row: Row, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rate with the best mean over the tuning seeds; one that diverged has lost."""
    means = {}
    for rate in row.learning_rates:
        values = [
            figure["balanced"]
            for figure in figures
            if figure["num_hard_examples"] == row.num_hard_examples
            and figure["learning_rate"] == rate
        ]
        means[rate] = float(np.mean(values))
    best = max(row.learning_rates, key=lambda rate: -1 if math.isnan(means[rate]) else means[rate])
    return {
        "name": row.name,
        "learning_rate": best,
        "is_at_edge": best in (row.learning_rates[0], row.learning_rates[-1]),
        "means": {f"{rate:g}": mean for rate, mean in means.items()},
    }


# --- the table ------------------------------------------------------------------------------------


def run_table(rows: list[Row], data: ImageData, classifier: Classifier, run: Run) -> dict[str, Any]:
    """Trains all rows together, evaluates on the test part, writes and returns the result."""
    first = rows[0]
    planned = _planned(rows)
    settings = sorted({(row["learning_rate"], row["num_hard_examples"]) for row in planned})
    members = [Member(seed, rate, count) for rate, count in settings for seed in first.seeds]
    rows_of_seed = {seed: training_rows(data.train_labels, first, seed) for seed in first.seeds}
    training = _training(classifier, data, members, rows_of_seed, first, run, first.num_steps)
    folder = run.folder / "checkpoints"
    checkpoint = load_latest_checkpoint(folder, warn_fn=run.console.print) if run.saves else None
    path = run.folder / "result.json"
    before: dict[str, Any] = {"seconds": 0.0, "curve": []}
    if checkpoint is not None:
        training.restore(checkpoint)
        before = earlier_result(path)
    start = time.perf_counter()
    curve: list[dict[str, Any]] = before["curve"]
    result: dict[str, Any] = {}
    saved_at = start

    def evaluate() -> None:
        nonlocal saved_at
        found = _per_member(training, data, first)
        measured = [
            {**row, "per_seed": [found[row["learning_rate"], row["num_hard_examples"], seed]
                                 for seed in first.seeds]}
            for row in planned
        ]  # fmt: skip
        result["rows"] = add_summaries(measured)
        means = {row["name"]: {part: row[part]["mean"] for part in PARTS} for row in measured}
        curve.append({"step": training.step, **means})
        result.update(
            table=run.table,
            num_steps=training.step,
            is_complete=training.step >= first.num_steps,
            seconds=before["seconds"] + time.perf_counter() - start,
            num_models=len(members),
            num_training_pictures=int(training.rows.shape[1]),
            settings=dataclasses.asdict(first),
            curve=curve,
            **about(run),
        )
        write_json(path, result)
        if run.saves and time.perf_counter() - saved_at > SAVE_SECONDS:
            CheckpointManager(folder).save(training.checkpoint(), step=training.step)
            saved_at = time.perf_counter()

    _train(
        training, first.num_steps, run, title=f"training {len(members)} models", every_fn=evaluate
    )
    if not result or result["num_steps"] != training.step:
        evaluate()
    if training.step >= first.num_steps:
        shutil.rmtree(folder, ignore_errors=True)
    elif run.saves:
        CheckpointManager(folder).save(training.checkpoint(), step=training.step)
    title = (
        f"{run.table}, tail classes {', '.join(map(str, first.tail_classes))}, "
        f"{training.step:,} steps, {len(first.seeds)} seeds: mean ± sd; paired"
    )
    run.console.print(format_table(result["rows"], title=title))
    return result


def _planned(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows of the paper, then SGD at the larger rates that a small k' amounts to."""
    planned: list[dict[str, Any]] = [
        {
            "name": row.name,
            "num_hard_examples": row.num_hard_examples,
            "learning_rate": row.learning_rate,
            "is_baseline": row.is_sgd,
            "paper": row.paper,
        }
        for row in rows
    ]
    for row in (row for row in rows if row.has_control):
        factor = row.batch_size / row.num_hard_examples
        planned.append(
            {
                "name": f"SGD at the rate of {row.name} x {factor:g}",
                "num_hard_examples": row.batch_size,
                "learning_rate": row.learning_rate * factor,
                "is_baseline": False,
                "paper": None,
            }
        )
    return planned


def _per_member(
    training: StackedTraining, data: ImageData, row: Row
) -> dict[tuple[float, int, int], dict[str, Any]]:
    """Test figures by (learning rate, k', seed); NaN for a model that diverged."""
    test = pictures_of(data.test_images, data.test_labels)
    predicted = training.predictions(test.pixels).numpy()  # (M, N)
    found = {}
    for member, own, diverged in zip(training.members, predicted, training.diverged(), strict=True):
        figures = accuracies(own, data.test_labels, row)
        if diverged:
            figures = dict.fromkeys(figures, math.nan)
        key = (member.learning_rate, member.num_hard_examples, member.seed)
        found[key] = {"seed": member.seed, **figures, "diverged": diverged}
    return found


# --- shared ---------------------------------------------------------------------------------------


def _training(
    classifier: Classifier,
    data: ImageData,
    members: Sequence[Member],
    rows_of_seed: dict[int, Any],
    row: Row,
    run: Run,
    num_steps: int,
) -> StackedTraining:
    on_gpu = run.device.type == "cuda"
    return StackedTraining(
        classifier,
        pictures_of(data.train_images, data.train_labels),
        members,
        rows_of_seed,
        batch_size=row.batch_size,
        momentum=row.momentum,
        weight_decay=row.weight_decay,
        decay_steps=num_steps if row.schedule == "cosine" else 0,
        augments=row.augments,
        device=run.device,
        precision=getattr(torch, row.precision) if on_gpu else torch.float32,
    )


def _train(
    training: StackedTraining,
    num_steps: int,
    run: Run,
    *,
    title: str,
    every_fn: Callable[[], None] = lambda: None,
) -> float:
    start, begun = time.perf_counter(), training.step
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU; the weights stay float32
    try:
        with count_bar(run.console, title) as advance:
            way = training.train(
                num_steps,
                compiles=run.compiles,
                on_step_fn=lambda step: advance(step, num_steps),
                should_stop_fn=run.should_stop_fn,
                every_fn=every_fn,
                every=run.every,
            )
    finally:
        torch.set_float32_matmul_precision(previous)
    seconds = time.perf_counter() - start
    each = 1000 * seconds / max(1, training.step - begun)
    run.console.print(
        f"{title}: step {training.step:,} after {seconds:.0f} s, {each:.2f} ms a step; {way}"
    )
    return seconds


def about(run: Run) -> dict[str, Any]:
    """The machine, the versions and the command: what a figure needs to be believed."""
    on_gpu = run.device.type == "cuda"
    return {
        "command": run.command,
        "machine": torch.cuda.get_device_name(run.device)
        if on_gpu
        else platform.processor() or platform.machine(),
        "versions": {
            "evenhand": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
    }
