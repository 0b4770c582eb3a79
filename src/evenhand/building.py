"""From settings to the parts of a training run: model, feed, sampler, optimisers, plan."""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.config import Config, to_toml
from evenhand.data import Dataset, Rows
from evenhand.errors import UserError
from evenhand.evaluation import check_selector
from evenhand.losses import LossFn
from evenhand.models.encoders import BagEncoder, MlpEncoder
from evenhand.models.retriever import Retriever
from evenhand.sampling import (
    FrequencySampler,
    InBatchSampler,
    LabelSampler,
    LogUniformSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.training.feed import PairFeed
from evenhand.training.loop import Optimizers, Plan, Training
from evenhand.training.optimizers import RowAdagrad, RowAdam, RowOptimizer


class Built(NamedTuple):
    """The parts of a training run, made from a config."""

    training: Training
    plan: Plan
    sampler: LabelSampler
    loss_fn: LossFn


def build_model(
    config: Config, num_features: int, num_labels: int, *, is_sparse: bool
) -> Retriever:
    generator = torch.Generator().manual_seed(config.training.seed)
    encoder: BagEncoder | MlpEncoder
    if is_sparse:
        encoder = BagEncoder(num_features, config.model.embedding_dim, generator=generator)
    else:
        encoder = MlpEncoder(
            num_features,
            config.model.embedding_dim,
            hidden_widths=config.model.hidden_widths,
            generator=generator,
        )
    return Retriever(
        encoder,
        num_labels,
        config.model.embedding_dim,
        is_cosine=config.model.similarity == "cosine",
        scale=config.model.scale,
        has_label_bias=config.model.label_bias,
        generator=generator,
    )


def build_training(config: Config, dataset: Dataset, device: torch.device) -> Built:
    """Everything a run starts from. The three generators come from one seed."""
    part = dataset.parts["train"]
    mining = config.mining
    check_against_data(config, dataset)
    model = build_model(
        config,
        dataset.num_features,
        dataset.num_labels,
        is_sparse=isinstance(part.features, Rows),
    ).to(device)
    feed = PairFeed(
        part,
        batch_size=mining.batch_size,
        masks_all_positives=mining.masks_all_positives,
        generator=torch.Generator().manual_seed(config.training.seed + 1_000_003),
        device=device,
    )
    generator = torch.Generator().manual_seed(config.training.seed + 2_000_003)
    settings = to_toml(config) + dataset.fingerprint
    training = Training(
        model,
        _build_optimizers(config, model),
        feed,
        generator,
        belongs_to=hashlib.sha256(settings.encode()).hexdigest(),
    )
    return Built(
        training,
        _build_plan(config, dataset),
        _build_sampler(config, dataset, device),
        config.loss.build(),
    )


def check_against_data(config: Config, dataset: Dataset) -> None:
    """Refuses settings that this data set cannot meet, before anything is made."""
    mining, num_labels = config.mining, dataset.num_labels
    num_pairs = len(dataset.parts["train"].positives.ids)
    if mining.batch_size > num_pairs:
        raise UserError(
            f"mining.batch_size must be at most {num_pairs} (the training pairs of "
            f"{dataset.name}), got {mining.batch_size}"
        )
    most = num_labels - 1 if mining.for_each_example else num_labels
    if mining.draws_labels and mining.num_sampled_labels > most:
        raise UserError(
            f"mining.num_sampled_labels must be at most {most} ({dataset.name} has {num_labels} "
            f"labels), got {mining.num_sampled_labels}"
        )
    _check_finite(dataset)
    if config.training.evaluate_every and "validation" not in dataset.parts:
        raise UserError(
            f"training.evaluate_every needs a validation part, and {dataset.name} has only "
            f"{', '.join(dataset.parts)}; make the data set with one, or set it to 0"
        )
    if config.training.evaluate_every:
        check_selector(
            config.training.select_by,
            dataset,
            "validation",
            cutoffs=config.evaluation.cutoffs,
            min_pairs=config.evaluation.min_pairs,
        )


def _check_finite(dataset: Dataset) -> None:
    for name, part in dataset.parts.items():
        rows = part.features
        values = rows.values if isinstance(rows, Rows) else rows
        if values is None or np.isfinite(values).all():
            continue
        place = int(np.argwhere(~np.isfinite(values))[0][0])
        if isinstance(rows, Rows):
            place = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        raise UserError(
            f"query {place} of the {name} part of {dataset.name} has a feature value that is NaN "
            f"or infinite; leave the query out or mend it"
        )


def _build_plan(config: Config, dataset: Dataset) -> Plan:
    mining, training = config.mining, config.training
    is_sampled = mining.draws_labels
    return Plan(
        num_steps=training.num_steps,
        num_sampled_labels=mining.num_sampled_labels if is_sampled else dataset.num_labels,
        num_hard_labels=mining.num_hard_labels if is_sampled else dataset.num_labels,
        num_hard_examples=mining.num_hard_examples if mining.mines_examples else mining.batch_size,
        anneal_fraction=mining.anneal_fraction if mining.method == "s2m-annealed" else 0.0,
        learning_rate=training.learning_rate,
        learning_rate_shape=training.learning_rate_shape,
        warmup_steps=training.warmup_steps,
        max_gradient_norm=training.max_gradient_norm,
        draws_for_each=mining.for_each_example and is_sampled,
        is_log_q_corrected=config.loss.log_q and is_sampled,
        log_every=training.log_every,
        evaluate_every=training.evaluate_every,
        checkpoint_every=training.checkpoint_every,
        patience=training.patience,
    )


def _build_sampler(config: Config, dataset: Dataset, device: torch.device) -> LabelSampler:
    mining = config.mining
    uniform = UniformSampler(dataset.num_labels)
    if not mining.draws_labels or mining.sampler == "uniform":
        return uniform  # asked for all labels, it gives them all
    counts = torch.from_numpy(dataset.label_counts()).to(device)
    if mining.sampler == "frequency":
        return FrequencySampler(counts, power=mining.sampler_power)
    if mining.sampler == "log-uniform":
        order = counts.argsort(descending=True, stable=True)
        return LogUniformSampler(dataset.num_labels, label_order=order)
    if mining.sampler == "in-batch":
        return InBatchSampler(counts)
    return MixedSampler(InBatchSampler(counts), uniform, first_share=mining.in_batch_share)


def _build_optimizers(config: Config, model: Retriever) -> Optimizers:
    def row_optimizer(table: Tensor) -> RowOptimizer:
        return RowAdam(table) if config.training.optimizer == "row-adam" else RowAdagrad(table)

    is_sparse = isinstance(model.encoder, BagEncoder)
    return Optimizers(
        label_rows=row_optimizer(model.label_table),
        bias_rows=None if model.label_bias is None else row_optimizer(model.label_bias),
        feature_rows=row_optimizer(model.encoder.weight) if is_sparse else None,  # type: ignore[arg-type]
        dense=None if is_sparse else torch.optim.Adam(model.encoder.parameters()),
    )
