"""From settings to the parts of a training run: model, feed, sampler, risk, optimisers, plan."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.config import Config, to_toml
from evenhand.data import (
    Dataset,
    FloatArray,
    Groups,
    Part,
    Rows,
    Strings,
    memberships,
    pad_rows,
)
from evenhand.data.dataset import check_all_ids, check_finite
from evenhand.data.held_out import GapBins, frequency_bins, hold_out_queries
from evenhand.data.text import featurizer_from, normalize
from evenhand.data.weighting import column_spread, feature_weights, unit_values
from evenhand.distributed.ranks import Ranks, Shards
from evenhand.errors import UserError
from evenhand.evaluation import check_selector, group_columns
from evenhand.evaluation.scores import check_known
from evenhand.methods import METHODS
from evenhand.models import (
    BagEncoder,
    FrozenEncoder,
    MlpEncoder,
    Retriever,
    RowRange,
    row_encoder,
)
from evenhand.objective import collapsed_loss
from evenhand.risk import (
    DualCvar,
    EvenMining,
    GroupRisk,
    count_below,
    ranked_range_weights,
)
from evenhand.sampling import (
    Distinct,
    FrequencySampler,
    InBatchSampler,
    LabelSampler,
    MixedSampler,
    UniformSampler,
)
from evenhand.text_encoder import cached_vectors, vector_width
from evenhand.training.feed import Batch, PairFeed
from evenhand.training.optimizers import Optimizers, RowAdagrad, RowAdam
from evenhand.training.state import Plan, Risk, Training
from evenhand.training.step import HARDEST, MEAN, ChosenStep, choose_step

MOST_KERNEL_BINS = 256  # of gaps; the GPU weighs with more of them between two graphs


def choose_device(name: str | None) -> torch.device:
    """The device of --device, tried out; without a name, the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton's kernels and new streams go
    except (RuntimeError, AssertionError) as error:
        why = "it is called cuda" if name.lower() == "gpu" else str(error)
        raise UserError(f"--device {name} cannot be used here: {why}") from error
    return device


class Built(NamedTuple):
    """The parts of a training run, made from a config."""

    training: Training
    plan: Plan
    precision: str
    ranks: Ranks | None = None  # None: one process holds all of it

    def choose_step(self, should_stop_fn: Callable[[], bool] = lambda: False) -> ChosenStep:
        """See `training.step.choose_step`."""
        how: dict[str, Any] = {"precision": self.precision, "ranks": self.ranks}
        return choose_step(self.training, self.plan, should_stop_fn=should_stop_fn, **how)


