"""Table 3's protocol on a file of AmazonCat-13K's shape, made on the spot: time and peak memory.

    python -m experiments.table3_amazoncat_shape --share 1.0 --folder FOLDER --json RESULT.json

1,186,239 / 306,782 documents, 203,882 features (about 71 a document), 13,330 labels (about 5). The
words of a document follow its labels, with a skew as in the real file; nothing else is like it, so
the recall means little. Reads both files, trains S2M with k' = 512 for an epoch, evaluates all test
documents.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from evenhand.files import write_json
from experiments.table2 import Run, about
from experiments.table3 import Protocol, Trial, mean_recall, open_any, outcome_of

TRAIN, TEST, FEATURES, LABELS = 1_186_239, 306_782, 203_882, 13_330
WORDS, POSITIVES = 71, 5
ROWS_AT_ONCE = 20_000


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=1.0, help="of the documents")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--json")
    options = parser.parse_args()
    folder, console = Path(options.folder), Console(width=120)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate({"train": TRAIN, "test": TEST}.items()):
        write(folder / f"{name}.txt", round(options.share * count), seed)
    began = time.perf_counter()
    dataset = open_any(str(folder), console)
    read = time.perf_counter()
    protocol, device = Protocol(), torch.device("cpu")
    steps = len(dataset.parts["train"].positives.ids) // protocol.batch_size  # an epoch
    command = f"python -m experiments.table3_amazoncat_shape --share {options.share:g}"
    run = Run(
        table="table3", folder=folder / "runs", command=command, device=device, console=console,
        every=1,
    )  # fmt: skip
    outcome, seconds = outcome_of(protocol, dataset, "test", Trial(512, 0.01, steps, 1), run)
    gibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report = {
        "share": options.share,
        "documents": {name: len(part) for name, part in dataset.parts.items()},
        "steps": steps,
        "reading_seconds": round(read - began, 1),
        "training_seconds": round(seconds, 1),
        "evaluating_seconds": round(time.perf_counter() - read - seconds, 1),
        "peak_gibibytes": round(gibibytes, 2),
        "mean_recall": round(mean_recall(outcome), 4),
        "threads": torch.get_num_threads(),
        **about(run),
    }
    console.print(report)
    if options.json:
        write_json(Path(options.json), report)


def write(path, num_rows, seed):
    """Documents in the text format; a label's words lie near each other, with some of any."""
    if path.exists():
        return
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, LABELS + 1) ** 0.9
    cumulative = np.cumsum(shares / shares.sum())
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{num_rows} {FEATURES} {LABELS}\n")
        for start in range(0, num_rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_rows - start)
            labels = np.searchsorted(cumulative, generator.random((count, POSITIVES)))
            own = labels[:, generator.integers(0, POSITIVES, WORDS)]  # (n, W)
            near = own * 15 + generator.geometric(0.2, (count, WORDS))
            anywhere = (FEATURES * generator.random((count, WORDS)) ** 3).astype(np.int64)
            words = np.where(generator.random((count, WORDS)) < 0.5, near, anywhere) % FEATURES
            values = generator.random((count, WORDS)).round(4)
            for row in range(count):
                ids, first = np.unique(words[row], return_index=True)
                pairs = zip(ids.tolist(), values[row, first].tolist(), strict=True)
                text = " ".join(f"{word}:{value}" for word, value in pairs)
                file.write(f"{','.join(map(str, np.unique(labels[row]).tolist()))} {text}\n")


if __name__ == "__main__":
    main()
