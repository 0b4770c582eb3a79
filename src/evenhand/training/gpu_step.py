"""Runs the training step on one GPU as a recorded CUDA graph.

Launching some twenty small kernels one by one takes ten times as long as running them. Here the
data set lies on the device, every step's learning rate, k', sample and batch are planned there,
and the host only says "again". The tables, their optimisers' state and the random numbers are
those of `Training`: batches and samples are the same as in `train_step`, and a checkpoint taken
by one continues by the other.

Risks without a kernel are functions of the host: then two graphs are replayed, and the risk weighs
the losses between them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import Rows, pairs_of
from evenhand.kernels.gpu.bags import bag_entries, bag_vectors, entry_capacity
from evenhand.kernels.gpu.batches import Clock, DevicePairs, draw_batch
from evenhand.kernels.gpu.even import EvenBuffers
from evenhand.kernels.gpu.gradients import shared_memory
from evenhand.kernels.gpu.losses import kernel_loss
from evenhand.kernels.gpu.rows import LARGEST_WIDTH, RowTable
from evenhand.kernels.gpu.segment_update import update_by_entries
from evenhand.kernels.gpu.selection import LARGEST_ROW
from evenhand.kernels.gpu.step import MiningStep
from evenhand.kernels.random import random_integers, row_keys
from evenhand.models import Bags
from evenhand.risk import GOLDEN, PRIOR_COUNT, WINDOW, EvenMining
from evenhand.sampling import UniformSampler
from evenhand.training.feed import Batch
from evenhand.training.optimizers import RowAdagrad, RowAdam, RowOptimizer
from evenhand.training.state import Plan, Scheduled, Training

BLOCK = 2**23  # numbers moved to the device at once
MOST_POSITIVES = 1024  # of one query: its list of positives is as wide for every other
MOST_MEMORY_SHARE = 0.5  # of the device's free memory that the data set may take
MOST_ENTRIES = 2**30  # features of a batch: kernels count them in 32 bits
SMALLEST_CAPABILITY = (8, 0)  # products of bfloat16, and of float32 in three parts


def why_no_graph(
    training: Training, plan: Plan, *, precision: torch.dtype = torch.bfloat16
) -> str | None:
    """What keeps a training on a CUDA device from `GpuStep`; None: nothing does.

    All settings that do are named, so that whoever wants the faster step changes them at once.
    """
    model, feed = training.model, training.feed
    is_in_blocks = bool(feed.part.block_pairs) or feed.part.feature_weights is not None
    settings = {
        "the data set is read in blocks": is_in_blocks,
        "the encoder is not a bag of sparse features": (
            getattr(model.encoder, "kernel_kind", None) != "bag"
        ),
        "model.labels is not 'table'": training.labels is not None,
        "mining.whole_queries is true": feed.has_whole_queries,
        "mining.sampler is not 'uniform'": not isinstance(plan.sampler, UniformSampler),
        "the loss (loss.name) has no kernel": kernel_loss(plan.loss_fn) is None,
        "model.label_bias is true": model.label_bias is not None,
        "loss.log_q is true": plan.is_log_q_corrected,
        "training.max_gradient_norm is above 0": plan.max_gradient_norm > 0,
        f"model.embedding_dim is above {LARGEST_WIDTH}": (
            model.label_table.shape[1] > LARGEST_WIDTH
        ),
        f"mining.batch_size is above {LARGEST_ROW}": feed.batch_size > LARGEST_ROW,
        f"more than {LARGEST_ROW} labels (mining.num_sampled_labels) are drawn": (
            plan.num_sampled_labels > LARGEST_ROW
        ),
    }
    reasons = [reason for reason, is_so in settings.items() if is_so]
    return " and ".join(reasons) if reasons else _device_limit(training, plan, precision)


def _device_limit(training: Training, plan: Plan, precision: torch.dtype) -> str | None:
    """What the data or the device cannot do; None: nothing."""
    device, num_positives = training.feed.device, _num_positives(training)
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < SMALLEST_CAPABILITY:
        return (
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, and "
            f"the kernels need {'.'.join(map(str, SMALLEST_CAPABILITY))}"
        )
    most: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if most < shared_memory(precision):
        return (
            f"{properties.name} has {most:,} bytes of shared memory for a program, and the kernels "
            f"need {shared_memory(precision):,}"
        )
    if num_positives > MOST_POSITIVES:
        return f"a query has more than {MOST_POSITIVES} positives"
    num_others = len(training.model.label_table) - num_positives
    if plan.draws_for_each and plan.num_sampled_labels > num_others:
        return "a query has so many positives that fewer labels remain than are drawn for it"
    num_entries = _num_entries(training, plan)
    if num_entries > MOST_ENTRIES:
        return f"the features of a batch may be {num_entries:,}, and kernels count to 2^30"
    free, _ = torch.cuda.mem_get_info(device)
    if _num_bytes(training, num_entries) > MOST_MEMORY_SHARE * free:
        return "the data set does not fit the device's memory"
    return None


class GpuStep:
    """Runs `train_step` as a CUDA graph, where `why_no_graph` is None."""

    def __init__(self, training: Training, plan: Plan, *, precision: torch.dtype) -> None:
        model, feed, device = training.model, training.feed, training.feed.device
        loss = kernel_loss(plan.loss_fn)
        features, positives = feed.part.features, feed.part.positives
        assert loss is not None
        assert isinstance(features, Rows)

        def copy(array: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            """On the device; a memory map is read a few megabytes at a time."""
            moved = torch.empty(array.shape, dtype=dtype, device=device)
            for start in range(0, len(array), BLOCK):
                block = np.array(array[start : start + BLOCK])  # a copy: torch wants it writable
                moved[start : start + BLOCK] = torch.from_numpy(block)
            return moved

        self.training = training
        steps = range(plan.num_steps)
        rates = [plan.at_step(s, batch_size=feed.batch_size).learning_rate for s in steps]
        self.clock = Clock.planned(
            torch.tensor(rates, device=device),
            torch.tensor(_counts(training, plan), device=device),
            _sample_keys(training, plan).to(device),
        )
        self.clock.step_number.fill_(training.step)
        # A step is planned by its own number, so those before the first are left empty.
        self.places = feed.places_ahead(plan.num_steps - training.step)
        keys, positions = torch.zeros(2, plan.num_steps, dtype=torch.int64)
        for step, place in enumerate(self.places, start=training.step):
            keys[step], positions[step] = place.key, place.position - feed.batch_size
        pairs = pairs_of(positives)
        self.pairs = DevicePairs(
            query_ids=copy(pairs.query_ids),
            label_ids=copy(pairs.label_ids),
            positive_offsets=copy(positives.offsets),
            positive_ids=copy(positives.ids),
            epoch_keys=keys.to(device),
            positions=positions.to(device),
        )
        self.offsets = copy(features.offsets)
        self.feature_ids = copy(features.ids, torch.int32)
        values = features.values
        self.feature_values = None if values is None else copy(values, torch.float32)
        self.pair_groups = None if feed.pair_groups is None else copy(feed.pair_groups)
        self.even = self._even_buffers()
        self.step = MiningStep(
            _row_table(training.optimizers.rows["labels"]),
            self.clock,
            batch_size=feed.batch_size,
            num_positives=_num_positives(training),
            num_sampled_labels=plan.num_sampled_labels,
            num_hard_labels=min(plan.num_hard_labels, plan.num_sampled_labels),
            loss=loss,
            scale=model.scale,
            is_cosine=model.is_cosine,
            draws_for_each=plan.draws_for_each,
            precision=precision,
        )
        self.feature_rows = _row_table(training.optimizers.rows["features"])
        self.documents = torch.zeros(feed.batch_size, dtype=torch.int64, device=device)
        self.pair_ids = torch.zeros_like(self.documents)
        num_entries = _num_entries(training, plan)
        self.entry_ids = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self.entry_sources = torch.zeros_like(self.entry_ids)
        self.entry_values = torch.zeros(num_entries, device=device)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.num_run = 0

    def _even_buffers(self) -> EvenBuffers | None:
        """For even-handed mining: the risk's own sums, where kernels can add to them."""
        risk, pair_bins = self.training.risk, self.pair_groups
        if risk.kernel_kind != "even":
            return None
        assert isinstance(risk.memory, EvenMining)
        assert pair_bins is not None
        even = risk.memory
        even.shape, even.sums = even.shape.to(pair_bins.device), even.sums.to(pair_bins.device)
        return EvenBuffers(
            pair_bins=pair_bins.int(),
            batch_bins=pair_bins.new_zeros(self.training.feed.batch_size, dtype=torch.int32),
            shape=even.shape,
            sums=even.sums,
            gaps=even.gaps().float(),
            scale=even.scale,
            gap_weight=even.gap_weight,
            mined_share=even.mined_share,
            multiplier=GOLDEN,
            prior_count=float(PRIOR_COUNT),
            decay=1 - 1 / WINDOW,
        )

    def __call__(self, scheduled: Scheduled) -> Tensor:
        """(2,): the objective, and the share of examples without any loss."""
        training = self.training
        is_by_kernel = training.risk.kernel_kind is not None
        parts = [self._whole] if is_by_kernel else [self._begin, self._end]
        # Triton launches on the current device.
        with torch.cuda.device_of(self.documents):  # type: ignore[no-untyped-call]
            # The first step ran as it is, which compiled the kernels.
            if self.num_run == 1 and self.documents.is_cuda:
                self.graphs = [_record(part) for part in parts]
            for index, part in enumerate(parts):
                if index:
                    self._weigh(scheduled.num_hard_examples)
                if self.graphs:
                    self.graphs[index].replay()
                else:
                    part()
        self.num_run += 1
        training.feed.place = self.places[self.num_run - 1]
        random_integers(1, 1, training.generator)  # that of the sample
        for optimizer in training.optimizers.rows.values():
            if isinstance(optimizer, RowAdam):
                optimizer.num_steps += 1
        return self.step.stats[training.step]

    def _whole(self) -> None:
        self._draw()
        if self.even is None:
            self.step.mine()
            self._update()
        else:
            self.step.mine_evenly(self.even, self.pair_ids)
            self._update()
            self.step.join_gaps()

    def _begin(self) -> None:
        self._draw()
        self.step.score()

    def _end(self) -> None:
        self.step.list_examples()
        self._update()

    def _draw(self) -> None:
        self.clock.tick()
        draw_batch(
            self.pairs, self.clock, out_pairs=self.pair_ids, out_queries=self.documents,
            out_labels=self.step.label_ids, out_positives=self.step.positive_ids,
            masks_all_positives=self.training.feed.masks_all_positives,
        )  # fmt: skip
        bag_vectors(
            self.feature_rows.table, self.offsets, self.feature_ids, self.feature_values,
            self.documents, out=self.step.vectors,
        )  # fmt: skip

    def _update(self) -> None:
        step, clock = self.step, self.clock
        step.update()
        bag_entries(
            self.offsets, self.feature_ids, self.feature_values, self.documents,
            step.kept.survivors, step.kept.num_survivors, out_row_ids=self.entry_ids,
            out_sources=self.entry_sources, out_values=self.entry_values,
        )  # fmt: skip
        update_by_entries(
            self.feature_rows, self.entry_ids, self.entry_sources, self.entry_values,
            step.query_gradients, learning_rate=clock.learning_rate, step_number=clock.step_number,
        )  # fmt: skip
        step.join()

    def _weigh(self, num_hard_examples: int) -> None:
        """Weighs the examples by a risk of the host."""
        step = self.step
        groups = None if self.pair_groups is None else self.pair_groups[self.pair_ids]
        nothing = Bags(self.documents, self.documents)  # no risk looks at features
        batch = Batch(nothing, step.label_ids, step.positive_ids, groups)
        weights = self.training.risk.weights(step.kept.losses, batch, num_hard_examples)
        step.kept.weights.copy_(weights)


