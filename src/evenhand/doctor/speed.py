"""What is slow: compiled code that is not kept, too many threads, and four rates in two seconds."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenhand.doctor.findings import BROKEN, OK, SLOW, Finding
from evenhand.doctor.usable import own_folder, usable_cores
from evenhand.kernels import rows

# A step of the default settings, which the rates are told by.
BATCH, SAMPLED, WIDTH = 2048, 4096, 256
CHECKPOINT = 600 * 2**20  # of places with the default settings: tables and their momentum
DISK_BYTES = 64 * 2**20
# Below these another machine, or a look at what else runs, is worth more than any setting.
SLOW_PRODUCT, SLOW_MEMORY, SLOW_DISK = 10e9, 3e9, 50e6  # flops a core, bytes, bytes a second
MEASURED_SECONDS = 0.5


def kept_code() -> Finding:
    """Whether numba's machine code is there for the next process."""
    kernel: Any = rows._unit_rows_compiled
    path = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    remedy = "set NUMBA_CACHE_DIR to a folder that can be written: every start compiles anew"
    if path is None:
        return Finding(SLOW, "nowhere to keep it", remedy)
    if not os.access(path, os.W_OK):
        return Finding(SLOW, f"{path} cannot be written", remedy)
    return Finding(OK, f"kept in {path}")


def threads() -> Finding:
    count, cores = torch.get_num_threads(), usable_cores()
    found = f"{count} for {cores:g} core{'s' * (cores != 1)}"
    if count > max(1, cores):
        name = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's default"
        return Finding(
            SLOW, f"{found} ({name})", f"OMP_NUM_THREADS={max(1, int(cores))}: they wait in turn"
        )
    return Finding(OK, found)


def product_rate() -> Finding:
    left, right = torch.ones(1024, 512), torch.ones(512, 1024)
    rate = 2 * 1024 * 1024 * 512 / _seconds(lambda: left @ right)
    step = 2 * BATCH * SAMPLED * WIDTH / rate
    found = (
        f"{rate / 1e9:,.0f} GFLOP/s: the scores of a default step "
        f"({BATCH:,} x {SAMPLED:,} x {WIDTH}) take {1000 * step:,.0f} ms"
    )
    if rate < SLOW_PRODUCT * min(torch.get_num_threads(), usable_cores()):
        return Finding(SLOW, found, "see what else runs here (top), and the line of threads")
    return Finding(OK, found)


def memory_rate() -> Finding:
    source = torch.ones(2**24)  # 64 MiB: no cache holds it twice
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    step = 5 * SAMPLED * WIDTH * 4 / rate  # rows read; rows and momentum read and written
    found = f"{rate / 1e9:,.1f} GB/s: the label rows of a default step take {1000 * step:,.1f} ms"
    if rate < SLOW_MEMORY:
        return Finding(SLOW, found, "see what else runs here; a step waits for memory")
    return Finding(OK, found)


def disk_rate(folder: Path) -> Finding:
    try:
        with own_folder(folder) as place, open(place / "block", "wb") as file:
            block = os.urandom(2**20)
            began = time.perf_counter()
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = DISK_BYTES / (time.perf_counter() - began)
    except OSError as error:
        return Finding(
            BROKEN,
            f"64 MiB cannot be written to {folder} ({error.strerror})",
            "make room, or choose a folder that can be written",
        )
    found = f"{rate / 1e6:,.0f} MB/s: a checkpoint of places takes {CHECKPOINT / rate:,.1f} s"
    if rate < SLOW_DISK:
        return Finding(SLOW, found, "write to a local disk, or raise training.checkpoint_every")
    return Finding(OK, found)


def _seconds(work_fn: Callable[[], Any]) -> float:
    """The best of as many as fit: what the machine can do when nobody disturbs it."""
    work_fn()
    best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        work_fn()
        best = min(best, time.perf_counter() - began)
    return best
