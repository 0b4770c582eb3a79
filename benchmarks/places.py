"""SNM against S2M on `places`, fairly: tuned on validation with equal trials, then seeds.

    python benchmarks/places.py tune   --size demo    every method, every trial, validation only
    python benchmarks/places.py seeds  --size demo    the chosen settings, three new seeds, test
    python benchmarks/places.py losses --size demo    every loss, every trial, validation only

`tune` trains each method once for every (steps, learning rate) of the size's grid and chooses by
pair recall@10 over the whole validation part: the figure one has when nobody labelled the groups.
`seeds` repeats the chosen settings with new seeds, fixes the list of worst groups on the
validation part, and gives paired differences with intervals over queries and over seeds.
`losses` is how the default loss was chosen: annealed S2M with each, with the same trials.
"""

import argparse
import itertools
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.build import build_training
from evenhand.config import Config, build_config
from evenhand.data import Dataset, open_dataset
from evenhand.evaluation import (
    Outcome,
    compare_outcomes,
    score_table,
    selected_value,
    worst_groups,
)
from evenhand.files import write_json
from evenhand.models import Retriever
from evenhand.result_tables import differences_table
from evenhand.runs import evaluate_model, open_data
from evenhand.training.checkpoint import CheckpointManager
from evenhand.training.loop import train
from opponents import changed

RESULTS = Path(__file__).parent / "results"
METHODS = ("snm", "s2m", "s2m-annealed", "s2m-even")
LOSSES: dict[str, dict[str, Any]] = {
    "contrastive, power 1": {"loss": {"name": "contrastive", "power": 1.0}},
    "contrastive, power 2": {"loss": {"name": "contrastive", "power": 2.0}},
    "softmax, scale 8": {"loss": {"name": "softmax"}, "model": {"scale": 8.0}},
    "softmax, scale 16": {"loss": {"name": "softmax"}, "model": {"scale": 16.0}},
    "bowl, hinge, dot product": {"loss": {"name": "bowl"}, "model": {"similarity": "dot"}},
    "bowl, logistic, dot product": {
        "loss": {"name": "bowl", "margin_loss": "logistic"},
        "model": {"similarity": "dot"},
    },
}
CRITERION = "recall@10"
SHOWN = (
    "recall@10",
    "recall@10 on head",
    "recall@10 on torso",
    "recall@10 on tail",
    "recall@10 on worst tenth of country",
    "recall@10 on worst 3 of script",
)
SIZES: dict[str, dict[str, Any]] = {
    "demo": {
        "data": {"num_buckets": 2**14},
        "model": {"embedding_dim": 128},
        "mining": {"batch_size": 1024, "num_sampled_labels": 2048, "num_hard_labels": 32,
                   "num_hard_examples": 256},
        "steps": (1500, 2000, 3000),
        "learning_rates": (0.012, 0.024, 0.048),
    },
    "full": {
        "data": {"num_buckets": 2**20},
        "model": {"embedding_dim": 512},
        "mining": {"batch_size": 2048, "num_sampled_labels": 4096, "num_hard_labels": 64,
                   "num_hard_examples": 512},
        "steps": (1500, 3000, 4500),
        "learning_rates": (0.006, 0.012, 0.024),
    },
}  # fmt: skip
SIZES["wide"] = SIZES["full"] | {
    "model": {"embedding_dim": 1024},
    "steps": (1000, 1500, 2000),
    "learning_rates": (0.012, 0.024),
}


def settings_of(
    size: str, method: str, steps: int, learning_rate: float, seed: int, loss: str | None = None
) -> Config:
    chosen, changes = SIZES[size], LOSSES[loss] if loss else {}
    return build_config({
        "data": chosen["data"],
        "model": chosen["model"] | changes.get("model", {}),
        "loss": changes.get("loss", {}),
        "mining": {"method": method, **chosen["mining"]},
        "training": {"num_steps": steps, "learning_rate": learning_rate, "seed": seed,
                     "checkpoint_every": 0},
    })  # fmt: skip


# --- training -------------------------------------------------------------------------------------


