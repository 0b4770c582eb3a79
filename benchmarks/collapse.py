"""Why mining collapses a small two-tower model on `places`, and what trains it well.

    python benchmarks/collapse.py cases               the seven that were reported, on the test part
    python benchmarks/collapse.py tune                repairs, on validation queries alone
    python benchmarks/collapse.py final --steps 10000 the plain mean and the repair that was chosen
    python benchmarks/collapse.py show                the tables of docs/deep.md

An alternate name is looked up among the main names of all cities. Queries and names are read by
one transformer over their first 24 bytes: 2 layers of width 48, 4 heads, feed-forward 128, no
dropout, mean-pooled, normalised. 128 pairs and 128 uniform negatives a step, softmax over 20 times
the cosines, AdamW at 5e-4. Runs of one seed begin with the same weights and see the same batches.
All are trained at once, their weights stacked, which a GPU (--device cuda) does in a minute; on a
CPU name a few by --only and --seeds.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evenhand.files import write_text
from evenhand.losses import softmax_loss
from evenhand.risk import GOLDEN
from machine import processor

RESULTS = Path(__file__).parent / "results" / "deep-collapse.json"
LENGTH, PAD, WIDTH, HEADS, LAYERS, HIDDEN = 24, 256, 48, 4, 2, 128
BATCH, SAMPLED, SCALE, RATE = 128, 128, 20.0, 5e-4
CHUNK = 128
NUM_QUERIES = 20_000  # of validation, and of test
MIN_PAIRS = 100  # of a script, to be among the worst
LAST = 50  # steps over which the last loss is averaged

Case = dict[str, float]
DEFAULTS = {  # all labels and all examples, from the first step on
    "k": SAMPLED, "skipped": 0, "masks_text": 0, "masks_above": math.inf,
    "k_prime": BATCH, "anneal": 0, "warm_up": 0, "ceiling": math.inf,
    "hopeless": math.inf, "dropped": 0, "share": 1, "even": 0,
}  # fmt: skip
CASES: dict[str, Case] = {
    "mean": {},
    "SNM": {"k": 16},
    "k' = 64": {"k_prime": 64},
    "k' annealed to 32": {"k_prime": 32, "anneal": 1.0},
    "k' annealed to 32, half the weight on the mean": {"k_prime": 32, "anneal": 1.0, "share": 0.5},
    "k = 16, k' = 64": {"k": 16, "k_prime": 64},
    "k' = 16": {"k_prime": 16},
}
REPAIRS: dict[str, Case] = {
    "mean": {},
    "same text masked": {"masks_text": 1},
    "hardest label skipped": {"skipped": 1},
    "4 hardest labels skipped": {"skipped": 4},
    "labels .1 above masked": {"masks_above": 0.1 * SCALE},
    "warm-up of half, k' = 64, ceiling .7": {"k_prime": 64, "ceiling": 0.7, "warm_up": 0.5},
}
OF_EXAMPLES: dict[str, Case] = {
    "k' = 32, ceiling .5": {"k_prime": 32, "ceiling": 0.5},
    "k' = 32, ceiling .5, half even": {"k_prime": 32, "ceiling": 0.5, "share": 0.5, "even": 1},
    "k' = 32, ceiling .7": {"k_prime": 32, "ceiling": 0.7},
    "k' = 32, ceiling .7, half even": {"k_prime": 32, "ceiling": 0.7, "share": 0.5, "even": 1},
    "k' = 96, 8 left out": {"k_prime": 96, "dropped": 8},
    "k' = 96, hopeless left out": {"k_prime": 96, "hopeless": 1.0},
    "k' = 64, hopeless left out": {"k_prime": 64, "hopeless": 1.0},
    "k' = 32, hopeless left out": {"k_prime": 32, "hopeless": 1.0},
    "k' = 32, hopeless left out, half even": {
        "k_prime": 32, "hopeless": 1.0, "share": 0.5, "even": 1,
    },
}  # fmt: skip
for k in (128, 32, 16):
    REPAIRS |= {f"k = {k}": {"k": k}} if k < SAMPLED else {}
    REPAIRS |= {f"k = {k}, {name}": {"k": k} | own for name, own in OF_EXAMPLES.items()}
CHOSEN = "k = 32, k' = 32, ceiling .7"


# --- data -----------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    queries: Tensor  # (N, 24) bytes
    labels: Tensor  # (N,)
    scripts: Tensor  # (N,) of each query


class Places(NamedTuple):
    names: Tensor  # (L, 24) bytes of the main names
    parts: dict[str, Pairs]
    scripts: list[str]

    def to(self, device: torch.device) -> "Places":
        moved = {
            name: Pairs(*(own.to(device) for own in pairs)) for name, pairs in self.parts.items()
        }
        return Places(self.names.to(device), moved, self.scripts)


def load() -> Places:
    from evenhand.data.places import load_places
    from evenhand.data.text import normalize

    dataset = load_places(num_buckets=2**10)
    assert dataset.label_names is not None
    names = [normalize(name[: name.rindex(" (")]) for name in dataset.label_names]
    parts, scripts = (
        {},
        sorted({s for p in dataset.parts.values() for s in p.groups["script"].names}),
    )
    for part_name, part in dataset.parts.items():
        assert part.texts is not None
        queries = np.repeat(np.arange(len(part)), np.diff(part.positives.offsets))
        own_scripts = np.array([scripts.index(s) for s in part.groups["script"].names])
        pairs = [
            to_bytes(list(part.texts))[torch.from_numpy(queries)],
            torch.from_numpy(np.array(part.positives.ids)).long(),
            torch.from_numpy(own_scripts[np.array(part.groups["script"].ids)[queries]]),
        ]
        if part_name != "train":  # a fixed sample, the same for all methods and seeds
            order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(20))
            kept = order[:NUM_QUERIES]
            pairs = [own[kept] for own in pairs]
        parts[part_name] = Pairs(*pairs)
    return Places(to_bytes(names), parts, scripts)


def to_bytes(texts: list[str]) -> Tensor:
    """(N, 24), padded with `PAD`."""
    table = np.full((len(texts), LENGTH), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        own = text.encode("utf-8")[:LENGTH]
        table[row, : len(own)] = np.frombuffer(own, dtype=np.uint8)
    return torch.from_numpy(table)


# --- model ----------------------------------------------------------------------------------------

Weights = dict[str, Tensor]  # the first dimension is that of the runs


def make_weights(seed: int) -> Weights:
    """One run's weights, as `nn.Embedding`, `nn.Linear` and `nn.LayerNorm` draw them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "bytes": torch.randn(PAD + 1, WIDTH, generator=generator),
        "places": torch.randn(LENGTH, WIDTH, generator=generator),
    }
    sizes = {
        "attend": (WIDTH, 3 * WIDTH),
        "join": (WIDTH, WIDTH),
        "widen": (WIDTH, HIDDEN),
        "narrow": (HIDDEN, WIDTH),
    }
    for layer in range(LAYERS):
        for name, (width, out) in sizes.items():
            drawn = 2 * torch.rand(width + 1, out, generator=generator) - 1
            weights[f"{name}{layer}"], weights[f"{name}{layer}.bias"] = (
                drawn / math.sqrt(width)
            ).split([width, 1])
        for norm in "ab":
            weights[f"norm{norm}{layer}"] = torch.ones(1, WIDTH)
            weights[f"norm{norm}{layer}.bias"] = torch.zeros(1, WIDTH)
    return weights


