"""From settings to the parts of a training run: model, feed, sampler, optimisers, plan."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenhand.building_risks import build_risk, groups_of_pairs
from evenhand.config import Config, to_toml
from evenhand.data import Dataset, Rows
from evenhand.data.checks import check_ids, check_offsets, first_not_finite
from evenhand.data.dataset import group_holders
from evenhand.distributed.ranks import Ranks
from evenhand.distributed.shards import Shards
from evenhand.errors import UserError
from evenhand.evaluation import check_selector
from evenhand.losses import LossFn
from evenhand.methods import ANNEALED
from evenhand.models.encoders import BagEncoder, MlpEncoder
from evenhand.models.initial import RowRange
from evenhand.models.retriever import Retriever
from evenhand.sampling import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    LabelSampler,
    LogUniformSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.training.feed import PairFeed
from evenhand.training.loop import (
    Optimizers,
    Plan,
    Training,
)
from evenhand.training.optimizers import RowAdagrad, RowAdam, RowOptimizer
from evenhand.training.recorded import RecordedStep, why_not_recorded
from evenhand.training.split_step import SplitStep


class Split(NamedTuple):
    """A training whose tables are cut for ranks."""

    ranks: Ranks
    labels: Shards
    features: Shards

    def row_ranges(self) -> dict[str, tuple[int, int]]:
        """Of every table: the first row that is here, and the rows in all."""
        shards = {"labels": self.labels, "biases": self.labels, "features": self.features}
        return {
            name: (shard.rows_of(self.ranks.rank)[0], shard.num_rows)
            for name, shard in shards.items()
        }


class Built(NamedTuple):
    """The parts of a training run, made from a config."""

    training: Training
    plan: Plan
    sampler: LabelSampler
    loss_fn: LossFn
    precision: str
    split: Split | None = None  # None: one process holds all of it

    def step_fn(
        self, should_stop_fn: Callable[[], bool] = lambda: False
    ) -> RecordedStep | SplitStep | None:
        """The step of many ranks, or the recorded one of a GPU; None: `train_step` it is.

        Args:
            should_stop_fn: what this rank was asked; the step tells all of them.
        """
        if self.split is not None:
            return SplitStep(
                self.training,
                self.plan,
                sampler=self.sampler,
                loss_fn=self.loss_fn,
                ranks=self.split.ranks,
                num_labels=self.split.labels.num_rows,
                num_features=self.split.features.num_rows,
                should_stop_fn=should_stop_fn,
            )
        products = torch.float32 if self.precision == "float32" else torch.bfloat16
        parts = self.training, self.plan, self.sampler, self.loss_fn
        reason = why_not_recorded(*parts, precision=products)
        if reason is None:
            return RecordedStep(self.training, self.plan, self.loss_fn, precision=products)
        if self.precision == "bfloat16":
            raise UserError(
                f"training.precision 'bfloat16' needs the recorded step of a GPU, and this run has "
                f"none: {reason}; set it to 'mixed'"
            )
        return None


def build_model(
    config: Config,
    num_features: int,
    num_labels: int,
    *,
    is_sparse: bool,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    label_rows: RowRange | None = None,
    feature_rows: RowRange | None = None,
) -> Retriever:
    """The model that a run begins with, made where it will be.

    Args:
        dtype: of the tables; all else is float32.
        label_rows: those of the label table to make, where other ranks have the rest; None: all.
        feature_rows: the same, of the table of sparse features.
    """
    generator = torch.Generator().manual_seed(config.training.seed)
    encoder: BagEncoder | MlpEncoder
    if is_sparse:
        encoder = BagEncoder(
            num_features,
            config.model.embedding_dim,
            generator=generator,
            rows=feature_rows,
            device=device,
            dtype=dtype,
        )
    else:
        encoder = MlpEncoder(
            num_features,
            config.model.embedding_dim,
            hidden_widths=config.model.hidden_widths,
            generator=generator,
            device=device,
        )
    return Retriever(
        encoder,
        num_labels,
        config.model.embedding_dim,
        is_cosine=config.model.similarity == "cosine",
        scale=config.model.scale,
        has_label_bias=config.model.label_bias,
        generator=generator,
        label_rows=label_rows,
        device=device,
        dtype=dtype,
    )


def table_dtype(config: Config) -> torch.dtype:
    """What the tables of a run are trained in."""
    return torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32


def build_training(
    config: Config, dataset: Dataset, device: torch.device, *, ranks: Ranks | None = None
) -> Built:
    """Everything a run starts from. The three generators come from one seed.

    Args:
        ranks: those that share the run; each makes its own rows of the tables.
    """
    part = dataset.parts["train"]
    mining = config.mining
    check_against_data(config, dataset)
    split, label_rows, feature_rows = None, None, None
    if ranks is not None:
        check_splittable(config, num_ranks=ranks.num_ranks)
        labels = Shards(dataset.num_labels, ranks.num_ranks)
        features = Shards(dataset.num_features, ranks.num_ranks)
        split = Split(ranks, labels, features)
        label_rows, feature_rows = labels.rows_of(ranks.rank), features.rows_of(ranks.rank)
    model = build_model(
        config,
        dataset.num_features,
        dataset.num_labels,
        is_sparse=isinstance(part.features, Rows),
        device=device,
        dtype=table_dtype(config),
        label_rows=label_rows,
        feature_rows=feature_rows,
    )
    groups = groups_of_pairs(config, dataset)
    feed = PairFeed(
        part,
        batch_size=mining.batch_size,
        masks_all_positives=mining.masks_all_positives,
        generator=torch.Generator().manual_seed(config.training.seed + 1_000_003),
        device=device,
        pair_groups=None if groups is None else groups.ids,
        share=(0, 1) if ranks is None else (ranks.rank, ranks.num_ranks),
        has_whole_queries=mining.whole_queries,
    )
    generator = torch.Generator().manual_seed(config.training.seed + 2_000_003)
    settings = to_toml(config) + dataset.fingerprint
    training = Training(
        model,
        _build_optimizers(config, model),
        feed,
        generator,
        build_risk(config, num_pairs=feed.num_pairs, pair_groups=groups),
        belongs_to=hashlib.sha256(settings.encode()).hexdigest(),
        row_ranges={} if split is None else split.row_ranges(),
    )
    return Built(
        training,
        _build_plan(config, dataset),
        _build_sampler(config, dataset, device),
        config.loss.build(),
        config.training.precision,
        split,
    )


def check_splittable(config: Config, *, num_ranks: int) -> None:
    """Refuses what many ranks cannot do, before anything is made."""
    batch_size = config.mining.batch_size
    if batch_size < num_ranks:
        raise UserError(
            f"mining.batch_size is that of all ranks together and must be at least {num_ranks} "
            f"(one example a rank), got {batch_size}"
        )
    if config.training.precision == "bfloat16":
        raise UserError("training.precision 'bfloat16' is for one GPU; set it to 'mixed'")
    one_process = {
        "search.num_neighbours": config.search.num_neighbours,
        "ranker.num_mined_labels": config.ranker.num_mined_labels,
    }
    for name, value in one_process.items():
        if value:
            raise UserError(
                f"{name} is for one process, and this run has {num_ranks}; set it to 0, or train "
                f"without torchrun"
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
    if mining.whole_queries:
        _refuse_blocks(dataset, "mining.whole_queries")
    _check_finite(dataset)
    check_all_ids(dataset)
    check_neighbours(config, dataset)
    check_ranker(config, dataset)
    groups_of_pairs(config, dataset)
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


def check_neighbours(config: Config, dataset: Dataset) -> None:
    """Neighbours are found by sparse features with values, among the training queries."""
    count, train_part = config.search.num_neighbours, dataset.parts["train"]
    if not count:
        return
    rows = train_part.features
    _refuse_blocks(dataset, "search.num_neighbours")
    if not isinstance(rows, Rows) or rows.values is None:
        raise UserError(
            f"search.num_neighbours needs sparse features with values, and {dataset.name} has "
            f"none; set it to 0"
        )
    if count > len(train_part):
        raise UserError(
            f"search.num_neighbours must be at most {len(train_part)} (the training queries of "
            f"{dataset.name}), got {count}"
        )


def check_ranker(config: Config, dataset: Dataset) -> None:
    """A ranker weighs sparse features with values, and mines among the labels that there are."""
    count = config.ranker.num_mined_labels
    if not count:
        return
    rows = dataset.parts["train"].features
    _refuse_blocks(dataset, "ranker.num_mined_labels")
    if not isinstance(rows, Rows) or rows.values is None:
        raise UserError(
            f"ranker.num_mined_labels needs sparse features with values, and {dataset.name} has "
            f"none; set it to 0"
        )
    if count > dataset.num_labels:
        raise UserError(
            f"ranker.num_mined_labels must be at most {dataset.num_labels} (the labels of "
            f"{dataset.name}), got {count}"
        )


def _refuse_blocks(dataset: Dataset, setting: str) -> None:
    if dataset.is_read_in_blocks:
        raise UserError(
            f"{setting} needs all training rows in memory, and {dataset.name} is read in blocks "
            f"because it may be larger; leave it out, or make the data set with `evenhand data "
            f"extreme`"
        )


def _check_finite(dataset: Dataset) -> None:
    if dataset.is_finite:
        return
    for name, part in dataset.parts.items():
        rows = part.features
        values = rows.values if isinstance(rows, Rows) else rows
        place = None if values is None else first_not_finite(values)
        if place is None:
            continue
        if isinstance(rows, Rows):
            place = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        raise UserError(
            f"query {place} of the {name} part of {dataset.name} has a feature value that is NaN "
            f"or infinite; leave the query out or mend it"
        )


def check_all_ids(dataset: Dataset) -> None:
    """Refuses ids that name no label, feature or group, and offsets that decrease.

    Whoever reads rows, compiled code too, relies on both.
    """
    # Rows of a streamed one were seen when it was made: to read all takes as long as an epoch.
    are_rows_read = not dataset.is_read_in_blocks
    try:
        if dataset.label_names is not None:
            check_offsets("labels.names", dataset.label_names.offsets)
        for name, part in dataset.parts.items():
            if are_rows_read:
                check_offsets(f"{name}.positives", part.positives.offsets)
                check_ids(f"labels of the {name} part", part.positives.ids, dataset.num_labels)
            if are_rows_read and isinstance(part.features, Rows):
                check_offsets(f"{name}.features", part.features.offsets)
                check_ids(f"features of the {name} part", part.features.ids, dataset.num_features)
            if part.texts is not None:
                check_offsets(f"{name}.texts", part.texts.offsets)
        for name, groups in group_holders(dataset).items():
            for column, group in groups.items():
                num_ids = len(group.names if group.sets is None else group.sets)
                check_ids(f"{column} of {name}", group.ids, num_ids, first=-1)
    except ValueError as error:
        raise UserError(f"{dataset.name} is damaged ({error}); make it again") from error


def _build_plan(config: Config, dataset: Dataset) -> Plan:
    mining, training = config.mining, config.training
    is_sampled = mining.draws_labels
    return Plan(
        num_steps=training.num_steps,
        num_sampled_labels=mining.num_sampled_labels if is_sampled else dataset.num_labels,
        num_hard_labels=mining.num_hard_labels if is_sampled else dataset.num_labels,
        num_hard_examples=mining.num_counting,
        anneal_fraction=mining.anneal_fraction if mining.method in ANNEALED else 0.0,
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
    """The sampler of a run. None repeats a label: k hardest labels are k different ones."""
    mining = config.mining
    uniform = UniformSampler(dataset.num_labels)
    if not mining.draws_labels or mining.sampler == "uniform":
        return uniform  # asked for all labels, it gives them all
    counts = torch.from_numpy(dataset.label_counts()).to(device)
    if mining.sampler == "frequency":
        return Distinct(FrequencySampler(counts, power=mining.sampler_power))
    if mining.sampler == "log-uniform":
        order = counts.argsort(descending=True, stable=True)
        return Distinct(LogUniformSampler(dataset.num_labels, label_order=order))
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
