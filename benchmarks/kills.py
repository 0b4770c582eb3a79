"""Kills a random rank of a run at a random moment, many times, and looks at what becomes of it.

    python benchmarks/kills.py --runs 50 --json benchmarks/results/kills.json

Each run is `evenhand train --ranks 2`, in which torchrun starts the ranks again when one is gone.
Nothing else helps it. Every other kill waits for a checkpoint to be in the making, so that it falls
within. At its end a run must have the weights, the metrics and the last checkpoint of a run that
was never disturbed, byte for byte.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from evenhand.config import toml_value
from evenhand.data import Dataset, Part, Rows, save_dataset

SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"dataset": "data"},
    "model": {"embedding_dim": 32},
    "mining": {
        "batch_size": 64,
        "num_sampled_labels": 256,
        "num_hard_labels": 16,
        "num_hard_examples": 16,
    },
    "training": {
        "num_steps": 300,
        "learning_rate": 0.05,
        "log_every": 10,
        "evaluate_every": 100,
        "checkpoint_every": 20,
    },
    "evaluation": {"cutoffs": [1, 10], "num_resamples": 20},
}


def main() -> int:
    options = _options()
    home = Path(tempfile.mkdtemp(prefix="evenhand-kills-"))
    try:
        results = _kills(home, options)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    Console().print(results["summary"])
    return 0 if results["summary"]["as_undisturbed"] == options.runs else 1


def _kills(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    save_dataset(_dataset(), home / "data")
    lines = []
    for section, values in SETTINGS.items():
        lines += [
            f"[{section}]",
            *(f"{key} = {toml_value(value)}" for key, value in values.items()),
        ]
    (home / "run.toml").write_text("\n".join(lines))
    began = time.monotonic()
    _wait(_started(home, "whole", options))
    seconds = time.monotonic() - began
    expected = fruits(home / "whole")
    draws = random.Random(options.seed)
    runs = []
    for number in track(range(options.runs), "killed runs", console=Console(stderr=True)):
        name = f"run-{number}"
        is_within_save = number % 2 == 1
        outcome = _killed(
            home, name, draws, options, seconds=seconds, is_within_save=is_within_save
        )
        different = [key for key in expected if fruits(home / name).get(key) != expected[key]]
        about = json.loads((home / name / "run.json").read_text())
        outcome |= {
            "different": different,
            "interruptions": about.get("interruptions", []),
            "restarts_told": len(about.get("interruptions", [])),
        }
        runs.append(outcome)
        shutil.rmtree(home / name)
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": SETTINGS | {"ranks": options.ranks, "seed": options.seed},
        "seconds_undisturbed": round(seconds, 1),
        "summary": {
            "runs": len(runs),
            "as_undisturbed": sum(run["code"] == 0 and not run["different"] for run in runs),
            "killed_within_a_checkpoint": sum(run["is_within_save"] for run in runs),
            "killed_before_the_end": sum(run["killed_at_step"] is not None for run in runs),
            "lost_steps_most": max(
                (i["lost_steps"] for run in runs for i in run["interruptions"]), default=0
            ),
        },
        "runs": runs,
    }


def _killed(
    home: Path,
    name: str,
    draws: random.Random,
    options: argparse.Namespace,
    *,
    seconds: float,
    is_within_save: bool,
) -> dict[str, Any]:
    """A run of which one rank is killed once; what happened."""
    process = _started(home, name, options)
    # One in five while it starts, the others at a step: on a machine that others use, a moment
    # drawn by the clock would often come after the end.
    is_early = draws.random() < 0.2 and not is_within_save
    wait_until = time.monotonic() + (draws.uniform(0.1, 0.4) * seconds if is_early else 0)
    step_to_reach = 0 if is_early else draws.randrange(SETTINGS["training"]["num_steps"] - 20)
    victim_rank = draws.randrange(options.ranks)
    folder = home / name
    is_within, victim = False, None
    while process.poll() is None:
        time.sleep(0.0005)
        if time.monotonic() < wait_until or _last_step(folder) < step_to_reach:
            continue
        is_within = any((folder / "checkpoints").glob(".step-*"))
        if is_within or not is_within_save:
            victim = _rank_process(process.pid, victim_rank)
            if victim is not None:
                break
    step = _last_step(folder) if victim is not None else None
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    code = _wait(process)
    return {
        "rank": victim_rank,
        "killed_at_step": step,
        "is_within_save": is_within,
        "code": code,
    }


def _started(home: Path, name: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "evenhand", "train", "run.toml", "--run", name]
    command += ["--ranks", str(options.ranks), "--max-restarts", "5"]
    log = open(home / f"{name}.log", "wb")  # noqa: SIM115 (the child's)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=home, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -1


def _rank_process(launcher: int, rank: int) -> int | None:
    """The process of a rank, found by its environment."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    try:
        pids = [int(pid) for pid in children.read_text().split()]
        for pid in pids:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in words:
                return pid
    except OSError:
        pass
    return None


def _last_step(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def fruits(folder: Path) -> dict[str, str]:
    """What must not depend on kills: digests of weights, metrics, scores, the last checkpoint."""
    left_out = ("run.json", "config.toml", "outcome.npz")  # times; an archive holds one too
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in left_out
    }


def _dataset() -> Dataset:
    """Labels that can be learnt: a query has features of its label, and noise."""
    generator = np.random.default_rng(0)
    num_labels, num_features = 2000, 4096
    parts = {}
    for name, size in {"train": 6000, "validation": 400, "test": 400}.items():
        labels = (num_labels * generator.random(size) ** 2).astype(np.int32)
        own = (labels[:, None] * 7 + np.arange(4) * 1001) % num_features
        noise = generator.integers(num_features, size=(size, 2))
        ids = np.concatenate([own, noise], axis=1).astype(np.int32)
        offsets = np.arange(size + 1) * 6
        parts[name] = Part(Rows(offsets, ids.ravel()), Rows(np.arange(size + 1), labels))
    return Dataset("kills", num_features, num_labels, parts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