def build_training(
    config: Config,
    dataset: Dataset,
    device: torch.device,
    *,
    ranks: Ranks | None = None,
    encoder: nn.Module | None = None,
) -> Built:
    """Everything a run starts from. The three generators come from one seed.

    Args:
        ranks: those that share the run; each makes its own rows of the tables.
        encoder: one of your own (see `models`), the same on all ranks; None: that of the
            settings.
    """
    dataset = encoder_inputs(config, dataset)
    part, mining, seed = dataset.parts["train"], config.mining, config.training.seed
    check_against_data(config, dataset)
    shards: dict[str, Shards] = {}
    if ranks is not None:
        check_splittable(config, num_ranks=ranks.num_ranks)
        labels = Shards(dataset.num_labels, ranks.num_ranks)
        features = Shards(dataset.num_features, ranks.num_ranks)
        shards = {"labels": labels, "biases": labels, "features": features}
    own_rows = {name: shard.rows_of(ranks.rank) for name, shard in shards.items() if ranks}
    model = build_model(
        config,
        dataset.num_features,
        dataset.num_labels,
        is_sparse=isinstance(part.features, Rows),
        device=device,
        dtype=table_dtype(config),
        label_rows=own_rows.get("labels"),
        feature_rows=own_rows.get("features"),
        encoder=encoder,
    )
    if isinstance(model.encoder, MlpEncoder) and model.encoder.means is not None:
        assert not isinstance(part.features, Rows)
        spread = map(torch.from_numpy, column_spread(part.features))
        for buffer, values in zip(model.encoder.buffers(), spread, strict=True):
            buffer.copy_(values)
    read_labels = None if model.tower is None else label_part(config, dataset, model.tower)
    groups, gap_bins = groups_of_pairs(config, dataset), _gap_bins(config, dataset)
    pair_groups = None if groups is None else groups.ids
    feed = PairFeed(
        part,
        batch_size=mining.batch_size,
        masks_all_positives=mining.masks_all_positives,
        generator=torch.Generator().manual_seed(seed + 1_000_003),
        device=device,
        pair_groups=pair_groups if gap_bins is None else gap_bins.pair_bins,
        share=(0, 1) if ranks is None else (ranks.rank, ranks.num_ranks),
        has_whole_queries=mining.whole_queries,
    )
    settings = to_toml(config) + dataset.fingerprint
    plan = _build_plan(config, dataset, _build_sampler(config, dataset, device), device)
    risk = _build_risk(config, pair_groups=groups, gap_bins=gap_bins)
    if mining.loss_ceiling and row_encoder(model.encoder) is None:
        score = model.scale if model.is_cosine else 0.0
        collapsed = collapsed_loss(plan.loss_fn, plan.num_hard_labels, score=score)
        risk = _below(risk, ceiling=mining.loss_ceiling * collapsed)
    training = Training(
        model,
        _build_optimizers(config, model),
        feed,
        torch.Generator().manual_seed(seed + 2_000_003),
        risk,
        belongs_to=hashlib.sha256(settings.encode()).hexdigest(),
        labels=read_labels,
        row_ranges={name: (own_rows[name].first, shards[name].num_rows) for name in shards},
    )
    return Built(training, plan, config.training.precision, ranks)


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
    encoder: nn.Module | None = None,
) -> Retriever:
    """The model that a run begins with, made where it will be.

    Args:
        dtype: of the tables; all else is float32.
        label_rows: those of the label table to make, where other ranks have the rest; None: all.
        feature_rows: the same, of the table of sparse features.
        encoder: of the queries; None: a bag of sparse features, or a perceptron for dense ones.
    """
    settings, generator = config.model, torch.Generator().manual_seed(config.training.seed)
    where: dict[str, Any] = {"generator": generator, "device": device}
    dim = settings.embedding_dim
    if encoder is not None:
        if settings.freeze_encoder:
            width, widths = vector_width(encoder, ["any text"]), settings.hidden_widths
            head = MlpEncoder(width, dim, hidden_widths=widths, generator=generator)
            encoder = FrozenEncoder(encoder, head)
        if torch.device(device).type != "meta":  # which would forget what no weights file holds
            encoder = encoder.to(device)
    elif is_sparse:
        encoder = BagEncoder(num_features, dim, rows=feature_rows, dtype=dtype, **where)
    else:
        widths, standardizes = settings.hidden_widths, config.data.weighting == "standard"
        encoder = MlpEncoder(
            num_features, dim, hidden_widths=widths, standardizes=standardizes, **where
        )
    tower = None
    if settings.labels != "table":
        tower = encoder if settings.label_tower == "shared" else copy.deepcopy(encoder)
    return Retriever(
        encoder,
        num_labels,
        dim,
        is_cosine=settings.similarity == "cosine",
        scale=settings.scale,
        has_label_bias=settings.label_bias,
        label_rows=label_rows,
        dtype=dtype,
        label_tower=tower,
        has_label_offsets=settings.labels == "both",
        **where,
    )


def encoder_inputs(config: Config, dataset: Dataset) -> Dataset:
    """The data set with what the encoder takes in place of features: texts, where it reads them."""
    if config.model.input == "features":
        return dataset
    parts = dict(dataset.parts)
    for name, part in dataset.parts.items():
        if config.model.freeze_encoder and isinstance(part.features, np.ndarray):
            continue  # vectors of the texts, computed before
        if part.texts is None:
            raise UserError(
                f'model.input = "texts" needs the texts of the queries, and the {name} part of '
                f"{dataset.name} has none; make the data set from a table of texts"
            )
        parts[name] = dataclasses.replace(part, is_read_as_text=True)
    return dataclasses.replace(dataset, parts=parts)


