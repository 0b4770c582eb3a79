"""10^8 labels x 128 in bfloat16 on one GPU: trained, killed, resumed, and compared bit for bit.

    python benchmarks/scale/hundred_million.py --json hundred-million.json
    python benchmarks/scale/hundred_million.py --labels 100000 --device cpu    the same, small
    python benchmarks/scale/hundred_million.py --phases data train resume      a part of it

The phases, each a process of its own; what they saw is kept in --folder until all are done:

    data         makes a data set by Zipf's law, learnable
    train        trains as `evenhand train` does, one checkpoint half way, and ends by SIGKILL
    resume       goes on from the checkpoint to the last step, and saves the weights
    undisturbed  trains the same without a break; saves nothing but digests of what it trained
    evaluate     reads the weights and searches all labels for the queries of the test part

The losses logged between the checkpoint and the kill must be those that the resumed run logs again,
and every bit of the tables and of the optimiser's state those of the undisturbed run.

Bytes, for L labels of D weights: the table takes 2 L D (25.6 GB for 10^8 x 128), the optimiser's
sums 4 L (0.4 GB). RowAdam would add a momentum of 4 L D, 51 GB. On the disk there is never more
than two of: the checkpoint half way, that of the last step, the weights. The first is removed when
the second is complete (keep_last = 1), and only then the weights are written beside it: 52 GB, or
48.5 GiB, and a few hundred megabytes of data.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from million_data import make_dataset
from rich.console import Console
from rich.table import Table

from evenhand.config import TrainingConfig, build_config, to_toml

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.machine import peak_anonymous_memory

WORKER = Path(__file__).with_name("million_worker.py")
PHASES = ("data", "train", "resume", "undisturbed", "evaluate")
SPARE_BYTES = 2**30  # of the disk, beside what is written
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    console = Console(width=110)
    home = Path(options.folder)
    home.mkdir(parents=True, exist_ok=True)
    (home / "about.json").write_text(json.dumps(vars(options)))
    for phase in options.phases:
        console.print(f"[bold]{phase}[/bold]")
        if phase == "data":
            _make_data(home, options)
        else:
            if phase in ("train", "undisturbed"):
                _write_config(home, options, is_undisturbed=phase == "undisturbed")
            if phase == "train":
                _check_disk(home, options)
            _run(phase, home)
        if phase == "train":  # the resumed run writes these lines again
            shutil.copy(home / "run" / "metrics.jsonl", home / "metrics-killed.jsonl")
        console.print_json(json.dumps(_read(home, phase)["seconds"]))
    result = report(home, options)
    _show(result, console)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    if not options.keep and all((home / f"{phase}.json").exists() for phase in PHASES):
        shutil.rmtree(home)
    if not all(result["checks"].values()):
        raise SystemExit("what must be equal is not")


# --- phases ---------------------------------------------------------------------------------------


def _make_data(home: Path, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    shutil.rmtree(home / "data", ignore_errors=True)
    make_dataset(
        home / "data",
        num_labels=options.labels,
        num_pairs=options.pairs,
        num_test=options.test_queries,
    )
    seconds = {"all": round(time.perf_counter() - began, 2)}
    (home / "data.json").write_text(json.dumps({"seconds": seconds}))


def _write_config(home: Path, options: argparse.Namespace, *, is_undisturbed: bool) -> None:
    training: dict[str, Any] = {
        "num_steps": options.steps,
        "optimizer": "row-adagrad",
        "learning_rate": options.learning_rate,
        "precision": "bfloat16" if options.device == "cuda" else "float32",
        "log_every": options.log_every,
        "checkpoint_every": 0 if is_undisturbed else options.checkpoint_every,
    }
    if "keep_last" in {field.name for field in dataclasses.fields(TrainingConfig)}:
        training["keep_last"] = 1
    settings = {
        "data": {"dataset": str(home / "data")},
        "model": {"embedding_dim": options.width},
        "mining": {
            "method": "s2m",  # with a k' that stays, so that losses compare
            "batch_size": options.batch_size,
            "num_sampled_labels": options.sampled,
            "num_hard_labels": min(64, options.sampled),
            "num_hard_examples": options.batch_size // 2,
        },
        "training": training,
        "evaluation": {"cutoffs": [1, 10], "num_resamples": 0},
    }
    name = "undisturbed" if is_undisturbed else "run"
    (home / f"{name}.toml").write_text(to_toml(build_config(settings)))
    shutil.rmtree(home / name, ignore_errors=True)


def _check_disk(home: Path, options: argparse.Namespace) -> None:
    free, needed = shutil.disk_usage(home).free, 2 * _checkpoint_bytes(options) + SPARE_BYTES
    if free < needed:
        raise SystemExit(
            f"{home} has {free / 2**30:.1f} GiB free, and {needed / 2**30:.1f} GiB are needed "
            f"for a checkpoint and the next beside it; choose another --folder or fewer --labels"
        )


def _checkpoint_bytes(options: argparse.Namespace) -> int:
    rows = options.labels + 2**18  # of the label table and of the features'
    return rows * (options.width * (2 if options.device == "cuda" else 4) + 4)


def _run(phase: str, home: Path) -> None:
    """Runs a phase in a process of its own and notes what it took of memory and disk."""
    (home / f"{phase}.json").unlink(missing_ok=True)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen([sys.executable, str(WORKER), phase, str(home)], env=environment)
    disk_bytes = 0
    with _device_memory() as device_used, peak_anonymous_memory(process.pid) as host_used:
        while process.poll() is None:
            disk_bytes = max(disk_bytes, _disk_bytes(home))
            time.sleep(0.1)
    expected = -signal.SIGKILL if phase == "train" else 0
    if process.returncode != expected:
        raise SystemExit(f"{phase} ended with {process.returncode}, not {expected}")
    record = _read(home, phase) | {
        "host_anonymous_bytes_peak": host_used[process.pid],
        "disk_bytes_peak": disk_bytes,
    }
    if device_used:
        record["nvidia_smi_peak_bytes"] = max(device_used)
    (home / f"{phase}.json").write_text(json.dumps(record))


@contextlib.contextmanager
def _device_memory() -> Any:
    """What nvidia-smi says is used of the device, all processes together, twice a second."""
    used: list[int] = []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        yield used
        return
    watcher = subprocess.Popen([*command, "-lms", "500"], stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert watcher.stdout is not None
        for line in watcher.stdout:
            if line.strip().isdigit():
                used.append(int(line) * 2**20)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield used
    finally:
        watcher.terminate()
        watcher.wait()
        reader.join()


def _disk_bytes(folder: Path) -> int:
    """What all files take, those included that are about to be renamed or removed."""
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that are gone, unlike rglob
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


# --- report ---------------------------------------------------------------------------------------


def report(home: Path, options: argparse.Namespace) -> Record:
    """All that the phases wrote down, and whether what must be equal is."""
    phases = {name: _read(home, name) for name in PHASES if (home / f"{name}.json").exists()}
    checks: dict[str, bool] = {}
    losses: dict[int, float] = {}
    if "resume" in phases:
        killed, resumed = (
            _losses(home / "metrics-killed.jsonl"),
            _losses(home / "run/metrics.jsonl"),
        )
        again = {step for step in killed if options.checkpoint_every < step <= options.kill_at}
        checks["losses before the kill come again"] = bool(again) and all(
            killed[step] == resumed[step] for step in killed
        )
        losses = resumed
        checks["the loss falls"] = losses[max(losses)] < losses[min(losses)]
    if "resume" in phases and "undisturbed" in phases:
        undisturbed = _losses(home / "undisturbed/metrics.jsonl")
        checks["losses of all steps as undisturbed"] = losses == undisturbed
        checks["every bit as undisturbed"] = (
            phases["resume"]["digests"] == phases["undisturbed"]["digests"] != {}
        )
    if "resume" in phases and "evaluate" in phases:
        trained = phases["resume"]["digests"]
        read = phases["evaluate"]["digests"]
        checks["weights on disk are those trained"] = bool(read) and all(
            trained[name] == value for name, value in read.items()
        )
    for record in phases.values():
        if "logged_steps" in record:
            record["milliseconds_a_step"] = _milliseconds(record.pop("logged_steps"), options)
    return {
        "command": " ".join(["python", "benchmarks/scale/hundred_million.py", *sys.argv[1:]]),
        "settings": vars(options) | {"precision": "bfloat16" if _is_cuda(options) else "float32"},
        "machine": _machine(options),
        "bytes_of_a_checkpoint": _checkpoint_bytes(options),
        "phases": phases,
        "losses": losses,
        "checks": checks,
    }


def _milliseconds(logged: list[tuple[int, float]], options: argparse.Namespace) -> Record:
    """Of stretches between two logged steps, which wait for the device; the first step of a
    process compiles, the second records, and a stretch that begins with a checkpoint writes it.
    """
    stretches = [
        (step, 1000 * (end - start) / (step - before))
        for (before, start), (step, end) in itertools.pairwise(logged)
        if before % options.checkpoint_every
    ]
    if not stretches:
        return {}
    times = [milliseconds for _, milliseconds in stretches]
    return {
        "median": round(median(times), 3),
        "least": round(min(times), 3),
        "most": round(max(times), 3),
        "stretches": [[step, round(milliseconds, 3)] for step, milliseconds in stretches],
    }


def _losses(path: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _read(home: Path, phase: str) -> Record:
    return dict(json.loads((home / f"{phase}.json").read_text()))


def _is_cuda(options: argparse.Namespace) -> bool:
    return bool(options.device == "cuda")


def _machine(options: argparse.Namespace) -> Record:
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "device": torch.cuda.get_device_name() if _is_cuda(options) else platform.machine(),
        "cores": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "versions": versions,
    }


def _show(result: Record, console: Console) -> None:
    table = Table("phase", "seconds", "ms a step", "GPU, torch", "GPU, nvidia-smi", "host", "disk")
    for name, record in result["phases"].items():
        table.add_row(
            name,
            f"{record['seconds']['all']:.0f}",
            str(record.get("milliseconds_a_step", {}).get("median", "")),
            *(
                f"{record[key] / 2**30:.2f} GiB" if key in record else ""
                for key in (
                    "device_peak_bytes", "nvidia_smi_peak_bytes", "host_anonymous_bytes_peak",
                    "disk_bytes_peak",
                )
            ),
        )  # fmt: skip
    console.print(table)
    for name, record in result["phases"].items():
        console.print(name, record["seconds"], record.get("scores", ""))
    console.print("losses", result["losses"])
    console.print(result["checks"])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--labels", type=int, default=10**8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=4_000_000)
    parser.add_argument("--test-queries", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--sampled", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--kill-at", type=int, default=700, help="the step that ends by SIGKILL")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", default="runs/hundred-million", help="where all is written")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--keep", action="store_true", help="leave the folder when all is done")
    parser.add_argument("--json", help="write what was measured to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
