"""Table 3's protocol on multilabel data: SNM and S2M with the paper's model, recall over pairs.

The paper (section 6.2): one linear hidden layer of 512, cosine contrastive loss, batch 2048,
4096 labels drawn uniformly, 64 of them kept, k' of 256, 512 or the whole batch, which is SNM. A
negative is masked only where it is the drawn positive. What the paper leaves open: the loss's
margin (the library's own) and power (1, the cosine embedding loss of most libraries, or 2), the
learning rate and the number of steps. The last two are chosen for each k' on the validation part,
with the same trials for all.

Every run that ends leaves a file in the folder, so the same command continues where it was stopped.
"""

import collections
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from evenhand.build import build_training
from evenhand.config import Config, DataConfig, build_config
from evenhand.data import Dataset, Part, Rows, load_extreme, open_dataset
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import (
    Difference,
    GroupList,
    Outcome,
    compare_outcomes,
    load_outcome,
    save_outcome,
)
from evenhand.files import read_json, write_json
from evenhand.progress import count_bar, stage_bar, step_bar
from evenhand.runs import evaluate_model, open_data
from evenhand.training.checkpoint import CheckpointManager
from evenhand.training.loop import train
from experiments.output_folder import claim, digest_of
from experiments.table2 import Run

CUTOFFS = (5, 10, 25, 50)
GROUPS = ("head", "torso", "tail")
OVER_PAIRS = {f"{name} over pairs": GroupList("frequency over pairs", (name,)) for name in GROUPS}
ENDINGS = ("", ".gz", ".bz2", ".xz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is run; the numbers of the paper, and ours where it gives none."""

    embedding_dim: int = 512
    batch_size: int = 2048
    num_sampled_labels: int = 4096  # K-bar, at most K - 1
    num_hard_labels: int = 64  # k, at most K-bar
    hard_examples: tuple[int, ...] = (256, 512)  # k'; the batch itself is SNM, and always run
    masks_all_positives: bool = False  # the paper's mask: the drawn positive alone
    power: float = 1.0  # of the distances in the loss
    learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    steps: tuple[int, ...] = (500, 1500, 5000)
    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 101

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds must be one or more different numbers, got {self.seeds}")
        if not self.power >= 1:
            raise UserError(f"the loss's power must be at least 1, got {self.power:g}")


class Trial(NamedTuple):
    num_hard_examples: int
    learning_rate: float
    num_steps: int
    seed: int

    @property
    def name(self) -> str:
        return (
            f"k{self.num_hard_examples}-rate{self.learning_rate:g}-steps{self.num_steps}"
            f"-seed{self.seed}"
        )


# --- data -----------------------------------------------------------------------------------------


def open_any(name: str, console: Console) -> Dataset:
    """`places`, a folder made by `evenhand data`, or one with train.txt and test.txt.

    The text files are those of the Extreme Classification Repository, as they are or compressed.
    """
    folder = Path(name)
    if name == "places":
        return open_data(DataConfig(), console)
    if (folder / "dataset.json").is_file():
        return open_dataset(folder)
    paths = [_first_file(folder, part) for part in ("train", "test")]
    if None in paths:
        raise UserError(
            f"{folder} holds neither a dataset.json nor train.txt and test.txt (plain, .gz, .bz2 "
            f"or .xz); name 'places', a folder made by evenhand data, or one with those files"
        )
    with stage_bar(console) as progress_fn:
        return load_extreme(
            *(path for path in paths if path), name=folder.name, progress_fn=progress_fn
        )


def _first_file(folder: Path, part: str) -> Path | None:
    paths = (folder / f"{part}.txt{ending}" for ending in ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def fixture(*, num_rows: int = 400, num_labels: int = 60, seed: int = 0) -> Dataset:
    """Generated documents whose words tell their labels, some labels rare: for a quick look."""
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, num_labels + 1)

    def part(count: int) -> Part:
        labels = [
            np.sort(generator.choice(num_labels, 2, replace=False, p=shares / shares.sum()))
            for _ in range(count)
        ]
        words = [[*ids, *(num_labels + generator.integers(0, 40, 3))] for ids in labels]
        offsets = np.arange(count + 1)
        return Part(
            Rows(5 * offsets, np.array(words, np.int32).ravel(), np.ones(5 * count, np.float32)),
            Rows(2 * offsets, np.array(labels, np.int32).ravel()),
        )

    sizes = {"train": num_rows, "validation": num_rows // 4, "test": num_rows // 4}
    parts = {name: part(count) for name, count in sizes.items()}
    return Dataset("generated documents", num_labels + 40, num_labels, parts, fingerprint="fixture")


# --- one run --------------------------------------------------------------------------------------


def config_of(protocol: Protocol, dataset: Dataset, trial: Trial) -> Config:
    """The paper's settings, cut to what the data set has."""
    num_pairs = len(dataset.parts["train"].positives.ids)
    batch_size = min(protocol.batch_size, num_pairs)
    num_sampled = min(protocol.num_sampled_labels, dataset.num_labels - 1)
    is_snm = trial.num_hard_examples >= batch_size
    return build_config(
        {
            "model": {"embedding_dim": protocol.embedding_dim, "similarity": "cosine"},
            "loss": {"name": "contrastive", "margin": 0.3, "power": protocol.power},
            "mining": {
                "method": "snm" if is_snm else "s2m",
                "batch_size": batch_size,
                "num_sampled_labels": num_sampled,
                "num_hard_labels": min(protocol.num_hard_labels, num_sampled),
                "num_hard_examples": min(trial.num_hard_examples, batch_size),
                "sampler": "uniform",
                "masks_all_positives": protocol.masks_all_positives,
            },
            "training": {
                "num_steps": trial.num_steps,
                "learning_rate": trial.learning_rate,
                "seed": trial.seed,
                "checkpoint_every": 0,
            },
            "evaluation": {"cutoffs": [1, *CUTOFFS]},
        }
    )


def outcome_of(
    protocol: Protocol, dataset: Dataset, part_name: str, trial: Trial, run: Run
) -> tuple[Outcome, float]:
    """Trains one model and searches for every query of a part; seconds of training beside it."""
    place = run.folder / part_name / trial.name
    if (place / "seconds.json").is_file():
        saved = read_json(place / "seconds.json")
        if not isinstance(saved, dict) or not isinstance(saved.get("seconds"), int | float):
            raise UserError(
                f"{place / 'seconds.json'} is damaged; remove it to train that row again"
            )
        return load_outcome(place), saved["seconds"]
    config = config_of(protocol, dataset, trial)
    built = build_training(config, dataset, run.device)
    began = time.perf_counter()
    place.mkdir(parents=True, exist_ok=True)
    (place / "metrics.jsonl").unlink(missing_ok=True)
    with step_bar(run.console, trial.name, total=trial.num_steps, done=0) as advance:
        is_complete = train(
            built.training,
            built.plan,
            built.choose_step().step,
            metrics_path=place / "metrics.jsonl",
            keeper=CheckpointManager(place / "checkpoints"),
            progress_fn=advance,
            should_stop_fn=run.should_stop_fn,
        )
    built.training.feed.close()
    if not is_complete:
        raise StoppedError(
            "stopped; the same command continues after the last run that was complete"
        )
    seconds = time.perf_counter() - began
    with count_bar(run.console, f"evaluating on {part_name}") as advance_fn:
        outcome = evaluate_model(
            built.training.model, dataset, part_name, config, progress_fn=advance_fn
        )
    save_outcome(outcome, place)
    write_json(place / "seconds.json", {"seconds": round(seconds, 1)})
    return outcome, seconds


def mean_recall(outcome: Outcome) -> float:
    """What settings are chosen by: recall over all pairs, mean over the table's cut-offs."""
    ranks = np.asarray(outcome.ranks)
    return float(np.mean([((ranks > 0) & (ranks <= cutoff)).mean() for cutoff in CUTOFFS]))


# --- the table ------------------------------------------------------------------------------------


def run_table3(protocol: Protocol, dataset: Dataset, run: Run) -> dict[str, Any]:
    """Chooses, trains, compares: what `result.json` holds."""
    if "validation" not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no validation part to choose the learning rate on; make it again "
            f"with --validation-fraction 0.1"
        )
    num_pairs = len(dataset.parts["train"].positives.ids)
    batch_size = min(protocol.batch_size, num_pairs)
    counts = [count for count in protocol.hard_examples if count < batch_size]
    if not counts:
        raise UserError(
            f"no k' of {', '.join(map(str, protocol.hard_examples))} is below the batch size "
            f"({batch_size}): {dataset.name} is too small for this table"
        )
    named = {"hard_examples", "learning_rates", "steps", "seeds", "tuning_seed"}  # of a trial
    fixed = {k: v for k, v in dataclasses.asdict(protocol).items() if k not in named}
    claim(run.folder, {"data": _digest(dataset), **fixed})
    chosen, trials = {}, []
    for count in (*counts, batch_size):
        figures = []
        for rate, num_steps in itertools.product(protocol.learning_rates, protocol.steps):
            trial = Trial(count, rate, num_steps, protocol.tuning_seed)
            outcome, seconds = outcome_of(protocol, dataset, "validation", trial, run)
            figures.append((mean_recall(outcome), trial, seconds))
        trials += [
            {**trial._asdict(), "mean_recall": value, "seconds": round(seconds, 1)}
            for value, trial, seconds in figures
        ]
        chosen[count] = max(figures, key=lambda figure: figure[0])[1]
        run.console.print(
            f"k' = {count}: learning rate {chosen[count].learning_rate:g} and "
            f"{chosen[count].num_steps:,} steps, chosen on validation of {len(figures)} trials"
        )
    outcomes: dict[int, list[Outcome]] = collections.defaultdict(list)
    seconds_of: dict[int, list[float]] = collections.defaultdict(list)
    for count, trial in chosen.items():
        for seed in protocol.seeds:
            outcome, seconds = outcome_of(protocol, dataset, "test", trial._replace(seed=seed), run)
            outcomes[count].append(outcome)
            seconds_of[count].append(round(seconds, 1))
    with run.console.status("intervals"):
        differences = {
            count: compare_outcomes(
                outcomes[batch_size], outcomes[count], dataset, "test", OVER_PAIRS
            )
            for count in counts
        }
    return {
        "data": {
            "name": dataset.name,
            "num_labels": dataset.num_labels,
            "num_features": dataset.num_features,
            "queries": {name: len(part) for name, part in dataset.parts.items()},
        },
        "protocol": dataclasses.asdict(protocol),
        "snm": batch_size,
        "rows": [
            {
                "num_hard_examples": count,
                "method": "snm" if count == batch_size else "s2m",
                "learning_rate": chosen[count].learning_rate,
                "num_steps": chosen[count].num_steps,
                "training_seconds": seconds_of[count],
                "precision@1": [
                    float(np.nanmean(own.query_metrics["precision@1"])) for own in outcomes[count]
                ],
            }
            for count in chosen
        ],
        "cells": _cells(differences),
        "trials": trials,
    }


def _digest(dataset: Dataset) -> str:
    sides = [side for part in dataset.parts.values() for side in (part.features, part.positives)]
    columns = [side if isinstance(side, Rows) else (side,) for side in sides]  # dense: one array
    return digest_of(column for side in columns for column in side if column is not None)


def _cells(differences: dict[int, list[Difference]]) -> list[dict[str, Any]]:
    """A row for each cut-off and group, SNM's recall first, then every k' beside it."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for count, rows in differences.items():
        for row in rows:
            if row.metric == "recall@1":
                continue
            cell = cells.setdefault(
                (row.metric, row.group),
                {"metric": row.metric, "group": row.group, "pairs": row.count,
                 "snm": row.baseline, "s2m": {}},
            )  # fmt: skip
            names = ("contender", "difference", "low", "high", "seed_low", "seed_high")
            cell["s2m"][str(count)] = {name: getattr(row, name) for name in names}
    return list(cells.values())


def format_table3(result: dict[str, Any]) -> Table:
    """Recall by cut-off and group: SNM, and every k' with its difference and interval."""
    counts = [row["num_hard_examples"] for row in result["rows"] if row["method"] == "s2m"]
    seeds = len(result["protocol"]["seeds"])
    table = Table(
        title=f"{result['data']['name']}: recall over pairs, mean of {seeds} seeds; difference to "
        f"SNM with its 95 % interval over queries",
        title_justify="left",
    )
    for name in ("recall", "group"):
        table.add_column(name)
    table.add_column("SNM", justify="right")
    for count in counts:
        table.add_column(f"k' = {count}", justify="right")
        table.add_column("difference", justify="right")
    for cell in result["cells"]:
        words = [cell["metric"].removeprefix("recall"), cell["group"], f"{cell['snm']:.4f}"]
        for count in counts:
            row = cell["s2m"][str(count)]
            words += [
                f"{row['contender']:.4f}",
                f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]",
            ]
        table.add_row(*words)
    return table
