"""`evenhand train --minutes`: one change at a time around a config, kept if it helps.

trials.json in the folder of the trials lists what was tried. The best model so far stays there
while the search runs, so that a change of how scores are combined needs no training.
"""

import dataclasses
import hashlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.config import Config, to_toml, toml_value
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.files import read_json, write_json
from evenhand.methods import METHODS
from evenhand.report.rendering import format_duration
from evenhand.run_folder import has_model, read_about, run_config
from evenhand.runs import validation_value
from evenhand.tuning.search import PART, StopFn, train_trial, without_test
from evenhand.tuning.space import LEARNING_RATE, NUM_STEPS, Settings, get_setting, with_settings

# These change how a trained model's scores are combined, so they need no training.
SCORING = ("search.neighbour_weight", "search.frequency_discount", "ranker.weight")
Row = dict[str, Any]  # of trials.json: key, change, value, seconds, training_seconds


def choose_within(
    minutes: float,
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: StopFn = lambda: False,
) -> Config:
    """The best settings around a config, with as many steps as the rest of the time allows.

    One change at a time: it stays if the validation part says so, and the next one is tried on top
    of it. Trials have a quarter of the steps, and then all of them while there is time.

    Args:
        minutes: for trials, and for the training and evaluation that follow.
        folder: of the trials; the same call continues what was stopped.

    Raises:
        StoppedError: the user asked to stop.
    """
    trials = _Trials(minutes, folder, config, dataset, device, console, should_stop_fn)
    console.print(
        f"trials for {minutes:g} minutes, by {config.training.select_by} on the validation part, "
        f"in {folder}"
    )
    best, num_kept = config, 0
    for share in (0.25, 1.0):  # of the steps
        if trials.seconds_left() < 2 * trials.seconds_to_finish(best):
            break
        best_value = trials.run(with_steps(best, share), {}, -1.0)
        is_better = best_value >= 0
        while is_better:
            is_better = False
            for change in changes_around(best):
                if share < 1 and next(iter(change)) in (NUM_STEPS, LEARNING_RATE):
                    continue  # few steps would always want more, and a higher rate
                changed = with_settings(best, change)
                candidate = with_steps(changed, share)
                if candidate in trials.tried or not trials.has_time_for(candidate, changed):
                    continue  # the next may take less
                value = trials.run(candidate, change, best_value)
                if value > best_value:
                    best, best_value, is_better = changed, value, True
                    num_kept += 1
    for name in ("best", "trial"):
        shutil.rmtree(folder / name, ignore_errors=True)
    console.print(f"{len(trials.tried)} trials, {num_kept} changes kept; training the best")
    possible = trials.seconds_left() / max(trials.seconds_to_finish(best), 1e-9)
    if possible >= 1:
        return best
    console.print(f"there is time for {max(0.25, possible):.0%} of its steps")
    return with_steps(best, max(0.25, possible))


def changes_around(config: Config) -> Iterator[Settings]:
    """The changes to try, one after the other; those that need no training come first."""
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
    yield {LEARNING_RATE: 2 * training.learning_rate}
    yield {LEARNING_RATE: training.learning_rate / 2}
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


class _Trials:
    """The trials of `choose_within`, and what they teach about the time the next ones take."""

    def __init__(
        self,
        minutes: float,
        folder: Path,
        config: Config,
        dataset: Dataset,
        device: torch.device,
        console: Console,
        should_stop_fn: StopFn,
    ) -> None:
        self.folder, self.device, self.console = folder, device, console
        self.dataset, self.should_stop_fn = without_test(dataset), should_stop_fn
        self.test_share = len(dataset.parts.get("test", ())) / max(1, len(dataset.parts[PART]))
        self.belongs_to = _digest(to_toml(config) + self.dataset.fingerprint)
        self.rows: list[Row] = []
        if (folder / "trials.json").exists():
            saved = read_json(folder / "trials.json")
            if not isinstance(saved, dict) or saved.get("belongs_to") != self.belongs_to:
                raise UserError(
                    f"{folder} holds trials of other data or settings; remove it, or choose "
                    f"another --run folder"
                )
            self.rows = saved["trials"]
        self.ends: float = (
            time.monotonic() + 60 * minutes - sum(row["seconds"] for row in self.rows)
        )
        self.tried: list[Config] = []  # with their steps; undoing a change leads to one again
        self.seconds_a_step = self.seconds_to_score = 0.0  # of the last trial that was trained

    def seconds_left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    def seconds_to_finish(self, config: Config) -> float:
        """Training with all steps, and evaluating on both parts."""
        training = self.seconds_a_step * config.training.num_steps
        return training + self.seconds_to_score * (1 + self.test_share)

    def has_time_for(self, candidate: Config, changed: Config) -> bool:
        """Whether a trial leaves enough to train the config with all its steps."""
        needed = self.seconds_to_finish(changed) + self.seconds_to_score
        if self.needs_training(candidate):
            needed += self.seconds_a_step * candidate.training.num_steps
        return self.seconds_left() >= needed

    def needs_training(self, config: Config) -> bool:
        """Whether the best model so far differs from this config in more than SCORING."""
        best = self.folder / "best"
        if not has_model(best):
            return True
        own = {name: get_setting(config, name) for name in SCORING}
        return with_settings(run_config(best), own) != config

    def run(self, config: Config, change: Settings, best_value: float) -> float:
        """The value of a trial, which is run unless it is known; the best one's model is kept."""
        self.tried.append(config)
        key, num_steps = _digest(to_toml(config)), config.training.num_steps
        row = next((row for row in self.rows if row["key"] == key), None)
        if row is None:
            began, is_trained = time.monotonic(), self.needs_training(config)
            row = {"key": key, "change": change, "training_seconds": 0.0, "value": -1.0}
            run, failure = self.folder / "best", ""
            if is_trained:
                run = self.folder / "trial"
                shutil.rmtree(run, ignore_errors=True)
                how: dict[str, Any] = {"device": self.device, "console": Console(quiet=True)}
                how["should_stop_fn"] = self.should_stop_fn
                failure = train_trial(run, config, self.dataset, **how)
                row["training_seconds"] = read_about(run).get("training_seconds", 0.0)
            if not failure:  # one that diverged keeps -1
                row["value"] = validation_value(run, self.dataset, config, device=self.device)
            row["seconds"] = time.monotonic() - began
            if is_trained and row["value"] > best_value:
                shutil.rmtree(self.folder / "best", ignore_errors=True)
                run.rename(self.folder / "best")
            self.rows.append(row)
            found = {"belongs_to": self.belongs_to, "trials": self.rows}
            write_json(self.folder / "trials.json", found)
        if row["training_seconds"]:
            self.seconds_a_step = row["training_seconds"] / num_steps
            self.seconds_to_score = row["seconds"] - row["training_seconds"]
        words = ", ".join(f"{name} = {toml_value(value)}" for name, value in change.items())
        verdict = " (kept)" if change and row["value"] > best_value else ""
        self.console.print(
            f"trial {len(self.tried)}, {num_steps:,} steps, {words or 'the best so far'}: "
            f"{row['value']:.4f}{verdict}; {format_duration(row['seconds'])}, "
            f"{format_duration(self.seconds_left())} left"
        )
        return float(row["value"])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
