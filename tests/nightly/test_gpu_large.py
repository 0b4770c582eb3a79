"""A table of more numbers than 32 bits can count: the rows that a step touches, and no others.

On a GPU it has 2^25 rows of 128 in bfloat16, 8 GiB; in the interpreter it is small, which tests
the test.
"""

from functools import partial

import pytest
import torch

from evenhand import top_weights
from evenhand.kernels.gpu.batches import Clock
from evenhand.kernels.gpu.losses import kernel_loss
from evenhand.kernels.gpu.rows import RowTable
from evenhand.kernels.gpu.step import MiningStep
from evenhand.losses import contrastive_loss
from evenhand.models import MlpEncoder, Retriever, random_rows
from evenhand.sampling import LabelSample
from evenhand.training.feed import Batch
from evenhand.training.optimizers import RowAdagrad
from evenhand.training.step import gradients_of, mine
from gpu_tables import DEVICES, by_device
from test_gpu_step import Given

BATCH, K, HARD = 12, 5, 6


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_on_a_table_beyond_32_bits_changes_the_right_rows(device):
    num_labels, width, num_sampled = by_device(device, (70, 8, 20), (2**25, 128, 512))
    generator = torch.Generator().manual_seed(0)
    table = random_rows(num_labels, width, generator, device=device, dtype=torch.bfloat16)
    vectors = torch.randn(BATCH, width, generator=generator)
    labels = num_labels - 1 - torch.randint(num_labels // 8, (BATCH,), generator=generator)
    clock = Clock.planned(
        torch.full((2,), 0.5, device=device),
        torch.full((2,), HARD, device=device),
        torch.randint(2**62, (2,), generator=generator).to(device),
    )
    step = MiningStep(
        RowTable(table, torch.zeros(num_labels, device=device)), clock, batch_size=BATCH,
        num_positives=1, num_sampled_labels=num_sampled, num_hard_labels=K,
        loss=kernel_loss(contrastive_loss), precision=torch.float32,
    )  # fmt: skip
    step.vectors.copy_(vectors)
    step.label_ids.copy_(labels)
    step.positive_ids.copy_(labels.unsqueeze(1))
    before = table.clone()
    clock.tick()
    step.mine()
    step.update()
    step.join()

    # The same on the few rows that can be touched, in torch and in float64.
    drawn = step.column_ids[:num_sampled].cpu()
    ids, columns = torch.cat([drawn, labels]).unique(return_inverse=True)
    model = Retriever(MlpEncoder(1, 1), len(ids), width)
    model.label_table.data = before[ids.to(device)].cpu().double()
    model.encoder = Given(vectors.double())
    own = columns[num_sampled:]
    batch = Batch(torch.arange(BATCH).unsqueeze(1).double(), own, own.unsqueeze(1))
    queries = model.query_vectors(batch.features)
    mined = mine(
        queries, batch, model, LabelSample(columns[:num_sampled], torch.zeros(num_sampled)),
        num_hard_labels=K, loss_fn=contrastive_loss,
        risk_fn=partial(top_weights, num_hard_examples=HARD),
    )  # fmt: skip
    gradients = gradients_of(mined, queries, batch, model)
    RowAdagrad(model.label_table).step(gradients["labels"], learning_rate=0.5)

    after = table[ids.to(device)].cpu().double()
    torch.testing.assert_close(step.kept.losses.cpu().double(), mined.losses, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(after, model.label_table.data, atol=1e-3, rtol=2**-7)
    (changed,) = (table != before).any(1).nonzero(as_tuple=True)
    touched = ids[gradients["labels"].ids]
    assert set(changed.tolist()) <= set(touched.tolist())
    assert len(changed) > len(touched) // 2
    assert int(changed.max()) * width > by_device(device, 0, 2**31)
