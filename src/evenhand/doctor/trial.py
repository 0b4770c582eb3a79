"""Trials that may crash or hang, run by the doctor in processes of their own.

python -m evenhand.doctor.trial bfloat16
torchrun --standalone --nproc-per-node 2 -m evenhand.doctor.trial talk
"""

import sys
from datetime import timedelta

import torch


def bfloat16() -> str:
    """A product of a size for which the library takes its fastest instructions."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    product = (left.bfloat16() @ right.bfloat16()).float()
    error = float((product - left @ right).abs().max())
    if not error < 1:  # of sums with a deviation of 16, rounded to 8 bits
        raise SystemExit(f"products are off by {error:.3g}")
    return f"products agree with float32 to {error:.2f} of 16"


def kernels() -> str:
    """A Triton kernel beside its oracle: the mean of some rows of a table."""
    from evenhand.kernels.gpu.bags import bag_vectors

    device = "cuda" if torch.cuda.is_available() else "cpu"  # there, by the interpreter
    table = torch.arange(12, dtype=torch.float32).view(4, 3)  # (F, D)
    offsets, ids = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 1, 0, 1, 2], dtype=torch.int32)
    documents = torch.tensor([2, 1, 0])
    vectors = torch.empty(3, 3, device=device)
    table_there, offsets, ids = table.to(device), offsets.to(device), ids.to(device)
    bag_vectors(table_there, offsets, ids, None, documents.to(device), out=vectors)
    expected = torch.stack([table[:3].mean(0), torch.zeros(3), table[[3, 1]].mean(0)])
    if not torch.allclose(vectors.cpu(), expected):
        raise SystemExit(f"a kernel answers {vectors.tolist()}, and not {expected.tolist()}")
    return "they compile and agree with their oracle"


def talk() -> str:
    """Every rank says its number to the others: under torchrun."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if total.item() != world_size * (world_size + 1) / 2:
        raise SystemExit(f"{world_size} processes add up to {total.item():g}")
    return f"{world_size} processes started and talked"


if __name__ == "__main__":
    print({"bfloat16": bfloat16, "kernels": kernels, "talk": talk}[sys.argv[1]]())