def label_part(config: Config, dataset: Dataset, tower: nn.Module) -> Part:
    """The labels as queries to their tower: each by its name, and the text that describes it."""
    if dataset.label_names is None:
        raise UserError(
            f"model.labels = {config.model.labels!r} reads the labels' names, and {dataset.name} "
            f'has none; set it to "table"'
        )
    train = dataset.parts["train"]
    weights = train.feature_weights
    if config.data.weighting in ("unit", "tf-idf") and weights is None:
        weights = feature_weights(train.features, dataset.num_features, config.data.weighting)
    words = words_of_labels(dataset.label_names, dataset.label_texts)
    return text_part(config, words, dataset.featurizer, weights, tower)


def words_of_labels(names: Iterable[str], texts: Iterable[str] | None) -> Iterable[str]:
    """What a tower reads of labels: the name, and what describes it."""
    if texts is None:
        return names
    return (" ".join(own) for own in zip(names, texts, strict=True))


def text_part(
    config: Config,
    words: Iterable[str],
    featurizer: dict[str, Any] | None,
    feature_weights: FloatArray | None,
    tower: nn.Module,
) -> Part:
    """Texts of labels as queries to their tower, without positives."""
    packed = Strings.pack(map(normalize, words))
    nothing = Rows(np.zeros(len(packed) + 1, np.int64), np.zeros(0, np.int32))
    if isinstance(tower, FrozenEncoder):
        return Part(cached_vectors(packed, tower.frozen, config.data.folder), nothing)
    if config.model.input == "texts":
        none = np.zeros((len(packed), 0), np.float32)
        return Part(none, nothing, texts=packed, is_read_as_text=True)
    features = featurizer_from(featurizer).featurize(packed)
    if feature_weights is not None:
        features = features.with_values(unit_values(features, feature_weights))
    return Part(features, nothing)


def table_dtype(config: Config) -> torch.dtype:
    """What the tables of a run are trained in."""
    return torch.bfloat16 if config.training.precision == "bfloat16" else torch.float32


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
    if config.model.labels != "table":
        raise UserError(
            f"model.labels = {config.model.labels!r} is for one process, and this run has "
            f'{num_ranks}; set it to "table", or train without torchrun'
        )
    for name, value in [
        ("search.num_neighbours", config.search.num_neighbours),
        ("ranker.num_mined_labels", config.ranker.num_mined_labels),
    ]:
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
    check_finite(dataset)
    check_all_ids(dataset)
    check_neighbours(config, dataset)
    check_ranker(config, dataset)
    method = METHODS[mining.method]
    if config.risk.group and (method.needs_groups or method.measures_gap):
        _known_groups(config, dataset)
    if not config.training.evaluate_every:
        return
    if "validation" not in dataset.parts:
        raise UserError(
            f"training.evaluate_every needs a validation part, and {dataset.name} has only "
            f"{', '.join(dataset.parts)}; make the data set with one, or set it to 0"
        )
    how: dict[str, Any] = {
        "cutoffs": config.evaluation.cutoffs,
        "min_pairs": config.evaluation.min_pairs,
    }
    check_selector(config.training.select_by, dataset, "validation", **how)


def check_neighbours(config: Config, dataset: Dataset) -> None:
    """Neighbours are found by sparse features with values, among the training queries."""
    most = len(dataset.parts["train"])
    count = config.search.num_neighbours
    _check_valued(dataset, "search.num_neighbours", count, most, "training queries")


def check_ranker(config: Config, dataset: Dataset) -> None:
    """A ranker weighs sparse features with values, and mines among the labels that there are."""
    count = config.ranker.num_mined_labels
    _check_valued(dataset, "ranker.num_mined_labels", count, dataset.num_labels, "labels")


