"""`evenhand train --minutes`: trials of one change each, around settings as they are.

A change stays if the validation part says so, and the next one is tried on top of it. Trials have a
quarter of the steps, and then all of them while there is time. In the folder of trials,
trials.json says what was tried; the same command, given again after a stop, goes on from there.
"""

import dataclasses
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.config import Config, to_toml, toml_value
from evenhand.data import Dataset
from evenhand.errors import StoppedError, UserError
from evenhand.files import read_json, write_json
from evenhand.methods import METHODS
from evenhand.report.rendering import format_duration
from evenhand.run_folder import has_model, read_about, run_config
from evenhand.runs import begin_run, train_run, validation_value
from evenhand.training.loop import NAN_REMEDY
from evenhand.tuning.space import (
    LEARNING_RATE,
    NUM_STEPS,
    Settings,
    get_setting,
    with_settings,
)
from evenhand.tuning.study import without_test

# What needs no training: it is added to the scores of a trained model.
ADDITIONS = ("search.neighbour_weight", "search.frequency_discount", "ranker.weight")
Row = dict[str, Any]  # of trials.json: key, change, value, seconds, training_seconds


def changes_around(config: Config) -> Iterator[Settings]:
    """What is tried, one after the other; what needs no training comes first."""
    search, ranker, training = config.search, config.ranker, config.training
    if search.num_neighbours:
        yield {"search.neighbour_weight": 2 * search.neighbour_weight}
        yield {"search.neighbour_weight": search.neighbour_weight / 2}
    if ranker.num_mined_labels:
        yield {"ranker.weight": 2 * ranker.weight}
        yield {"ranker.weight": ranker.weight / 2}
    if search.frequency_discount:
        yield {"search.frequency_discount": 2 * search.frequency_discount}
        yield {"search.frequency_discount": 0.0}
    yield {"training.learning_rate": 2 * training.learning_rate}
    yield {"training.learning_rate": training.learning_rate / 2}
    yield {NUM_STEPS: 2 * training.num_steps}
    yield {NUM_STEPS: math.ceil(training.num_steps / 2)}
    method = METHODS[config.mining.method]
    if method.mines_examples:
        yield {"mining.method": "snm" if method.samples_labels else "sgd"}
    if config.loss.name == "contrastive":
        yield {"loss.name": "softmax", "model.scale": 16.0}


def with_steps(config: Config, share: float) -> Config:
    """The config with a share of its steps, and of all that is counted in steps."""
    names = ("num_steps", "evaluate_every", "warmup_steps")
    values = {name: math.ceil(share * getattr(config.training, name)) for name in names}
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **values))


class Trials:
    """The trials of a run: what is known of each, and how to make another."""

    def __init__(
        self, folder: Path, config: Config, dataset: Dataset, device: torch.device
    ) -> None:
        self.folder, self.dataset, self.device = folder, dataset, device
        self.belongs_to = _digest(to_toml(config) + dataset.fingerprint)
        self.rows: list[Row] = []
        if (folder / "trials.json").exists():
            saved = read_json(folder / "trials.json")
            if not isinstance(saved, dict) or saved.get("belongs_to") != self.belongs_to:
                raise UserError(
                    f"{folder} holds trials of other data or settings; remove it, or choose "
                    f"another --run folder"
                )
            self.rows = saved["trials"]

    def needs_training(self, config: Config) -> bool:
        """Whether no model is kept that differs in what is added to its scores alone."""
        kept = self.folder / "best"
        if not has_model(kept):
            return True
        own = {name: get_setting(config, name) for name in ADDITIONS}
        return with_settings(run_config(kept), own) != config

    def run(
        self,
        config: Config,
        change: Settings,
        best_value: float,
        should_stop_fn: Callable[[], bool],
    ) -> Row:
        """Trains and scores a trial, unless it is known; the model is kept if it is the best."""
        key = _digest(to_toml(config))
        known = next((row for row in self.rows if row["key"] == key), None)
        if known is not None:
            return known
        began = time.monotonic()
        row: Row = {"key": key, "change": change, "training_seconds": 0.0}
        place, quiet = self.folder / "best", Console(quiet=True)
        try:
            if self.needs_training(config):
                place = self.folder / "trial"
                shutil.rmtree(place, ignore_errors=True)
                begin_run(place, config, self.dataset, device=self.device)
                if not train_run(
                    place, config, self.dataset,
                    device=self.device, console=quiet, should_stop_fn=should_stop_fn,
                ):  # fmt: skip
                    raise StoppedError
                row["training_seconds"] = read_about(place).get("training_seconds", 0.0)
            row["value"] = validation_value(place, self.dataset, config, device=self.device)
        except UserError as error:
            if NAN_REMEDY not in str(error):
                raise
            row["value"] = -1.0  # it diverged
        row["seconds"] = time.monotonic() - began
        if row["value"] > best_value and place.name == "trial":
            shutil.rmtree(self.folder / "best", ignore_errors=True)
            place.rename(self.folder / "best")
        self.rows.append(row)
        found = {"belongs_to": self.belongs_to, "trials": self.rows}
        write_json(self.folder / "trials.json", found)
        return row