def train_once(
    config: Config, dataset: Dataset, opponent: tuple[str, float] | None = None
) -> tuple[Retriever, float]:
    """The trained model, and the seconds it took.

    Args:
        opponent: a name and a strength, see `opponents.changed`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built = build_training(config, dataset, device)
    if opponent is not None:
        built = changed(built, dataset, *opponent)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        train(
            built.training,
            built.plan,
            built.choose_step().step,
            metrics_path=Path(folder) / "metrics.jsonl",
            keeper=CheckpointManager(Path(folder) / "checkpoints"),
        )
        model, seconds = built.training.model, time.monotonic() - began
        if opponent is not None:
            model.label_bias = None  # of logit adjustment, which is for training alone
        return model, seconds


def trained_outcomes(
    config: Config,
    data: str,
    part_names: Sequence[str],
    num_threads: int,
    opponent: tuple[str, float] | None = None,
) -> tuple[dict[str, Outcome], float]:
    """Trains once and searches for every query of the parts; also the seconds of training."""
    torch.set_num_threads(num_threads)
    dataset = open_dataset(Path(data))
    model, seconds = train_once(config, dataset, opponent)
    return {name: evaluate_model(model, dataset, name, config) for name in part_names}, seconds


def train_all(
    configs: Sequence[Config],
    data: str,
    part_names: Sequence[str],
    workers: int,
    opponents: Sequence[tuple[str, float] | None] | None = None,
) -> Iterator[tuple[dict[str, Outcome], float]]:
    """`trained_outcomes` of every config, in order; so many are trained at a time."""
    num_threads = max(1, multiprocessing.cpu_count() // workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        running = [
            executor.submit(trained_outcomes, config, data, part_names, num_threads, opponent)
            for config, opponent in zip(configs, opponents or [None] * len(configs), strict=True)
        ]
        for future in running:
            yield future.result()


# --- commands -------------------------------------------------------------------------------------


def tune(options: argparse.Namespace, console: Console) -> None:
    """The best (steps, learning rate) of each method, on validation."""
    variants = {method: (method, None) for method in options.methods}
    chosen, trials = best_of_trials(variants, options, console)
    path = RESULTS / f"places-{options.size}-tuning.json"
    if path.exists():  # the trials of other methods stay
        before = json.loads(path.read_text())
        chosen = before["chosen"] | chosen
        trials += [trial for trial in before["trials"] if trial["variant"] not in options.methods]
    write_json(path, about(options) | {"criterion": CRITERION, "chosen": chosen, "trials": trials})
    console.print(f"written to {path}")


def losses(options: argparse.Namespace, console: Console) -> None:
    """Annealed S2M with each loss, each at its best (steps, learning rate), on validation."""
    variants = {loss: ("s2m-annealed", loss) for loss in LOSSES}
    chosen, trials = best_of_trials(variants, options, console)
    path = RESULTS / f"places-{options.size}-losses.json"
    write_json(path, about(options) | {"criterion": CRITERION, "chosen": chosen, "trials": trials})
    console.print(f"written to {path}")


def best_of_trials(
    variants: dict[str, tuple[str, str | None]], options: argparse.Namespace, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains every variant at every point of the grid; the best of each by the criterion."""
    size = SIZES[options.size]
    points = itertools.product(variants, size["steps"], size["learning_rates"])
    jobs = sorted(points, key=lambda job: -job[1])  # the longest first
    configs = [
        settings_of(options.size, variants[name][0], steps, rate, seed=0, loss=variants[name][1])
        for name, steps, rate in jobs
    ]
    data, trials = prepared(options, configs[0], console), []
    found = train_all(configs, data, ["validation"], options.workers)
    for (name, steps, rate), (outcomes, seconds) in zip(jobs, found, strict=True):
        figures = figures_of(outcomes["validation"], data, configs[0], "validation")
        trials.append({
            "variant": name, "num_steps": steps, "learning_rate": rate, "validation": figures,
            "training_seconds": round(seconds, 1), "device": device_name(),
        })  # fmt: skip
        console.print(
            f"{name:28s} steps {steps} rate {rate}: {CRITERION} {figures[CRITERION]:.4f}, "
            f"worst 3 scripts {figures[SHOWN[-1]]:.4f} ({seconds:.0f} s)"
        )
    chosen = {
        name: max(
            (trial for trial in trials if trial["variant"] == name),
            key=lambda trial: trial["validation"][CRITERION],
        )
        for name in variants
    }
    for name, trial in chosen.items():
        console.print(
            f"chosen for {name}: steps {trial['num_steps']}, rate {trial['learning_rate']}, "
            f"{CRITERION} {trial['validation'][CRITERION]:.4f}"
        )
    return chosen, trials


