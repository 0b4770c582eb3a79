"""How much each example of a batch counts: losses (B,) -> weights (B,), without gradient.

Every risk is sum_b w_b * loss_b with the weights held fixed, so one backward pass serves them
all, and only examples with a weight need one. Weights are not negative. Those of one batch sum
to 1, but for `DualCvar`, whose weights nearly do so over many batches.

A risk without memory is a function. One that remembers is a class: its state goes into the
checkpoint by `state` and `load`. A loss that is NaN makes a weight that counts, so that it is seen.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from evenhand.mining import hardest_examples

RiskFn = Callable[[Tensor], Tensor]  # (B,) -> (B,)
WINDOW = 100  # steps over which gaps are measured
GOLDEN = 2654435769  # 2**32 over the golden ratio: its multiples are spread evenly over 2**32
PRIOR_COUNT = 32  # held-out examples of a bin that weigh as much as the curve through all bins


class Memory(Protocol):
    """What a checkpoint keeps of a risk."""

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: dict[str, Tensor]) -> None: ...


# --- without memory -------------------------------------------------------------------------------


@torch.no_grad()
def mean_weights(losses: Tensor) -> Tensor:
    """1/B each: plain SGD.

    Example:
        >>> mean_weights(torch.tensor([3.0, 1.0]))
        tensor([0.5000, 0.5000])
    """
    return torch.full_like(losses, 1 / len(losses))


@torch.no_grad()
def top_weights(losses: Tensor, *, num_hard_examples: int) -> Tensor:
    """1/k' for the k' largest losses, 0 for the rest (equation 11); k' = 1 is the maximum.

    Example:
        >>> top_weights(torch.tensor([3.0, 1.0, 2.0]), num_hard_examples=2)
        tensor([0.5000, 0.0000, 0.5000])
    """
    positions = hardest_examples(losses, num_hard_examples)  # (k',)
    return torch.zeros_like(losses).index_fill(0, positions, 1 / num_hard_examples)


@torch.no_grad()
def count_below(losses: Tensor, num_hard_examples: int, *, ceiling: float) -> int:
    """k', or the least above it for which the k' largest losses have a mean of at most `ceiling`.

    All B where none has. Examples whose loss is above that of a collapsed model teach an encoder
    to collapse (docs/deep.md); with easier ones among them they do not.

    Example:
        >>> count_below(torch.tensor([9.0, 3.0, 0.0, 0.0]), 1, ceiling=4.0)
        3
    """
    sorted_losses = losses.sort(descending=True).values
    means = sorted_losses.cumsum(0) / torch.arange(1, len(losses) + 1, device=losses.device)
    num_above = int((means > ceiling).sum())  # means fall, so they are the first
    return max(num_hard_examples, min(num_above + 1, len(losses)))


@torch.no_grad()
def tail_weights(losses: Tensor, *, tail_fraction: float) -> Tensor:
    """Weights whose risk is the CVaR of the batch at level alpha, also where alpha B is not whole.

    The largest losses have 1 / (alpha B) each; the loss at the threshold has what is left, and
    equal losses there share it. With alpha B = k' and no ties this is `top_weights`.

    Example:
        >>> tail_weights(torch.tensor([3.0, 1.0, 2.0, 0.0]), tail_fraction=0.375)
        tensor([0.6667, 0.0000, 0.3333, 0.0000])
    """
    return _weights_of_tail(losses, losses, tail_fraction)


@torch.no_grad()
def even_weights(
    losses: Tensor,
    gaps: Tensor,
    *,
    num_hard_examples: int,
    mined_share: float = 0.5,
    num_dropped: int = 0,
    is_held_out: Tensor | None = None,
) -> Tensor:
    """Even-handed mining: the hardest examples at test time, mixed with the mean.

    An example's loss at test time is expected to be its training loss and the generalisation gap
    of examples like it. The k' with the largest sum count, and so many of the others, evenly spread
    over the batch, that on average over batches in random order `mined_share` of the weight is that
    of `top_weights` and the rest that of `mean_weights`. All that count have the same weight: an
    optimiser that scales its steps by past gradients takes unequal ones badly.

    Args:
        losses, gaps: (B,).
        num_dropped: so many of the largest losses have no weight, against wrong labels.
        is_held_out: (B,) examples that have no weight; not all of them.

    Example:
        >>> losses, gaps = torch.tensor([2.0, 0, 1, 0, 0]), torch.tensor([0.0, 3, 0, 0, 0])
        >>> even_weights(losses, gaps, num_hard_examples=1, mined_share=1.0)
        tensor([0., 1., 0., 0., 0.])
        >>> even_weights(losses, gaps, num_hard_examples=1, mined_share=0.5)
        tensor([0.0000, 0.5000, 0.0000, 0.0000, 0.5000])
    """
    if is_held_out is None:
        is_held_out = torch.zeros_like(losses, dtype=torch.bool)
    is_out = is_held_out
    if num_dropped:
        dropped = hardest_examples(losses.masked_fill(is_held_out, -torch.inf), num_dropped)
        is_out = is_held_out.index_fill(0, dropped, True)
        is_out = torch.where(is_out.all(), is_held_out, is_out)  # drops none rather than all
    keys = (losses + gaps).masked_fill(is_out, -torch.inf)
    is_hard = torch.zeros_like(is_out).index_fill(
        0, hardest_examples(keys, num_hard_examples), True
    )
    # In the mixture an easy example weighs (1 - share) / B, a hard one share / k' more than that.
    num_left = (~is_out).sum().double()
    easy, more = (1 - mined_share) * num_hard_examples, mined_share * num_left  # both times B k'
    easy_share = easy / (easy + more)
    places = torch.arange(1, len(losses) + 1, device=losses.device) * GOLDEN % 2**32
    counts = (is_hard | (places < easy_share * 2**32)) & ~is_out
    weights = (counts.double() / counts.sum()).to(losses.dtype)
    return torch.where(losses.isnan(), torch.nan, weights)


@torch.no_grad()
def ranked_range_weights(losses: Tensor, *, num_dropped: int, num_hard_examples: int) -> Tensor:
    """1/k' for the k' largest losses after the m largest, which are dropped: "semi-hard" examples.

    Wrong labels have large losses. Where some are wrong, the very hardest examples teach errors.

    Example:
        >>> losses = torch.tensor([9.0, 1.0, 2.0, 3.0])
        >>> ranked_range_weights(losses, num_dropped=1, num_hard_examples=2)
        tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """
    if not 1 <= num_hard_examples <= len(losses):
        raise ValueError(
            f"num_hard_examples must be between 1 and {len(losses)} (the number of examples in the "
            f"batch), got {num_hard_examples}"
        )
    if not 0 <= num_dropped <= len(losses) - num_hard_examples:
        raise ValueError(
            f"num_dropped must be between 0 and {len(losses) - num_hard_examples} (the examples "
            f"in the batch without the {num_hard_examples} hard ones), got {num_dropped}"
        )
    hardest = losses.topk(num_dropped + num_hard_examples).indices  # largest first
    positions = hardest[num_dropped:]  # (k',)
    weights = torch.zeros_like(losses).index_fill(0, positions, 1 / num_hard_examples)
    return torch.where(losses.isnan(), torch.nan, weights)


# --- with memory ----------------------------------------------------------------------------------


class DualCvar:
    """The CVaR by its dual (Rockafellar and Uryasev), with the threshold tracked across batches.

    min_t t + mean (loss - t)_+ / alpha, where t minimises over the losses of the last batches
    and not of one alone. So a batch with many hard examples counts more than one with few: the
    risk is that of the data, where `top_weights` takes the k' hardest of every batch, however easy.
    A threshold followed by gradient steps may run away and leave no gradient; this one cannot.
    """

    def __init__(self, *, window: int = 16) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 (batch), got {window}")
        self.window = window
        self.recent: Tensor | None = None  # (at most window * B,)

    @torch.no_grad()
    def __call__(self, losses: Tensor, *, tail_fraction: float) -> Tensor:
        """(B,) -> (B,): 1 / (alpha B) above the threshold, a part of it at the threshold."""
        before = losses.new_empty(0) if self.recent is None else self.recent
        self.recent = torch.cat([before, losses.detach()])[-self.window * len(losses) :]
        weights = _weights_of_tail(losses, self.recent, tail_fraction)
        # A whole batch may lie below the threshold, as while losses fall quickly. Its hardest
        # example then counts as in the plain mean: it goes on, and on average hardly matters.
        hardest = top_weights(losses, num_hard_examples=1) / len(losses)
        return torch.where((weights == 0).all(), hardest, weights)

    def state(self) -> dict[str, Tensor]:
        return {} if self.recent is None else {"recent": self.recent}

    def load(self, state: dict[str, Tensor]) -> None:
        self.recent = state.get("recent")


class EvenMining:
    """Even-handed mining, `even_weights`, with the generalisation gap measured while training.

    A rare label is learnt by heart: its training loss falls to nothing, and it fails at test time.
    So some examples are held out: they are in the batches and have losses, but no weight. Examples
    are in bins, such as those of equally rare labels. The gap of a bin is the mean loss of its
    held-out examples less that of the others, over some 100 steps. A bin with few held-out examples
    leans on the curve c * `shape` that fits all bins best.
    """

    def __init__(
        self,
        shape: Tensor,
        *,
        scale: float = 0.27,
        gap_weight: float = 0.75,
        mined_share: float = 0.5,
    ) -> None:
        """
        Args:
            shape: (G,) how the gaps of the bins compare, such as 1/sqrt(n) for labels with n pairs.
            scale: where nothing is held out, the gaps are scale * shape.
            gap_weight: times the gap is added to a loss. With the whole gap, as the theory has it,
                rare labels gain more and the first results of frequent ones lose a little.
        """
        self.shape = shape.double()
        self.scale, self.gap_weight, self.mined_share = scale, gap_weight, mined_share
        # Of the trained and the held-out examples (2) the number and the sum of losses (2) by bin;
        # what a step adds to it loses 1/WINDOW of its weight with every further one.
        self.sums = torch.zeros(2, 2, len(shape), dtype=torch.float64)

    @torch.no_grad()
    def __call__(
        self, losses: Tensor, bin_ids: Tensor, *, num_hard_examples: int, num_dropped: int = 0
    ) -> Tensor:
        """(B,), (B,) twice the bin of each example, plus 1 if it is held out -> (B,)."""
        self.sums, self.shape = self.sums.to(losses.device), self.shape.to(losses.device)
        bins, is_held_out = bin_ids // 2, bin_ids % 2 == 1
        weights = even_weights(
            losses,
            (self.gap_weight * self.gaps())[bins].to(losses.dtype),
            num_hard_examples=num_hard_examples,
            mined_share=self.mined_share,
            num_dropped=num_dropped,
            is_held_out=is_held_out & ~is_held_out.all(),  # a batch without an example is no batch
        )
        in_bins = bins.unsqueeze(1) == torch.arange(len(self.shape), device=bins.device)  # (B, G)
        kinds = torch.stack([~is_held_out, is_held_out]).double()  # (2, B)
        values = torch.stack([torch.ones_like(losses), losses]).double()  # (2, B)
        new = torch.einsum("kb,vb,bg->kvg", kinds, values, in_bins.double())
        self.sums = (1 - 1 / WINDOW) * self.sums + new
        return weights

    def gaps(self) -> Tensor:
        """(G,) float64, as measured up to now."""
        (num_trained, num_held_out), (trained, held_out) = self.sums.unbind(1)
        means = trained / num_trained.clamp(min=1e-9)
        counts = torch.where(num_trained > 0, num_held_out, 0)  # (G,)
        excess = torch.where(num_trained > 0, held_out - num_held_out * means, 0)  # counts * gaps
        squares = (counts * self.shape.square()).sum()
        scale = torch.where(squares > 0, (excess * self.shape).sum() / squares, self.scale)
        return (excess + PRIOR_COUNT * scale * self.shape) / (counts + PRIOR_COUNT)

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self.sums = state["sums"].clone()  # kernels add to it in place


class GroupRisk:
    """The worst mixture of known groups, followed by multiplicative weights over batches.

    With every group on its own as a mixture, this is group DRO (Sagawa et al., 2020); with a set
    of mixtures it is the agnostic loss (equation 14; Mohri et al., 2019), max over the set of
    sum_p nu_p * mean loss of group p.
    """

    def __init__(
        self, num_groups: int, *, step_size: float = 0.01, mixtures: Tensor | None = None
    ) -> None:
        """
        Args:
            mixtures: (V, G), rows that sum to 1: the corners of the set; None: each group alone.
        """
        if mixtures is not None and mixtures.shape[1:] != (num_groups,):
            raise ValueError(
                f"mixtures must be of shape (V, {num_groups}), got {tuple(mixtures.shape)}"
            )
        self.num_groups = num_groups
        self.step_size = step_size
        self.mixtures = mixtures
        num_corners = num_groups if mixtures is None else len(mixtures)
        self.log_weights = torch.zeros(num_corners, dtype=torch.float64)  # (V,)

    @torch.no_grad()
    def __call__(self, losses: Tensor, group_ids: Tensor) -> Tensor:
        """(B,), (B,) ids from 0 to G - 1 -> (B,); groups that a batch lacks leave no gap.

        An example in several groups has a row of `group_ids` (B, P), padded with -1: it counts in
        the mean loss of each, and weighs what it weighs in them together.
        """
        self.log_weights = self.log_weights.to(losses.device)
        ids = group_ids.unsqueeze(-1).flatten(1)  # (B,) or (B, P) -> (B, P)
        is_member, places = ids >= 0, ids.clamp(min=0)
        sums = self.log_weights.new_zeros(self.num_groups)  # (G,)
        counts = sums.index_add(0, places.flatten(), is_member.flatten().to(sums.dtype))
        member_losses = losses.to(sums.dtype).unsqueeze(-1).where(is_member, 0)  # (B, P)
        means = sums.index_add(0, places.flatten(), member_losses.flatten()) / counts.clamp(min=1)
        self.log_weights = self.log_weights + self.step_size * self._of_corners(means)
        self.log_weights = self.log_weights - self.log_weights.logsumexp(0)
        shares = self._of_groups(self.log_weights.exp())  # (G,)
        weights = (shares[places] / counts[places]).where(is_member, 0).sum(-1)  # (B, P) -> (B,)
        # Present groups may hold next to nothing of the mass, even 0 in floating point.
        floor = torch.finfo(weights.dtype).tiny
        return ((weights + floor) / (weights + floor).sum()).to(losses.dtype)

    def _of_corners(self, values: Tensor) -> Tensor:
        return values if self.mixtures is None else self._mixtures() @ values  # (G,) -> (V,)

    def _of_groups(self, weights: Tensor) -> Tensor:
        return weights if self.mixtures is None else weights @ self._mixtures()  # (V,) -> (G,)

    def _mixtures(self) -> Tensor:
        assert self.mixtures is not None
        return self.mixtures.to(self.log_weights)

    def state(self) -> dict[str, Tensor]:
        return {"log_weights": self.log_weights}

    def load(self, state: dict[str, Tensor]) -> None:
        self.log_weights = state["log_weights"]


# --- helpers --------------------------------------------------------------------------------------


def _weights_of_tail(losses: Tensor, reference: Tensor, tail_fraction: float) -> Tensor:
    """Weights of losses (B,), by the threshold that the hardest alpha of reference (n,) lie above.

    A loss equal to the threshold has the part of 1 / (alpha B) that makes the weights of the
    reference sum to what they should: without it, equal losses would have no gradient at all.
    """
    if not 0 < tail_fraction <= 1:
        raise ValueError(f"tail_fraction must be above 0 and at most 1, got {tail_fraction}")
    tail_size = tail_fraction * len(reference)
    count = min(len(reference), max(1, math.ceil(tail_size - 1e-9)))
    threshold = reference.topk(count).values[-1]
    num_above, num_equal = (
        is_so.sum().double() for is_so in (reference > threshold, reference == threshold)
    )
    part = (tail_size - num_above) / num_equal  # between 0 and 1
    parts = (losses > threshold) + part * (losses == threshold)
    parts = torch.where(losses.isnan(), torch.nan, parts)
    return (parts / (tail_fraction * len(losses))).to(losses.dtype)
