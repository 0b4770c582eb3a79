"""`evenhand export`: the vectors of a trained model as files, for any vector store.

Label vectors are what the index searches (of length 1 under the cosine), query vectors what it is
asked with (scale included): their product, plus the label's bias where there is one, is the score.
The label table is read and written a block of rows at a time, and never held as a whole.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.added_labels import load_added_labels
from evenhand.build import encoder_inputs
from evenhand.config import Config
from evenhand.data import Dataset, Part
from evenhand.data.vector_writer import Block, write_blocks
from evenhand.distributed.ranks import share_of
from evenhand.errors import UserError
from evenhand.files import atomic_folder, write_json
from evenhand.models import Retriever, RowRange, features_of
from evenhand.run_folder import load_model, open_weights, read_about, run_config
from evenhand.run_search import query_data_of
from evenhand.search import QueryData
from evenhand.search.searcher import discount_biases
from evenhand.version import __version__

BLOCK_BYTES = 2**25  # of vectors, read and written at once
FILE_BYTES = 2**30  # of vectors, at most in a file unless the number of files is given
FORMAT_VERSION = 1

BlockFn = Callable[[int, int], Block]  # first row, and the one after the last


def export_run(
    folder: Path,
    out: Path,
    data: Dataset | QueryData,
    *,
    file_format: str = "npy",
    num_shards: int | None = None,
    part_name: str | None = None,
    device: torch.device,
    progress_fn: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the vectors of a run to a new folder, all of it or nothing; returns the manifest.

    Args:
        data: the data set, or what the run folder keeps of it, which has no part.
        num_shards: files of label vectors; None: as many as keep each below FILE_BYTES.
        part_name: whose queries to write as well.
    """
    config, credit = run_config(folder), read_about(folder)["dataset"].get("attribution", "")
    parts = {}
    if isinstance(data, Dataset):
        parts = encoder_inputs(config, data).parts
        data = query_data_of(data, config, weighs_features=False)
    if num_shards is not None and not 1 <= num_shards <= data.num_labels:
        raise UserError(
            f"--shards must be between 1 and {data.num_labels} (the labels of {data.name}), "
            f"got {num_shards}"
        )
    if part_name is not None and part_name not in parts:
        raise UserError(f"{data.name} has no {part_name} part; it has {', '.join(parts)}")
    if out.exists():
        raise UserError(f"{out} exists already; choose another --out folder, or remove it first")
    nothing = RowRange(0, 0)  # label vectors are read as they are written
    model = load_model(
        folder,
        data,
        device=device,
        label_rows=nothing,
        feature_rows=None if part_name else nothing,
        config=config,
    )
    dim, added = model.label_table.shape[1], load_added_labels(folder)
    if added is not None:
        data = added.extend(data)
    sources = {"labels": (data.num_labels, _label_blocks(folder, model, data, config, device))}
    if part_name is not None:
        sources["queries"] = (len(parts[part_name]), _query_blocks(model, parts[part_name], device))
    total, done, files = sum(count for count, _ in sources.values()), 0, []

    def blocks(name: str, first: int, last: int) -> Iterator[Block]:
        """The vectors of a file, BLOCK_BYTES at a time."""
        nonlocal done
        size = max(1, BLOCK_BYTES // (4 * dim))
        for start in range(first, last, size):
            stop = min(start + size, last)
            block = sources[name][1](start, stop)
            if not np.isfinite(block.vectors).all():
                raise UserError(
                    f"a vector of {name} {start} to {stop - 1} is infinite or no number: the "
                    f"model's weights or the feature values are too large; train anew with a "
                    f"lower training.learning_rate"
                )
            yield block
            done += stop - start
            progress_fn(done, total)

    with atomic_folder(out) as staging:
        for name, (num_rows, _) in sources.items():
            count = num_shards if name == "labels" else None
            count = count or max(1, math.ceil(4 * num_rows * dim / FILE_BYTES))
            for shard in range(count):
                first, last = share_of(num_rows, shard, count)
                stem, shape = f"{name}-{shard + 1:05d}-of-{count:05d}", (last - first, dim)
                written = write_blocks(
                    staging, stem, blocks(name, first, last), file_format=file_format, shape=shape
                )
                files += [{"of": name, "first_row": first, **file} for file in written]
        has_biases = model.label_bias is not None or bool(config.search.frequency_discount)
        manifest = {
            "version": FORMAT_VERSION,
            "evenhand": __version__,
            "run": folder.resolve().name,
            "dataset": {"name": data.name, "fingerprint": data.fingerprint, "attribution": credit},
            "dimension": dim,
            "metric": "cosine" if model.is_cosine else "dot",
            "scale": model.scale,
            "has_biases": has_biases,
            "score": "query . label" + (" + bias" if has_biases else ""),
            "num_labels": data.num_labels,
            "num_queries": 0 if part_name is None else len(parts[part_name]),
            "part": part_name,
            "format": file_format,
            "files": files,
        }
        write_json(staging / "manifest.json", manifest)
    return manifest


def _label_blocks(
    folder: Path, model: Retriever, data: QueryData, config: Config, device: torch.device
) -> BlockFn:
    saved, counts, added = open_weights(folder), data.label_counts, load_added_labels(folder)
    num_saved = saved.entries["label_table"].shape[0]

    def block(first: int, last: int) -> Block:
        rows = torch.zeros(last - first, model.label_table.shape[1], device=device)
        num_own = max(0, min(last, num_saved) - first)  # others were added
        if num_own:
            saved.read("label_table", rows[:num_own], first_row=first)
        if added is not None and num_own < len(rows):
            start = first + num_own - num_saved
            rows[num_own:] = torch.from_numpy(added.rows[start : last - num_saved].copy())
        biases = None
        if model.label_bias is not None:
            column = torch.zeros(last - first, 1)
            if num_own:
                saved.read("label_bias", column[:num_own], first_row=first)
            biases = column[:, 0]  # (n,)
        own_counts = None if counts is None else counts[first:last]
        biases = discount_biases(biases, own_counts, config.search.frequency_discount)
        vectors, numbers = model.unit(rows).cpu().numpy(), np.arange(first, last)
        names = None if data.label_names is None else [data.label_names[row] for row in numbers]
        return Block(numbers, vectors, None if biases is None else biases.numpy(), names)

    return block


def _query_blocks(model: Retriever, part: Part, device: torch.device) -> BlockFn:
    def block(first: int, last: int) -> Block:
        rows = np.arange(first, last)
        vectors = model.query_vectors(features_of(part, rows, device=device)).cpu().numpy()
        texts = None if part.texts is None else [part.texts[row] for row in rows]
        return Block(rows, vectors, None, texts)

    return block
