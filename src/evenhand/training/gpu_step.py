"""The step of one GPU: `train_step` recorded as a CUDA graph and replayed, step after step.

Launching some twenty small kernels one by one takes ten times as long as running them. Here the
data set lies on the device, every step's learning rate, k', sample and batch are planned there,
and the host only says "again". The tables, their optimisers' state and the random numbers are
those of `Training`: batches and samples are the same as in `train_step`, and a checkpoint taken
by one continues by the other.

Risks without a kernel are functions of the host: then two graphs are replayed, and the risk weighs
the losses between them.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenhand.data import IntArray, Rows, pairs_of
from evenhand.kernels.draws import random_integers
from evenhand.kernels.permutation import row_keys
from evenhand.models.encoders import Bags
from evenhand.sampling import UniformSampler
from evenhand.training.feed import Batch
from evenhand.training.optimizers import RowAdam, RowOptimizer
from evenhand.training.state import Plan, Scheduled, Training

if TYPE_CHECKING:  # these modules need triton, which a machine without a GPU need not have
    from evenhand.kernels.gpu.batches import DevicePairs
    from evenhand.kernels.gpu.rows import RowTable

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
    try:
        settings = list(_settings_without_kernel(training, plan))
    except ImportError:
        return "triton is not installed"
    if settings:
        return " and ".join(settings)
    return _device_limit(training, plan, precision)


def _settings_without_kernel(training: Training, plan: Plan) -> Iterator[str]:
    from evenhand.kernels.gpu.losses import kernel_loss
    from evenhand.kernels.gpu.rows import LARGEST_WIDTH
    from evenhand.kernels.gpu.selection import LARGEST_ROW

    model, feed = training.model, training.feed
    if feed.part.block_pairs or feed.part.feature_weights is not None:
        yield "the data set is read in blocks"
    if getattr(model.encoder, "kernel_kind", None) != "bag":
        yield "the encoder is not a bag of sparse features"
    if feed.has_whole_queries:
        yield "mining.whole_queries is true"
    if not isinstance(plan.sampler, UniformSampler):
        yield "mining.sampler is not 'uniform'"
    if kernel_loss(plan.loss_fn) is None:
        yield "the loss (loss.name) has no kernel"
    if model.label_bias is not None:
        yield "model.label_bias is true"
    if plan.is_log_q_corrected:
        yield "loss.log_q is true"
    if plan.max_gradient_norm:
        yield "training.max_gradient_norm is above 0"
    if model.label_table.shape[1] > LARGEST_WIDTH:
        yield f"model.embedding_dim is above {LARGEST_WIDTH}"
    if feed.batch_size > LARGEST_ROW:
        yield f"mining.batch_size is above {LARGEST_ROW}"
    if plan.num_sampled_labels > LARGEST_ROW:
        yield f"more than {LARGEST_ROW} labels (mining.num_sampled_labels) are drawn"


def _device_limit(training: Training, plan: Plan, precision: torch.dtype) -> str | None:
    """What the data or the device cannot do; None: nothing."""
    from evenhand.kernels.gpu.gradients import shared_memory

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
        from evenhand.kernels.gpu.batches import Clock
        from evenhand.kernels.gpu.losses import kernel_loss
        from evenhand.kernels.gpu.step import MiningStep

        model, feed, device = training.model, training.feed, training.feed.device
        loss = kernel_loss(plan.loss_fn)
        assert loss is not None
        assert training.optimizers.feature_rows is not None
        self.training = training
        self.clock = Clock.planned(
            torch.tensor([now.learning_rate for now in _schedule(training, plan)], device=device),
            torch.tensor(_counts(training, plan), device=device),
            _sample_keys(training, plan).to(device),
        )
        self.clock.step_number.fill_(training.step)
        self.places = feed.places_ahead(plan.num_steps - training.step)
        self.pairs = self._device_pairs(first_step=training.step)
        features = feed.part.features
        assert isinstance(features, Rows)
        self.offsets = _copy_to(features.offsets, torch.int64, device)
        self.feature_ids = _copy_to(features.ids, torch.int32, device)
        values = features.values
        self.feature_values = None if values is None else _copy_to(values, torch.float32, device)
        self.step = MiningStep(
            _row_table(training.optimizers.label_rows),
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
        self.feature_rows = _row_table(training.optimizers.feature_rows)
        self.documents = torch.zeros(feed.batch_size, dtype=torch.int64, device=device)
        self.pair_ids = torch.zeros_like(self.documents)
        num_entries = _num_entries(training, plan)
        self.entry_ids = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self.entry_sources = torch.zeros_like(self.entry_ids)
        self.entry_values = torch.zeros(num_entries, device=device)
        groups = feed.pair_groups
        self.pair_groups = None if groups is None else _copy_to(groups, torch.int64, device)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.num_run = 0

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
        for optimizer in training.optimizers.row_optimizers().values():
            if isinstance(optimizer, RowAdam):
                optimizer.num_steps += 1
        return self.step.stats[training.step]

    def _whole(self) -> None:
        self._draw()
        self.step.mine()
        self._update()

    def _begin(self) -> None:
        self._draw()
        self.step.score()

    def _end(self) -> None:
        self.step.list_examples()
        self._update()

    def _draw(self) -> None:
        from evenhand.kernels.gpu.bags import bag_vectors
        from evenhand.kernels.gpu.batches import draw_batch

        self.clock.tick()
        draw_batch(
            self.pairs,
            self.clock,
            masks_all_positives=self.training.feed.masks_all_positives,
            out_pairs=self.pair_ids,
            out_queries=self.documents,
            out_labels=self.step.label_ids,
            out_positives=self.step.positive_ids,
        )
        bag_vectors(
            self.feature_rows.table,
            self.offsets,
            self.feature_ids,
            self.feature_values,
            self.documents,
            out=self.step.vectors,
        )

    def _update(self) -> None:
        from evenhand.kernels.gpu.bags import bag_entries
        from evenhand.kernels.gpu.entries import update_by_entries

        self.step.update()
        bag_entries(
            self.offsets,
            self.feature_ids,
            self.feature_values,
            self.documents,
            self.step.kept.survivors,
            self.step.kept.num_survivors,
            out_row_ids=self.entry_ids,
            out_sources=self.entry_sources,
            out_values=self.entry_values,
        )
        update_by_entries(
            self.feature_rows,
            self.entry_ids,
            self.entry_sources,
            self.entry_values,
            self.step.query_gradients,
            learning_rate=self.clock.learning_rate,
            step_number=self.clock.step_number,
        )
        self.step.join()

    def _weigh(self, num_hard_examples: int) -> None:
        """Weighs the examples by a risk of the host."""
        groups = None if self.pair_groups is None else self.pair_groups[self.pair_ids]
        batch = Batch(
            Bags(self.documents, self.documents),  # no risk looks at features
            self.step.label_ids,
            self.step.positive_ids,
            self.pair_ids,
            groups,
        )
        weights = self.training.risk.weights(self.step.kept.losses, batch, num_hard_examples)
        self.step.kept.weights.copy_(weights)

    def _device_pairs(self, first_step: int) -> "DevicePairs":
        from evenhand.kernels.gpu.batches import DevicePairs

        feed = self.training.feed
        # A step is planned by its own number, so those before the first are left empty.
        keys = torch.zeros(first_step + len(self.places), dtype=torch.int64)
        positions = torch.zeros_like(keys)
        for step, place in enumerate(self.places, start=first_step):
            keys[step] = place.key
            positions[step] = place.position - feed.batch_size
        positives = feed.part.positives

        def copy(array: IntArray) -> Tensor:
            return _copy_to(array, torch.int64, feed.device)

        pairs = pairs_of(positives)
        return DevicePairs(
            query_ids=copy(pairs.query_ids),
            label_ids=copy(pairs.label_ids),
            positive_offsets=copy(positives.offsets),
            positive_ids=copy(positives.ids),
            epoch_keys=keys.to(feed.device),
            positions=positions.to(feed.device),
        )


def _schedule(training: Training, plan: Plan) -> list[Scheduled]:
    """Of every step of the plan."""
    batch_size = training.feed.batch_size
    return [plan.at_step(step, batch_size=batch_size) for step in range(plan.num_steps)]


def _counts(training: Training, plan: Plan) -> list[int]:
    """How many examples of each step the kernels keep; those of the host's risks count anew."""
    if training.risk.kernel_kind == "mean":
        return [training.feed.batch_size] * plan.num_steps
    return [now.num_hard_examples for now in _schedule(training, plan)]


