"""S2M as one `nn.Module` for a training loop of your own: sampling, masks, mining and annealing."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evenhand.kernels.random import without_repeats
from evenhand.losses import LossFn, softmax_loss
from evenhand.mining import hardest_labels, mask_positives
from evenhand.objective import collapsed_loss
from evenhand.risk import EvenMining, count_below, mean_weights
from evenhand.sampling import (
    InBatchSampler,
    LabelSampler,
    SampleRequest,
    UniformSampler,
    log_q_corrected,
)


class Candidates(NamedTuple):
    """The labels that a batch is scored against."""

    ids: Tensor  # (M,), -1: none
    vectors: Tensor  # (M, D)
    log_counts: Tensor | None  # (M,), see `sampling`


class S2MLoss(nn.Module):
    """The loss of a batch, mined: query vectors (B, D), label vectors and label ids (B,) -> ().

    Scores are dot products: normalise both sides for cosines, and multiply the queries by a scale
    (say 20) for a softmax over cosines. All are scored without gradient; only the examples that
    count are differentiated.

    In eval mode all examples count the same and no step is counted, so that validation losses can
    be compared. Every process of data-parallel training mines its own batch.

    Example:
        >>> loss_fn = S2MLoss(num_labels=5, num_sampled_labels=4)
        >>> queries, table = torch.eye(3, requires_grad=True), torch.eye(5, 3)
        >>> loss_fn(queries, table, torch.tensor([0, 1, 1])).backward()

    With the label vectors of the batch alone, as of two towers, the others' labels are negatives:

        >>> in_batch = S2MLoss(tail_fraction=0.5, mined_share=1.0, anneal_steps=0)
        >>> in_batch(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([8, 2]))
        tensor(0.3133)
    """

    label_bins: Tensor | None

    def __init__(
        self,
        num_labels: int | None = None,
        *,
        num_sampled_labels: int = 1024,
        num_hard_labels: int = 64,
        tail_fraction: float = 0.25,
        mined_share: float = 0.5,
        anneal_steps: int = 1000,
        loss_ceiling: float = 0.7,
        loss_fn: LossFn = softmax_loss,
        label_counts: Tensor | None = None,
        gap_scale: float = 0.27,
        sampler: LabelSampler | None = None,
        log_q: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """
        Args:
            num_labels: L; None: the candidates are the label vectors of the batch.
            num_sampled_labels: labels drawn for a batch, at most L.
            num_hard_labels: k, those of them that an example keeps.
            tail_fraction: k' / B, the part of the batch that is mined; 1 is SNM.
            mined_share: of the weight, to the mined examples; the rest goes to all. 1 is S2M as
                in the paper.
            anneal_steps: calls over which k' shrinks from the whole batch.
            loss_ceiling: k' is so large that the mean of the hardest losses is at most this part of
                the loss of a model that tells no labels apart, which an encoder would collapse to
                where more is mined than it can learn; `math.inf`: k' as it is.
            label_counts: (L,) training pairs of each label. Examples are then mined by the loss
                they can be expected to have at test time (even-handed mining).
            gap_scale: with counts, the gap between test and training loss times the square root
                of a label's pairs, while no held-out examples measure it. .27 suits losses between
                0 and 2; a softmax loss wants held-out examples.
            sampler: None: uniform. Mine from one without repeats (`Distinct`).
            log_q: corrects a softmax loss for how often labels are drawn, after mining; in a
                batch it needs `label_counts`.
            generator: of the draws; None: torch's own on the CPU.
        """
        super().__init__()
        if not 0 < tail_fraction <= 1:
            raise ValueError(f"tail_fraction must be above 0 and at most 1, got {tail_fraction}")
        if not 0 <= mined_share <= 1:
            raise ValueError(f"mined_share must be between 0 and 1, got {mined_share}")
        if num_labels is None and sampler is not None:
            raise ValueError("a sampler needs num_labels: in a batch nothing is drawn")
        if label_counts is not None and num_labels not in (None, len(label_counts)):
            raise ValueError(f"label_counts must have {num_labels} values, got {len(label_counts)}")
        self.sampler = sampler
        if num_labels is not None and sampler is None:
            self.sampler = UniformSampler(num_labels)
        elif num_labels is None and log_q:
            if label_counts is None:
                raise ValueError("log_q needs label_counts where the labels of the batch are used")
            self.sampler = InBatchSampler(label_counts)
        self.num_labels, self.log_q, self.loss_fn = num_labels, log_q, loss_fn
        self.num_sampled_labels = min(num_sampled_labels, num_labels or num_sampled_labels)
        self.num_hard_labels, self.tail_fraction = num_hard_labels, tail_fraction
        self.anneal_steps, self.loss_ceiling = anneal_steps, loss_ceiling
        self.generator = generator
        self.step = 0  # calls in train mode

        # Bins of equally rare labels, with 1, 2, 3-4, 5-8, ... pairs; without counts a single one.
        counts = (torch.ones(1) if label_counts is None else label_counts).double().cpu()
        bins = counts.clamp(min=1).log2().ceil().long()  # (L,)
        roots = torch.bincount(bins, weights=counts.sqrt())  # a sum over pairs of 1 / sqrt(n)
        shape = roots / torch.bincount(bins, weights=counts).clamp(min=1)  # (G,)
        self.risk = EvenMining(shape, scale=gap_scale, mined_share=mined_share)
        self.register_buffer("label_bins", None if label_counts is None else bins, persistent=False)

    def forward(
        self,
        query_vectors: Tensor,
        label_vectors: Tensor | Callable[[Tensor], Tensor],
        ids: Tensor,
        *,
        positive_ids: Tensor | None = None,
        is_held_out: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            query_vectors: (B, D).
            label_vectors: (L, D), or what gives the vectors of ids, (n,) -> (n, D): an
                `nn.Embedding` (which may be sparse) or a tower. In a batch: (C, D), row b the
                label of example b, and behind them any further negatives.
            ids: (B,) the label of each example; in a batch (C,), those of the rows.
            positive_ids: (B, P), padded with -1, further labels that are right and so no negatives.
            is_held_out: (B,) examples that teach nothing and measure the gap, always the same
                ones (such as `row_ids % 200 == 0`); for even-handed mining.
        """
        batch_size = len(query_vectors)
        if self.num_labels is None:
            positive_vectors, candidates = self._in_batch(label_vectors, ids, batch_size)
        else:
            positive_vectors, candidates = self._sampled(label_vectors, ids)
        own_ids = ids[:batch_size]  # (B,)
        right_ids = own_ids.unsqueeze(1)  # (B, 1)
        if positive_ids is not None:
            right_ids = torch.cat([right_ids, positive_ids], dim=1)

        with torch.no_grad():
            scores = query_vectors @ candidates.vectors.T  # (B, M)
            scores = mask_positives(scores, candidates.ids, right_ids)
            kept = hardest_labels(scores, min(self.num_hard_labels, scores.shape[1]))  # (B, k)
            scores = scores.gather(1, kept)
            losses = self._losses(query_vectors, positive_vectors, scores, candidates, kept)
            collapsed = collapsed_loss(self.loss_fn, kept.shape[1], score=1.0)  # cosines of 1
            ceiling = self.loss_ceiling * collapsed
            weights = self._weights(losses, own_ids, is_held_out, ceiling=ceiling)
            survivors = weights.nonzero().squeeze(1)  # (S,)

        query_vectors, kept = query_vectors[survivors], kept[survivors]
        is_empty = scores[survivors] == -torch.inf  # (S, k): positives, and slots without a label
        scores = (query_vectors @ candidates.vectors.T).gather(1, kept)
        scores = scores.masked_fill(is_empty, -torch.inf)
        losses = self._losses(query_vectors, positive_vectors[survivors], scores, candidates, kept)
        return (weights[survivors] * losses).sum()

    def _in_batch(
        self, label_vectors: Tensor | Callable[[Tensor], Tensor], ids: Tensor, batch_size: int
    ) -> tuple[Tensor, Candidates]:
        """Vectors of the positives (B, D), and the labels of the batch, each once."""
        if not isinstance(label_vectors, Tensor):
            raise ValueError("a function as label_vectors needs num_labels, to draw ids from")
        if not batch_size <= len(label_vectors) == len(ids):
            raise ValueError(
                f"without num_labels, label_vectors and ids must have the same rows, one at least "
                f"for each of the {batch_size} queries, got {len(label_vectors)} and {len(ids)}"
            )
        log_counts = None
        if isinstance(self.sampler, InBatchSampler):
            request = SampleRequest(ids[:batch_size, None], len(ids), is_shared=True)
            log_counts = self.sampler.log_counts(ids.unsqueeze(0), request)[0].float()  # (C,)
        candidates = Candidates(without_repeats(ids), label_vectors, log_counts)
        return label_vectors[:batch_size], candidates

    def _sampled(
        self, label_vectors: Tensor | Callable[[Tensor], Tensor], ids: Tensor
    ) -> tuple[Tensor, Candidates]:
        """Vectors of the positives (B, D), and a sample of all labels."""
        assert self.sampler is not None
        generator = torch.default_generator if self.generator is None else self.generator
        sample = self.sampler.sample(ids.unsqueeze(1), self.num_sampled_labels, generator=generator)
        wanted = torch.cat([ids, sample.ids.clamp(min=0)])  # looked up at once: it may be a tower
        if isinstance(label_vectors, Tensor):
            vectors = label_vectors.index_select(0, wanted)
        else:
            vectors = label_vectors(wanted)
        return vectors[: len(ids)], Candidates(sample.ids, vectors[len(ids) :], sample.log_counts)

    def _losses(
        self,
        query_vectors: Tensor,
        positive_vectors: Tensor,
        kept_scores: Tensor,
        candidates: Candidates,
        kept: Tensor,
    ) -> Tensor:
        """(B, D), (B, D), (B, k) -> (B,)."""
        if self.log_q and candidates.log_counts is not None:
            kept_scores = log_q_corrected(kept_scores, candidates.log_counts[kept])
        return self.loss_fn((query_vectors * positive_vectors).sum(1), kept_scores)

    def _weights(
        self, losses: Tensor, label_ids: Tensor, is_held_out: Tensor | None, *, ceiling: float
    ) -> Tensor:
        """(B,) -> (B,)."""
        if not self.training:
            return mean_weights(losses)
        batch_size = len(losses)
        fewest = max(1, math.ceil(self.tail_fraction * batch_size - 1e-9))
        annealed = min(1.0, self.step / self.anneal_steps) if self.anneal_steps else 1.0
        self.step += 1
        bins = torch.zeros_like(label_ids)
        if self.label_bins is not None:
            bins = self.label_bins[label_ids]
        bin_ids = 2 * bins + (0 if is_held_out is None else is_held_out)
        count = round(batch_size + annealed * (fewest - batch_size))
        count = count_below(losses, count, ceiling=ceiling)
        return self.risk(losses, bin_ids, num_hard_examples=count)

    def get_extra_state(self) -> dict[str, Tensor]:
        """What `state_dict` holds: the step, and the gaps measured up to now."""
        return {"step": torch.tensor(self.step), **self.risk.state()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.step = int(state["step"])
        self.risk.load(state)
