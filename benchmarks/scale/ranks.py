"""Steps of real processes joined by gloo: what they send, hold and wait for, beside the cost model.

    python benchmarks/scale/ranks.py --json benchmarks/results/scaling-ranks.json
    python benchmarks/scale/ranks.py --parts memory      only that part; the others are kept

`bytes`: two ranks, tables of 10^4 to 10^7 labels. Bytes a rank sends in a step, by our counters, by
the cost model, and by the kernel: what TCP acknowledged on the sockets of the two processes, and
what the loopback device carried, less what it carried while nothing ran.

`memory`: peak resident memory of 10^7 labels x 128, in one process and on each of two ranks.

`real`: a training on place names by 8 ranks (threads): how far survivors that agree about hard
labels send less than survivors that choose independently.
"""

import argparse
import dataclasses
import itertools
import os
import resource
import socket
import struct
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from problem import Problem, about_run, model_of, part_of, rank_step, scheduled, whole_step
from rich.console import Console

from evenhand.build import build_training
from evenhand.config import Config, build_config
from evenhand.data import Dataset, Rows
from evenhand.distributed.ranks import ProcessRanks, Ranks
from evenhand.files import read_json, write_json
from evenhand.runs import open_data
from evenhand.training.rank_step import RankStep
from evenhand.training.step import Step

sys.path.append(str(Path(__file__).parents[2]))  # for `experiments`
from benchmarks.machine import proc_bytes
from experiments.scaling_laws import law_of_counts
from experiments.simulated_ranks import run_ranks
from experiments.step_costs import StepShape, bytes_sent, kept_label_bounds, memory_held

RESULTS = Path(__file__).parents[1] / "results" / "scaling-ranks.json"
LABELS = (10**4, 10**5, 10**6, 10**7)
SHAPES = {
    "batch 512": {"batch_size": 512, "sampled": 1024, "hard_labels": 64, "hard_examples": 128},
    "batch 2,048": {},  # the shape of docs/speed.md
    "batch 2,048, SNM": {"hard_examples": 2048},
}
NUM_STEPS = 10
STRETCHES = ((0, 10), (90, 100), (290, 300))  # steps of the real training


# --- processes ------------------------------------------------------------------------------------


