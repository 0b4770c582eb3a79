"""The linear ranker of a trained model: mined and fitted, saved beside its weights, loaded."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from evenhand.build import check_ranker
from evenhand.config import Config
from evenhand.data import Dataset, Rows
from evenhand.data.dataset import IntArray
from evenhand.errors import StoppedError, UserError
from evenhand.files import atomic_path, check_is_file
from evenhand.models.encoders import features_of
from evenhand.models.retriever import Retriever
from evenhand.progress import count_bar
from evenhand.search import ExactIndex, LinearRanker
from evenhand.search.ranker import check_rows, fit_ranker, hardest_labels

DTYPES = {"offsets": "int64", "features": "int32", "values": "float32", "biases": "float32"}


def fitted_ranker(
    model: Retriever,
    dataset: Dataset,
    config: Config,
    *,
    console: Console,
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> LinearRanker | None:
    """A ranker for a trained model, if the config asks for one: mined with the model alone.

    The neighbours have no part in it: the nearest training query of a training query is itself.
    """
    settings, part = config.ranker, dataset.parts["train"]
    if not settings.num_mined_labels:
        return None
    check_ranker(config, dataset)
    assert isinstance(part.features, Rows)
    if model.label_table.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    device = model.label_table.device

    def stopping(advance: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def advance_or_stop(done: int, total: int) -> None:
            advance(done, total)
            if done < total and should_stop_fn():  # what is finished is kept
                raise StoppedError

        return advance_or_stop

    @torch.no_grad()
    def encode(row_ids: IntArray) -> Tensor:
        return model.query_vectors(features_of(part, row_ids, device=device))

    with torch.no_grad(), count_bar(console, "mining labels (queries)") as advance:
        mined = hardest_labels(
            encode,
            ExactIndex(model.label_vectors(), label_bias=model.biases()),
            part.positives,
            settings.num_mined_labels,
            progress_fn=stopping(advance),
        )
    with count_bar(console, "fitting the ranker (pairs)") as advance:
        return fit_ranker(
            part.features,
            part.positives,
            mined,
            num_features=dataset.num_features,
            num_labels=dataset.num_labels,
            positive_cost=settings.positive_cost,
            negative_cost=settings.negative_cost,
            smallest_weight=settings.smallest_weight,
            seed=config.training.seed,
            progress_fn=stopping(advance),
        )


# --- on disk ------------------------------------------------------------------------------------


def ranker_path(folder: Path) -> Path:
    return folder / "model" / "ranker.safetensors"


def save_ranker(folder: Path, ranker: LinearRanker) -> None:
    weights = ranker.weights
    assert weights.values is not None
    arrays = {
        "offsets": weights.offsets,
        "features": weights.ids,
        "values": weights.values,
        "biases": ranker.biases,
    }
    with atomic_path(ranker_path(folder)) as staging:
        try:
            safetensors.numpy.save_file(arrays, staging)
        except SafetensorError as error:  # a full disk, said by the library in its own way
            raise OSError(str(error)) from error


def load_ranker(folder: Path, config: Config, dataset: Dataset) -> LinearRanker | None:
    """The ranker of a run; None where its settings ask for none."""
    if not config.ranker.num_mined_labels:
        return None
    path = ranker_path(folder)
    if not path.exists():
        raise UserError(
            f"{folder} holds no fitted ranker yet; finish it: "
            f"evenhand train --resume --run {folder}"
        )
    try:
        check_is_file(path)
        arrays = safetensors.numpy.load_file(path)
        for name, dtype in DTYPES.items():
            if arrays[name].dtype != dtype:  # to convert could make one id of another
                raise ValueError(f"{name} are {arrays[name].dtype}, expected {dtype}")
        weights, biases = (
            Rows(arrays["offsets"], arrays["features"], arrays["values"]),
            arrays["biases"],
        )
        check_rows(weights, dataset.num_features, "features")
        if not (np.isfinite(arrays["values"]).all() and np.isfinite(biases).all()):
            raise ValueError("a weight is not finite")
        if len(weights) != dataset.num_labels or biases.shape != (dataset.num_labels,):
            raise ValueError(f"{len(weights)} labels, the data set has {dataset.num_labels}")
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} does not fit this run's data, or is damaged ({error}); remove it and finish "
            f"the run again: evenhand train --resume --run {folder}"
        ) from error
    return LinearRanker(weights, biases, dataset.num_features)