def choose_within(
    minutes: float,
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> Config:
    """The best settings around a config, with as many steps as the rest of the time allows.

    Args:
        minutes: for trials, and for the training and evaluation that follow.
        folder: of the trials.

    Raises:
        StoppedError: it was asked to stop.
    """
    trials = Trials(folder, config, without_test(dataset), device)
    asked = {name: len(part) for name, part in dataset.parts.items()}
    ends = time.monotonic() + 60 * minutes - sum(row["seconds"] for row in trials.rows)
    rule, number = config.training.select_by, 0
    console.print(f"trials for {minutes:g} minutes, by {rule} on the validation part, in {folder}")

    tried: list[Config] = []  # with their steps; a change back leads to one of them again

    def try_out(candidate: Config, change: Settings, best_value: float) -> Row:
        nonlocal number
        shortened = with_steps(candidate, share)
        tried.append(shortened)
        number, row = number + 1, trials.run(shortened, change, best_value, should_stop_fn)
        words = ", ".join(f"{name} = {toml_value(value)}" for name, value in change.items())
        verdict = " (kept)" if change and row["value"] > best_value else ""
        left = format_duration(max(0.0, ends - time.monotonic()))
        what = f"{shortened.training.num_steps:,} steps, {words or 'the best so far'}"
        times = f"{format_duration(row['seconds'])}, {left} left"
        console.print(f"trial {number}, {what}: {row['value']:.4f}{verdict}; {times}")
        return row

    best, last, num_kept = config, 0.0, 0
    for share in (0.25, 1.0):  # of the steps
        if ends - time.monotonic() < 2 * last:
            break
        best_row = trained = try_out(best, {}, -1.0)
        # What is kept in hand for training with all steps and for the last evaluation.
        evaluation = best_row["seconds"] - best_row["training_seconds"]
        last = evaluation * (1 + asked.get("test", 0) / max(1, asked["validation"]))
        last += best_row["training_seconds"] / share
        is_better = best_row["value"] >= 0
        while is_better:
            is_better = False
            for change in changes_around(best):
                if share < 1 and next(iter(change)) in (NUM_STEPS, LEARNING_RATE):
                    continue  # few steps would always want more, and a higher rate
                candidate = with_settings(best, change)
                if with_steps(candidate, share) in tried:
                    continue
                factor = max(1.0, candidate.training.num_steps / best.training.num_steps)
                expected = trained["seconds"] - trained["training_seconds"]
                if trials.needs_training(with_steps(candidate, share)):
                    expected += factor * trained["training_seconds"]
                if ends - time.monotonic() < factor * last + expected:
                    continue  # the next may take less
                row = try_out(candidate, change, best_row["value"])
                trained = row if row["training_seconds"] else trained
                if row["value"] > best_row["value"]:
                    best, best_row, is_better = candidate, row, True
                    last, num_kept = factor * last, num_kept + 1
    shutil.rmtree(folder / "best", ignore_errors=True)
    shutil.rmtree(folder / "trial", ignore_errors=True)
    possible = max(0.25, min(1.0, (ends - time.monotonic()) / max(last, 1e-9)))
    console.print(f"{number} trials, {num_kept} changes kept; training the best")
    if possible < 1:
        console.print(f"there is time for {possible:.0%} of its steps")
    return with_steps(best, possible) if possible < 1 else best


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
