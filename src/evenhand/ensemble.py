"""Combines several trained runs into one model whose score is the mean of theirs.

With dot products the mean of n models' scores is the score of one wider model: query vectors side
by side, label vectors side by side and divided by n, and the mean of the biases. So the average is
a run folder like any other, to be evaluated, compared and served; only its vectors are longer.
"""

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenhand.config import Config, to_toml
from evenhand.data import Dataset
from evenhand.errors import UserError
from evenhand.files import atomic_folder, write_json, write_text
from evenhand.models import BagEncoder, Retriever
from evenhand.run_folder import about_run, load_model, read_about, run_config, save_model
from evenhand.runs import mine_and_fit_ranker, query_data_of, query_data_path, ranker_path
from evenhand.search.reranker import save_ranker
from evenhand.search.searcher import save_query_data


def average_models(models: Sequence[Retriever]) -> Retriever:
    """One model whose scores are the mean of the models': dot products of bags, of one scale."""
    first = models[0]
    tables: list[Any] = [model.encoder.weight for model in models]  # (F, D) each
    table = torch.cat(tables, dim=1)  # (F, sum of D)
    whole = Retriever(
        BagEncoder(len(table), table.shape[1]),
        len(first.label_table),
        table.shape[1],
        is_cosine=False,
        scale=first.scale,
        has_label_bias=first.label_bias is not None,
    )
    whole.encoder.weight.data = table
    whole.label_table.data = torch.cat([m.label_table for m in models], dim=1) / len(models)
    if whole.label_bias is not None:
        biases = [m.label_bias.data for m in models if m.label_bias is not None]  # (L, 1) each
        whole.label_bias.data = torch.stack(biases).mean(0)
    return whole


def average_runs(
    folders: Sequence[Path], out: Path, dataset: Dataset, *, console: Console
) -> Config:
    """Writes the average of trained runs as a run folder of its own, and returns its settings.

    Where the runs have a ranker, one is fitted for the average: other labels are hard for it.
    """
    if len(folders) < 2:
        raise UserError(f"an average needs two runs or more, got {len(folders)}")
    if out.exists():
        raise UserError(f"{out} exists already; choose another --run folder, or remove it first")
    if not dataset.is_sparse:
        raise UserError(
            f"{dataset.name} has dense features; only runs on sparse features can be averaged"
        )
    configs = [run_config(folder) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        if config.model.similarity != "dot":
            raise UserError(
                f"{folder} scores by the {config.model.similarity}; only runs with "
                f'model.similarity = "dot" can be averaged'
            )
        for name in ("data", "search", "ranker"):
            if getattr(config, name) != getattr(configs[0], name):
                raise UserError(f"{folder} and {folders[0]} differ in their [{name}] settings")
        for name in ("scale", "label_bias", "hidden_widths"):
            ours, theirs = getattr(config.model, name), getattr(configs[0].model, name)
            if ours != theirs:
                raise UserError(
                    f"{folder} has model.{name} = {ours} and {folders[0]} {theirs}; runs that are "
                    f"averaged must have the same"
                )
    device = torch.device("cpu")
    whole = average_models([load_model(folder, dataset, device=device) for folder in folders])
    wider = dataclasses.replace(configs[0].model, embedding_dim=whole.label_table.shape[1])
    config = dataclasses.replace(configs[0], model=wider)
    began = time.monotonic()
    ranker = mine_and_fit_ranker(whole, dataset, config, console=console)
    abouts = [read_about(folder) for folder in folders]
    about = {
        **about_run(out, config, dataset, device),
        "averaged": [folder.resolve().name for folder in folders],
        "dataset": abouts[0]["dataset"],
        "training_seconds": round(sum(about.get("training_seconds", 0.0) for about in abouts), 1),
        "is_complete": True,
    }
    if ranker is not None:
        about["ranker_seconds"] = round(time.monotonic() - began, 1)
    command = f"evenhand average {shlex.join(map(str, folders))} --run {shlex.quote(str(out))}"
    with atomic_folder(out) as staging:
        write_text(staging / "config.toml", f"# {command}\n{to_toml(config)}")
        write_json(staging / "run.json", about)
        save_model(staging, whole)
        save_query_data(query_data_path(staging), query_data_of(dataset, config))
        if ranker is not None:
            save_ranker(ranker_path(staging), ranker)
    return config
