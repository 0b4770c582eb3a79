"""Steps of 8 to 512 ranks, their bytes counted and not sent: how many, and how evenly.

    python benchmarks/scale/simulate.py --json benchmarks/results/scaling-simulation.json
    python benchmarks/scale/simulate.py --ranks 8 32        fewer ranks, seconds

Ranks are threads of one process and run the code of `evenhand.distributed`. `exchange` is what a
step says through it, for a table of 10^9 labels that is one row shown 10^9 times: the ids of a
uniform sample, of Zipf positives, of bags of Zipf features, and of what random survivors keep. Ids
are in order of frequency, so that the first ranks own all that is frequent, or in random order.
The batch is 4,096 examples for all ranks together (`fixed`), or 256 for each (`growing`).

`load` is the busiest rank over the mean one, for bytes sent, bytes received, and rows that owners
are asked for.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problem import (
    Problem,
    about_run,
    shuffled,
    zipf_ids,
)
from rich.console import Console
from torch import Tensor

from evenhand.distributed.ranks import Ranks, Shards, share_of
from evenhand.distributed.row_exchange import RowExchange, sorted_distinct_ids
from evenhand.files import write_json
from evenhand.models import RowGradients
from evenhand.sampling import UniformSampler

sys.path.append(str(Path(__file__).parents[2]))  # for `experiments`
from experiments.scaling_laws import zipf_law
from experiments.simulated_ranks import run_ranks
from experiments.step_costs import bytes_sent, owed_rows, touched

RANKS = (8, 32, 128, 512)
FIXED_BATCH, SHARE = 4096, 256
DTYPE = torch.bfloat16
TIMEOUT = 900.0  # seconds: hundreds of threads share a few cores


def problem_of(num_ranks: int, batch: str) -> Problem:
    size = FIXED_BATCH if batch == "fixed" else SHARE * num_ranks
    return Problem(
        labels=10**9,
        batch_size=size,
        hard_examples=size // 4,
        features=10**7,
        positive_exponent=1.0,
        queries=size,
    )


class CountedRanks:
    """Ranks that also count the bytes that they receive."""

    def __init__(self, ranks: Ranks) -> None:
        self.inner, self.received = ranks, 0
        self.rank, self.num_ranks, self.sent = ranks.rank, ranks.num_ranks, ranks.sent

    def start_exchange(
        self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str
    ) -> Callable[[], Tensor]:
        size = rows.shape[1:].numel() * rows.element_size()
        self.received += (sum(received) - received[self.rank]) * size
        return self.inner.start_exchange(rows, sent=sent, received=received, what=what)

    def gather(self, rows: Tensor, *, counts: Sequence[int], what: str) -> Tensor:
        size = rows.shape[1:].numel() * rows.element_size()
        self.received += max(counts) * size * (self.num_ranks - 1)
        return self.inner.gather(rows, counts=counts, what=what)

    def sum_(self, values: Tensor, *, what: str) -> Tensor:
        return self.inner.sum_(values, what=what)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The ids of a step of all ranks."""

    problem: Problem
    sampled: Tensor  # (M,)
    positives: Tensor  # (B,)
    features: Tensor  # (B, F)
    survives: Tensor  # (B,)


def stream_of(problem: Problem, *, is_shuffled: bool, seed: int) -> Stream:
    generator, size = np.random.default_rng(seed), problem.batch_size
    positives = zipf_ids(generator, problem.labels, size, exponent=problem.positive_exponent)
    bags = zipf_ids(generator, problem.features, size * problem.features_a_query, exponent=1.0)
    if is_shuffled:
        positives = shuffled(positives, problem.labels)
        bags = shuffled(bags, problem.features)
    sample = UniformSampler(problem.labels).sample(
        torch.zeros(1, 1, dtype=torch.long),
        problem.sampled,
        generator=torch.Generator().manual_seed(seed),
    )
    survives = torch.zeros(size, dtype=torch.bool)
    survives[generator.permutation(size)[: problem.hard_examples]] = True
    return Stream(
        problem,
        sample.ids,
        torch.from_numpy(positives),
        torch.from_numpy(bags).view(size, -1),
        survives,
    )


