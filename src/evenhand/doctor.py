"""What `evenhand doctor` checks: what is installed, usable and slow here, with a remedy each.

Whatever may crash or hang runs as a self-test in a child process: python -m evenhand.doctor NAME
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
from concurrent.futures import ThreadPoolExecutor
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
from evenhand.progress import count_bar
from evenhand.version import __version__

OK, SLOW, MISSING, BROKEN = "ok", "slow", "missing", "broken"
COLOURS = {OK: "green", SLOW: "yellow", MISSING: "dim", BROKEN: "bold red"}
CGROUP = Path("/sys/fs/cgroup")
TEST_SECONDS = 40.0  # importing torch alone may take several
LEAST_DISK, LITTLE_DISK = 100 * 2**20, 2 * 2**30  # bytes
REMEDIES = {  # of self-tests
    "loops": "remove numba's cache (__pycache__/*.nbi); if that does not help, install numba anew",
    "kernels": "pip install the triton that fits torch, and a C compiler (gcc)",
}


class Finding(NamedTuple):
    """What a check found, and what to do about it."""

    state: str
    found: str
    remedy: str = ""


def print_findings(folder: Path, *, console: Console, as_json: bool) -> bool:
    """Runs every check and prints what it found; False if anything is broken.

    A check that raises has found something broken. The self-tests start at once, beside each other
    and the other checks.
    """
    screen = Console(stderr=True, quiet=not console.is_terminal) if as_json else console
    findings: dict[str, Finding] = {}
    with ThreadPoolExecutor() as pool, count_bar(screen, "checking") as advance:
        loops, kernels = pool.submit(run_self_test, "loops"), pool.submit(run_self_test, "kernels")
        checks: dict[str, Callable[[], Finding]] = {
            "evenhand": check_evenhand,
            "python": lambda: Finding(OK, f"{platform.python_version()}, {sys.executable}"),
            **{word: partial(check_package, word) for word in requirements()},
            "disk": partial(check_disk, folder),
            "gpu": check_gpu,
            "compiled code": check_compile_cache,
            "compiled loops": loops.result,
            "GPU kernels": lambda: check_kernels(kernels.result()),
            "threads": check_threads,
        }
        for name, check_fn in checks.items():
            advance(len(findings), len(checks))
            try:
                findings[name] = check_fn()
            except Exception as error:
                sentence = f"the check failed: {type(error).__name__}: {error}"
                findings[name] = Finding(BROKEN, sentence, "report this")
        advance(len(checks), len(checks))
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


# --- what is installed ----------------------------------------------------------------------------


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


# --- what is usable -------------------------------------------------------------------------------


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


def check_kernels(trial: Finding) -> Finding:
    if torch.cuda.is_available():
        return trial
    remedy = "nothing: on the CPU, training takes the eager step"
    return Finding(MISSING, "not tried without a GPU", remedy)


# --- what is slow ---------------------------------------------------------------------------------


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


# --- self-tests, each in a process of its own -----------------------------------------------------


def try_loops() -> str:
    """A numba loop against torch's own normalisation."""
    from evenhand.kernels.rows import unit

    vectors = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    error = float((unit(vectors) - torch.nn.functional.normalize(vectors)).abs().max())
    if not error < 1e-5:
        raise SystemExit(f"off by {error:.3g}")
    return f"agree with torch to {error:.0e}"


def try_kernels() -> str:
    """A Triton kernel against its oracle: the means of some rows of a table."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU"
    from evenhand.kernels.gpu.bags import bag_vectors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.arange(12, dtype=torch.float32, device=device).view(4, 3)  # (F, D)
    offsets = torch.tensor([0, 2, 2, 5], device=device)
    ids = torch.tensor([3, 1, 0, 1, 2], dtype=torch.int32, device=device)
    vectors = torch.empty(3, 3, device=device)
    documents = torch.tensor([2, 1, 0], device=device)
    bag_vectors(table, offsets, ids, None, documents, out=vectors)
    expected = torch.stack([table[:3].mean(0), torch.zeros(3).to(device), table[[3, 1]].mean(0)])
    if not torch.allclose(vectors, expected):
        raise SystemExit(f"a kernel answers {vectors.tolist()}, not {expected.tolist()}")
    return "they compile and agree with their oracle: training takes a CUDA graph"


SELF_TESTS = {"loops": try_loops, "kernels": try_kernels}


def run_self_test(name: str) -> Finding:
    words = ["-m", "evenhand.doctor", name]
    return run_python(words, timeout=TEST_SECONDS, remedy=REMEDIES[name])


def run_python(words: Sequence[str], *, timeout: float, remedy: str) -> Finding:
    """Runs Python with these arguments; survives and reports a crash or a hang there."""
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
    print(SELF_TESTS[sys.argv[1]]())
