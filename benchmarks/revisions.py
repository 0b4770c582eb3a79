"""The demo's training step now, beside the same step at another revision of this repository.

    python benchmarks/revisions.py REVISION

Both run as processes of their own that take turns, a few steps each, so that whatever else the
machine does slows both alike. The turns are spread over the demo's run, in which k' shrinks. What
is printed are the medians of the rounds, and of their ratios.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]

WORKER = """
import sys, time
import torch
from rich.console import Console
try:
    from evenhand.build import build_training
    from evenhand.runs import open_data
    from evenhand.training.step import train_step
except ImportError:  # an older revision
    from evenhand.building import build_training
    from evenhand.runs import open_data
    from evenhand.training.loop import train_step
from evenhand.config import build_config, read_preset
from evenhand.training.schedules import learning_rate_at, num_hard_examples_at

config = build_config(read_preset(f"demo-{sys.argv[1]}"))
built = build_training(config, open_data(config.data, Console(quiet=True)), torch.device("cpu"))
training, plan = built.training, built.plan

def take_step(step):
    rate = learning_rate_at(step, num_steps=plan.num_steps, peak=plan.learning_rate)
    num_hard_examples = num_hard_examples_at(
        step, num_steps=plan.num_steps, batch_size=training.feed.batch_size,
        num_hard_examples=plan.num_hard_examples, anneal_fraction=plan.anneal_fraction)
    if hasattr(plan, "at_step"):
        train_step(training, plan, plan.at_step(step, batch_size=training.feed.batch_size))
    else:
        train_step(training, plan, sampler=built.sampler, loss_fn=built.loss_fn,
                   learning_rate=rate, num_hard_examples=num_hard_examples)

for line in sys.stdin:
    share, num_steps = line.split()
    start = time.perf_counter()
    for _ in range(int(num_steps)):
        take_step(int(float(share) * (plan.num_steps - 1)))
    print((time.perf_counter() - start) / int(num_steps), flush=True)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("revision", help="what git calls the other one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=40, help="of each, in a round")
    options = parser.parse_args(arguments)
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="evenhand-revision-") as folder:
        other = Path(folder) / "other"
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(other), options.revision], check=True
        )
        try:
            for method in ("snm", "s2m"):
                before, now = _times(method, [other, ROOT], options.rounds, options.steps)
                ratio = median(old / new for old, new in zip(before, now, strict=True))
                print(
                    f"{method}: {1e3 * median(before):.1f} ms a step at {options.revision}, "
                    f"{1e3 * median(now):.1f} ms now: {ratio:.2f} times as fast",
                    flush=True,
                )
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)


def _times(method: str, roots: list[Path], rounds: int, steps: int) -> list[list[float]]:
    """Seconds a step, of each root in each round."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, method],
            env={**os.environ, "PYTHONPATH": str(root / "src"), "GOMP_SPINCOUNT": "2000"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for root in roots
    ]
    times = [[_turn(worker, turn / rounds, steps) for worker in workers] for turn in range(rounds)]
    for worker in workers:
        worker.communicate()
    return [list(own) for own in zip(*times[1:], strict=True)]  # the first round warms up


def _turn(worker: subprocess.Popen[str], share: float, steps: int) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{share} {steps}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


if __name__ == "__main__":
    main()
