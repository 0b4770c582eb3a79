"""Why mining collapses a small two-tower model on `places`, and what trains it well.

    python benchmarks/collapse.py cases     the seven cases that were reported, on the test part
    python benchmarks/collapse.py tune      repairs, on validation queries alone

An alternate name is looked up among the main names of all cities. Queries and names are read by
one transformer over their first 24 bytes: 2 layers of width 48, 4 heads, feed-forward 128, no
dropout, mean-pooled, normalised. 128 pairs and 128 uniform negatives a step, softmax over 20 times
the cosines, AdamW at 5e-4. A run that is in the file of results is not run again; one that was
stopped goes on from its last checkpoint, which lies under --state.
"""

import argparse
import fcntl
import json
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenhand.data.places import load_places
from evenhand.data.text import normalize
from evenhand.files import write_json
from evenhand.kernels.selection import largest
from evenhand.losses import softmax_loss
from evenhand.mining import hardest_labels, mask_positives
from evenhand.risk import count_below, even_weights, top_weights
from machine import processor

RESULTS = Path(__file__).parent / "results" / "deep-collapse.json"
LENGTH, PAD, WIDTH, HEADS, LAYERS, HIDDEN = 24, 256, 48, 4, 2, 128
BATCH, SAMPLED, SCALE, RATE = 128, 128, 20.0, 5e-4
CHUNK = 128  # texts of about equal length that are encoded at once
NUM_VALIDATION, NUM_TEST, NUM_REPORTED = 10_000, 20_000, 1_500
LAST = 50  # steps over which the last loss is averaged

# k and k', and how k' is treated. Without a word on it, Algorithm 1: k' from the first step on.
CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "SNM": {"k": 16},
    "k' = 64": {"k_prime": 64},
    "k' annealed to 32": {"k_prime": 32, "anneal": 1.0},
    "k' annealed to 32, half the weight on the mean": {
        "k_prime": 32,
        "anneal": 1.0,
        "mined_share": 0.5,
    },
    "k = 16, k' = 64": {"k": 16, "k_prime": 64},
    "k' = 16": {"k_prime": 16},
}

# What might prevent the collapse, and more: see `objective` and `weights_of` for the words.
REPAIRS: dict[str, dict[str, Any]] = {
    "ceiling .5, k' = 32": {"k_prime": 32, "ceiling": 0.5},
    "hopeless left out, k' = 64": {"k_prime": 64, "hopeless": 1.0},
    "ceiling .5, k' = 32, half even": {
        "k_prime": 32,
        "ceiling": 0.5,
        "mined_share": 0.5,
        "even": True,
    },
    "8 left out, k' = 96": {"k_prime": 96, "dropped": 8},
    "mean": {},
    "ceiling .5, k' = 96": {"k_prime": 96, "ceiling": 0.5},
    "hopeless left out": {"hopeless": 1.0},
    "ceiling .7, k' = 64": {"k_prime": 64, "ceiling": 0.7},
    "warm-up of half, ceiling .7, k' = 64": {"k_prime": 64, "ceiling": 0.7, "warm_up": 0.5},
    "same text masked": {"masks_text": True},
    "hardest label skipped": {"skipped": 1},
    "4 hardest labels skipped": {"skipped": 4},
    "labels .1 above masked": {"masks_above": 0.1 * SCALE},
    "ceiling .9, k' = 32": {"k_prime": 32, "ceiling": 0.9},
}


# --- data -----------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    queries: Tensor  # (N, 24) bytes
    labels: Tensor  # (N,)
    scripts: list[str]  # of each query

    def take(self, positions: Tensor) -> "Pairs":
        scripts = [self.scripts[position] for position in positions.tolist()]
        return Pairs(self.queries[positions], self.labels[positions], scripts)


class Places(NamedTuple):
    names: Tensor  # (L, 24) bytes of the main names
    parts: dict[str, Pairs]
    counts: Tensor  # (L,) training pairs


def load() -> Places:
    dataset = load_places(num_buckets=2**10)
    assert dataset.label_names is not None
    names = [normalize(name[: name.rindex(" (")]) for name in dataset.label_names]
    parts = {}
    for part_name, part in dataset.parts.items():
        assert part.texts is not None
        queries = np.repeat(np.arange(len(part)), np.diff(part.positives.offsets))
        scripts, of_query = part.groups["script"].names, part.groups["script"].ids
        pairs = Pairs(
            to_bytes(list(part.texts))[torch.from_numpy(queries)],
            torch.from_numpy(np.array(part.positives.ids)).long(),
            [scripts[own] for own in np.array(of_query)[queries]],
        )
        if part_name != "train":  # a fixed sample, the same for all methods and seeds
            order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(20))
            pairs = pairs.take(order[: NUM_VALIDATION if part_name == "validation" else NUM_TEST])
        parts[part_name] = pairs
    return Places(to_bytes(names), parts, torch.from_numpy(dataset.label_counts()))


