"""One process of `hundred_million.py`: trains, is killed or ends, and writes down what it saw.

    python benchmarks/scale/million_worker.py PHASE FOLDER

It trains by `runs.train_run`, as `evenhand train` does. Around it are clocks, and a digest
of all that was trained, taken from the device when the model is about to be saved.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from evenhand import runs
from evenhand.config import build_config, read_settings
from evenhand.data import open_dataset
from evenhand.training.checkpoint import CheckpointManager
from evenhand.training.loop import Training

BLOCK = 2**26  # bytes of a tensor that are digested at once


class Watch:
    """Seconds of each part of a run, and of every logged stretch of steps."""

    def __init__(self, folder: Path, *, kill_at: int = 0) -> None:
        self.folder, self.kill_at = folder, kill_at
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.steps: list[tuple[int, float]] = []  # (step, seconds since the beginning)
        self.digests: dict[str, str] = {}
        self.training: Training | None = None

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                _wait_for_device()
                self.seconds[name] = round(time.perf_counter() - start, 2)

        return call

    def built(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            built = function(*arguments, **options)
            self.training = built.training
            return built

        return call

    def should_stop(self) -> bool:
        """Asked after every step, before its checkpoint; never stops, but may kill."""
        assert self.training is not None
        step, now = self.training.step, time.perf_counter() - self.began
        if not self.training.recent:  # it was logged, so the device was waited for
            self.steps.append((step, now))
        if step == self.kill_at:
            self.write("train")
            os.kill(os.getpid(), signal.SIGKILL)  # nothing is flushed or closed
        return False

    def write(self, phase: str) -> None:
        record = {
            "seconds": self.seconds | {"all": round(time.perf_counter() - self.began, 2)},
            "logged_steps": self.steps,
            "digests": self.digests,
            "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        if torch.cuda.is_available():
            record["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            record["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
        (self.folder.parent / f"{phase}.json").write_text(json.dumps(record))


def digest(tensor: Tensor) -> str:
    """Of every bit of a tensor, wherever it lies: sums of words times odd numbers, then SHA-256."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    generator = torch.Generator().manual_seed(0)
    num_factors = (min(BLOCK, len(raw)) + 7) // 8
    factors = torch.randint(2**62, (num_factors,), generator=generator) * 2 + 1
    factors = factors.to(tensor.device)
    sums = []
    for start in range(0, len(raw), BLOCK):
        block = raw[start : start + BLOCK]
        if len(block) % 8:
            block = torch.nn.functional.pad(block, (0, -len(block) % 8))
        words = block.view(torch.int64)
        sums.append((words * factors[: len(words)]).sum())
    numbers = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + numbers).hexdigest()


def digests_of(training: Training) -> dict[str, str]:
    tensors = dict(training.model.state_dict())
    for name, optimizer in training.optimizers.rows.items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state().items()}
    return {name: digest(tensor) for name, tensor in tensors.items()}


def train(phase: str, home: Path, about: dict[str, Any]) -> None:
    """`phase`: "train" is killed at a step, "resume" ends, "undisturbed" ends and saves nothing."""
    folder = home / ("undisturbed" if phase == "undisturbed" else "run")
    watch = Watch(folder, kill_at=about["kill_at"] if phase == "train" else 0)
    save_model = runs.save_model

    def save(folder: Path, model: Any, **options: Any) -> None:
        assert watch.training is not None
        watch.digests = digests_of(watch.training)
        if phase != "undisturbed":
            watch.timed("write the weights", save_model)(folder, model, **options)

    names = {"build": "build_training", "read the checkpoint": "load_latest_checkpoint"}
    for words, name in names.items():
        setattr(runs, name, watch.timed(words, getattr(runs, name)))
    runs.build_training = watch.built(runs.build_training)
    runs.save_model = save  # type: ignore[assignment]
    write_checkpoint = watch.timed("write a checkpoint", CheckpointManager.save)
    CheckpointManager.save = write_checkpoint  # type: ignore[method-assign]
    Training.load = watch.timed("load the checkpoint", Training.load)  # type: ignore[method-assign]

    device = torch.device(about["device"])
    dataset = watch.timed("open the data", open_dataset)(home / "data")
    if phase == "resume":
        config = runs.resumable_config(folder, None, dataset)
    else:
        config = build_config(read_settings(home / f"{folder.name}.toml"))
        runs.begin_run(folder, config, dataset, device=device)
    is_complete = runs.train_run(
        folder,
        config,
        dataset,
        device=device,
        console=Console(),
        title=phase,
        should_stop_fn=watch.should_stop,
    )
    assert is_complete
    watch.write(phase)


def evaluate(home: Path, about: dict[str, Any]) -> None:
    folder = home / "run"
    watch = Watch(folder)
    load_model = watch.timed("read the weights", runs.load_model)

    def load(*arguments: Any, **options: Any) -> Any:
        model = load_model(*arguments, **options)
        watch.digests = {name: digest(tensor) for name, tensor in model.state_dict().items()}
        return model

    runs.load_model = load
    dataset = open_dataset(home / "data")
    run = watch.timed("evaluate", runs.evaluate_run)
    scores = run(folder, dataset, "test", device=torch.device(about["device"]), console=Console())
    watch.write("evaluate")
    path = home / "evaluate.json"
    shown = {
        f"{score.metric}, {score.group}": round(score.value, 4)
        for score in scores
        if score.metric in ("recall@1", "recall@10")
        and (score.column == "all" or score.column == "frequency over pairs")
        and score.count
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scores": shown}))


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    chosen, place = sys.argv[1], Path(sys.argv[2])
    options = json.loads((place / "about.json").read_text())
    if chosen == "evaluate":
        evaluate(place, options)
    else:
        train(chosen, place, options)
