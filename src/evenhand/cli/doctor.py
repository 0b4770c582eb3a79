"""`evenhand doctor`: what is usable and slow on this machine, with a remedy each."""

import contextlib
import os
import platform
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

OK, SLOW, MISSING, BROKEN = "ok", "slow", "missing", "broken"
COLOURS = {OK: "green", SLOW: "yellow", MISSING: "dim", BROKEN: "bold red"}
CGROUP = Path("/sys/fs/cgroup")
TEST_SECONDS = 60.0  # importing torch alone may take several
SELF_TEST = "from evenhand.cli.doctor import self_test; print(self_test())"


class Finding(NamedTuple):
    """What a check found, and what to do about it."""

    state: str
    found: str
    remedy: str = ""


def doctor() -> int:
    """What is installed, usable and slow on this machine.

    Exit code 1 if anything is broken; what is slow or missing still works.
    """
    from rich.table import Table
    from rich.text import Text

    from evenhand.cli.console import console

    with console.status("checking"):
        findings = {
            "versions": check_versions(),
            "gpu": check_gpu(),
            "threads": check_threads(),
            "machine code": check_compile_cache(),
            "kernels": run_self_test(),
        }
    table = Table("", "state", "found", "remedy")
    for name, (state, found, remedy) in findings.items():
        table.add_row(name, Text(state, style=COLOURS[state]), Text(found), Text(remedy))
    console.print(table)
    counts = Counter(finding.state for finding in findings.values())
    console.print(", ".join(f"{counts[state]} {state}" for state in COLOURS if counts[state]))
    return 1 if counts[BROKEN] else 0


def check_versions() -> Finding:
    import numba
    import torch

    from evenhand.version import __version__

    versions = {"evenhand": __version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "numba": numba.__version__}
    return Finding(OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_gpu() -> Finding:
    """Whether there is a GPU that torch can use, and how much of its memory is free."""
    import torch

    from evenhand.errors import gibibytes

    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Finding(MISSING, "torch is built without CUDA", "training runs on the CPU")
        remedy = "see that nvidia-smi finds one; training runs on the CPU"
        return Finding(MISSING, "no GPU is seen", remedy)
    free, total = torch.cuda.mem_get_info()
    found = f"{torch.cuda.get_device_name()}, {gibibytes(free)} of {gibibytes(total)} free"
    if free < total / 2:
        return Finding(SLOW, found, "another program has most of its memory: see nvidia-smi")
    return Finding(OK, found)


def check_threads() -> Finding:
    """Whether torch has no more threads than there are cores for them."""
    import torch

    count, cores = torch.get_num_threads(), usable_cores()
    found = f"{count} for {cores:g} core{'s' * (cores != 1)}"
    if count <= max(1, cores):
        return Finding(OK, found)
    return Finding(SLOW, found, f"OMP_NUM_THREADS={max(1, int(cores))}: they wait for each other")


def usable_cores() -> float:
    """Cores that affinity and the quota of a container leave to this process."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores: float = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup, or no quota
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, int(quota) / int(period))
    return cores


def check_compile_cache() -> Finding:
    """Whether numba keeps its machine code for the next process."""
    from evenhand.kernels import rows

    kernel: Any = rows._unit_rows_compiled
    path = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if path is not None and os.access(path, os.W_OK):
        return Finding(OK, f"kept in {path}")
    found = "nowhere to keep it" if path is None else f"{path} cannot be written"
    remedy = "set NUMBA_CACHE_DIR to a folder that can be written: every start compiles anew"
    return Finding(SLOW, found, remedy)


def self_test() -> str:
    """Vectors of length 1 by a numba loop and, on a GPU, the means of rows by a Triton kernel."""
    import torch

    from evenhand.kernels.rows import unit

    vectors = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    error = float((unit(vectors) - torch.nn.functional.normalize(vectors)).abs().max())
    if not error < 1e-5:
        raise SystemExit(f"numba's loops are off by {error:.3g}; remove __pycache__/*.nbi")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "numba's loops agree with torch; without a GPU training takes the eager step"
    from evenhand.kernels.gpu.bags import bag_vectors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.arange(12, dtype=torch.float32, device=device).view(4, 3)  # (F, D)
    starts = torch.tensor([0, 2, 2, 5], device=device)
    ids = torch.tensor([3, 1, 0, 1, 2], dtype=torch.int32, device=device)
    found, bags = torch.empty(3, 3, device=device), torch.tensor([2, 1, 0], device=device)
    bag_vectors(table, starts, ids, None, bags, out=found)
    expected = torch.stack([table[:3].mean(0), torch.zeros_like(table[0]), table[[3, 1]].mean(0)])
    if not torch.allclose(found, expected):
        raise SystemExit(f"a Triton kernel answers {found.tolist()}, not {expected.tolist()}")
    return "numba's loops and Triton's kernels agree with torch; training takes a CUDA graph"


def run_self_test(code: str = SELF_TEST, *, timeout: float = TEST_SECONDS) -> Finding:
    """Runs the self-test in a child: compiled code may crash or hang."""
    remedy = "install numba anew; on a GPU also the triton that fits torch, and a C compiler (gcc)"
    paths = [str(Path(__file__).parents[2]), *sys.path]
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(BROKEN, f"no answer in {timeout:.0f} s", remedy)
    if done.returncode < 0:
        return Finding(BROKEN, f"it died of {signal.Signals(-done.returncode).name}", remedy)
    text = done.stderr if done.returncode else done.stdout
    last_line = text.strip().rpartition("\n")[2].strip()[:200]
    if done.returncode:
        return Finding(BROKEN, last_line or f"it ended with {done.returncode}", remedy)
    return Finding(OK, last_line)