def to_bytes(texts: list[str]) -> Tensor:
    """(N, 24), padded with `PAD`."""
    table = np.full((len(texts), LENGTH), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        own = text.encode("utf-8")[:LENGTH]
        table[row, : len(own)] = np.frombuffer(own, dtype=np.uint8)
    return torch.from_numpy(table)


# --- model ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What `nn.TransformerEncoderLayer` computes; at this size in half the time."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """(N, T, W), (N, 1, 1, T) -> (N, T, W)."""
        size, length, _ = inputs.shape
        heads = self.attend(inputs).view(size, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (N, H, T, W / H)
        scores = queries @ keys.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + mask
        found = (scores.softmax(-1) @ values).transpose(1, 2).reshape(size, length, WIDTH)
        inputs = self.norms[0](inputs + self.join(found))
        outputs: Tensor = self.norms[1](inputs + self.narrow(F.relu(self.widen(inputs))))
        return outputs


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(PAD + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, texts: Tensor) -> Tensor:
        """(N, T) -> (N, W) of length 1."""
        is_byte = texts != PAD
        mask = torch.zeros(texts.shape).masked_fill(~is_byte, -1e9)[:, None, None]
        vectors = self.bytes(texts) + self.places.weight[: texts.shape[1]]
        for layer in self.layers:
            vectors = layer(vectors, mask)
        sums = (vectors * is_byte.unsqueeze(2)).sum(1)
        return F.normalize(sums / is_byte.sum(1, keepdim=True).clamp(min=1))

    def encode(self, texts: Tensor, chunk: int = CHUNK) -> Tensor:
        """The same, with texts of about equal length together, so that little is padding."""
        lengths = (texts != PAD).sum(1)
        order = lengths.argsort()
        parts = [self(texts[own, : max(1, int(lengths[own].max()))]) for own in order.split(chunk)]
        return torch.cat(parts)[order.argsort()]


# --- training -------------------------------------------------------------------------------------


class Step(NamedTuple):
    loss: Tensor  # () what is differentiated
    losses: Tensor  # (B,) of all examples


def objective(model: Encoder, places: Places, case: dict[str, Any], rows: Tensor,
              negatives: Tensor, progress: float) -> Step:  # fmt: skip
    """The loss of a batch: `rows` (B,) of the training pairs, `negatives` (M,) label ids."""
    pairs, labels = places.parts["train"], places.parts["train"].labels[rows]
    texts = torch.cat([pairs.queries[rows], places.names[labels], places.names[negatives]])
    queries, positives, others = model.encode(texts).split([BATCH, BATCH, SAMPLED])
    positive = SCALE * (queries * positives).sum(1)
    scores = mask_positives(SCALE * queries @ others.T, negatives, labels.unsqueeze(1))
    if case.get("masks_text"):  # other cities of the same name
        is_same = (places.names[labels].unsqueeze(1) == places.names[negatives]).all(2)
        scores = scores.masked_fill(is_same, -torch.inf)
    if case.get("masks_above"):  # labels that score above the positive
        is_above = scores.detach() > positive.detach().unsqueeze(1) + case["masks_above"]
        scores = scores.masked_fill(is_above, -torch.inf)
    skipped = case.get("skipped", 0)
    if skipped:
        scores = scores.scatter(1, hardest_labels(scores, skipped), -torch.inf)
    k = case.get("k", SAMPLED)
    losses = softmax_loss(positive, scores.gather(1, hardest_labels(scores, k)))
    return Step((weights_of(losses.detach(), case, k, progress) * losses).sum(), losses.detach())


def weights_of(losses: Tensor, case: dict[str, Any], k: int, progress: float) -> Tensor:
    """(B,) -> (B,): how much each example counts, at this part of the run."""
    warm = case.get("warm_up", 0.0)
    if progress < warm:
        return torch.full_like(losses, 1 / BATCH)
    count = case.get("k_prime", BATCH)
    if anneal := case.get("anneal"):
        count = round(BATCH + min(1.0, progress / anneal) * (count - BATCH))
    if ceiling := case.get("ceiling"):
        count = count_below(losses, count, ceiling=ceiling * float(np.log(k + 1)))
    share = case.get("mined_share", 1.0)
    if hopeless := case.get("hopeless"):
        is_out = losses > hopeless * float(np.log(k + 1))
        losses = losses.masked_fill(is_out, -torch.inf)
        count = min(count, BATCH - int(is_out.sum()))
    if case.get("even"):  # the same share, by examples that weigh the same
        return even_weights(
            losses,
            torch.zeros_like(losses),
            num_hard_examples=count,
            mined_share=share,
            num_dropped=case.get("dropped", 0),
        )
    if dropped := case.get("dropped"):
        losses = losses.scatter(0, losses.topk(dropped).indices, -torch.inf)
        count = min(count, BATCH - dropped)
    return share * top_weights(losses, num_hard_examples=count) + (1 - share) / BATCH


def train(places: Places, case: dict[str, Any], steps: int, seed: int, state: Path,
          watch: Any = None) -> tuple[Encoder, dict[str, Any]]:  # fmt: skip
    """The model, and what its losses were; `state` is the file of the checkpoint."""
    torch.manual_seed(seed)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    first, mined, losses, flat, seconds = 0, [], [], 0, 0.0
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first, mined, losses, flat, seconds = kept["progress"]
    num_pairs, num_labels = len(places.parts["train"].labels), len(places.names)
    collapsed = float(np.log(case.get("k", SAMPLED) + 1))
    began = time.process_time()
    for step in range(first, steps):
        draws = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        rows = torch.randint(num_pairs, (BATCH,), generator=draws)
        negatives = torch.randperm(num_labels, generator=draws)[:SAMPLED]
        found = objective(model, places, case, rows, negatives, step / steps)
        optimizer.zero_grad()
        found.loss.backward()
        if watch is not None:
            watch(step, model, rows, negatives, found)
        optimizer.step()
        mined, losses = [*mined, found.loss.item()][-LAST:], [*losses, found.losses.mean().item()]
        losses = losses[-LAST:]
        flat += abs(mined[-1] - collapsed) < 0.02 * collapsed
        if (step + 1) % 500 == 0 and step + 1 < steps:
            spent = seconds + time.process_time() - began
            state.parent.mkdir(parents=True, exist_ok=True)
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(kept | {"progress": [step + 1, mined, losses, flat, spent]}, state)
    return model, {
        "mined_loss": float(np.mean(mined)),
        "mean_loss": float(np.mean(losses)),
        "steps_at_the_loss_of_a_guess": int(flat),
        "cpu_seconds": round(seconds + time.process_time() - began, 1),
    }


# --- evaluation -----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: Encoder, places: Places, part: str) -> dict[str, Any]:
    """Recall@10 of pairs among all labels, over all and by script."""
    pairs = places.parts[part]
    names, which = torch.unique(places.names, dim=0, return_inverse=True)  # equal names tie
    vectors = model.encode(names)[which]
    queries = model.encode(pairs.queries)
    is_found = []
    for own, labels in zip(queries.split(500), pairs.labels.split(500), strict=True):
        first = largest(own @ vectors.T, 10).positions  # (b, 10)
        is_found.append((first == labels.unsqueeze(1)).any(1))
    found = torch.cat(is_found).double()
    probes = queries[:256]
    cosine = float((probes.sum(0).square().sum() - 256) / (256**2 - 256))
    scripts = np.array(pairs.scripts)
    by_script = {
        str(name): [int(found[torch.from_numpy(scripts == name)].sum()), int(count)]
        for name, count in zip(*np.unique(scripts, return_counts=True), strict=True)
    }
    return {
        "recall@10": float(found.mean()),
        f"recall@10 of {NUM_REPORTED}": float(found[:NUM_REPORTED].mean()),
        "query_cosine": cosine,
        "scripts": by_script,
    }


# --- commands -------------------------------------------------------------------------------------


def run(jobs: list[tuple[str, dict[str, Any], int, int, str]], options: argparse.Namespace) -> None:
    """Each job: name, case, steps, seed, part. Several processes may share the file."""
    places = load()
    for name, case, steps, seed, part in jobs:
        key = {"case": name, "steps": steps, "seed": seed, "part": part}
        if _find(options.out, key) is not None:
            continue
        file = "".join(sign if sign.isalnum() else "-" for sign in f"{name}-{steps}-{seed}")
        options.state.mkdir(parents=True, exist_ok=True)
        with open(options.state / f"{file}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # another process has it
            if _find(options.out, key) is not None:
                continue
            model, figures = train(places, case, steps, seed, options.state / f"{file}.pt")
            row = key | {"settings": case} | figures | evaluate(model, places, part)
            _add(options.out, row)
        shown = {name: value for name, value in row.items() if name != "scripts"}
        print(json.dumps(shown), flush=True)


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found
    machine = {"processor": processor(), "threads": torch.get_num_threads()}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"machine": machine | versions, "runs": []}


def _find(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    rows = _read(path)["runs"]
    return next((row for row in rows if key.items() <= row.items()), None)


def _add(path: Path, row: dict[str, Any]) -> None:
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = _read(path)
        content["runs"].append(row)
        write_json(path, content)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("cases", "tune"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="of the cases, by name")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--state", type=Path, default=Path("runs") / "collapse")
    options = parser.parse_args()
    chosen, part = (REPAIRS, "validation") if options.command == "tune" else (CASES, "test")
    steps = options.steps or 1000
    names = options.only or list(chosen)
    jobs = [(name, chosen[name], steps, seed, part) for seed in options.seeds for name in names]
    run(jobs, options)


if __name__ == "__main__":
    main()