def encode(weights: Weights, texts: Tensor) -> Tensor:
    """(R, N, T) -> (R, N, W) of length 1."""
    runs, size, length = texts.shape
    if runs == 1 and size > CHUNK:  # texts of about equal length together: little is padding
        lengths = (texts[0] != PAD).sum(1)
        order = lengths.argsort()
        parts = [encode(weights, texts[:, o, : int(lengths[o[-1]])]) for o in order.split(CHUNK)]
        return torch.cat(parts, 1)[:, order.argsort()]
    is_byte = texts != PAD
    mask = is_byte.view(-1, 1, 1, length)  # (R N, 1, 1, T)

    def linear(name: str, inputs: Tensor) -> Tensor:  # (R, N T, F)
        return torch.baddbmm(weights[f"{name}.bias"], inputs, weights[name])

    def normalized(name: str, inputs: Tensor) -> Tensor:
        return F.layer_norm(inputs, (WIDTH,)) * weights[name] + weights[f"{name}.bias"]

    own_bytes = texts + (PAD + 1) * torch.arange(runs, device=texts.device)[:, None, None]
    vectors = F.embedding(own_bytes, weights["bytes"].flatten(0, 1))  # (R, N, T, W)
    vectors = (vectors + weights["places"][:, None, :length]).flatten(1, 2)
    for layer in range(LAYERS):
        heads = linear(f"attend{layer}", vectors).view(-1, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (R N, H, T, W / H)
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        found = found.transpose(1, 2).reshape(runs, size * length, WIDTH)
        vectors = normalized(f"norma{layer}", vectors + linear(f"join{layer}", found))
        hidden = F.relu(linear(f"widen{layer}", vectors))
        vectors = normalized(f"normb{layer}", vectors + linear(f"narrow{layer}", hidden))
    sums = (vectors.view(runs, size, length, WIDTH) * is_byte.unsqueeze(3)).sum(2)
    return F.normalize(sums / is_byte.sum(2, keepdim=True).clamp(min=1), dim=2)


# --- training -------------------------------------------------------------------------------------


def as_columns(cases: list[Case], device: torch.device) -> dict[str, Tensor]:
    """(R, 1) of every setting."""
    return {
        name: torch.tensor([[float(case.get(name, default))] for case in cases], device=device)
        for name, default in DEFAULTS.items()
    }


def losses_of(vectors: Tensor, is_own: Tensor, is_same: Tensor, case: dict[str, Tensor]) -> Tensor:
    """(R, B + B + M, W) queries, positives, negatives; (R, B, M) twice -> (R, B)."""
    queries, positives, others = vectors.split([BATCH, BATCH, SAMPLED], 1)
    positive = SCALE * (queries * positives).sum(2)
    scores = SCALE * queries @ others.transpose(1, 2)
    own = {name: case[name].unsqueeze(2) for name in ("masks_above", "masks_text", "skipped", "k")}
    is_above = scores > positive.unsqueeze(2) + own["masks_above"]
    scores = scores.masked_fill(is_own | is_above | is_same & (own["masks_text"] > 0), -torch.inf)
    scores = scores.sort(2, descending=True).values
    places = torch.arange(SAMPLED, device=scores.device) - own["skipped"]
    scores = scores.masked_fill((places < 0) | (places >= own["k"]), -torch.inf)
    return softmax_loss(positive.flatten(), scores.flatten(0, 1)).view(len(scores), -1)


def weights_of(losses: Tensor, case: dict[str, Tensor], progress: float) -> Tensor:
    """(R, B) -> (R, B): how much each example counts, at this part of the run.

    In every run what `evenhand.risk` computes: `count_below`, then `top_weights`, mixed with the
    mean, or `even_weights`.
    """
    size = losses.shape[1]
    guess = (case["k"] + 1).log()  # the loss of a model that tells no labels apart
    part = torch.where(case["anneal"] > 0, (progress / case["anneal"]).clamp(max=1), 1)
    count = (size + part * (case["k_prime"] - size)).round()
    order = torch.arange(1, size + 1, device=losses.device)
    means = losses.sort(1, descending=True).values.cumsum(1) / order
    above = (means > case["ceiling"] * guess).sum(1, keepdim=True)
    count = torch.maximum(count, (above + 1).clamp(max=size))
    count = torch.where(progress < case["warm_up"], size, count)

    places = losses.argsort(1, descending=True).argsort(1)  # 0: the hardest
    is_out = (places < case["dropped"]) | (losses > case["hopeless"] * guess)
    keys = losses.masked_fill(is_out, -torch.inf)
    is_hard = (keys.argsort(1, descending=True).argsort(1) < count) & ~is_out
    share = case["share"]
    top = share * is_hard / is_hard.sum(1, keepdim=True).clamp(min=1) + (1 - share) / size
    easy, more = (1 - share) * count, share * (~is_out).sum(1, keepdim=True)
    is_spread = (order * GOLDEN % 2**32) < easy / (easy + more) * 2.0**32
    counts = (is_hard | is_spread) & ~is_out
    even = counts / counts.sum(1, keepdim=True)
    return torch.where(case["even"] > 0, even, top)


class Trained(NamedTuple):
    weights: Weights
    figures: list[dict[str, Any]]  # of each run


def train(places: Places, cases: list[Case], seeds: list[int], steps: int) -> Trained:
    """A run for each case, with the seed beside it."""
    device = places.names.device
    made = {seed: make_weights(seed) for seed in sorted(set(seeds))}
    weights = {
        name: torch.stack([made[seed][name] for seed in seeds]).to(device).requires_grad_()
        for name in made[seeds[0]]
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, fused=True)
    pairs, case = places.parts["train"], as_columns(cases, device)
    of_run = torch.tensor([list(made).index(seed) for seed in seeds], device=device)
    draws = {seed: torch.Generator().manual_seed(1_000_003 + seed) for seed in made}
    rows, others = (  # (steps, S, B) and (steps, S, M)
        torch.stack([
            torch.randint(many, (steps, size), generator=draw) for draw in draws.values()
        ], 1).to(device)
        for many, size in ((len(pairs.labels), BATCH), (len(places.names), SAMPLED))
    )  # fmt: skip
    guess = (case["k"] + 1).log().squeeze(1)
    mined, means, num_flat = [], [], torch.zeros(len(cases), device=device)
    for step in range(steps):
        labels = pairs.labels[rows[step]]
        names = places.names[torch.cat([labels, others[step]], 1)]  # (S, B + M, T)
        texts = torch.cat([pairs.queries[rows[step]], names], 1)[of_run]
        is_own = (labels.unsqueeze(2) == others[step].unsqueeze(1))[of_run]
        is_same = (names[:, :BATCH, None] == names[:, None, BATCH:]).all(3)[of_run]
        losses = losses_of(encode(weights, texts), is_own, is_same, case)
        objective = (weights_of(losses.detach(), case, step / steps) * losses).sum(1)  # (R,)
        optimizer.zero_grad()
        objective.sum().backward()
        optimizer.step()
        num_flat += ((objective - guess).abs() < 0.02 * guess).detach()
        if step >= steps - LAST:
            mined.append(objective.detach())
            means.append(losses.detach().mean(1))
    found = zip(*(torch.stack(own).mean(0).tolist() for own in (mined, means)), strict=True)
    return Trained(weights, [
        {"mined_loss": own[0], "mean_loss": own[1], "steps_at_the_loss_of_a_guess": int(flat)}
        for own, flat in zip(found, num_flat.tolist(), strict=True)
    ])  # fmt: skip


# --- evaluation -----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(weights: Weights, run: int, places: Places, part: str) -> dict[str, Any]:
    """Recall@10 of pairs among all labels, over all and by script. Labels that tie share a rank."""
    pairs = places.parts[part]
    own = {name: values[run : run + 1] for name, values in weights.items()}

    def vectors_of(texts: Tensor) -> Tensor:
        return torch.cat([encode(own, chunk.unsqueeze(0))[0] for chunk in texts.split(4096)])

    names, which = torch.unique(places.names, dim=0, return_inverse=True)
    vectors, queries = vectors_of(names), vectors_of(pairs.queries)
    sizes = torch.bincount(which).to(vectors.dtype)
    is_found = []
    for query_vectors, labels in zip(
        queries.split(1000), which[pairs.labels].split(1000), strict=True
    ):
        scores = query_vectors @ vectors.T  # (b, L')
        above = (scores > scores.gather(1, labels.unsqueeze(1))).to(sizes.dtype) @ sizes
        is_found.append(above + (sizes[labels] - 1) / 2 < 10)
    found = torch.cat(is_found).double()
    probes = queries[:256]
    counts = torch.bincount(pairs.scripts, minlength=len(places.scripts))
    hits = torch.bincount(pairs.scripts, found, minlength=len(places.scripts))
    return {
        "recall@10": float(found.mean()),
        "query_cosine": float((probes.sum(0).square().sum() - 256) / (256**2 - 256)),
        "scripts": {
            name: [int(hit), int(count)]
            for name, hit, count in zip(places.scripts, hits.tolist(), counts.tolist(), strict=True)
            if count
        },
    }


def recalls_of(rows: list[dict[str, Any]], scripts: list[str] | None = None) -> Tensor:
    """(runs,): recall@10 of all pairs, or of those of some scripts."""
    found = torch.tensor(
        [[row["scripts"][name] for name in scripts or row["scripts"]] for row in rows]
    )
    hits, counts = found.double().sum(1).T
    return hits / counts


def bad_scripts(rows: list[dict[str, Any]]) -> list[str]:
    """Those with enough pairs where the plain mean is below its average, the worst first."""
    plain = [row for row in rows if row["case"] == "mean"]
    names = [name for name, (_, count) in plain[0]["scripts"].items() if count >= MIN_PAIRS]
    by_script = {name: float(recalls_of(plain, [name]).mean()) for name in names}
    average = float(recalls_of(plain).mean())
    return sorted((name for name in names if by_script[name] < average), key=by_script.__getitem__)


# --- commands -------------------------------------------------------------------------------------


def run(cases: dict[str, Case], parts: list[str], options: argparse.Namespace) -> None:
    """Trains and evaluates; the rows go to the file, in place of older ones of the same runs."""
    device = torch.device(options.device)
    places, began = load().to(device), time.perf_counter()
    runs = [(seed, name) for seed in options.seeds for name in cases]
    own = [cases[name] for _, name in runs]
    trained = train(places, own, [seed for seed, _ in runs], options.steps)
    name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    content = json.loads(options.out.read_text("utf-8")) if options.out.exists() else []
    for part in parts:
        for position, (seed, case) in enumerate(runs):
            key = {"case": case, "steps": options.steps, "seed": seed, "part": part, "device": name}
            row = key | {"settings": cases[case], "torch": torch.__version__}
            row |= trained.figures[position] | evaluate(trained.weights, position, places, part)
            content = [other for other in content if not key.items() <= other.items()] + [row]
            print(json.dumps(key | {"recall@10": row["recall@10"]}), flush=True)
    write_text(options.out, "[\n" + ",\n".join(map(json.dumps, content)) + "\n]\n")
    print(f"{time.perf_counter() - began:.0f} s")


def show(content: list[dict[str, Any]]) -> None:
    """The tables of docs/deep.md."""

    def kind(row: dict[str, Any]) -> tuple[int, str, str]:
        return row["steps"], row["device"], row["part"]

    for steps, device, part in sorted(set(map(kind, content))):
        rows = [row for row in content if kind(row) == (steps, device, part)]
        plain = {row["seed"]: row for row in rows if row["case"] == "mean"}
        by_case: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["seed"] in plain:
                by_case.setdefault(row["case"], []).append(row)
        bad = bad_scripts([row for row in content if kind(row) == (steps, device, "validation")])
        print(f"\n{part}, {steps} steps, {device}; bad scripts: {', '.join(bad)}\n")
        print("| | recall@10 | gain, all | gain, bad scripts | loss | cosine |")
        print("|---|--:|--:|--:|--:|--:|")
        for name, own in by_case.items():
            before = [plain[row["seed"]] for row in own]
            figures = [f"{np.mean([row['recall@10'] for row in own]):.4f}"]
            for scripts in (None, bad):
                gain = 100 * (recalls_of(own, scripts) - recalls_of(before, scripts))
                spread = f" ± {gain.std():.2f}" if len(own) > 1 else ""
                figures.append(f"{gain.mean():+.2f}{spread}")
            figures.append(f"{np.mean([row['mined_loss'] for row in own]):.2f}")
            figures.append(f"{np.mean([row['query_cosine'] for row in own]):.2f}")
            print(f"| {name} | {' | '.join(figures)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("cases", "tune", "final", "show"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="of the cases, by name")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "show":
        show(json.loads(options.out.read_text("utf-8")))
        return
    cases, parts = {
        "cases": (CASES, ["test"]),
        "tune": (REPAIRS, ["validation"]),
        "final": ({name: REPAIRS[name] for name in ("mean", CHOSEN)}, ["validation", "test"]),
    }[options.command]
    run({name: cases[name] for name in options.only or cases}, parts, options)


if __name__ == "__main__":
    main()
