"""Losses for two towers at equal time on real text: ours, and those of sentence-transformers.

    python benchmarks/deep_text.py places
    python benchmarks/deep_text.py FOLDER       # with docs.jsonl.xz of debian-deps

Descriptions of packages find the names of those they depend on; alternate names of places the main
ones. One small transformer reads both as pieces of bytes; it and its tokenizer are made on the
spot. Every method has the same batches of 128 pairs, the other labels of the batch as
negatives, softmax over 20 times the cosines, AdamW at 1e-3, and the same seconds of CPU time.
Nothing is tuned. Half of the held-out queries are for validation: by them the worst groups are
fixed, the fifth of the pairs that the first method serves worst by section or script.
"""

import argparse
import json
import lzma
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as peers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from evenhand import S2MLoss
from evenhand.data.places import load_places
from evenhand.files import write_text
from machine import processor

RESULTS = Path(__file__).parent / "results" / "deep-text.json"
VOCABULARY, WIDTH, LENGTH, BATCH, SCALE = 4000, 64, 32, 128, 20.0
NUM_HELD_OUT, MIN_PAIRS = 4000, 50

# What S2MLoss is given; SNM keeps all examples, even-handed mining knows how rare labels are.
MINERS: dict[str, dict[str, Any]] = {
    "plain": {"num_hard_labels": BATCH, "tail_fraction": 1.0},
    "SNM, k = 32": {"num_hard_labels": 32, "tail_fraction": 1.0},
    "S2M, half on the mean": {"num_hard_labels": 32, "anneal_steps": 400},
    "S2M": {"num_hard_labels": 32, "mined_share": 1.0, "anneal_steps": 400},
    "S2M without ceiling": {
        "num_hard_labels": 32, "mined_share": 1.0, "anneal_steps": 400, "loss_ceiling": 1e9,
    },
    "even-handed": {"num_hard_labels": 32, "anneal_steps": 400},
}  # fmt: skip
PEERS = ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss")


class Pairs(NamedTuple):
    texts: list[str]
    positives: list[list[int]]  # label ids
    groups: list[str]


class Data(NamedTuple):
    labels: list[str]
    parts: dict[str, Pairs]  # train, validation, test


def load(source: str) -> Data:
    if source == "places":
        dataset = load_places(num_buckets=2**10)
        assert dataset.label_names is not None
        parts = {}
        for name, part in dataset.parts.items():
            assert part.texts is not None
            ids = np.split(np.array(part.positives.ids), part.positives.offsets[1:-1])
            positives = [own.tolist() for own in ids]
            scripts = np.array(part.groups["script"].names)[np.array(part.groups["script"].ids)]
            parts[name] = Pairs(list(part.texts), positives, scripts.tolist())
        names = [name[: name.rindex(" (")].lower() for name in dataset.label_names]
    else:
        with lzma.open(Path(source) / "docs.jsonl.xz", "rt", encoding="utf-8") as file:
            docs = [json.loads(line) for line in file]
        names = sorted({label for doc in docs for label in doc["labels"]})
        ids = {name: position for position, name in enumerate(names)}
        parts = {}
        for part in ("train", "test"):
            own = [doc for doc in docs if doc["split"] == part and doc["labels"]]
            positives = [[ids[label] for label in doc["labels"]] for doc in own]
            texts = [doc["text"] for doc in own]
            parts[part] = Pairs(texts, positives, [doc["group"] for doc in own])
    held_out = parts["test"]
    order = np.random.default_rng(0).permutation(len(held_out.texts))[: 2 * NUM_HELD_OUT]
    for name, rows in (("validation", order[::2]), ("test", order[1::2])):
        parts[name] = Pairs(*([own[row] for row in rows] for own in held_out))
    return Data(names, parts)


