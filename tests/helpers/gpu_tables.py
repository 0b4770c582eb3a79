"""Tables on a device and their twins in torch, for the tests of the Triton kernels.

Without CUDA the kernels run in Triton's interpreter, on tiny shapes; with it, as compiled.
"""

import pytest
import torch

from evenhand.kernels.random import num_bits
from evenhand.models import BagEncoder, Retriever
from evenhand.training.optimizers import RowAdagrad, RowAdam

NO_TRITON = "triton is not installed: the kernels for CUDA need it"
triton = pytest.importorskip("triton", reason=NO_TRITON)
rows = pytest.importorskip("evenhand.kernels.gpu.rows", reason=NO_TRITON)
tl = triton.language
labels_at = pytest.importorskip("evenhand.kernels.gpu.own_samples", reason=NO_TRITON).labels_at

IS_COMPILED = isinstance(rows.through_unit, triton.JITFunction)
NOT_INTERPRETED = "kernels are compiled for CUDA: triton was imported without TRITON_INTERPRET=1"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(IS_COMPILED, reason=NOT_INTERPRETED)),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda]),
]
BETAS = (0.8, 0.99)
OPTIMIZERS = ["adam", "adagrad"]
WIDTHS = [1, 3, 17, 130]


def by_device(device, tiny, real):
    return tiny if device == "cpu" else real


def make_table(num_rows, width, *, optimizer, device, dtype=torch.float32, seed=None):
    table = torch.randn(num_rows, width).to(dtype)
    momentum = torch.zeros(num_rows, width) if optimizer == "adam" else None
    return rows.RowTable(
        table.to(device),
        torch.zeros(num_rows, device=device),
        None if momentum is None else momentum.to(device),
        betas=BETAS,
        seed=seed,
    )


def twin_of(rows_table, optimizer):
    """The same step in torch, in float64."""
    table = rows_table.table.double().cpu()
    return RowAdam(table, betas=BETAS) if optimizer == "adam" else RowAdagrad(table)


def scalars(device, *, learning_rate, step_number):
    return {
        "learning_rate": torch.tensor([learning_rate], device=device),
        "step_number": torch.tensor([step_number], device=device),
    }


def unit_gradients(gradients, vectors):
    """The slow code's way through the unit rows."""
    retriever = Retriever(BagEncoder(1, vectors.shape[1]), 1, vectors.shape[1])
    return retriever.through_unit(gradients, vectors)


def assert_state_is(rows_table, twin):
    near = {"rtol": 5e-5, "atol": 5e-6}
    torch.testing.assert_close(rows_table.table.double().cpu(), twin.table, **near)
    moments = twin.second_moments if isinstance(twin, RowAdam) else twin.sums
    torch.testing.assert_close(rows_table.moments.double().cpu(), moments, **near)
    if isinstance(twin, RowAdam):
        torch.testing.assert_close(rows_table.momentum.double().cpu(), twin.momentum, **near)


def drawn_ids(positive_ids, *, key, num_labels, num_sampled):
    """(B, M) the labels that stand in the slots of samples drawn for each example."""
    out = positive_ids.new_empty(len(positive_ids), num_sampled)
    _drawn_ids[(len(positive_ids), triton.cdiv(num_sampled, 1024))](
        positive_ids, key, out, num_labels, num_sampled, positive_ids.shape[1],
        BITS=num_bits(num_labels), BLOCK=1024,
    )  # fmt: skip
    return out


@triton.jit
def _drawn_ids(
    positive_ids, key_at, out, num_labels, num_sampled, num_positives, BITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_at)
    labels = labels_at(
        slots.to(tl.int64) % num_sampled, positive_ids, row, key, num_labels, num_positives, BITS
    )
    tl.store(out + row * num_sampled + slots, labels, mask=slots < num_sampled)