def in_processes(num_ranks: int, rank_fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `rank_fn(ranks, *arguments)` gave on each rank, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        processes = [
            context.Process(
                target=_run_rank, args=(rank, num_ranks, folder, answers, rank_fn, arguments)
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        found = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    errors = [answer for answer in found.values() if isinstance(answer, BaseException)]
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(num_ranks)]


def _run_rank(
    rank: int, num_ranks: int, folder: str, answers: Any, rank_fn: Any, arguments: Any
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names of torch that are about to change
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        # A file as the meeting place: no byte on the network but those of the steps.
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
        answer = rank_fn(ProcessRanks(), *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        answer = RuntimeError(f"rank {rank}: {error!r}")
    answers.put((rank, answer))


# --- bytes ----------------------------------------------------------------------------------------


def measure_bytes(console: Console) -> list[dict[str, Any]]:
    problems = {
        (name, labels): Problem(labels=labels, **sizes)
        for labels in LABELS
        for name, sizes in SHAPES.items()
        if labels == 10**6 or "SNM" not in name
    }
    found = in_processes(2, _bytes_of_problems, list(problems.values()))
    rows = []
    for (name, _), problem, *counted in zip(problems, problems.values(), *found, strict=True):
        expected = bytes_sent(problem.shape(2))
        ours = {what: _mean([own["sent"][what] for own in counted]) for what in expected}
        row = {
            "shape": name,
            **dataclasses.asdict(problem),
            "ranks": 2,
            "steps": NUM_STEPS,
            "counted": ours,
            "model": expected,
            "counted_sum": sum(ours.values()),
            "model_sum": sum(expected.values()),
            "tcp_payload": _mean([own["acknowledged"] for own in counted]),
            "tcp_segments": _mean([own["segments"] for own in counted]),
            "loopback": counted[0]["loopback"] / 2,
            "loopback_idle": counted[0]["loopback_idle"] / 2,
        }
        rows.append(row)
        console.print(
            f"{name}, {problem.labels:,} labels: {row['counted_sum']:,.0f} bytes a rank a step, "
            f"model {row['model_sum'] / row['counted_sum'] - 1:+.2%}, TCP payload "
            f"{row['tcp_payload'] / row['counted_sum'] - 1:+.2%}, loopback "
            f"{row['loopback'] / row['counted_sum'] - 1:+.2%}"
        )
    return rows


def _bytes_of_problems(ranks: ProcessRanks, problems: list[Problem]) -> list[dict[str, Any]]:
    found = []
    for _, same_labels in itertools.groupby(problems, key=lambda problem: problem.labels):
        alike = list(same_labels)  # the same tables serve them all
        part = part_of(alike[0])
        model = model_of(alike[0], share=(ranks.rank, ranks.num_ranks))
        for problem in alike:
            step = rank_step(problem, part, ranks, model=model)
            found.append(_bytes_of_rank(ranks, step, problem))
            step.training.feed.close()
    return found


def _bytes_of_rank(ranks: ProcessRanks, step: RankStep, problem: Problem) -> dict[str, Any]:
    """Mean bytes of a step, for this rank; of the loopback device, for all."""
    for _ in range(2):
        step(scheduled(problem))
    began = time.perf_counter()
    before = _tcp_counts(), _loopback_bytes()
    ranks.sent.clear()
    for _ in range(NUM_STEPS):
        step(scheduled(problem))
    sent = {what: count / NUM_STEPS for what, count in ranks.sent.items()}
    dist.barrier()
    time.sleep(0.05)  # until the last acknowledgement is in
    after = _tcp_counts(), _loopback_bytes()
    seconds = time.perf_counter() - began
    idle = _loopback_bytes()
    time.sleep(seconds)
    idle = _loopback_bytes() - idle
    dist.barrier()
    return {
        "sent": sent,
        "acknowledged": (after[0][0] - before[0][0]) / NUM_STEPS,
        "segments": (after[0][1] - before[0][1]) / NUM_STEPS,
        "loopback": (after[1] - before[1] - idle) / NUM_STEPS,
        "loopback_idle": idle / NUM_STEPS,
    }


def _tcp_counts() -> tuple[int, int]:
    """Bytes that the peers of this process's connections have acknowledged; segments sent."""
    acknowledged = segments = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= 144:
            acknowledged += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
            segments += struct.unpack_from("I", info, 136)[0]  # tcpi_segs_out
    return acknowledged, segments


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text("utf-8").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])  # sent
    raise SystemExit("/proc/net/dev has no loopback device")


# --- memory ---------------------------------------------------------------------------------------


def measure_memory(console: Console) -> list[dict[str, Any]]:
    problem = Problem(labels=10**7)
    free = proc_bytes("MemAvailable", "meminfo")
    if free < 8 * 2**30:
        raise SystemExit(f"10^7 labels need 8 GiB to be free, and {free / 2**30:.1f} are")
    rows = []
    for num_ranks in (1, 2):
        found = in_processes(num_ranks, _memory_of_rank, problem)
        held = memory_held(problem.shape(num_ranks))
        for rank, own in enumerate(found):
            rows.append({"ranks": num_ranks, "rank": rank, **own, "model": held})
            console.print(f"{num_ranks} ranks, rank {rank}: {own}")
    return rows


def _memory_of_rank(ranks: ProcessRanks, problem: Problem) -> dict[str, int]:
    """Peak bytes of this process, with what python and torch take before anything is made."""
    empty = {"empty_rss": proc_bytes("VmRSS"), "empty_anonymous": proc_bytes("RssAnon")}
    part = part_of(problem)
    step: Step
    step = whole_step(problem, part) if ranks.num_ranks == 1 else rank_step(problem, part, ranks)
    for _ in range(10):
        step(scheduled(problem))
    return {
        **empty,
        "peak_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "anonymous": proc_bytes("RssAnon"),
    }


# --- a real training ------------------------------------------------------------------------------


def measure_real(console: Console, *, num_ranks: int = 8) -> list[dict[str, Any]]:
    """The demonstration's S2M on place names: bytes of stretches of the training."""
    rows = []
    for loss in ("bowl", "softmax"):
        config = _demo_config(loss)
        dataset = open_data(config.data, console)
        counted = run_ranks(num_ranks, partial(_real_bytes, config=config, dataset=dataset))
        shape = _demo_shape(config, dataset, num_ranks)
        expected = bytes_sent(shape)
        for index, (first, last) in enumerate(STRETCHES):
            sent = {what: _mean([own[index][what] for own in counted]) for what in expected}
            row = {
                "loss": loss,
                "ranks": num_ranks,
                "steps": [first, last],
                "counted": sent,
                "model": expected,
                "kept_bounds": kept_label_bounds(shape),
            }
            rows.append(row)
            ratios = {what: round(sent[what] / expected[what], 3) for what in expected}
            total = sum(sent.values()) / sum(expected.values())
            console.print(f"{loss}, steps {first} to {last}: {total:.3f} of the model; {ratios}")
    return rows


def _demo_config(loss: str) -> Config:
    text = resources.files("evenhand").joinpath("presets", "demo-s2m.toml").read_text("utf-8")
    settings = tomllib.loads(text)
    settings["mining"]["method"] = "s2m"  # k' as it is at the end of the annealing
    settings["loss"] = settings.get("loss", {}) if loss == "bowl" else {"name": loss}
    return build_config(settings)


def _demo_shape(config: Config, dataset: Dataset, num_ranks: int) -> StepShape:
    part, mining = dataset.parts["train"], config.mining
    assert isinstance(part.features, Rows)
    pairs = part.positives.lengths()  # of each query: an example each
    weights = np.repeat(pairs, part.features.lengths())
    features = np.bincount(part.features.ids, weights=weights, minlength=dataset.num_features)
    num_pairs = len(part.positives.ids)
    return StepShape(
        num_ranks=num_ranks,
        num_labels=dataset.num_labels,
        batch_size=mining.batch_size,
        num_sampled_labels=mining.num_sampled_labels,
        num_hard_labels=mining.num_hard_labels,
        num_hard_examples=mining.num_counting,
        dim=config.model.embedding_dim,
        positives=law_of_counts(dataset.label_counts(), num_draws=num_pairs),
        features=law_of_counts(features, num_draws=num_pairs),
        num_features=dataset.num_features,
    )


def _real_bytes(ranks: Ranks, *, config: Config, dataset: Dataset) -> list[dict[str, float]]:
    """Mean bytes of a step in each stretch."""
    built = build_training(config, dataset, torch.device("cpu"), ranks=ranks)
    training, plan, step = built.training, built.plan, built.choose_step().step
    found = []
    for first, last in STRETCHES:
        while training.step < last:
            if training.step == first:
                ranks.sent.clear()
            step(plan.at_step(training.step, batch_size=training.feed.batch_size))
            training.step += 1
        found.append({what: count / (last - first) for what, count in ranks.sent.items()})
    training.feed.close()
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


PARTS = {
    "bytes": measure_bytes,
    "memory": measure_memory,
    "real": measure_real,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    console = Console()
    found = read_json(options.json) if options.json and options.json.exists() else {}
    for name in options.parts:
        found[name] = {**about_run(), "rows": PARTS[name](console)}
        if options.json:
            write_json(options.json, found)


if __name__ == "__main__":
    main()