def exchanged(ranks: Ranks, *, streams: Sequence[Stream]) -> dict[str, float]:
    """What a rank says in these steps: means of bytes and rows."""
    counted = CountedRanks(ranks)
    owed_labels = owed_features = updated = 0
    for seed, stream in enumerate(streams):
        problem, own = (
            stream.problem,
            slice(*share_of(len(stream.positives), ranks.rank, ranks.num_ranks)),
        )
        generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
        labels = RowExchange("labels", problem.labels, counted)
        features = RowExchange("features", problem.features, counted)
        wanted = [stream.sampled, stream.positives[own]]
        owed_labels += _looked_up(labels, torch.cat(wanted), problem)
        owed_features += _looked_up(features, stream.features[own].flatten(), problem)
        counts = [
            len(range(*share_of(problem.batch_size, r, ranks.num_ranks)))
            for r in range(ranks.num_ranks)
        ]
        losses = torch.zeros(counts[ranks.rank], 4, dtype=torch.float64)
        counted.gather(losses, counts=counts, what="losses")
        alive = stream.survives[own]
        kept = torch.rand(int(alive.sum()), problem.sampled, generator=generator)
        kept = kept.topk(problem.hard_labels, dim=1).indices  # (survivors, k)
        touched_labels = torch.cat([stream.positives[own][alive], stream.sampled[kept].flatten()])
        updated += _brought(labels, touched_labels, problem)
        updated += _brought(features, stream.features[own][alive].flatten(), problem)
    return {
        **{f"sent, {what}": count / len(streams) for what, count in ranks.sent.items()},
        "sent": ranks.sent.total() / len(streams),
        "received": counted.received / len(streams),
        "owed label rows": owed_labels / len(streams),
        "owed feature rows": owed_features / len(streams),
        "updated rows": updated / len(streams),
    }


def _looked_up(rows: RowExchange, ids: Tensor, problem: Problem) -> int:
    """Asks for rows of a table that takes no memory; how many rows others asked of this one."""
    request = rows.request(sorted_distinct_ids(ids)[0])
    own = rows.shards.rows_of(rows.ranks.rank)
    table = torch.zeros(1, problem.dim, dtype=DTYPE).expand(own.size, -1)
    rows.start_fetch(request, table)()
    return len(request.owed_rows)


def _brought(rows: RowExchange, ids: Tensor, problem: Problem) -> int:
    """Brings gradients to their owners; how many rows this one updates."""
    ids = sorted_distinct_ids(ids)[0]
    return len(rows.sum_gradients(RowGradients(ids, torch.zeros(len(ids), problem.dim))).ids)


def simulated_exchange(num_ranks: int, batch: str, order: str, *, steps: int) -> dict[str, Any]:
    problem = problem_of(num_ranks, batch)
    is_shuffled = order == "random"
    streams = [stream_of(problem, is_shuffled=is_shuffled, seed=seed) for seed in range(steps)]
    began = time.perf_counter()
    found = run_ranks(num_ranks, partial(exchanged, streams=streams), timeout=TIMEOUT)
    shape = dataclasses.replace(problem.shape(num_ranks), table_bytes=2)
    expected = bytes_sent(shape)
    names = found[0].keys()
    means = {name: float(np.mean([own[name] for own in found])) for name in names}
    row = {
        "ranks": num_ranks,
        "batch": batch,
        "order": order,
        **dataclasses.asdict(problem),
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "mean": means,
        "load": {
            name: max(own[name] for own in found) / max(means[name], 1e-9)
            for name in ("sent", "received", "owed label rows", "owed feature rows", "updated rows")
        },
        "model": {"sent": sum(expected.values()), **expected},
    }
    if order == "frequency":
        rows = Shards(problem.labels, num_ranks).rows_of(0)
        first = zipf_law(problem.labels, rows=(rows.first, rows.last))
        expected_rows = owed_rows(shape, first, range_rows=rows.size)
        row["model"]["load of owed label rows"] = expected_rows / touched(shape).labels
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    found: dict[str, Any] = {"exchange": {**about_run(), "rows": []}}
    for num_ranks, batch, order in itertools.product(
        options.ranks, ("fixed", "growing"), ("random", "frequency")
    ):
        row = simulated_exchange(num_ranks, batch, order, steps=max(1, 64 // num_ranks))
        found["exchange"]["rows"].append(row)
        loads = {what: round(load, 3) for what, load in row["load"].items()}
        console.print(
            f"{num_ranks} ranks, batch {row['batch_size']:,} {order}: "
            f"{row['mean']['sent']:,.0f} bytes, model "
            f"{row['model']['sent'] / row['mean']['sent'] - 1:+.2%}, load {loads}, "
            f"{row['seconds']} s"
        )
        if options.json:
            write_json(options.json, found)


if __name__ == "__main__":
    main()