def _check_valued(dataset: Dataset, setting: str, count: int, most: int, what: str) -> None:
    """Refuses a setting above 0 where features have no values, or `count` exceeds `most`."""
    if not count:
        return
    rows = dataset.parts["train"].features
    _refuse_blocks(dataset, setting)
    if not isinstance(rows, Rows) or rows.values is None:
        raise UserError(
            f"{setting} needs sparse features with values, and {dataset.name} has none; set it to 0"
        )
    if count > most:
        raise UserError(
            f"{setting} must be at most {most} (the {what} of {dataset.name}), got {count}"
        )


def _refuse_blocks(dataset: Dataset, setting: str) -> None:
    if dataset.is_read_in_blocks:
        raise UserError(
            f"{setting} needs all training rows in memory, and {dataset.name} is read in blocks "
            f"because it may be larger; leave it out, or make the data set with `evenhand data "
            f"extreme`"
        )


def _build_plan(
    config: Config, dataset: Dataset, sampler: LabelSampler, device: torch.device
) -> Plan:
    mining, training = config.mining, config.training
    is_sampled = mining.draws_labels
    return Plan(
        sampler=sampler,
        loss_fn=config.loss.build(),
        num_steps=training.num_steps,
        num_sampled_labels=mining.num_sampled_labels if is_sampled else dataset.num_labels,
        num_hard_labels=mining.num_hard_labels if is_sampled else dataset.num_labels,
        num_hard_examples=mining.num_counting,
        anneal_fraction=mining.anneal_fraction if mining.is_annealed else 0.0,
        learning_rate=training.learning_rate,
        learning_rate_shape=training.learning_rate_shape,
        warmup_steps=training.warmup_steps,
        max_gradient_norm=training.max_gradient_norm,
        chunk_size=training.chunk_size,
        is_mixed=device.type == "cuda" and training.precision == "mixed",
        refresh_every=mining.refresh_every,
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
    if mining.sampler == "in-batch":
        return InBatchSampler(counts)
    return MixedSampler(InBatchSampler(counts), uniform, first_share=mining.in_batch_share)


def _build_optimizers(config: Config, model: Retriever) -> Optimizers:
    tables = {"labels": model.label_table} if model.tower is None else {}
    if model.label_offsets is not None:
        tables["label offsets"] = model.label_offsets
    if model.label_bias is not None:
        tables["biases"] = model.label_bias
    by_rows = row_encoder(model.encoder)
    if by_rows is not None:
        tables["features"] = by_rows.weight
    own_tower = None if model.label_tower is None else row_encoder(model.label_tower)
    if own_tower is not None:
        tables["label features"] = own_tower.weight
    row_optimizer = RowAdam if config.training.optimizer == "row-adam" else RowAdagrad
    dense = [weight for weight in model.parameters() if weight.requires_grad]
    rows = {name: row_optimizer(table) for name, table in tables.items()}
    rate, own_rate = config.training.learning_rate, config.training.encoder_learning_rate
    if not dense:
        return Optimizers(rows, None)
    decay = 0.01 if own_rate else 0.0
    return Optimizers(rows, torch.optim.AdamW(dense, weight_decay=decay), (own_rate or rate) / rate)


def groups_of_pairs(config: Config, dataset: Dataset) -> Groups | None:
    """The known groups of every training pair; pairs without one are a group too."""
    return _known_groups(config, dataset) if METHODS[config.mining.method].needs_groups else None


def _known_groups(config: Config, dataset: Dataset) -> Groups:
    columns = {column.name: column for column in group_columns(dataset, "train")}
    check_known(config.risk.group, list(columns), "column of groups (risk.group)")
    groups = columns[config.risk.group].groups
    if groups.sets is None:
        return groups._replace(ids=np.where(groups.ids < 0, len(groups.names), groups.ids))
    offsets = np.append(groups.sets.offsets, len(groups.sets.ids) + 1)  # and the set of that group
    sets = Rows(offsets, np.append(groups.sets.ids, len(groups.names)))
    return groups._replace(ids=np.where(groups.ids < 0, len(sets) - 1, groups.ids), sets=sets)


def _gap_bins(config: Config, dataset: Dataset) -> GapBins | None:
    """Where the method measures a generalisation gap: in which bin each training pair is."""
    if not METHODS[config.mining.method].measures_gap:
        return None
    positives, num_labels = dataset.parts["train"].positives, dataset.num_labels
    is_held_out = hold_out_queries(
        positives,
        num_labels=num_labels,
        share=0.0 if dataset.is_read_in_blocks else config.risk.held_out_share,
        seed=config.training.seed + 3_000_003,
    )
    bins = frequency_bins(positives, is_held_out, num_labels=num_labels)
    if not config.risk.group:
        return bins
    group_ids = _known_groups(config, dataset).ids.astype(np.int64)
    return GapBins(2 * group_ids + bins.pair_bins % 2, np.ones(group_ids.max() + 1))


def _build_risk(config: Config, *, pair_groups: Groups | None, gap_bins: GapBins | None) -> Risk:
    """How the method weighs the examples of a batch; k' is the number of hard examples."""
    kind, risk = METHODS[config.mining.method].risk, config.risk
    if kind == "mean":
        return MEAN
    if kind == "cvar":
        cvar = DualCvar(window=risk.window)
        return Risk(lambda losses, _, k: cvar(losses, tail_fraction=k / len(losses)), memory=cvar)

    def num_dropped(losses: Tensor, count: int) -> int:
        """As k' shrinks from the whole batch, the number of dropped examples grows from none.

        At first every example is hard, and a wrong label does not show: what is dropped then
        is what has not been learnt yet (docs/experiments.md).
        """
        shrunk = (len(losses) - count) / max(1, len(losses) - config.mining.num_counting)  # 0 to 1
        return round(shrunk * risk.num_dropped)

    if kind == "ranked-range":
        return Risk(
            lambda losses, batch, k: ranked_range_weights(
                losses, num_dropped=num_dropped(losses, k), num_hard_examples=k
            )
        )
    if pair_groups is not None:
        return _build_group_risk(config, pair_groups)
    if gap_bins is not None:
        shape = torch.from_numpy(gap_bins.shape)
        even = EvenMining(
            shape,
            scale=risk.gap_scale,
            gap_weight=risk.gap_weight,
            mined_share=risk.mined_share,
        )
        drops_hardest = kind == "even-range"

        def weigh_evenly(losses: Tensor, batch: Batch, count: int) -> Tensor:
            dropped = num_dropped(losses, count) if drops_hardest else 0
            bins = cast(Tensor, batch.group_ids)
            return even(losses, bins, num_hard_examples=count, num_dropped=dropped)

        has_kernel = not drops_hardest and len(shape) <= MOST_KERNEL_BINS
        return Risk(weigh_evenly, kernel_kind="even" if has_kernel else None, memory=even)
    return HARDEST


def _below(risk: Risk, *, ceiling: float) -> Risk:
    """The same risk, with k' grown until the mean of the hardest losses is below a ceiling."""

    def weights(losses: Tensor, batch: Batch, count: int) -> Tensor:
        return risk.weights(losses, batch, count_below(losses, count, ceiling=ceiling))

    return Risk(weights, memory=risk.memory)


def _build_group_risk(config: Config, pair_groups: Groups) -> Risk:
    """A batch has one number an example: its group, or the set of groups that it is in."""
    counts = np.bincount(memberships(pair_groups)[1])
    share, mixtures, sets = config.risk.natural_share, None, None
    if share:
        shares = counts / counts.sum()
        mixtures = torch.from_numpy(share * shares + (1 - share) * np.eye(len(counts)))
    if pair_groups.sets is not None:
        all_sets = np.arange(len(pair_groups.sets))
        sets = torch.from_numpy(pad_rows(pair_groups.sets, all_sets))  # (sets, P)
    risk = GroupRisk(len(counts), step_size=config.risk.step_size, mixtures=mixtures)

    def weigh_groups(losses: Tensor, batch: Batch, count: int) -> Tensor:
        assert batch.group_ids is not None  # the feed gives them
        ids = batch.group_ids
        return risk(losses, ids if sets is None else sets[ids.cpu()].to(losses.device))

    return Risk(weigh_groups, memory=risk)
