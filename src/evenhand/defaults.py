"""The settings that fit a data set: what `evenhand train` chooses where nobody else did.

What a preset, a file or a flag says goes before the rules, and the rules follow it: with a given
batch size, the number of hard examples fits that batch. How each rule was found: docs/choosing.md.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.table import Column, Table
from rich.text import Text

from evenhand.config import OWN, Config, build_config, check_settings, toml_value
from evenhand.data import Dataset, Rows
from evenhand.data.weighting import column_spread
from evenhand.errors import UserError
from evenhand.evaluation.scores import main_cutoff
from evenhand.methods import METHODS

NAMES, TEXTS = "n-grams of short texts", "n-grams of long texts"
SPARSE, DENSE = "sparse features with values", "dense features"
ENCODED, OWN_ENCODED = "read by a transformer", "read by an encoder of your own"
MOST_NGRAMS = 200  # of a short text, on average: 50 characters


class Choice(NamedTuple):
    """A setting that a rule chose."""

    name: str  # "mining.batch_size"
    value: Any
    reason: str


class Facts(NamedTuple):
    """What the rules look at."""

    num_labels: int
    num_queries: int  # of the training part
    num_pairs: int
    num_features: int
    density: float  # sparse: the share of all features that a query has, on average
    kind: str  # one of the six above
    is_uneven: bool  # dense: a column is much wider than most, or they lie far from 0
    has_counts: bool  # sparse: nobody has weighted the values (whole numbers, words of texts)
    num_validation: int  # queries
    is_streamed: bool
    num_ranks: int
    is_gpu: bool
    memory: int  # bytes
    encoder_width: int = 0  # numbers in a vector of the given encoder

    def describe(self) -> str:
        """'54,958 training queries, 298,166 pairs, 26,388 labels, dense features'"""
        return (
            f"{self.num_queries:,} training queries, {self.num_pairs:,} pairs, "
            f"{self.num_labels:,} labels, {self.kind}"
        )


def facts_of(
    dataset: Dataset, *, device: torch.device, num_ranks: int = 1, encoder_width: int = 0
) -> Facts:
    """Reads what the rules look at; of the feature values, no more than the first million."""
    train, validation = dataset.parts["train"], dataset.parts.get("validation")
    features, kind, has_counts, is_uneven, density = train.features, DENSE, False, False, 1.0
    if not isinstance(features, Rows):
        means, deviations = column_spread(features)
        is_uneven = bool(max(deviations.max(), np.median(abs(means))) > 10 * np.median(deviations))
    if isinstance(features, Rows):
        density = len(features.ids) / max(1, len(features) * dataset.num_features)
        is_short = len(features.ids) <= MOST_NGRAMS * len(features)
        kind = SPARSE if features.values is not None else NAMES if is_short else TEXTS
        if features.values is not None:
            first = np.asarray(features.values[:1_000_000])
            is_ours = (dataset.featurizer or {}).get("kind") == "words"
            has_counts = is_ours or bool((first == np.round(first)).all())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return Facts(
        num_labels=dataset.num_labels,
        num_queries=len(train),
        num_pairs=len(train.positives.ids),
        num_features=dataset.num_features,
        density=density,
        kind=kind,
        is_uneven=is_uneven,
        has_counts=has_counts,
        num_validation=0 if validation is None else len(validation),
        is_streamed=dataset.is_read_in_blocks,
        num_ranks=num_ranks,
        is_gpu=device.type == "cuda",
        memory=memory,
        encoder_width=encoder_width,
    )


def fit_settings(
    given: Mapping[str, Mapping[str, Any]],
    dataset: Dataset,
    *,
    device: torch.device | None = None,
    num_ranks: int = 1,
    encoder_width: int = 0,
) -> tuple[Config, list[Choice]]:
    """The whole config of a run on a data set, and what the rules chose of it, with reasons.

    Args:
        given: settings by section, as in a TOML file; they stay, except for sizes that the data do
            not have: of 50 labels, no 4,096 can be drawn.
        dataset: as it was made (`data.weighting` is chosen here, and applied afterwards).
        device: that of the run; None: the CPU.
        encoder_width: numbers in a vector of the encoder that is given; 0: none is.
    """
    how: Any = {"num_ranks": num_ranks, "encoder_width": encoder_width}
    facts = facts_of(dataset, device=device or torch.device("cpu"), **how)
    settings, choices = choose_settings(given, facts)
    return build_config(settings), choices


def choose_settings(
    given: Mapping[str, Mapping[str, Any]], facts: Facts
) -> tuple[dict[str, dict[str, Any]], list[Choice]]:
    """The rules, one after the other; each sees what is given and what those before it chose."""
    settings = check_settings(given)
    choices: list[Choice] = []

    def choose(name: str, value: Any, reason: str, *, most: int | None = None) -> Any:
        """The value that holds: the given one, lowered to `most`, or else that of the rule."""
        section, _, key = name.partition(".")
        own = settings[section].get(key)
        if own is not None and (most is None or own <= most):
            return own
        if own is not None:
            value, reason = most, f"{own:,} were asked for, and the data have no more"
        settings[section][key] = value
        choices.append(Choice(name, value, reason))
        return value

    def is_given(name: str) -> bool:
        section, _, key = name.partition(".")
        return key in settings[section]

    f, kind = facts, facts.kind
    if f.encoder_width:
        kind = OWN_ENCODED if settings["model"].get("encoder") == OWN else ENCODED
    is_tuned = kind in (ENCODED, OWN_ENCODED)
    is_frozen = is_tuned and bool(settings["model"].get("freeze_encoder"))
    if is_frozen:
        kind, is_tuned = DENSE, False  # a perceptron over vectors
    is_document = kind in (TEXTS, SPARSE)
    has_tower = settings["model"].get("labels", "table") != "table"
    labels_of_query = f.num_pairs / max(1, f.num_queries)

    # Features. Counts without weights: tf-idf. Anything else was weighted by whoever made it.
    if kind == SPARSE:
        why = (
            "values are counts of features"
            if f.has_counts
            else "values are weighted already; rows of length 1"
        )
        choose("data.weighting", "tf-idf" if f.has_counts else "unit", why)

    if kind == DENSE and f.is_uneven and not (is_given("model.encoder") or has_tower):
        # P@1 on breast cancer is .983, and .942 with the columns as they are; on wine .963, .889.
        choose("data.weighting", "standard", "some columns are far wider than others")

    # The loss. On names (places) contrastive beats softmax and BOWL, .875, .858 and .820; on
    # documents softmax on dot products with a bias is far better (recall@10 .336 and .248 on 7,600
    # package descriptions): frequent labels need a bias.
    asks_for_dot = settings["model"].get("similarity") == "dot" or is_given("model.scale")
    why = kind + "; those of words would have votes and a ranker" * (kind == TEXTS)
    is_contrastive = kind == NAMES and not asks_for_dot and not has_tower
    loss = choose("loss.name", "contrastive" if is_contrastive else "softmax", why)
    is_dot = is_document and loss != "contrastive" and not has_tower
    similarity = choose("model.similarity", "dot" if is_dot else "cosine", why)
    is_sharp = is_tuned or has_tower
    scale = 1.0 if loss != "softmax" else 3.0 if similarity == "dot" else 20.0 if is_sharp else 16.0
    choose("model.scale", scale, why)
    choose("model.label_bias", similarity == "dot", why)

    # Vectors, with the optimiser's state as large again, take no more than a quarter of memory.
    num_rows = f.num_labels + (f.num_features if kind in (NAMES, TEXTS, SPARSE) else 0)
    width = 256
    if is_tuned:
        width = f.encoder_width
        if settings["model"].get("embedding_dim", width) != width:
            raise UserError(
                f"model.embedding_dim must be {width} (the numbers in a vector of the encoder), "
                f"got {settings['model']['embedding_dim']}"
            )
    while not is_tuned and width > 16 and 8 * width * num_rows > f.memory / 4:
        width //= 2
    is_whole = is_tuned or width == 256
    choose("model.embedding_dim", width, why if is_whole else "tables in a quarter of memory")

    # The method. Even-handed mining is at or above SNM on all, head, tail and worst groups of
    # places; on documents it costs nothing beside all examples (docs/choosing.md).
    method = METHODS[choose("mining.method", "s2m-even", "rare labels count as they will at test")]
    all_fit = f.num_labels <= 4096
    why = "a step can score all labels" if all_fit else "a step scores some of many labels"
    most = max(1, f.num_labels - bool(settings["mining"].get("for_each_example")))
    wanted = max(4096, settings["mining"].get("num_hard_labels", 0))
    num_sampled = choose("mining.num_sampled_labels", min(most, wanted), why, most=most)
    if not all_fit and loss == "softmax":
        # Frequent labels are the ones confused: power .4 beat .5 and uniform on debian-deps.
        choose("mining.sampler", "frequency", why)
        choose("mining.sampler_power", 0.4, why)
        choose("loss.log_q", settings["mining"]["sampler"] != "uniform", why)
    sampler = settings["mining"].get("sampler", "uniform")
    k = num_sampled if loss == "softmax" and all_fit else 128 if loss == "softmax" else 64
    if is_sharp:
        k = 32 if is_tuned else 64  # of which a tower encodes each again
    choose("mining.num_hard_labels", min(k, num_sampled), why, most=num_sampled)

    # Batches: large ones for mining, but four to an epoch, and scores within a 16th of memory. Of
    # names fifty to an epoch: on 25,000 names P@1 is .743, .770 with batches of 2,048, 512.
    size = 2048 if kind == DENSE else 4096 if f.num_queries > 20_000 else 1024
    if is_tuned:
        size = 1024 if f.is_gpu else 256
    if kind == NAMES:
        size = min(2048, 2 ** round(math.log2(max(64, f.num_queries / 50))))
    columns = num_sampled if method.samples_labels else f.num_labels
    size = min(size, max(16, f.num_queries // 4), max(1, f.memory // 64 // columns), f.num_pairs)
    if sampler in ("in-batch", "mixed"):
        share = settings["mining"].get("in_batch_share", 0.5) if sampler == "mixed" else 1
        size = min(size, round(share * num_sampled))
    size = max(size, settings["mining"].get("num_hard_examples", 0), f.num_ranks)
    why = f"of {f.num_pairs:,} training pairs"
    batch_size = choose("mining.batch_size", min(size, f.num_pairs), why, most=f.num_pairs)
    if method.mines_examples and not settings["mining"].get("tail_fraction"):
        # k' of a quarter was tuned on places, of a half on debian-deps: the mean needs more there.
        share = 2 if is_document or is_tuned else 4
        choose("mining.num_hard_examples", -(-batch_size // share), why, most=batch_size)
    if method.drops_hardest:
        room = batch_size - settings["mining"].get("num_hard_examples", batch_size // 2)
        choose("risk.num_dropped", min(batch_size // 64, room), "some labels may be wrong")
    if labels_of_query > 1.5 and (is_document or is_frozen) and not f.is_gpu and not f.is_streamed:
        mining = settings["mining"]
        can_share = sampler not in ("in-batch", "mixed") and not mining.get("for_each_example")
        if can_share and mining.get("masks_all_positives", True):
            why = f"{labels_of_query:.1f} labels a query, scored once for all"
            choose("mining.whole_queries", True, why)

    # Steps. The presets that were tuned on three data sets of very different size all see 33 to 40
    # pairs for every query; with one label a query, 13 beat 36 (recall@10 .713 and .703). Of short
    # texts, 13. Fewer where there are millions, but three epochs.
    # An encoder that has been trained before is only tuned; another begins with random weights.
    visits = 13 if kind == NAMES else min(35, 15 * labels_of_query)
    if is_tuned:
        visits = labels_of_query * (3 if kind == ENCODED else 10)
    num_seen = min(visits * f.num_queries, max(8_000_000, 3 * f.num_pairs))
    least = 300 if kind not in (NAMES, TEXTS, SPARSE) else 100
    num_steps = max(least, round(num_seen / batch_size))
    why = f"{num_steps * batch_size / max(1, f.num_queries):.0f} pairs seen for each query"
    num_steps = choose("training.num_steps", num_steps, why)
    choose("training.learning_rate", 0.024 if kind == NAMES else 0.01, "falls in a line to 0")
    if is_tuned:
        rate = 5e-5 if kind == ENCODED else 5e-4
        choose("training.encoder_learning_rate", rate, kind)
        choose("training.warmup_steps", num_steps // 10, kind)
        choose("training.chunk_size", 64, "memory for the activations of 64 texts")

    # Early stopping: the best of eight looks at the validation part, where looking is cheap.
    seen, looked_at = num_steps * batch_size * columns, f.num_validation * f.num_labels
    is_cheap = 8 * looked_at < seen / 4
    if f.num_validation >= 200 and is_cheap and num_steps >= 16:
        why = f"of {f.num_validation:,} validation queries; the best of 8 looks is kept"
        every = choose("training.evaluate_every", -(-num_steps // 8), why)
        if every:
            choose("training.patience", 3, why)
    cutoffs = settings["evaluation"].get("cutoffs", Config().evaluation.cutoffs)
    cutoff = main_cutoff(cutoffs, num_labels=f.num_labels)
    choose("training.select_by", f"recall@{cutoff}", "what a better model has more of")

    # Additions to the model's scores, by features with values. Rows that share most of few features
    # are all alike, and only the nearest should vote: a power of 8 is best on bibtex and delicious,
    # 2 on four sets made of debian-deps and on lines of three words (P@1 .530 and .508).
    if kind == SPARSE and not has_tower:
        can_add = not f.is_streamed and f.num_ranks == 1
        why = "similar training documents vote"
        choose("search.frequency_discount", 0.15, why)
        num_neighbours = 50 if can_add and f.num_queries <= 200_000 else 0
        choose("search.num_neighbours", min(num_neighbours, f.num_queries), why, most=f.num_queries)
        choose("search.neighbour_weight", 12.0, why)
        choose("search.neighbour_power", 8.0 if f.density > 0.01 else 2.0, why)
        num_mined = f.num_labels if f.num_labels <= 1000 else 150
        num_mined = min(num_mined, 40_000_000 // max(1, f.num_queries))
        num_mined = num_mined if can_add and num_mined >= min(50, f.num_labels) else 0
        why = "a linear classifier a label, on its hardest queries"
        choose("ranker.num_mined_labels", num_mined, why, most=f.num_labels)
        choose("ranker.num_candidates", max(1, min(f.num_labels, num_mined, 1000)), why)
        choose("ranker.positive_cost", 1.0, why)
        choose("ranker.negative_cost", 0.3, why)
        # Labels with one or two pairs teach a classifier little: P@1 .539 with 2, .521 with 8.
        choose("ranker.weight", 8.0 if f.num_pairs > 4 * f.num_labels else 2.0, why)
    return settings, choices


def choices_table(choices: list[Choice]) -> Table:
    """What was chosen, and why: a line for all that has one reason."""
    lines: dict[str, list[str]] = {}
    for name, value, reason in choices:
        key = name.removesuffix(".name").split(".")[-1]
        lines.setdefault(reason, []).append(f"{key} {toml_value(value)}")
    table = Table(Column(overflow="fold"), Column(style="dim"), box=None, show_header=False)
    for reason, words in lines.items():
        table.add_row(Text(", ".join(words)), Text(reason))
    return table
