"""The trained model of a run folder: saved by one process or by many ranks, loaded by either.

The weights are the store model/weights (see `evenhand.tensor_store`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import safetensors
import torch
from safetensors import SafetensorError

from evenhand.build import build_model
from evenhand.config import Config, build_config, read_settings
from evenhand.data import Dataset
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.files import check_is_file
from evenhand.models.encoders import RowRange, row_encoder
from evenhand.models.retriever import Retriever
from evenhand.run_folder import check_trained_on
from evenhand.tensor_store import (
    DTYPES,
    DamagedError,
    Entry,
    Piece,
    SavedTensors,
    Table,
    all_finite,
    gather_json,
    has_store,
    open_store,
    save_tensors,
)

REMEDY = "restore it, or train anew in another --run folder"
OLD_NAME = "weights.safetensors"  # of version 0.1.0, in the folder model


class Sizes(Protocol):
    """What the shapes of a model depend on beside the settings; a data set has it."""

    @property
    def num_features(self) -> int: ...

    @property
    def num_labels(self) -> int: ...

    @property
    def is_sparse(self) -> bool: ...


def run_config(folder: Path) -> Config:
    """The settings of a run."""
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} is not a run folder: it holds no config.toml")
    return build_config(read_settings(folder / "config.toml"))


def weights_folder(folder: Path) -> Path:
    """Where the weights of a run are."""
    return folder / "model" / "weights"


def has_model(folder: Path) -> bool:
    """Whether a run folder holds a whole model."""
    return has_store(weights_folder(folder)) or (folder / "model" / OLD_NAME).exists()


def save_model(folder: Path, model: Retriever, *, ranks: Ranks | None = None) -> None:
    """Saves the model, all of it or nothing; with ranks, each saves its rows, and all wait."""
    tensors, rank = model.state_dict(), 0 if ranks is None else ranks.rank
    tables = {}
    for name in split_names(model):
        rows = tensors.pop(name)
        counts = gather_json(len(rows), ranks)
        tables[name] = Table(rows, sum(counts[:rank]), sum(counts))
    save_tensors(weights_folder(folder), tensors, tables, ranks=ranks)


def split_names(model: Retriever) -> list[str]:
    """The weights that ranks split by rows; they have all others alike."""
    biases = [] if model.label_bias is None else ["label_bias"]
    features = [] if row_encoder(model.encoder) is None else ["encoder.weight"]
    return ["label_table", *biases, *features]


def load_model(
    folder: Path,
    sizes: Sizes,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    label_rows: RowRange | None = None,
    feature_rows: RowRange | None = None,
    config: Config | None = None,
) -> Retriever:
    """The trained model of a run, its tables as `dtype` whatever they were trained in.

    Args:
        sizes: of the data; a data set must be the one that the run was trained on.
        ranks: this rank's rows are read alone; how many ranks saved the model does not matter.
        label_rows, feature_rows: without ranks, the rows of the tables to read; None: all.
        config: of the run, where it has been read.
    """
    if isinstance(sizes, Dataset):
        check_trained_on(folder, sizes)
    if ranks is not None:
        label_rows = Shards(sizes.num_labels, ranks.num_ranks).rows_of(ranks.rank)
        feature_rows = Shards(sizes.num_features, ranks.num_ranks).rows_of(ranks.rank)
    counts, is_sparse = (sizes.num_features, sizes.num_labels), sizes.is_sparse
    config = config or run_config(folder)
    # "meta": no memory, and nothing is drawn that would be overwritten.
    build_fn = partial(build_model, config, *counts, is_sparse=is_sparse, device="meta")
    rows = {"label_table": label_rows, "label_bias": label_rows, "encoder.weight": feature_rows}
    while True:
        saved = open_weights(folder)
        model = build_fn(dtype=dtype)
        check_shapes(saved, model)
        if label_rows is not None or feature_rows is not None:
            model = build_fn(dtype=dtype, label_rows=label_rows, feature_rows=feature_rows)
        try:
            return fill_model(model.to_empty(device=device), saved, rows)
        except DamagedError as error:
            if open_weights(folder).files == saved.files:  # else a running training replaced them
                raise UserError(f"{error}; {REMEDY}") from error


def check_shapes(saved: SavedTensors, model: Retriever) -> None:
    """Refuses saved weights whose names or shapes are not those of a model."""
    found = {name: entry.shape for name, entry in saved.entries.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"{saved.folder} does not fit this run's settings and data: {name} is "
                f"{found.get(name, 'not there')}, and must be {wanted.get(name, 'not there')}"
            )


def fill_model(
    model: Retriever, saved: SavedTensors, rows: Mapping[str, RowRange | None] | None = None
) -> Retriever:
    """Reads the weights into a model, and returns it.

    Args:
        rows: by name, those that `model` holds; all of a tensor that is not named.
    """
    for name, target in model.state_dict().items():
        own = (rows or {}).get(name)
        saved.read(name, target, first_row=0 if own is None else own.first)
        if not all_finite(target):
            raise UserError(f"{saved.folder}: {name} holds a number that is not finite")
    return model


def open_weights(folder: Path) -> SavedTensors:
    """The saved weights of a run; any rows of them can be read."""
    try:
        if has_store(weights_folder(folder)):
            return open_store(weights_folder(folder))
        if has_model(folder):
            return _open_old_weights(folder / "model" / OLD_NAME)
    except DamagedError as error:
        raise UserError(f"{error}; {REMEDY}") from error
    if (folder / "model" / "weights.index.json").exists():
        raise UserError(f"{folder} has weights of ranks in a form no longer read; {REMEDY}")
    raise UserError(
        f"{folder} holds no trained model yet; finish it: evenhand train --resume --run {folder}"
    )


def _open_old_weights(path: Path) -> SavedTensors:
    """Weights of version 0.1.0: one file, and no checksum."""
    entries = {}
    try:
        check_is_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                dtype, shape = file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()
                pieces = [Piece(path.name, 0, shape[0])]
                entries[name] = Entry(DTYPES[dtype], tuple(shape), True, pieces)
    except (OSError, SafetensorError, KeyError, IndexError) as error:
        raise DamagedError(path, str(error)) from error
    return SavedTensors(path.parent, entries)