def _sample_keys(training: Training, plan: Plan) -> Tensor:
    """(S,) the key of each step's sample, as the generator will give them from here on."""
    ahead = torch.Generator()
    ahead.set_state(training.generator.get_state())
    keys = torch.zeros(plan.num_steps, 1, dtype=torch.int64)
    for step in range(training.step, plan.num_steps):
        keys[step] = random_integers(1, 1, ahead)
    # A sample for each example takes the keys of its rows from this one in the kernel.
    return (keys if plan.draws_for_each else row_keys(keys, 1))[:, 0]


def _row_table(optimizer: RowOptimizer) -> "RowTable":
    """The table and its state as kernels take them: the same tensors, not copies."""
    from evenhand.kernels.gpu.rows import RowTable

    if isinstance(optimizer, RowAdam):
        return RowTable(
            optimizer.table.data,
            optimizer.second_moments,
            optimizer.momentum,
            optimizer.betas,
            seed=0,
        )
    return RowTable(optimizer.table.data, optimizer.sums, seed=0)


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
    from evenhand.kernels.gpu.bags import entry_capacity

    features, positives = training.feed.part.features, training.feed.part.positives
    assert isinstance(features, Rows)
    lengths, num_pairs = (
        torch.from_numpy(np.diff(rows.offsets).astype(np.int64)) for rows in (features, positives)
    )
    most = training.feed.batch_size
    if training.risk.kernel_kind is not None:
        most = max(_counts(training, plan))
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


def _copy_to(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An array on the device; a memory map is read there a few megabytes at a time."""
    moved = torch.empty(array.shape, dtype=dtype, device=device)
    for start in range(0, len(array), BLOCK):
        block = np.array(array[start : start + BLOCK])  # a copy: torch wants it writable
        moved[start : start + BLOCK] = torch.from_numpy(block)
    return moved
