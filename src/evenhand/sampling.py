"""Which negative labels a step looks at: samplers, and the count each draw stands for.

Contract shared by every sampler here:

    sample(positive_ids (B, P), M)           ->  ids (M,), one sample shared by the batch
    sample_for_each(positive_ids (B, P), M)  ->  ids (B, M), one sample for each example

`positive_ids` is padded with -1; its first column is the drawn positive, and P = 1 is the paper's
mask. A shared sample may hold some example's positive: the caller masks it, so that an example
sees M or M - 1 labels. A sample for each example never holds one of its positives.

An id of -1 is a slot without a label; its log-count is 0 and means nothing. Everywhere else
`log_counts` has one meaning: the log of the expected number of times the label occurs in such a
sample, seen by an example whose positive it is not. Without repeats that is the probability of
being in the sample; with repeats it is M * p. So, for every sampler, the sum of
exp(score - log_count) over the slots is an unbiased estimate of the sum of exp(score) over the
labels that can be drawn and are not positives: see `log_q_corrected`.

Randomness comes from the generator alone, drawn on its device and moved to that of
`positive_ids`. Tables stay on the device they were given on, which must be that of `positive_ids`.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from evenhand.kernels.random import (
    BEYOND,
    inclusion,
    is_among,
    permute,
    random_integers,
    row_keys,
    sorted_distinct,
    without_repeats,
)

_MOST_LABELS = 2**40  # a random integer modulo this is uniform to one part in 2**22


class LabelSample(NamedTuple):
    ids: Tensor  # (M,) shared by the batch, or (B, M) drawn for each example; int64, -1: no label
    log_counts: Tensor  # like ids, float32: log of the expected number of occurrences; 0 where -1


class SampleRequest(NamedTuple):
    """Asks for R rows of M ids: R = 1 for a shared sample, R = B for one for each example."""

    positive_ids: Tensor  # (B, P)
    num_sampled_labels: int
    is_shared: bool

    @property
    def excluded_ids(self) -> Tensor:
        """(R, P') ids that a row must not hold, padded with -1."""
        return self.positive_ids.new_full((1, 1), -1) if self.is_shared else self.positive_ids


class LabelSampler(Protocol):
    """What a training step asks of a sampler, which says `has_repeats`, `draw` and `log_counts`."""

    has_repeats: bool  # True: M independent draws; False: a label occurs at most once in a row

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        """(R, M) ids."""

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        """Log-counts of any ids (R, N), drawn by this sampler or not."""

    def sample(
        self, positive_ids: Tensor, num_sampled_labels: int, *, generator: Generator
    ) -> LabelSample:
        """One sample (M,) shared by a batch with positives (B, P)."""
        request = SampleRequest(positive_ids, num_sampled_labels, is_shared=True)
        ids, log_counts = self._answer(request, generator)
        return LabelSample(ids[0], log_counts[0])  # (1, M) -> (M,)

    def sample_for_each(
        self, positive_ids: Tensor, num_sampled_labels: int, *, generator: Generator
    ) -> LabelSample:
        """Samples (B, M), each without the positives of its own example."""
        request = SampleRequest(positive_ids, num_sampled_labels, is_shared=False)
        return self._answer(request, generator)

    def _answer(self, request: SampleRequest, generator: Generator) -> LabelSample:
        num_draws = request.num_sampled_labels
        if num_draws < 1:
            raise ValueError(f"num_sampled_labels must be at least 1, got {num_draws}")
        ids = self.draw(request, generator)
        log_counts = self.log_counts(ids, request).masked_fill(ids < 0, 0)
        return LabelSample(ids, log_counts.float())


def log_q_corrected(negative_scores: Tensor, log_counts: Tensor) -> Tensor:
    """Scores whose softmax loss estimates the loss over all labels: score - log_count.

    For the softmax loss alone, and after mining: gather the log-counts of the kept labels. Mined
    on corrected scores, the labels that are rarely drawn would be the hardest, whatever their
    score. The positive is always present, its count is 1: it needs no correction. The estimate of
    the sum of exp(score) has no bias when every sampled label is kept.

    Args:
        negative_scores: (B, k), -inf where a slot holds no label; it stays -inf.
        log_counts: (k,) or (B, k), from a `LabelSample`.

    Example:
        >>> scores = torch.tensor([[1.0, -torch.inf]])
        >>> log_q_corrected(scores, torch.tensor([-2.0, 0.0]))
        tensor([[3., -inf]])
    """
    corrected = negative_scores - log_counts.to(negative_scores.dtype)
    return corrected.masked_fill(negative_scores == -torch.inf, -torch.inf)


class UniformSampler(LabelSampler):
    """A uniform random subset of the labels, without repeats: the paper's sample.

    The first M of an order of the labels that a random key decides (`kernels.random`).

    A sample for each example is uniform over the labels that are not its positives; where fewer
    than M of those remain, all of them, and the slots left over are -1. Time and memory grow with
    M and P, never with the number of labels.

    Example:
        >>> sampler = UniformSampler(4)
        >>> generator = torch.Generator().manual_seed(0)
        >>> sample = sampler.sample_for_each(torch.tensor([[2]]), 3, generator=generator)
        >>> sample.ids.sort().values, sample.log_counts
        (tensor([[0, 1, 3]]), tensor([[0., 0., 0.]]))
    """

    has_repeats = False

    def __init__(self, num_labels: int) -> None:
        _check_num_labels(num_labels)
        self.num_labels = num_labels

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        num_draws = request.num_sampled_labels
        limit = self.num_labels if request.is_shared else self.num_labels - 1
        if num_draws > limit:
            raise ValueError(
                f"num_sampled_labels must be between 1 and {limit} (the number of labels"
                f"{'' if request.is_shared else ' but the positive'}), got {num_draws}"
            )
        key = random_integers(1, 1, generator).to(request.positive_ids.device)
        slots = torch.arange(num_draws, device=key.device)
        if request.is_shared:
            return permute(slots.unsqueeze(0), row_keys(key, 1), self.num_labels)  # (1, M)
        excluded, num_left = self._remaining(request)
        keys = row_keys(key, len(excluded))  # an order each
        is_empty = slots >= num_left  # (R, M): more were asked for than there are
        # The walk of the permutation ends only within its size, so no slot may lie outside.
        sizes = num_left.clamp(min=1)
        places = permute(slots % sizes, keys, self.num_labels, sizes=sizes)  # (R, M)
        # A label y that is not excluded is the (y - #{p_j < y})-th such label, counted from 0. Back
        # from its place u: y = u + #{j: p_j - j <= u}, for excluded p_0 < p_1 < ... A bijection, so
        # a uniform subset of places is a uniform subset of labels.
        thresholds = excluded - torch.arange(excluded.shape[1], device=excluded.device)  # (R, P)
        ids = places + torch.searchsorted(thresholds, places, right=True)
        return ids.masked_fill(is_empty, -1)

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        if request.is_shared:
            inclusion = request.num_sampled_labels / self.num_labels
            return torch.full_like(ids, math.log(inclusion), dtype=torch.float64)
        _, num_left = self._remaining(request)
        inclusions = (request.num_sampled_labels / num_left.double()).clamp(max=1)
        return inclusions.log().expand(ids.shape)  # (R, 1) -> (R, N)

    def _remaining(self, request: SampleRequest) -> tuple[Tensor, Tensor]:
        """Excluded ids in order (R, P), and the number of labels that are left (R, 1)."""
        excluded = sorted_distinct(request.excluded_ids)
        return excluded, self.num_labels - (excluded < BEYOND).sum(1, keepdim=True)


class FrequencySampler(LabelSampler):
    """M independent draws, with repeats, with probability proportional to count ** power.

    The paper's sample is a set: mine from `Distinct(FrequencySampler(...))`, as runs do, or the
    hardest labels are a few frequent ones many times over.

    Inverts the cumulative distribution, because torch.multinomial stops at 2**24 labels. For each
    example the draws are from the distribution without its positives. A slot is -1 when no label
    with a count is left, or when rounding lands on a positive (about once in 1e16 draws).

    Args:
        label_counts: (L,) how often each label is a positive of the training data.
        power: 1 follows the data, 0 is uniform over the labels that occur.

    Example:
        >>> sampler = FrequencySampler(torch.tensor([3, 0, 1]), power=1.0)
        >>> generator = torch.Generator().manual_seed(0)
        >>> sample = sampler.sample_for_each(torch.tensor([[0]]), 2, generator=generator)
        >>> sample.ids, sample.log_counts.exp()
        (tensor([[2, 2]]), tensor([[2., 2.]]))
    """

    has_repeats = True

    def __init__(self, label_counts: Tensor, *, power: float = 0.75) -> None:
        _check_label_counts(label_counts)
        weights = torch.where(label_counts > 0, label_counts.double() ** power, 0.0)  # (L,)
        # Summed in order, on the CPU: a parallel sum rounds differently from one prefix to the
        # next, which could give a label of weight 0 a span of its own.
        ends = weights.cpu().cumsum(0).to(label_counts.device)  # (L,)
        self.edges = pad(ends, (1, 0))  # (L + 1,); label y spans edges[y] to edges[y + 1]
        self.total = self.edges[-1]
        if not 0 < self.total < torch.inf:
            raise ValueError(f"the sum of count ** power must be finite and above 0, power {power}")

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        excluded = sorted_distinct(request.excluded_ids)
        starts, widths = self._spans(excluded)
        # Cut the excluded spans out of the line, draw a point on what is left, then put back the
        # spans before it: no draw is rejected, however likely the excluded labels are.
        removed = pad(widths.cumsum(1), (1, 0))  # (R, 1 + P)
        lengths = (self.total - removed[:, -1:]).clamp(min=0)  # (R, 1)
        shape, device = (len(excluded), request.num_sampled_labels), generator.device
        units = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        points = units.to(excluded.device) * lengths  # (R, M)
        num_passed = torch.searchsorted(starts - removed[:, :-1], points, right=True)
        points = points + removed.gather(1, num_passed)
        # The first label that ends after the point: never one of weight 0, which ends at its start.
        last_point = torch.nextafter(self.total, torch.zeros_like(self.total))
        points = torch.minimum(points, last_point)
        ids = torch.searchsorted(self.edges, points, right=True) - 1
        return ids.masked_fill(is_among(ids, excluded), -1)

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        _, widths = self._spans(ids.clamp(min=0))
        _, removed = self._spans(sorted_distinct(request.excluded_ids))
        lengths = self.total - removed.sum(1, keepdim=True)  # (R, P) -> (R, 1)
        return (request.num_sampled_labels * widths / lengths).log()

    def _spans(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where on the line the labels begin, and how wide they are; BEYOND: nowhere, and 0."""
        is_absent = ids == BEYOND
        ids = ids.masked_fill(is_absent, 0)
        starts = self.edges[ids]
        widths = self.edges[ids + 1] - starts
        return starts.masked_fill(is_absent, torch.inf), widths.masked_fill(is_absent, 0)


class InBatchSampler(LabelSampler):
    """The drawn positives of the batch, `positive_ids[:, 0]`, as negatives of the other examples.

    Each label once: its repeats are -1, and so are the slots after the first B. Seen by an
    example, a label occurs when any of the other B - 1 examples drew it: with probability
    1 - (1 - p) ** (B - 1), p its share of the training pairs, as if pairs were drawn independently.
    (Not B: the example's own draw is its positive. It matters in small batches.)

    Args:
        label_counts: (L,) how often each label is a positive of the training data.

    Example:
        >>> sampler = InBatchSampler(torch.tensor([1, 1, 2]))
        >>> positive_ids = torch.tensor([[0], [2], [2]])
        >>> sampler.sample(positive_ids, 4, generator=torch.Generator()).ids
        tensor([ 0,  2, -1, -1])
    """

    has_repeats = False

    def __init__(self, label_counts: Tensor) -> None:
        _check_label_counts(label_counts)
        self.probabilities = label_counts.double() / label_counts.double().sum()  # (L,)

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        batch_size, num_slots = len(request.positive_ids), request.num_sampled_labels
        if not 2 <= batch_size <= num_slots:
            raise ValueError(
                f"in-batch negatives need at least 2 examples and num_sampled_labels no less than "
                f"their number, got {batch_size} examples and num_sampled_labels {num_slots}"
            )
        labels = request.positive_ids[:, 0]  # (B, P) -> (B,)
        is_unknown = (labels >= 0) & (self.probabilities[labels.clamp(min=0)] == 0)
        if is_unknown.any():
            raise ValueError(
                f"label_counts must be positive for every label of a batch, "
                f"got 0 for label {int(labels[is_unknown][0])}"
            )
        labels = pad(without_repeats(labels), (0, num_slots - batch_size), value=-1)  # (M,)
        excluded = sorted_distinct(request.excluded_ids)  # (R, P)
        ids = labels.repeat(len(excluded), 1)  # (R, M)
        return ids.masked_fill(is_among(ids, excluded), -1)

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        probabilities = self.probabilities[ids.clamp(min=0)]
        return inclusion(probabilities, len(request.positive_ids) - 1).log()


class Distinct(LabelSampler):
    """The draws of a sampler with repeats, each label once: its repeats become -1.

    A label is then in the sample with probability 1 - (1 - p) ** M.

    Example:
        >>> sampler = Distinct(FrequencySampler(torch.tensor([0, 5])))
        >>> sampler.sample(torch.tensor([[0]]), 3, generator=torch.Generator())
        LabelSample(ids=tensor([ 1, -1, -1]), log_counts=tensor([0., 0., 0.]))
    """

    has_repeats = False

    def __init__(self, source: LabelSampler) -> None:
        if not source.has_repeats:
            raise ValueError(f"source must be a sampler with repeats, got {type(source).__name__}")
        self.source = source

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        return without_repeats(self.source.draw(request, generator))

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        num_draws = request.num_sampled_labels
        probabilities = self.source.log_counts(ids, request).exp() / num_draws
        return inclusion(probabilities, num_draws).log()


class MixedSampler(LabelSampler):
    """The union of two independent samples, such as in-batch and uniform negatives.

    The first gives round(first_share * M) slots and the second the others; a label drawn by both
    keeps its first slot and is -1 in the other. Drawn with probability a by the one and b by the
    other, it is in the union with probability a + b - ab. A source with repeats is made `Distinct`.

    Example:
        >>> in_batch = InBatchSampler(torch.tensor([1, 1, 2]))
        >>> sampler = MixedSampler(in_batch, UniformSampler(3), first_share=2 / 5)
        >>> positive_ids = torch.tensor([[0], [2]])
        >>> sampler.sample(positive_ids, 5, generator=torch.Generator()).ids.sort().values
        tensor([-1, -1,  0,  1,  2])
    """

    has_repeats = False

    def __init__(self, first: LabelSampler, second: LabelSampler, *, first_share: float) -> None:
        if not 0 < first_share < 1:
            raise ValueError(f"first_share must be between 0 and 1, exclusive, got {first_share}")
        self.first = Distinct(first) if first.has_repeats else first
        self.second = Distinct(second) if second.has_repeats else second
        self.first_share = first_share

    def draw(self, request: SampleRequest, generator: Generator) -> Tensor:
        first, second = self._split(request)
        draws = [self.first.draw(first, generator), self.second.draw(second, generator)]
        return without_repeats(torch.cat(draws, dim=1))  # (R, M)

    def log_counts(self, ids: Tensor, request: SampleRequest) -> Tensor:
        first, second = self._split(request)
        in_first = self.first.log_counts(ids, first).exp()
        in_second = self.second.log_counts(ids, second).exp()
        return (in_first + in_second * (1 - in_first)).log()

    def _split(self, request: SampleRequest) -> tuple[SampleRequest, SampleRequest]:
        num_slots = request.num_sampled_labels
        num_first = round(self.first_share * num_slots)
        if not 1 <= num_first < num_slots:
            raise ValueError(
                f"num_sampled_labels must leave each sampler a slot: first_share "
                f"{self.first_share} of {num_slots} is {num_first}"
            )
        return (
            request._replace(num_sampled_labels=num_first),
            request._replace(num_sampled_labels=num_slots - num_first),
        )


def _check_num_labels(num_labels: int) -> None:
    if not 1 <= num_labels <= _MOST_LABELS:
        raise ValueError(f"num_labels must be between 1 and {_MOST_LABELS}, got {num_labels}")


def _check_label_counts(label_counts: Tensor) -> None:
    if label_counts.ndim != 1 or len(label_counts) == 0:
        raise ValueError(f"label_counts must be (L,), got shape {tuple(label_counts.shape)}")
    if not (label_counts.min() >= 0 and 0 < label_counts.max() < torch.inf):
        raise ValueError(
            f"label_counts must be finite, none negative and at least one positive, "
            f"got values from {label_counts.min()} to {label_counts.max()}"
        )
