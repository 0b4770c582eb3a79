"""The recorded step against `train_step`: the same batches, samples, losses and tables."""

import numpy as np
import pytest
import torch

from evenhand import losses
from evenhand.data.dataset import Part, Rows
from evenhand.models.encoders import BagEncoder, MlpEncoder
from evenhand.models.retriever import Retriever
from evenhand.risk import DualCvar
from evenhand.sampling import InBatchSampler, UniformSampler
from evenhand.training.feed import PairFeed
from evenhand.training.loop import (
    Optimizers,
    Plan,
    StepRisk,
    Training,
    hardest_of_batch,
    train_step,
    whole_batch,
)
from evenhand.training.optimizers import RowAdagrad, RowAdam
from evenhand.training.recorded import RecordedStep, why_not_recorded
from evenhand.training.schedules import learning_rate_at, num_hard_examples_at
from gpu_tables import DEVICES, needs_cuda

NUM_FEATURES, NUM_LABELS, WIDTH, BATCH_SIZE = 30, 60, 6, 5
CPU = torch.device("cpu")


def part_of(*, has_values):
    """11 queries with 0 to 4 features and 1 to 3 positives: 22 pairs, so epochs end often."""
    rng = np.random.default_rng(0)
    lengths = np.array([3, 0, 1, 4, 2, 3, 4, 1, 2, 3, 4])
    counts = np.array([1, 2, 3, 2, 1, 3, 2, 2, 1, 3, 2])
    offsets, starts = (np.concatenate([[0], np.cumsum(x)]) for x in (lengths, counts))
    ids = rng.integers(0, NUM_FEATURES, offsets[-1]).astype(np.int32)
    values = rng.random(offsets[-1]).astype(np.float32) if has_values else None
    labels = [rng.choice(NUM_LABELS, count, replace=False) for count in counts]
    positives = Rows(starts, np.concatenate(labels).astype(np.int32))
    return Part(Rows(offsets, ids, values), positives, {})


def training_of(
    device, *, weigh_fn=hardest_of_batch, memory=None, optimizer=RowAdagrad, has_values=True,
    masks_all_positives=True, pair_groups=None,
):  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    encoder = BagEncoder(NUM_FEATURES, WIDTH, generator=generator)
    model = Retriever(encoder, NUM_LABELS, WIDTH, generator=generator).to(device)
    feed = PairFeed(
        part_of(has_values=has_values),
        batch_size=BATCH_SIZE,
        masks_all_positives=masks_all_positives,
        generator=torch.Generator().manual_seed(4),
        device=device,
        pair_groups=pair_groups,
    )
    optimizers = Optimizers(optimizer(model.label_table), None, optimizer(encoder.weight), None)
    return Training(
        model, optimizers, feed, torch.Generator().manual_seed(5), StepRisk(weigh_fn, memory)
    )


def plan_of(num_steps=6, *, draws_for_each=False):
    return Plan(
        num_steps=num_steps,
        num_sampled_labels=20,
        num_hard_labels=4,
        num_hard_examples=2,
        anneal_fraction=0.5,
        learning_rate=0.05,
        warmup_steps=2,
        draws_for_each=draws_for_each,
    )


def eager(training, plan, num_steps):
    stats = []
    for _ in range(num_steps):
        stats.append(
            train_step(
                training, plan, sampler=UniformSampler(NUM_LABELS),
                loss_fn=losses.contrastive_loss,
                learning_rate=learning_rate_at(
                    training.step, num_steps=plan.num_steps, peak=plan.learning_rate,
                    warmup_steps=plan.warmup_steps, shape=plan.learning_rate_shape,
                ),
                num_hard_examples=num_hard_examples_at(
                    training.step, num_steps=plan.num_steps, batch_size=BATCH_SIZE,
                    num_hard_examples=plan.num_hard_examples,
                    anneal_fraction=plan.anneal_fraction,
                ),
            )
        )  # fmt: skip
        training.step += 1
    return torch.stack(stats)


def recorded(training, plan, num_steps):
    step = RecordedStep(training, plan, losses.contrastive_loss, precision=torch.float32)
    stats = []
    for _ in range(num_steps):
        stats.append(step())
        training.step += 1
    return torch.stack(stats)


