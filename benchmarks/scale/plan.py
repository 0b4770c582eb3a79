"""The plan for 10^9 labels and 10^10 examples: machines, memory, network and hours.

    python benchmarks/scale/plan.py
    python benchmarks/scale/plan.py --ranks 64 --batch-size 131072 --gigabits 200

Bytes and memory are those of `experiments.step_costs`. Time is the sum of three parts, none of
them overlapped: computing, at the measured time of a step on one H200 (benchmarks/results/
speed-gpu.json, and docs/speed.md for plain torch) times the examples of a rank over those of the
measured step; sending, at the share of the link that is assumed to be used; and waiting, once for
every message. The last two are assumptions: NCCL over several GPUs has not been run by us.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

sys.path.append(str(Path(__file__).parents[2]))  # for `experiments`
from experiments.scaling_laws import in_bags, zipf_law
from experiments.step_costs import StepShape, bytes_sent, flops, memory_held, touched

RESULTS = Path(__file__).parents[1] / "results"
NUM_LABELS, NUM_EXAMPLES = 10**9, 10**10
NUM_FEATURES, FEATURES_A_QUERY = 10**7, 20
GPU_BYTES = 139 * 2**30  # of an H200
RANKS_A_MACHINE = 8
LINK_USE = 0.7  # of the link's rate
LATENCY = 50e-6  # seconds for every message of a step
NUM_MESSAGES = 13  # all-to-alls and gathers of a step with sparse features
DISK_RATE = 2e9  # bytes a second that a machine writes
PLAIN_STEP = (29.0 / 3000, 1024)  # the demonstration in plain torch on an H200: seconds, examples
EXAMPLE_BYTES = 4 * FEATURES_A_QUERY + 8 + 16  # feature ids, a label, offsets


@dataclasses.dataclass(frozen=True)
class Plan:
    ranks: int
    batch_size: int
    gigabits: float  # of each rank's link


PLANS = (
    Plan(8, 16_384, 400),
    Plan(32, 4_096, 400),
    Plan(32, 65_536, 400),
    Plan(32, 65_536, 100),
    Plan(128, 262_144, 400),
)


def shape_of(plan: Plan) -> StepShape:
    return StepShape(
        num_ranks=plan.ranks,
        num_labels=NUM_LABELS,
        batch_size=plan.batch_size,
        num_sampled_labels=4096,
        num_hard_labels=64,
        num_hard_examples=plan.batch_size // 4,
        dim=128,
        positives=zipf_law(NUM_LABELS),
        features=in_bags(zipf_law(NUM_FEATURES), FEATURES_A_QUERY),
        num_features=NUM_FEATURES,
        table_bytes=2,
    )


def recorded_step() -> tuple[float, int]:
    """Seconds and examples of the whole step of an epoch, encoder included, one CUDA graph."""
    rows = json.loads((RESULTS / "speed-gpu.json").read_text("utf-8"))
    (epoch,) = [row for row in rows if "milliseconds_a_step" in row]
    return epoch["milliseconds_a_step"] / 1000, epoch["batch_size"]


def figures_of(plan: Plan) -> dict[str, Any]:
    """All figures of a plan, with what they are made from."""
    shape = shape_of(plan)
    sent, held = sum(bytes_sent(shape).values()), memory_held(shape)
    num_steps = NUM_EXAMPLES / plan.batch_size
    sending = sent / (plan.gigabits / 8 * 1e9 * LINK_USE)
    waiting = NUM_MESSAGES * LATENCY
    share = shape.share
    times = {}
    for name, (seconds, examples) in (("plain", PLAIN_STEP), ("recorded", recorded_step())):
        # A step of fewer examples is no quicker than the measured one: launches dominate.
        times[name] = seconds * max(1.0, share / examples) + sending + waiting
    gpu = sum(held.values()) - held["checkpoint staging"]
    machines = -(-plan.ranks // RANKS_A_MACHINE)
    return {
        "machines": machines,
        "share": share,
        "gpu_bytes": gpu,
        "gpu_share": gpu / GPU_BYTES,
        "staging_bytes": held["checkpoint staging"] * min(plan.ranks, RANKS_A_MACHINE),
        "checkpoint_bytes": held["checkpoint staging"] * plan.ranks,
        "checkpoint_seconds": held["checkpoint staging"] * plan.ranks / machines / DISK_RATE,
        "sent": sent,
        "sending": sending,
        "waiting": waiting,
        "steps": num_steps,
        "hours": {name: num_steps * seconds / 3600 for name, seconds in times.items()},
        "step_seconds": times,
        "read_rate": NUM_EXAMPLES * EXAMPLE_BYTES / (num_steps * times["plain"]) / machines,
        "flops": sum(flops(shape).values()),
        "rows": touched(shape),
    }


def table(plans: Sequence[Plan] = PLANS) -> list[str]:
    """Lines of a table in Markdown, a column for each plan."""
    found = [figures_of(plan) for plan in plans]
    rows: dict[str, list[str]] = {
        "GPUs (machines of 8)": [
            f"{plan.ranks} ({own['machines']})" for plan, own in zip(plans, found, strict=True)
        ],
        "batch, and examples a rank": [
            f"{plan.batch_size:,}, {own['share']:,.0f}"
            for plan, own in zip(plans, found, strict=True)
        ],
        "link of a GPU, Gb/s (assumed)": [f"{plan.gigabits:g}" for plan in plans],
        "GB held by a GPU (of 149)": [f"{own['gpu_bytes'] / 1e9:.1f}" for own in found],
        "GB staged by a machine for a checkpoint": [
            f"{own['staging_bytes'] / 1e9:.0f}" for own in found
        ],
        "label rows looked up, feature rows": [
            f"{own['rows'].labels:,.0f}, {own['rows'].features:,.0f}" for own in found
        ],
        "MB sent by a rank in a step": [f"{own['sent'] / 1e6:.2f}" for own in found],
        "ms to send them": [f"{1000 * own['sending']:.2f}" for own in found],
        "ms of latency (13 messages, assumed)": [f"{1000 * own['waiting']:.2f}" for own in found],
        "Gflop of a rank in a step": [f"{own['flops'] / 1e9:.1f}" for own in found],
        "steps": [f"{own['steps']:,.0f}" for own in found],
        "ms a step, plain torch": [f"{1000 * own['step_seconds']['plain']:.1f}" for own in found],
        "**hours, plain torch**": [f"**{own['hours']['plain']:.1f}**" for own in found],
        "ms a step, if recorded": [
            f"{1000 * own['step_seconds']['recorded']:.2f}" for own in found
        ],
        "hours, if recorded": [f"{own['hours']['recorded']:.2f}" for own in found],
        "MB/s of examples read by a machine": [f"{own['read_rate'] / 1e6:,.0f}" for own in found],
        "seconds to write a checkpoint (2 GB/s a machine)": [
            f"{own['checkpoint_seconds']:.0f}" for own in found
        ],
    }
    heads = [chr(ord("A") + index) for index in range(len(plans))]
    lines = [f"| plan | {' | '.join(heads)} |", "|---" * (len(plans) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def arithmetic(plan: Plan) -> list[str]:
    """How the figures of a plan come about, line by line."""
    own, shape = figures_of(plan), shape_of(plan)
    rows, others = own["rows"], (plan.ranks - 1) / plan.ranks
    plain_seconds, plain_examples = PLAIN_STEP
    plain = plain_seconds * max(1.0, own["share"] / plain_examples)
    return [
        f"tables: ({NUM_LABELS:,} + {NUM_FEATURES:,}) rows x 128 x 2 bytes / {plan.ranks} ranks = "
        f"{memory_held(shape)['tables'] / 1e9:.2f} GB; optimiser 4 bytes a row: "
        f"{memory_held(shape)['optimiser'] / 1e9:.2f} GB",
        f"looked up by a rank: {rows.labels:,.0f} label rows (4,096 sampled, the rest positives) "
        f"and {rows.features:,.0f} feature rows x 256 bytes x {others:.3f} held by others",
        f"gradients of a rank: {rows.label_gradients:,.0f} label rows and "
        f"{rows.feature_gradients:,.0f} feature rows x 512 bytes (float32) x {others:.3f}",
        *(f"  {what}: {count:,.0f} bytes" for what, count in bytes_sent(shape).items()),
        f"sent: {own['sent']:,.0f} bytes / ({plan.gigabits:g} Gb/s / 8 x {LINK_USE}) = "
        f"{1000 * own['sending']:.2f} ms",
        f"computing, plain torch: {1000 * plain_seconds:.2f} ms for {plain_examples:,} examples, "
        f"so {1000 * plain:.1f} ms for {own['share']:,.0f}",
        f"hours: {own['steps']:,.0f} steps x {1000 * own['step_seconds']['plain']:.1f} ms "
        f"/ 3600 s = {own['hours']['plain']:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--gigabits", type=float, default=400)
    options = parser.parse_args(arguments)
    console = Console()
    plan = Plan(options.ranks, options.batch_size, options.gigabits)
    if plan in PLANS:
        console.print(Markdown("\n".join(table())))
    console.print(f"{plan.ranks} ranks, batch {plan.batch_size:,}, {plan.gigabits:g} Gb/s:")
    for line in arithmetic(plan):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
