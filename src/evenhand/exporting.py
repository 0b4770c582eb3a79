"""`evenhand export`: the vectors of a trained model as files, for any vector store.

Label vectors are what the index searches (of length 1 under the cosine), query vectors what it is
asked with (scale included): their product, plus the label's bias where there is one, is the score.
The label table is read and written a block of rows at a time, and never held as a whole.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evenhand.config import Config
from evenhand.data import Dataset
from evenhand.data.dataset import Strings
from evenhand.data.vector_files import Block, check_format, write_blocks
from evenhand.distributed.shards import share_of
from evenhand.errors import UserError
from evenhand.files import atomic_folder, write_json
from evenhand.models.encoders import RowRange, features_of
from evenhand.models.retriever import Retriever
from evenhand.saved_models import load_model, open_weights, run_config
from evenhand.version import __version__

BLOCK_BYTES = 2**25  # of vectors, read and written at once
FILE_BYTES = 2**30  # of vectors, at most in a file unless the number of files is given
FORMAT_VERSION = 1


class Source(NamedTuple):
    """Vectors to write, of labels or of queries, any range of them."""

    name: str
    num_rows: int
    block_fn: Callable[[int, int], Block]  # first row, and the one after the last


def export_run(
    folder: Path,
    out: Path,
    dataset: Dataset,
    *,
    file_format: str = "npy",
    num_shards: int | None = None,
    part_name: str | None = None,
    device: torch.device,
    progress_fn: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the vectors of a run to a new folder, all of it or nothing; returns the manifest.

    Args:
        num_shards: files of label vectors; None: as many as keep each below FILE_BYTES.
        part_name: whose queries to write as well.
    """
    config, num_labels = run_config(folder), dataset.num_labels
    if num_shards is not None and not 1 <= num_shards <= num_labels:
        raise UserError(
            f"--shards must be between 1 and {num_labels} (the labels of {dataset.name}), "
            f"got {num_shards}"
        )
    if part_name is not None and part_name not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no {part_name} part; it has {', '.join(dataset.parts)}"
        )
    if out.exists():
        raise UserError(f"{out} exists already; choose another --out folder, or remove it first")
    check_format(file_format)
    model = load_model(
        folder,
        dataset,
        device=device,
        label_rows=RowRange(0, 0),  # they are read as they are written
        feature_rows=None if part_name else RowRange(0, 0),
    )
    dim = model.label_table.shape[1]
    sources = [_labels(folder, model, dataset, config, device)]
    if part_name is not None:
        sources.append(_queries(model, dataset, part_name, device))
    total, done = sum(source.num_rows for source in sources), 0
    files = []
    with atomic_folder(out) as staging:
        for source in sources:
            count = num_shards if source.name == "labels" else None
            count = count or max(1, math.ceil(4 * source.num_rows * dim / FILE_BYTES))
            for shard in range(count):
                first, last = share_of(source.num_rows, shard, count)
                written = write_blocks(
                    staging,
                    f"{source.name}-{shard + 1:05d}-of-{count:05d}",
                    _blocks(source, first, last, dim, partial(_advance, progress_fn, done, total)),
                    file_format=file_format,
                    shape=(last - first, dim),
                )
                files += [
                    {"of": source.name, "first_row": first, **file._asdict()} for file in written
                ]
            done += source.num_rows
        manifest = _manifest(folder, model, dataset, config, part_name) | {
            "format": file_format,
            "files": files,
        }
        write_json(staging / "manifest.json", manifest)
    return manifest


def _blocks(
    source: Source, first: int, last: int, dim: int, progress_fn: Callable[[int], None]
) -> Iterator[Block]:
    size = max(1, BLOCK_BYTES // (4 * dim))
    for start in range(first, last, size):
        stop = min(start + size, last)
        block = source.block_fn(start, stop)
        if not np.isfinite(block.vectors).all():
            raise UserError(
                f"a vector of {source.name} {start} to {stop - 1} is infinite or no number: the "
                f"model's weights or the feature values are too large; train anew with a lower "
                f"training.learning_rate"
            )
        yield block
        progress_fn(stop)


def _advance(
    progress_fn: Callable[[int, int], None], rows_before: int, total: int, row: int
) -> None:
    progress_fn(rows_before + row, total)


def _labels(
    folder: Path, model: Retriever, dataset: Dataset, config: Config, device: torch.device
) -> Source:
    saved, discount = open_weights(folder), config.search.frequency_discount
    counts = dataset.label_counts() if discount else None

    def block(first: int, last: int) -> Block:
        rows = torch.empty(last - first, model.label_table.shape[1], device=device)
        saved.read("label_table", rows, first_row=first)
        biases = None
        if model.label_bias is not None:
            column = torch.empty(last - first, 1)
            saved.read("label_bias", column, first_row=first)
            biases = column[:, 0]  # (n,)
        if counts is not None:  # as `label_index` takes it off
            seen = torch.from_numpy(counts[first:last]).float()
            discounts = discount * torch.log1p(seen)
            biases = -discounts if biases is None else biases - discounts
        return Block(
            np.arange(first, last),
            model.unit(rows).cpu().numpy(),
            None if biases is None else biases.numpy(),
            _names(dataset.label_names, first, last),
        )

    return Source("labels", dataset.num_labels, block)


def _queries(model: Retriever, dataset: Dataset, part_name: str, device: torch.device) -> Source:
    part = dataset.parts[part_name]

    def block(first: int, last: int) -> Block:
        rows = np.arange(first, last)
        vectors = model.query_vectors(features_of(part, rows, device=device))
        return Block(rows, vectors.cpu().numpy(), None, _names(part.texts, first, last))

    return Source("queries", len(part), block)


def _names(strings: Strings | None, first: int, last: int) -> list[str] | None:
    return None if strings is None else [strings[row] for row in range(first, last)]


def _manifest(
    folder: Path, model: Retriever, dataset: Dataset, config: Config, part_name: str | None
) -> dict[str, Any]:
    has_biases = model.label_bias is not None or bool(config.search.frequency_discount)
    return {
        "version": FORMAT_VERSION,
        "evenhand": __version__,
        "run": folder.resolve().name,
        "dataset": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "attribution": dataset.attribution,
        },
        "dimension": model.label_table.shape[1],
        "metric": "cosine" if model.is_cosine else "dot",
        "scale": model.scale,
        "has_biases": has_biases,
        "score": "query . label" + (" + bias" if has_biases else ""),
        "num_labels": dataset.num_labels,
        "num_queries": 0 if part_name is None else len(dataset.parts[part_name]),
        "part": part_name,
    }