def _counts(training: Training, plan: Plan) -> list[int]:
    """How many examples of each step the kernels keep; those of the host's risks count anew."""
    batch_size = training.feed.batch_size
    if training.risk.kernel_kind == "mean":
        return [batch_size] * plan.num_steps
    steps = range(plan.num_steps)
    return [plan.at_step(step, batch_size=batch_size).num_hard_examples for step in steps]


def _sample_keys(training: Training, plan: Plan) -> Tensor:
    """(S,) the key of each step's sample, as the generator will give them from here on."""
    ahead = torch.Generator()
    ahead.set_state(training.generator.get_state())
    keys = torch.zeros(plan.num_steps, 1, dtype=torch.int64)
    for step in range(training.step, plan.num_steps):
        keys[step] = random_integers(1, 1, ahead)
    # A sample for each example takes the keys of its rows from this one in the kernel.
    return (keys if plan.draws_for_each else row_keys(keys, 1))[:, 0]


def _row_table(optimizer: RowOptimizer) -> RowTable:
    """The table and its state as kernels take them: the same tensors, not copies."""
    table = optimizer.table.data
    if isinstance(optimizer, RowAdagrad):
        return RowTable(table, optimizer.sums, seed=0)
    moments, momentum = optimizer.second_moments, optimizer.momentum
    return RowTable(table, moments, momentum, optimizer.betas, seed=0)


