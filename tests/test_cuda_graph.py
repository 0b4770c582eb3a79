"""The step as a CUDA graph against `train_step`: the same batches, samples, losses and tables."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evenhand import losses
from evenhand.data import Part, Rows
from evenhand.models import BagEncoder, MlpEncoder, Retriever
from evenhand.risk import DualCvar
from evenhand.sampling import Distinct, FrequencySampler, UniformSampler
from evenhand.training.feed import PairFeed
from evenhand.training.gpu_step import GpuStep, why_no_graph
from evenhand.training.optimizers import Optimizers, RowAdagrad, RowAdam
from evenhand.training.state import Plan, Risk, Training
from evenhand.training.step import HARDEST, MEAN, choose_step, train_step
from gpu_tables import DEVICES, by_device, needs_cuda

NUM_FEATURES, NUM_LABELS, WIDTH, BATCH_SIZE = 30, 60, 6, 5
CPU = torch.device("cpu")
NEAR = {"atol": 2e-5, "rtol": 1e-3}


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
    device, *, risk=HARDEST, optimizer=RowAdagrad, has_values=True, masks_all_positives=True,
    pair_groups=None, part=None, batch_size=BATCH_SIZE, sizes=(NUM_FEATURES, NUM_LABELS, WIDTH),
):  # fmt: skip
    generator, (num_features, num_labels, width) = torch.Generator().manual_seed(3), sizes
    encoder = BagEncoder(num_features, width, generator=generator)
    model = Retriever(encoder, num_labels, width, generator=generator).to(device)
    feed = PairFeed(
        part or part_of(has_values=has_values),
        batch_size=batch_size,
        masks_all_positives=masks_all_positives,
        generator=torch.Generator().manual_seed(4),
        device=device,
        pair_groups=pair_groups,
    )
    optimizers = Optimizers(
        {"labels": optimizer(model.label_table), "features": optimizer(encoder.weight)}, dense=None
    )
    return Training(model, optimizers, feed, torch.Generator().manual_seed(5), risk)


def plan_of(num_steps=6, *, draws_for_each=False):
    return Plan(
        sampler=UniformSampler(NUM_LABELS),
        loss_fn=losses.contrastive_loss,
        num_steps=num_steps,
        num_sampled_labels=20,
        num_hard_labels=4,
        num_hard_examples=2,
        anneal_fraction=0.5,
        learning_rate=0.05,
        warmup_steps=2,
        draws_for_each=draws_for_each,
    )


def take_steps(training, plan, step, num_steps):
    stats = []
    for _ in range(num_steps):
        scheduled = plan.at_step(training.step, batch_size=training.feed.batch_size)
        stats.append(step(scheduled))
        training.step += 1
    return torch.stack(stats)


def eager(training, plan, num_steps):
    return take_steps(training, plan, lambda now: train_step(training, plan, now), num_steps)


def as_graph(training, plan, num_steps):
    step = GpuStep(training, plan, precision=torch.float32)
    return take_steps(training, plan, step, num_steps)


def assert_same(ours, expected, **tolerances):
    tolerances = tolerances or NEAR
    ours, expected = ours.checkpoint().everything(), expected.checkpoint().everything()
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name].cpu(), tensor.cpu(), **tolerances, msg=name)


def assert_graph_is_eager(training_fn, plan, device, num_steps, **tolerances):
    """Statistics and all that a checkpoint holds, of the same training by either step."""
    ours, expected = training_fn(torch.device(device)), training_fn(CPU)
    stats = as_graph(ours, plan, num_steps)
    torch.testing.assert_close(stats.cpu(), eager(expected, plan, num_steps), **NEAR)
    assert_same(ours, expected, **tolerances)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("settings", "draws_for_each"),
    [
        ({"optimizer": RowAdam}, False),
        ({"risk": MEAN, "has_values": False}, False),
        ({"masks_all_positives": False}, True),
    ],
    ids=["S2M, Adam", "SNM, means", "for each, the paper's mask"],
)
def test_a_recorded_run_is_the_run(device, settings, draws_for_each):
    # The fifth is of the second epoch; the interpreter is slow.
    count = by_device(device, 5 if settings.get("optimizer") else 2, 6)
    plan = plan_of(draws_for_each=draws_for_each)
    assert_graph_is_eager(lambda where: training_of(where, **settings), plan, device, count)


@pytest.mark.parametrize("device", DEVICES)
def test_a_risk_of_the_host_weighs_between_two_graphs(device):
    def training(where):
        cvar, groups = DualCvar(window=3), np.arange(22) % 3

        def weigh(losses, batch, count):
            return (1 + batch.group_ids) * cvar(losses, tail_fraction=count / len(losses))

        return training_of(where, risk=Risk(weigh, memory=cvar), pair_groups=groups)

    assert_graph_is_eager(training, plan_of(), device, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_run_resumes_exactly_and_where_the_other_stopped(device):
    whole, first, second = (training_of(torch.device(device), optimizer=RowAdam) for _ in range(3))
    third = training_of(CPU, optimizer=RowAdam)
    as_graph(first, plan_of(), 1)
    saved = copy.deepcopy(first.checkpoint())
    for training, step_fn in ((second, as_graph), (third, eager)):
        training.load(saved)
        step_fn(training, plan_of(), 1)
    as_graph(whole, plan_of(), 2)
    assert_same(second, whole, atol=0, rtol=0)
    assert_same(third, whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("risk", [MEAN, Risk(MEAN.weights)], ids=["kernel", "host"])
def test_documents_that_are_many_times_in_a_batch_lose_no_gradient(device, risk):
    """Three documents of ten labels each, batches of twelve pairs."""
    rng = np.random.default_rng(0)
    ids, values = rng.integers(0, NUM_FEATURES, 13).astype(np.int32), rng.random(13, np.float32)
    labels = [rng.choice(NUM_LABELS, 10, replace=False) for _ in range(3)]
    positives = Rows(np.arange(0, 31, 10), np.concatenate(labels).astype(np.int32))
    part = Part(Rows(np.array([0, 2, 9, 13]), ids, values), positives, {})
    settings = {"part": part, "batch_size": 12, "risk": risk}
    near = {"atol": 1e-5, "rtol": 1e-4}
    assert_graph_is_eager(
        lambda where: training_of(where, **settings), plan_of(), device, 2, **near
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_kernels_take_no_more_shared_memory_than_is_asked_for(precision):
    from evenhand.kernels.gpu import gradients

    training = training_of(torch.device("cuda"), sizes=(NUM_FEATURES, NUM_LABELS, 512))
    take_steps(training, plan_of(), GpuStep(training, plan_of(), precision=precision), 1)
    products = gradients._query_products, gradients._label_products
    kernels = [kernel for product in products for kernel in product.device_caches[0][0].values()]
    assert kernels
    most = gradients.shared_memory(torch.float32)
    assert max(kernel.metadata.shared for kernel in kernels) <= most
    if precision == torch.bfloat16:
        own = [k for k in kernels if "bf16" in str(k.src.signature)]
        assert 0 < max(k.metadata.shared for k in own) <= gradients.shared_memory(precision)


@pytest.mark.gpu
@needs_cuda
def test_a_step_on_a_gpu_is_a_graph():
    training, plan = training_of(torch.device("cuda")), plan_of()
    chosen = choose_step(training, plan)
    assert (chosen.kind, chosen.reason) == ("CUDA graph", None)
    assert take_steps(training, plan, chosen.step, 3).isfinite().all()
    assert len(chosen.step.graphs) == 1


@pytest.fixture
def as_if_on_cuda(monkeypatch):
    """A training as if on a GPU whose properties the test may change."""
    properties = SimpleNamespace(
        name="a GPU", major=9, minor=0, shared_memory_per_block_optin=232_448, free=2**34
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (properties.free, 2**36))
    training = training_of(CPU)
    training.feed.device = torch.device("cuda")
    return training, properties


def test_a_device_too_old_too_small_or_too_full_is_not_tried(as_if_on_cuda, monkeypatch):
    training, properties = as_if_on_cuda
    step = GpuStep(training_of(CPU), plan_of(), precision=torch.float32)
    copied = [*step.pairs[:4], step.offsets, step.feature_ids, step.feature_values]
    copied += [step.entry_ids, step.entry_sources, step.entry_values]
    needed = sum(tensor.nbytes for tensor in copied) + 24 * len(step.entry_ids)  # to sort them
    bfloat16, float32 = torch.bfloat16, torch.float32
    for name, limit, precision, words in (  # of the device, its least value, what is said below it
        ("major", 8, bfloat16, "a GPU has compute capability 7.0, and the kernels need 8.0"),
        ("shared_memory_per_block_optin", 73_728, bfloat16, "73,727 bytes of shared memory"),
        ("shared_memory_per_block_optin", 98_304, float32, "98,303 bytes of shared memory"),
        ("free", 2 * needed, bfloat16, "the data set does not fit the device's memory"),
    ):  # a half of the memory may be taken
        for value in (limit, limit - 1):
            with monkeypatch.context() as patch:
                patch.setattr(properties, name, value)
                found = why_no_graph(training, plan_of(), precision=precision)
                assert found is None if value == limit else words in found
    monkeypatch.setattr("evenhand.training.gpu_step.MOST_ENTRIES", 19)  # 5 pairs of 4 features
    assert "20" in why_no_graph(training, plan_of())


def test_a_sample_for_each_must_find_enough_labels_that_are_no_positives(as_if_on_cuda):
    training, _ = as_if_on_cuda  # queries have up to 3 positives
    for num_sampled, is_possible in ((NUM_LABELS - 3, True), (NUM_LABELS - 2, False)):
        plan = dataclasses.replace(plan_of(draws_for_each=True), num_sampled_labels=num_sampled)
        assert (why_no_graph(training, plan) is None) == is_possible


FREQUENCY = Distinct(FrequencySampler(torch.ones(NUM_LABELS)))
OBSTACLES = {
    "mining.sampler is not 'uniform'": {"sampler": FREQUENCY},
    "the loss (loss.name) has no kernel": {"loss_fn": lambda positive, negative: positive},
    "loss.log_q is true": {"is_log_q_corrected": True},
    "training.max_gradient_norm is above 0": {"max_gradient_norm": 1.0},
    "more than 32768 labels (mining.num_sampled_labels) are drawn": {"num_sampled_labels": 40000},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_a_run_on_a_gpu_without_a_graph_names_the_setting_that_prevents_it(as_if_on_cuda, reason):
    training, _ = as_if_on_cuda
    chosen = choose_step(training, dataclasses.replace(plan_of(), **OBSTACLES[reason]))
    assert (chosen.kind, chosen.reason) == ("eager", reason)
    assert chosen.describe() == f"training step: eager (no CUDA graph: {reason})"


def test_all_settings_that_prevent_a_graph_are_named_together_and_triton_alone(
    as_if_on_cuda, monkeypatch
):
    training, _ = as_if_on_cuda
    training.feed.has_whole_queries = True
    dot = {"is_cosine": False, "has_label_bias": True}
    training.model = Retriever(MlpEncoder(2, WIDTH), NUM_LABELS, WIDTH, **dot)
    assert why_no_graph(training, plan_of()) == (
        "the encoder is not a bag of sparse features and mining.whole_queries is true and "
        "model.label_bias is true"
    )
    monkeypatch.setitem(sys.modules, "evenhand.training.gpu_step", None)  # as if it failed to load
    assert choose_step(training, plan_of())[1:3] == ("eager", "triton is not installed")


@pytest.mark.parametrize("device", DEVICES)
def test_tables_in_bfloat16_are_rounded_by_chance_and_resume_exactly(device):
    def training():
        made = training_of(torch.device(device))
        for optimizer in made.optimizers.rows.values():
            optimizer.table.data = optimizer.table.data.bfloat16()
        return made

    whole, first, second = training(), training(), training()
    as_graph(whole, plan_of(4), 2)
    as_graph(first, plan_of(4), 1)
    second.load(first.checkpoint())
    as_graph(second, plan_of(4), 1)
    assert_same(second, whole, atol=0, rtol=0)
    assert whole.optimizers.rows["labels"].sums.dtype == torch.float32
    exact = training_of(CPU)
    eager(exact, plan_of(4), 2)
    near = whole.model.label_table.cpu().float()
    torch.testing.assert_close(near, exact.model.label_table.data, atol=0.03, rtol=0.03)
