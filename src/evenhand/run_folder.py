"""A run folder: everything a training run leaves, and everything needed to repeat it.

config.toml        every setting, and why it was chosen; `evenhand train config.toml` repeats it all
run.json           what was run where: data set, versions, commit, device, time
metrics.jsonl      a line a logged step or validation; the same bytes whenever repeated
checkpoints/       where `--resume` continues (the files of each: evenhand/tensor_store.py); removed
                   when the run is finished, unless --keep-checkpoints was given
model/             the chosen weights, in the same format, and the ranker, where there is one;
                   query_data.safetensors, by which queries are answered without the data set;
                   encoder/, the files of a transformer, as it was before training;
                   added_labels.safetensors, labels that came later
evaluation/<part>/ what happened to every pair, and the scores by subpopulation; slices.json, once
                   `evenhand slices` has looked for those that are failed
report.html
"""

import dataclasses
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from evenhand.build import build_model
from evenhand.config import OWN, Config, build, build_config, read_settings
from evenhand.data import Dataset
from evenhand.distributed.ranks import Ranks, Shards
from evenhand.errors import UserError
from evenhand.evaluation import Outcome, Score, load_outcome, save_outcome
from evenhand.files import read_json, read_text, write_json
from evenhand.models import Retriever, RowRange, row_encoder
from evenhand.search import QueryData
from evenhand.tensor_store import (
    DamagedError,
    SavedTensors,
    Table,
    all_finite,
    gather_json,
    has_store,
    open_store,
    save_tensors,
)
from evenhand.text_encoder import TextEncoder
from evenhand.version import __version__

SECONDS = ("training_seconds", "ranker_seconds")
MAX_SECONDS = 1e10  # three centuries


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One evaluated run, as the report and the comparison read it."""

    name: str
    about: dict[str, Any]  # run.json
    config_text: str
    part_name: str
    scores: list[Score]
    outcome: Outcome
    validation: Outcome | None = None  # if it was evaluated there too: to choose groups by
    baselines: dict[str, Outcome] = dataclasses.field(default_factory=dict)  # without training


def save_result(folder: Path, part_name: str, outcome: Outcome, scores: list[Score]) -> None:
    """Writes evaluation/<part>/, the outcome first."""
    place = folder / "evaluation" / part_name
    save_outcome(outcome, place)
    write_json(place / "scores.json", [dataclasses.asdict(score) for score in scores])


def is_of_predictions(folder: Path) -> bool:
    """Whether a folder holds what another model predicted (see `evenhand.predictions`)."""
    return "predictions" in read_about(folder)


def is_evaluated(folder: Path, part_name: str) -> bool:
    return (folder / "evaluation" / part_name / "scores.json").exists()


def load_result(folder: Path, part_name: str = "test") -> RunResult:
    """Opens an evaluated run."""
    place, about = folder / "evaluation" / part_name, read_about(folder)
    if not is_evaluated(folder, part_name):
        raise UserError(
            f"{folder} has not been evaluated on the {part_name} part; "
            f"run: evenhand evaluate {folder} --part {part_name}"
        )
    config_text = _read_text(folder / "config.toml")
    scores, outcome = read_scores(place / "scores.json"), load_outcome(place)
    other, validation = folder / "evaluation" / "validation", None
    if part_name != "validation" and is_evaluated(folder, "validation"):
        validation = load_outcome(other)
    return RunResult(
        folder.resolve().name, about, config_text, part_name, scores, outcome, validation
    )


def read_about(folder: Path) -> dict[str, Any]:
    """run.json, with what every reader of it needs."""
    path = folder / "run.json"
    if not path.exists():
        raise UserError(f"{folder} is not a run folder: it holds no run.json")
    about = read_json(path)
    if not isinstance(about, dict) or not isinstance(about.get("dataset"), dict):
        raise UserError(f"{path} is damaged (it does not say what was trained on)")
    for name in SECONDS:
        seconds = about.get(name, 0.0)
        if not isinstance(seconds, int | float) or not 0 <= seconds < MAX_SECONDS:
            raise UserError(f"{path} is damaged ({name} is {str(seconds)[:40]})")
    return about


def check_trained_on(folder: Path, dataset: Dataset | QueryData) -> None:
    """Refuses a data set that is not the one a run was trained on."""
    fingerprint = read_about(folder)["dataset"].get("fingerprint")
    if fingerprint != dataset.fingerprint:
        raise UserError(
            f"{folder} was trained on another data set (fingerprint {str(fingerprint)[:12]}, "
            f"{dataset.name} now has {dataset.fingerprint[:12]}); name the right one with --data, "
            f"restore it, or train anew in another --run folder"
        )


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged ({error})") from error


def read_scores(path: Path) -> list[Score]:
    """What `save_result` wrote of scores; null stands for NaN."""
    rows = read_json(path)
    try:
        if not isinstance(rows, list):
            raise TypeError("it is no list")
        scores = []
        for row in rows:
            empty: Any = {key: math.nan for key, value in row.items() if value is None}
            score = build(Score, row | dict.fromkeys(empty, 0.0), section="score")
            scores.append(dataclasses.replace(score, **empty))
        return scores
    except (AttributeError, TypeError, UserError) as error:  # JSON, but not ours
        raise UserError(f"{path} is damaged ({error}); evaluate the run again") from error


def about_run(
    folder: Path, config: Config, dataset: Dataset, device: torch.device
) -> dict[str, Any]:
    """What run.json says when a run begins."""
    is_command = Path(sys.argv[0]).name in ("evenhand", "__main__.py")
    num_threads = torch.get_num_threads()
    device_name = f"{platform.machine()} CPU, {num_threads} thread{'s' * (num_threads > 1)}"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "name": folder.resolve().name,
        "method": config.mining.method,
        "seed": config.training.seed,
        "command": shlex.join(["evenhand", *sys.argv[1:]]) if is_command else "in Python",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "evenhand": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "device": device_name,
        "is_complete": False,
        "dataset": {
            "name": dataset.name,
            "folder": str(config.data.folder.absolute()),  # for whoever uses the run elsewhere
            "fingerprint": dataset.fingerprint,
            "num_labels": dataset.num_labels,
            "num_features": dataset.num_features,
            "num_queries": {name: len(part) for name, part in dataset.parts.items()},
            "attribution": dataset.attribution,
            "query_columns": list(dataset.query_columns),
        },
    }


def _commit() -> str | None:
    """The commit of the source tree this package runs from, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    place = Path(__file__).parent
    try:
        answer = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# --- the trained model ----------------------------------------------------------------------------
