"""The trained model of a run folder: saved by one process or by many ranks, loaded by either."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from evenhand.building import build_model
from evenhand.config import Config, build_config, read_settings
from evenhand.data import Dataset
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import Shards
from evenhand.distributed.weights import (
    SavedWeights,
    has_weights,
    save_split,
    save_whole,
    single_path,
)
from evenhand.errors import UserError
from evenhand.models.initial import RowRange
from evenhand.models.retriever import Retriever
from evenhand.models.weights import all_finite
from evenhand.run_folder import check_trained_on
from evenhand.search import QueryData


def run_config(folder: Path) -> Config:
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} is not a run folder: it holds no config.toml")
    return build_config(read_settings(folder / "config.toml"))


def weights_path(folder: Path) -> Path:
    """Where one process saves the model of a run."""
    return single_path(folder / "model")


def has_model(folder: Path) -> bool:
    """Whether a run folder holds a whole model."""
    return has_weights(folder / "model")


def save_model(folder: Path, model: Retriever, *, ranks: Ranks | None = None) -> None:
    """Saves the model, all of it or nothing; with ranks, each saves its rows, and all wait."""
    if ranks is None:
        save_whole(folder / "model", model)
    else:
        save_split(folder / "model", model, ranks)


def load_model(
    folder: Path,
    dataset: Dataset | QueryData,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
) -> Retriever:
    """The trained model of a run, its tables as `dtype` whatever they were trained in.

    With ranks, this rank's rows of it, and no others are read; how many ranks saved it does not
    matter.
    """
    label_rows = feature_rows = None
    if ranks is not None:
        label_rows = Shards(dataset.num_labels, ranks.num_ranks).rows_of(ranks.rank)
        feature_rows = Shards(dataset.num_features, ranks.num_ranks).rows_of(ranks.rank)
    return load_model_shard(
        folder,
        dataset,
        device=device,
        dtype=dtype,
        label_rows=label_rows,
        feature_rows=feature_rows,
    )


def load_model_shard(
    folder: Path,
    dataset: Dataset | QueryData,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    label_rows: RowRange | None = None,
    feature_rows: RowRange | None = None,
) -> Retriever:
    """The trained model with some rows of its tables alone; None: with all of them."""
    config = run_config(folder)
    check_trained_on(folder, dataset)
    if not has_model(folder):
        raise UserError(
            f"{folder} holds no trained model yet; finish it: "
            f"evenhand train --resume --run {folder}"
        )
    is_sparse = dataset.is_sparse
    sizes = config, dataset.num_features, dataset.num_labels
    whole = build_model(*sizes, is_sparse=is_sparse, device="meta")
    check_shapes(SavedWeights(folder / "model"), whole)  # before memory of that size is asked for
    model = build_model(
        *sizes,
        is_sparse=is_sparse,
        device="meta",  # nothing is drawn that would be overwritten
        dtype=dtype,
        label_rows=label_rows,
        feature_rows=feature_rows,
    ).to_empty(device=device)
    rows = {"label_table": label_rows, "label_bias": label_rows, "encoder.weight": feature_rows}
    fill_model(model, folder / "model", whole, rows=rows)
    return model


def check_shapes(saved: SavedWeights, whole: Retriever) -> None:
    """Refuses saved weights whose names or shapes are not those of a model."""
    saved.check({name: tuple(weights.shape) for name, weights in whole.state_dict().items()})


def fill_model(
    model: Retriever,
    weights_folder: Path,
    whole: Retriever,
    *,
    rows: Mapping[str, RowRange | None] = MappingProxyType({}),
) -> None:
    """Reads the weights of a model, of split tables some rows alone.

    Args:
        whole: of the shapes that the saved weights must have.
        rows: by name, those that `model` holds; all of a tensor that is not named.
    """
    saved = SavedWeights(weights_folder)
    check_shapes(saved, whole)
    for name, target in model.state_dict().items():
        own = rows.get(name)
        saved.read(name, target, first_row=0 if own is None else own.first)
        if not all_finite(target):
            raise UserError(f"{saved.path}: {name} holds a number that is not finite")
