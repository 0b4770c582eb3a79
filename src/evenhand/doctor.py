"""What `evenhand doctor` checks: what is installed, usable and slow here, with a remedy each.

Compiled code may crash or hang, so its self-test runs in a child: python -m evenhand.doctor
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.torch_version import TorchVersion
from torch.utils import collect_env

from evenhand.errors import gibibytes
from evenhand.version import __version__

OK, SLOW, MISSING, BROKEN = "ok", "slow", "missing", "broken"
COLOURS = {OK: "green", SLOW: "yellow", MISSING: "dim", BROKEN: "bold red"}
CGROUP = Path("/sys/fs/cgroup")
TEST_SECONDS = 60.0  # importing torch alone may take several
LEAST_DISK, LITTLE_DISK = 100 * 2**20, 2 * 2**30  # bytes


class Finding(NamedTuple):
    """What a check found, and what to do about it."""

    state: str
    found: str
    remedy: str = ""


def print_findings(folder: Path, *, console: Console, as_json: bool) -> bool:
    """Runs every check and prints what it found; False if anything is broken.

    A check that raises has found something broken.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "evenhand": check_evenhand,
        "python": lambda: Finding(OK, f"{platform.python_version()}, {sys.executable}"),
        **{word: partial(check_package, word) for word in requirements()},
        "disk": partial(check_disk, folder),
        "gpu": check_gpu,
        "threads": check_threads,
        "machine code": check_compile_cache,
        "kernels": run_self_test,
    }
    findings: dict[str, Finding] = {}
    screen = Console(stderr=True, quiet=not console.is_terminal) if as_json else console
    with screen.status("checking"):
        for name, check_fn in checks.items():
            try:
                findings[name] = check_fn()
            except Exception as error:
                sentence = f"the check failed: {type(error).__name__}: {error}"
                findings[name] = Finding(BROKEN, sentence, "report this")
    counts = Counter(finding.state for finding in findings.values())
    if as_json:
        rows = [{"check": name, **finding._asdict()} for name, finding in findings.items()]
        print(json.dumps({"is_sound": not counts[BROKEN], "findings": rows}, indent=1))
    else:
        table = Table("", "state", "found", "remedy")
        for name, (state, found, remedy) in findings.items():
            table.add_row(name, Text(state, style=COLOURS[state]), Text(found), Text(remedy))
        console.print(table)
        console.print(", ".join(f"{counts[state]} {state}" for state in COLOURS if counts[state]))
    return not counts[BROKEN]


# --- what is installed and usable -----------------------------------------------------------------


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_evenhand() -> Finding:
    known = version_of("evenhand")
    if known not in (None, __version__):
        remedy = "install it anew: pip install --force-reinstall evenhand"
        return Finding(BROKEN, f"{__version__} runs, but {known} is installed", remedy)
    return Finding(OK, __version__ + ("" if known else ", from its source tree"))


def requirements() -> list[str]:
    """What the package needs, such as 'torch>=2.11'; none of it is known in a bare source tree."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return [word for word in metadata.requires("evenhand") or () if "extra ==" not in word]
    return []


def check_package(requirement: str) -> Finding:
    match = re.match(r"([\w-]+).*?>=([\d.]+)", requirement)
    assert match is not None
    found, least = version_of(match[1]), match[2]
    if found is not None and TorchVersion(found) >= least:
        return Finding(OK, found)
    state = "not installed" if found is None else f"{found} is too old"
    return Finding(BROKEN, state, f"pip install '{requirement}'")


def check_gpu() -> Finding:
    """Whether there is a GPU that torch can use, and how much of its memory is free."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Finding(MISSING, "torch is built without CUDA", "training runs on the CPU")
        driver = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
        found = f"no GPU is seen ({f'driver {driver}' if driver else 'no NVIDIA driver'})"
        return Finding(MISSING, found, "see that nvidia-smi finds one; training runs on the CPU")
    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    found = f"{torch.cuda.get_device_name()}, {gibibytes(free)} of {gibibytes(total)} free"
    found += f", and {count - 1} more" if count > 1 else ""
    if free < total / 2:
        return Finding(SLOW, found, "another program has most of its memory: see nvidia-smi")
    return Finding(OK, found)


def check_disk(folder: Path) -> Finding:
    """Space, and whether a file can be written, in the folder or its nearest parent that exists."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    found = f"{gibibytes(free)} free in {folder}"
    if free < LEAST_DISK:
        return Finding(BROKEN, found, "make room: not even a small checkpoint fits")
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror})"
        return Finding(BROKEN, found, "make room, or choose a folder that can be written")
    if free < LITTLE_DISK:
        return Finding(SLOW, found, "make room: a checkpoint takes three times its tables' size")
    return Finding(OK, found)


# --- what is slow ---------------------------------------------------------------------------------


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


def usable_cores() -> float:
    """Cores that affinity and the quota of a container leave to this process."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores: float = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup, or no quota
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, int(quota) / int(period))
    return cores


def check_threads() -> Finding:
    """Whether torch has no more threads than there are cores for them."""
    count, cores = torch.get_num_threads(), usable_cores()
    found = f"{count} for {cores:g} core{'s' * (cores != 1)}"
    if count <= max(1, cores):
        return Finding(OK, found)
    source = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's default"
    remedy = f"OMP_NUM_THREADS={max(1, int(cores))}: they wait for each other"
    return Finding(SLOW, f"{found} ({source})", remedy)


# --- what computes something else -----------------------------------------------------------------


def self_test() -> str:
    """Vectors of length 1 by a numba loop and, on a GPU, the means of rows by a Triton kernel."""
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


def run_self_test(
    words: Sequence[str] = ("-m", "evenhand.doctor"), *, timeout: float = TEST_SECONDS
) -> Finding:
    """Runs the self-test in a child, or other words of Python; survives a crash or a hang there."""
    remedy = "install numba anew; on a GPU also the triton that fits torch, and a C compiler (gcc)"
    paths = [str(Path(__file__).parents[1]), *sys.path]
    try:
        done = subprocess.run(
            [sys.executable, *words],
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


if __name__ == "__main__":
    print(self_test())