def assert_same(ours, expected, **tolerances):
    tolerances = tolerances or {"atol": 2e-5, "rtol": 1e-3}
    ours, expected = ours.checkpoint().everything(), expected.checkpoint().everything()
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name].cpu(), tensor.cpu(), **tolerances, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": RowAdam},
        {"weigh_fn": whole_batch, "has_values": False},
        {"masks_all_positives": False, "draws_for_each": True},
    ],
    ids=["S2M, Adam", "SNM, means", "for each, the paper's mask"],
)
def test_a_recorded_run_is_the_run(device, settings):
    settings = dict(settings)
    plan = plan_of(draws_for_each=settings.pop("draws_for_each", False))
    ours, expected = training_of(torch.device(device), **settings), training_of(CPU, **settings)
    stats = recorded(ours, plan, 6)
    torch.testing.assert_close(stats.cpu(), eager(expected, plan, 6), atol=2e-5, rtol=1e-3)
    assert_same(ours, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_risk_of_the_host_weighs_between_two_graphs(device):
    def training(where):
        risk = DualCvar(window=3)
        groups = np.arange(22) % 3

        def weigh(losses, batch, count):
            assert batch.group_ids.tolist() == [groups[pair] for pair in batch.pair_ids.tolist()]
            return risk(losses, tail_fraction=count / len(losses))

        return training_of(where, weigh_fn=weigh, memory=risk, pair_groups=groups)

    ours, expected = training(torch.device(device)), training(CPU)
    stats = recorded(ours, plan_of(), 5)
    torch.testing.assert_close(stats.cpu(), eager(expected, plan_of(), 5), atol=2e-5, rtol=1e-3)
    assert_same(ours, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_run_resumes_exactly_and_where_the_other_stopped(device):
    whole = training_of(torch.device(device), optimizer=RowAdam)
    recorded(whole, plan_of(), 5)
    first = training_of(torch.device(device), optimizer=RowAdam)
    recorded(first, plan_of(), 3)
    second = training_of(torch.device(device), optimizer=RowAdam)
    second.load(first.checkpoint())
    recorded(second, plan_of(), 2)
    assert_same(second, whole, atol=0, rtol=0)
    third = training_of(CPU, optimizer=RowAdam)
    third.load(first.checkpoint())
    eager(third, plan_of(), 2)
    assert_same(third, whole)


def test_what_cannot_be_recorded_says_why():
    training, plan, loss_fn = training_of(CPU), plan_of(), losses.contrastive_loss
    sampler = UniformSampler(NUM_LABELS)
    assert "CUDA" in why_not_recorded(training, plan, sampler, loss_fn)
    training.feed.device = torch.device("cuda")  # as if
    in_batch = InBatchSampler(torch.ones(NUM_LABELS))
    assert "uniform" in why_not_recorded(training, plan, in_batch, loss_fn)
    assert "loss" in why_not_recorded(training, plan, sampler, lambda p, n: p)
    training.feed.whole_queries = object()
    assert "whole" in why_not_recorded(training, plan, sampler, loss_fn)
    training.feed.whole_queries = None
    training.model.encoder = MlpEncoder(2, WIDTH)
    assert "encoder" in why_not_recorded(training, plan, sampler, loss_fn)


@pytest.mark.gpu
@needs_cuda
def test_a_recorded_step_is_a_graph():
    training, plan = training_of(torch.device("cuda")), plan_of()
    sampler = UniformSampler(NUM_LABELS)
    assert why_not_recorded(training, plan, sampler, losses.contrastive_loss) is None
    step = RecordedStep(training, plan, losses.contrastive_loss, precision=torch.bfloat16)
    for _ in range(3):
        assert step().isfinite().all()
        training.step += 1
    assert len(step.graphs) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_tables_in_bfloat16_are_rounded_by_chance_and_resume_exactly(device):
    def training():
        made = training_of(torch.device(device))
        for optimizer in made.optimizers.row_optimizers().values():
            optimizer.table.data = optimizer.table.data.bfloat16()
        return made

    whole, first, second = training(), training(), training()
    recorded(whole, plan_of(4), 4)
    recorded(first, plan_of(4), 2)
    second.load(first.checkpoint())
    recorded(second, plan_of(4), 2)
    assert_same(second, whole, atol=0, rtol=0)
    assert whole.optimizers.label_rows.sums.dtype == torch.float32
    exact = training_of(CPU)
    eager(exact, plan_of(4), 4)
    near = whole.model.label_table.cpu().float()
    torch.testing.assert_close(near, exact.model.label_table.data, atol=0.03, rtol=0.03)