def seeds(options: argparse.Namespace, console: Console) -> None:
    tuning = json.loads((RESULTS / f"places-{options.size}-tuning.json").read_text())
    jobs = [(method, seed) for seed in options.seeds for method in options.methods]
    configs = [
        settings_of(options.size, method, trial["num_steps"], trial["learning_rate"], seed=seed)
        for method, seed in jobs
        for trial in [tuning["chosen"][method]]
    ]
    data = prepared(options, configs[0], console)
    runs: dict[str, list[dict[str, Outcome]]] = {method: [] for method in options.methods}
    rows = []
    results = train_all(configs, data, ["validation", "test"], options.workers)
    for (method, seed), (outcomes, seconds) in zip(jobs, results, strict=True):
        runs[method].append(outcomes)
        figures = figures_of(outcomes["test"], data, configs[0], "test")
        rows.append({"method": method, "seed": seed, "test": figures, "seconds": seconds})
        console.print(
            f"{method:13s} seed {seed}: test {CRITERION} {figures[CRITERION]:.4f}, "
            f"worst 3 scripts {figures[SHOWN[-1]]:.4f} ({seconds:.0f} s)"
        )
    differences = {}
    for contender in options.methods[1:]:
        found = compared(runs["snm"], runs[contender], data, configs[0])
        console.print(differences_table(found, baseline="snm", contender=contender))
        differences[contender] = [vars(row) for row in found]
    path = RESULTS / f"places-{options.size}-seeds.json"
    write_json(
        path,
        about(options) | {"chosen": tuning["chosen"], "runs": rows, "differences": differences},
    )
    console.print(f"written to {path}")


def figures_of(outcome: Outcome, data: str, config: Config, part_name: str) -> dict[str, float]:
    dataset, min_pairs = open_dataset(Path(data)), config.evaluation.min_pairs
    scores = score_table(outcome, dataset, part_name, min_pairs=min_pairs, num_resamples=0)
    return {name: selected_value(scores, name) for name in SHOWN}


def compared(
    baseline: list[dict[str, Outcome]],
    contender: list[dict[str, Outcome]],
    data: str,
    config: Config,
) -> list[Any]:
    """Paired differences on test; the worst groups are those of the baseline on validation."""
    dataset = open_dataset(Path(data))
    groups = worst_groups(
        baseline[0]["validation"],
        dataset,
        chosen_on="validation",
        compared_on="test",
        metric=CRITERION,
        min_pairs=config.evaluation.min_pairs,
    )
    groups = {title: groups[title] for title in ("worst 3 of script", "worst tenth of country")}
    sides = ([run["test"] for run in runs] for runs in (baseline, contender))
    return compare_outcomes(*sides, dataset, "test", groups)


def prepared(options: argparse.Namespace, config: Config, console: Console) -> str:
    """The folder of the data set, prepared once for all workers."""
    if options.data:
        return str(options.data)
    open_data(config.data, console)
    return f"datasets/places-{config.data.min_population}-{config.data.num_buckets}"


def device_name() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return f"{device or platform.machine()}, torch {torch.__version__}"


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": f"python benchmarks/places.py {options.what} --size {options.size}",
        "device": device_name(),
        "settings": {key: SIZES[options.size][key] for key in ("data", "model", "mining")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tune", "seeds", "losses"))
    parser.add_argument("--size", choices=tuple(SIZES), default="demo")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", help="folder of a prepared data set")
    options = parser.parse_args()
    {"tune": tune, "seeds": seeds, "losses": losses}[options.what](options, Console())


if __name__ == "__main__":
    main()