def _record(part: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on: a feed asks for memory meanwhile. A stream of our own, because the
    # default one stays on the device that was current when the first graph was recorded.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        part()
    return graph


def _num_positives(training: Training) -> int:
    feed = training.feed
    if not feed.masks_all_positives:
        return 1
    return int(np.diff(feed.part.positives.offsets).max(initial=1))


def _num_entries(training: Training, plan: Plan) -> int:
    """The features of the largest batch that can survive."""
    features, positives = training.feed.part.features, training.feed.part.positives
    assert isinstance(features, Rows)
    lengths, num_pairs = (
        torch.from_numpy(np.diff(rows.offsets).astype(np.int64)) for rows in (features, positives)
    )
    counts_no_more = training.risk.kernel_kind in ("hardest", "mean")  # than k' examples
    most = max(_counts(training, plan)) if counts_no_more else training.feed.batch_size
    return entry_capacity(lengths, num_pairs, most)


def _num_bytes(training: Training, num_entries: int) -> int:
    """What `GpuStep` puts on the device: the data set, and the entries of a batch."""
    features, positives = training.feed.part.features, training.feed.part.positives
    assert isinstance(features, Rows)
    num_offsets = len(features.offsets) + len(positives.offsets)
    feature_size = 4 if features.values is None else 8
    pair_size = 24 if training.feed.pair_groups is None else 32  # query, label, positive, group
    # Ids, sources and values, and what sorting them takes: keys and order, twice.
    entry_size = 12 + 2 * 12
    return (
        8 * num_offsets
        + feature_size * len(features.ids)
        + pair_size * len(positives.ids)
        + entry_size * num_entries
    )
