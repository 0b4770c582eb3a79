"""Even-handed mining by kernels, against `risk.EvenMining` in the eager step."""

import numpy as np
import pytest
import torch

from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.buffers import Buffers, Kept
from evenhand.kernels.gpu.even import EvenBuffers, measure_gaps, select_even_examples
from evenhand.risk import GOLDEN, PRIOR_COUNT, WINDOW, EvenMining
from evenhand.training.state import Risk
from gpu_tables import DEVICES, by_device
from test_cuda_graph import CPU, as_graph, assert_same, eager, plan_of, training_of

SHAPE = torch.tensor([1.0, 0.7, 0.5])


def even_training(device, *, mined_share=0.5, **settings):
    """22 pairs in 3 bins, every fifth held out."""
    even = EvenMining(SHAPE, mined_share=mined_share)
    pairs = np.arange(22)
    risk = Risk(
        lambda losses, batch, count: even(losses, batch.group_ids, num_hard_examples=count),
        kernel_kind="even",
        memory=even,
    )
    pair_bins = 2 * (pairs % 3) + (pairs % 5 == 0)
    return training_of(device, risk=risk, pair_groups=pair_bins, **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [{}, {"mined_share": 1.0, "batch_size": 2}])
def test_a_recorded_run_is_the_run(device, settings):
    ours, expected = even_training(torch.device(device), **settings), even_training(CPU, **settings)
    count = by_device(device, 2, 6)
    stats = as_graph(ours, plan_of(), count)
    torch.testing.assert_close(stats.cpu(), eager(expected, plan_of(), count), atol=2e-5, rtol=1e-3)
    assert_same(ours, expected)


def weigh_by_kernels(even, losses, pair_bins, num_hard_examples):
    """Weights, survivors, statistics and next gaps of one batch that is all the pairs in order."""
    device, size = losses.device, len(losses)
    step = Buffers.__new__(Buffers)
    step.batch_size = size
    step.__dict__.update(as_buffers(losses, num_hard_examples))
    even.shape, even.sums = even.shape.to(device), even.sums.to(device)
    gaps = even.gaps().float()
    buffers = EvenBuffers(
        pair_bins.int().to(device), torch.zeros(size, dtype=torch.int32, device=device),
        even.shape, even.sums, gaps, even.scale, even.gap_weight,
        even.mined_share, GOLDEN, float(PRIOR_COUNT), 1 - 1 / WINDOW,
    )  # fmt: skip
    select_even_examples(step, buffers, torch.arange(size, device=device))
    measure_gaps(step, buffers)
    kept = step.kept
    survivors = kept.survivors[: int(kept.num_survivors)].tolist()
    return kept.weights.cpu(), survivors, step.stats[0].tolist(), buffers.gaps.cpu()


def as_buffers(losses, num_hard_examples):
    device, size = losses.device, len(losses)
    clock = Clock.planned(
        torch.zeros(1, device=device),
        torch.tensor([num_hard_examples], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    clock.num_hard_examples.fill_(num_hard_examples)
    rows = [torch.zeros(size, device=device) for _ in range(5)]
    ints = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(2)]
    number = torch.zeros(1, dtype=torch.int32, device=device)
    kept = Kept(losses, rows[0], ints[0], rows[1], rows[2], rows[3], ints[1], number)
    return {"kept": kept, "clock": clock, "stats": torch.zeros(1, 2, device=device)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mined_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("size", "count", "held_out"), [(1, 1, 0), (7, 3, 2), (64, 16, 5), (33, 33, 3), (8, 2, 8)]
)
def test_weights_and_gaps_are_those_of_the_risk(device, mined_share, size, count, held_out):
    generator = torch.Generator().manual_seed(size + count)
    losses = torch.rand(size, generator=generator)
    bins = torch.randint(3, (size,), generator=generator)
    is_held_out = torch.randperm(size, generator=generator) < held_out
    pair_bins = 2 * bins + is_held_out
    risks = [EvenMining(SHAPE, mined_share=mined_share) for _ in range(2)]
    sums = torch.rand(2, 2, 3, generator=generator, dtype=torch.float64)
    for risk in risks:
        risk.sums = 50 * sums.clone()
    expected = risks[1](losses, pair_bins, num_hard_examples=count)
    weights, survivors, stats, gaps = weigh_by_kernels(
        risks[0], losses.to(device), pair_bins, count
    )
    torch.testing.assert_close(weights, expected)
    assert survivors == expected.nonzero().squeeze(1).tolist()
    assert stats[0] == pytest.approx(float((expected * losses).sum()), rel=1e-5)
    torch.testing.assert_close(risks[0].sums.cpu(), risks[1].sums)
    torch.testing.assert_close(gaps, risks[1].gaps().float())


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_that_is_no_number_is_seen(device):
    losses = torch.tensor([1.0, torch.nan, 0.5, 2.0], device=device)
    even = EvenMining(SHAPE)
    _, _, stats, gaps = weigh_by_kernels(even, losses, torch.tensor([0, 2, 2, 5]), 2)
    assert np.isnan(stats[0])
    assert gaps.isnan().any()