class Reader(nn.Module):
    """Tokens (B, T), padded with 0, to the mean of a transformer's last layer, in the features."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, is_token = features["input_ids"], features["attention_mask"]
        inputs = self.tokens(ids) + self.places[: ids.shape[1]]
        found = self.layers(inputs, src_key_padding_mask=~is_token)
        sums = (found * is_token.unsqueeze(2)).sum(1)
        return features | {"sentence_embedding": sums / is_token.sum(1, keepdim=True).clamp(min=1)}


def make_tokens(texts: list[str], data: Data) -> Callable[[list[str]], dict[str, Tensor]]:
    """A byte-level BPE of these texts and the labels; what it gives is cut to `LENGTH` pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["[PAD]"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([*texts, *data.labels], trainer)
    tokenizer.enable_truncation(LENGTH)

    def features_of(own: list[str]) -> dict[str, Tensor]:
        rows = [found.ids for found in tokenizer.encode_batch(own)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": ids != 0}

    return features_of


def train(data: Data, features_of: Any, method: str, seed: int, seconds: float) -> tuple[Any, int]:
    """The model, and how many steps it had time for."""
    torch.manual_seed(seed)
    model = SentenceTransformer(modules=[Reader()], device="cpu").train()
    optimizer, part = torch.optim.AdamW(model.parameters(), 1e-3), data.parts["train"]
    pairs = [(row, label) for row, own in enumerate(part.positives) for label in own]
    counts = torch.bincount(torch.tensor([label for _, label in pairs]), minlength=len(data.labels))
    if method in PEERS:
        options = {"mini_batch_size": 32} if method.startswith("Cached") else {}
        peer = getattr(peers, method)(model, scale=SCALE, **options)
    else:
        own_counts = counts if method == "even-handed" else None
        mined = S2MLoss(label_counts=own_counts, **MINERS[method])
    draws, began, step = np.random.default_rng(seed), time.process_time(), 0
    while time.process_time() - began < seconds:
        chosen = [pairs[row] for row in draws.integers(len(pairs), size=BATCH)]
        columns = [
            features_of([part.texts[row] for row, _ in chosen]),
            features_of([data.labels[label] for _, label in chosen]),
        ]
        if method in PEERS:
            loss = peer(columns, torch.zeros(BATCH))
        else:
            queries, labels = (F.normalize(model(own)["sentence_embedding"]) for own in columns)
            right = [part.positives[row] for row, _ in chosen]  # all of them: no negatives
            width = max(map(len, right))
            others = torch.tensor([own + [-1] * (width - len(own)) for own in right])
            ids = torch.tensor([label for _, label in chosen])
            is_held_out = torch.tensor([row % 200 == 0 for row, _ in chosen])
            loss = mined(
                SCALE * queries, labels, ids, positive_ids=others,
                is_held_out=is_held_out if method == "even-handed" else None,
            )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    return model.eval(), step


@torch.no_grad()
def evaluate(model: Any, data: Data, features_of: Any, part: str) -> dict[str, Any]:
    """Recall@10 of the pairs: [found, all] over all, by group, and by how frequent the label is."""

    def vectors_of(texts: list[str]) -> Tensor:
        order = np.argsort([len(text) for text in texts])
        chunks = [order[start : start + 512] for start in range(0, len(order), 512)]
        found = [
            model(features_of([texts[i] for i in own]))["sentence_embedding"] for own in chunks
        ]
        return F.normalize(torch.cat(found))[torch.from_numpy(order.argsort())]

    own, labels = data.parts[part], vectors_of(data.labels)
    counts = np.bincount(
        [label for row in data.parts["train"].positives for label in row],
        minlength=len(data.labels),
    )
    first = [(chunk @ labels.T).topk(10).indices for chunk in vectors_of(own.texts).split(500)]
    sums: dict[str, list[int]] = {}
    for found, right, group in zip(
        torch.cat(first).tolist(), own.positives, own.groups, strict=True
    ):
        for label in right:
            size = "label unseen" if not counts[label] else "label in 1-9 pairs"
            size = size if counts[label] < 10 else "label in 10-99 pairs"
            size = size if counts[label] < 100 else "label in 100 pairs or more"
            for name in ("all", size, group):
                total = sums.setdefault(name, [0, 0])
                total[0] += label in found
                total[1] += 1
    return {"pairs": sums}


def worst_groups(rows: list[dict[str, Any]]) -> list[str]:
    """The groups that `plain` serves worst on validation, up to a fifth of all pairs."""
    plain = [
        row["pairs"] for row in rows if row["method"] == "plain" and row["part"] == "validation"
    ]
    sums = {name: np.sum([own[name] for own in plain], axis=0) for name in plain[0]}
    names = [
        name for name, (_, count) in sums.items()
        if not name.startswith(("all", "label ")) and count >= MIN_PAIRS * len(plain)
    ]  # fmt: skip
    names.sort(key=lambda name: float(sums[name][0] / sums[name][1]))
    shares = np.cumsum([sums[name][1] for name in names]) / sums["all"][1]
    return names[: max(1, int((shares <= 0.2).sum()))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help='"places", or the folder of debian-deps')
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*MINERS, *PEERS], help="methods")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    data, name = load(options.source), "places" if options.source == "places" else "debian-deps"
    features_of = make_tokens(data.parts["train"].texts[::10], data)
    for seed in options.seeds:
        for method in options.only:
            content = json.loads(options.out.read_text("utf-8")) if options.out.exists() else []
            key = {"data": name, "method": method, "seed": seed, "seconds": options.seconds}
            if any(key.items() <= row.items() for row in content):
                continue
            model, steps = train(data, features_of, method, seed, options.seconds)
            for part in ("validation", "test"):
                row = key | {"part": part, "steps": steps, "processor": processor()}
                content.append(row | evaluate(model, data, features_of, part))
            write_text(options.out, "[\n" + ",\n".join(map(json.dumps, content)) + "\n]\n")
            found, count = content[-1]["pairs"]["all"]
            print(
                json.dumps(key | {"steps": steps, "recall@10": round(found / count, 4)}), flush=True
            )


if __name__ == "__main__":
    main()