# Saved by one process or by many ranks, loaded by either: the store model/weights.

REMEDY = "restore it, or train anew in another --run folder"


def run_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of a run, unchecked."""
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} is not a run folder: it holds no config.toml")
    return read_settings(folder / "config.toml")


def run_config(folder: Path) -> Config:
    """The settings of a run."""
    return build_config(run_settings(folder))


def weights_folder(folder: Path) -> Path:
    """Where the weights of a run are."""
    return folder / "model" / "weights"


def has_model(folder: Path) -> bool:
    """Whether a run folder holds a whole model."""
    return has_store(weights_folder(folder))


def query_data_path(folder: Path) -> Path:
    return folder / "model" / "query_data.safetensors"


def encoder_folder(folder: Path) -> Path:
    """Where a run keeps the transformer that it began with."""
    return folder / "model" / "encoder"


def run_encoder(folder: Path, config: Config, module: nn.Module | None) -> nn.Module | None:
    """The encoder of a run, to be filled with its weights; None: one that the settings make.

    Args:
        module: one of your own.
    """
    if config.model.encoder == OWN:
        if module is None:
            raise UserError(
                f"{folder} was trained with an encoder of your own, whose weights alone it holds; "
                f"open it in Python: evenhand.load({str(folder)!r}, encoder=module)"
            )
        return module
    if module is not None:
        raise UserError(f"{folder} was not trained with an encoder of your own; leave encoder out")
    return TextEncoder(encoder_folder(folder)) if config.model.encoder else None


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
    towers = [] if model.label_tower is None else [model.label_tower]
    features += ["label_tower.weight" for tower in towers if row_encoder(tower) is not None]
    offsets = [] if model.label_offsets is None else ["label_offsets"]
    return ["label_table", *biases, *offsets, *features]


def load_model(
    folder: Path,
    data: Dataset | QueryData,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    label_rows: RowRange | None = None,
    feature_rows: RowRange | None = None,
    config: Config | None = None,
    encoder: nn.Module | None = None,
) -> Retriever:
    """The trained model of a run, its tables as `dtype` whatever they were trained in.

    Args:
        data: what the run was trained on, or what its folder keeps of it.
        ranks: this rank's rows are read alone; how many ranks saved the model does not matter.
        label_rows, feature_rows: without ranks, the rows of the tables to read; None: all.
        config: of the run, where it has been read.
        encoder: a module of your own, which gets the weights of the run.
    """
    if isinstance(data, Dataset):
        check_trained_on(folder, data)
    if ranks is not None:
        label_rows = Shards(data.num_labels, ranks.num_ranks).rows_of(ranks.rank)
        feature_rows = Shards(data.num_features, ranks.num_ranks).rows_of(ranks.rank)
    counts, is_sparse = (data.num_features, data.num_labels), data.is_sparse
    config = config or run_config(folder)
    # "meta": no memory, and nothing is drawn that would be overwritten.
    encoder = run_encoder(folder, config, encoder)
    build_fn = partial(build_model, config, *counts, is_sparse=is_sparse, device="meta")
    rows = dict.fromkeys(("label_table", "label_bias", "label_offsets"), label_rows)
    rows |= dict.fromkeys(("encoder.weight", "label_tower.weight"), feature_rows)
    while True:
        saved = open_weights(folder)
        model = build_fn(dtype=dtype, encoder=encoder)
        check_shapes(saved, model)
        if label_rows is not None or feature_rows is not None:
            rows_built: Any = {"label_rows": label_rows, "feature_rows": feature_rows}
            model = build_fn(dtype=dtype, encoder=encoder, **rows_built)
        # Not `to_empty`: for meta tensors that imports sympy, which takes half a second.
        model._apply(  # type: ignore[no-untyped-call]
            lambda own: torch.empty_like(own, device=device) if own.is_meta else own.to(device)
        )
        try:
            return fill_model(model, saved, rows)
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
        if has_model(folder):
            return open_store(weights_folder(folder))
    except DamagedError as error:
        raise UserError(f"{error}; {REMEDY}") from error
    if is_of_predictions(folder):
        raise UserError(
            f"{folder} holds the predictions of another model, which is not there; to evaluate "
            f"others: evenhand evaluate --predictions FILE --truth FILE --run NEW"
        )
    if (folder / "model" / "weights.safetensors").exists():
        raise UserError(f"{folder} was trained by version 0.1.0, whose weights are no longer read")
    raise UserError(
        f"{folder} holds no trained model yet; finish it: evenhand train --resume --run {folder}"
    )
