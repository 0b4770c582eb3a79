"""`evenhand doctor`: what is installed, usable and slow on this machine, with a remedy each.

Whatever may crash or hang runs as a self-test in a child process: python -m evenhand.doctor NAME
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.torch_version import TorchVersion
from torch.utils import collect_env

from evenhand.faults import gibibytes
from evenhand.progress import count_bar
from evenhand.version import __version__

OK, SLOW, MISSING, BROKEN = "ok", "slow", "missing", "broken"
COLOURS = {OK: "green", SLOW: "yellow", MISSING: "dim", BROKEN: "bold red"}
NEEDED = {  # as in pyproject.toml
    "torch": "2.11", "numba": "0.60", "numpy": "1.26", "rich": "13", "safetensors": "0.4",
    "scipy": "1.11", "filelock": "3.30",
}  # fmt: skip
STALE = "remove numba's cache (__pycache__/*.nbi); if that does not help, install numba anew"
CGROUP, SHARED_MEMORY = Path("/sys/fs/cgroup"), Path("/dev/shm")
TEST_SECONDS = 40.0  # importing torch alone may take several
LITTLE_MEMORY, LITTLE_SHARED = 2 * 2**30, 2**30  # bytes
LEAST_DISK, LITTLE_DISK, WRITTEN = 100 * 2**20, 2 * 2**30, 64 * 2**20
# Below these, another machine or a look at what else is running helps more than any setting.
SLOW_PRODUCT, SLOW_DISK = 10e9, 50e6  # flops a core, bytes a second
BATCH, SAMPLED, WIDTH = 2048, 4096, 256  # of a step with the default settings


class Finding(NamedTuple):
    state: str
    found: str
    remedy: str = ""


class Trial(NamedTuple):
    """How a child process ended."""

    is_good: bool
    message: str  # its last line, or how it died
    signal: int = 0  # that killed it
    is_late: bool = False


def print_findings(folder: Path, *, console: Console, as_json: bool) -> bool:
    """Runs every check and prints what it found; False if anything is broken."""
    screen = Console(stderr=True, quiet=not console.is_terminal) if as_json else console
    findings = examine(folder, console=screen)
    counts = {state: sum(f.state == state for _, f in findings) for state in COLOURS}
    if as_json:
        rows = [{"check": name, **finding._asdict()} for name, finding in findings]
        print(json.dumps({"is_sound": not counts[BROKEN], "findings": rows}, indent=1))
    else:
        table = Table("", "state", "found", "remedy")
        for name, finding in findings:
            state = Text(finding.state, style=COLOURS[finding.state])
            table.add_row(name, state, Text(finding.found), Text(finding.remedy))
        console.print(table)
        console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return not counts[BROKEN]


def examine(folder: Path, *, console: Console) -> list[tuple[str, Finding]]:
    """Runs every check; one that raises has found something broken.

    The self-tests start at once, side by side, and speed is measured when they are over.
    """
    findings: list[tuple[str, Finding]] = []
    with ThreadPoolExecutor() as pool, count_bar(console, "checking") as advance:
        checks = all_checks(folder, {name: pool.submit(self_test, name) for name in SELF_TESTS})
        for name, check_fn in checks:
            advance(len(findings), len(checks))
            try:
                finding = check_fn()
            except Exception as error:
                sentence = f"the check failed: {type(error).__name__}: {error}"
                finding = Finding(BROKEN, sentence, "report this")
            findings.append((name, finding))
        advance(len(checks), len(checks))
    return findings


def all_checks(
    folder: Path, trials: dict[str, Future[Trial]]
) -> list[tuple[str, Callable[[], Finding]]]:
    """The checks in the order of the table; speed last, when no self-test runs any more."""
    return [
        ("evenhand", evenhand_itself),
        ("python", lambda: Finding(OK, f"{platform.python_version()}, {sys.executable}")),
        *((name, partial(package, name)) for name in NEEDED),
        ("memory", memory),
        ("disk", partial(disk, folder)),
        ("gpu", gpu),
        ("compiled code", compile_cache),
        ("compiled loops", lambda: judge(trials["loops"].result(), STALE)),
        ("bfloat16 on the CPU", lambda: bfloat16(trials["bfloat16"].result())),
        ("GPU kernels", lambda: gpu_kernels(trials["kernels"].result())),
        ("torchrun", lambda: torchrun(trials["ranks"].result())),
        ("threads", threads),
        ("speed", speed),
    ]


# --- what is installed ----------------------------------------------------------------------------


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def evenhand_itself() -> Finding:
    known = version_of("evenhand")
    if known is not None and known != __version__:
        remedy = "install it anew: pip install --force-reinstall evenhand"
        return Finding(BROKEN, f"{__version__} runs, but {known} is installed", remedy)
    return Finding(OK, __version__ + ("" if known else ", from its source tree"))


def package(name: str) -> Finding:
    found, least = version_of(name), NEEDED[name]
    if found is None or TorchVersion(found) < least:
        state = "not installed" if found is None else f"{found} is too old"
        return Finding(BROKEN, state, f"pip install '{name}>={least}'")
    return Finding(OK, found)


# --- what is usable -------------------------------------------------------------------------------


def usable_cores() -> float:
    """Cores that affinity and the quota of a container leave to this process."""
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup, or no quota
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, int(quota) / int(period))
    return cores


def memory() -> Finding:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (page * os.sysconf(f"SC_{name}PHYS_PAGES") for name in ("AV", ""))
    except (AttributeError, OSError, ValueError):
        return Finding(MISSING, "not known on this system", "nothing")
    found = f"{gibibytes(free)} of {gibibytes(total)} free"
    if free < LITTLE_MEMORY:
        return Finding(SLOW, found, "see what else runs here (top); large tables may not fit")
    return Finding(OK, found)


def gpu() -> Finding:
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


def disk(folder: Path) -> Finding:
    """Space, and the speed of writing, in the folder or its nearest parent that exists."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    found = f"{gibibytes(free)} free in {folder}"
    if free < LEAST_DISK:
        return Finding(BROKEN, found, "make room: not even a small checkpoint fits")
    try:
        with tempfile.TemporaryFile(prefix=".doctor-", dir=place) as file:
            block, began = os.urandom(2**20), time.perf_counter()
            for _ in range(WRITTEN // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = WRITTEN / (time.perf_counter() - began)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror})"
        return Finding(BROKEN, found, "make room, or choose a folder that can be written")
    found += f", written at {rate / 1e6:,.0f} MB/s"
    if free < LITTLE_DISK:
        return Finding(SLOW, found, "make room: a checkpoint takes three times its tables' size")
    if rate < SLOW_DISK:
        return Finding(SLOW, found, "write to a local disk, or raise training.checkpoint_every")
    return Finding(OK, found)


def compile_cache() -> Finding:
    """Whether numba keeps its machine code for the next process."""
    from evenhand.kernels import rows

    kernel: Any = rows._unit_rows_compiled
    path = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if path is not None and os.access(path, os.W_OK):
        return Finding(OK, f"kept in {path}")
    found = "nowhere to keep it" if path is None else f"{path} cannot be written"
    remedy = "set NUMBA_CACHE_DIR to a folder that can be written: every start compiles anew"
    return Finding(SLOW, found, remedy)


# --- self-tests, each in a process of its own -----------------------------------------------------


def self_test(name: str) -> Trial:
    words = ["-m", "evenhand.doctor", name]
    if name != "ranks":
        return run_python(words, timeout=TEST_SECONDS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_python([*launcher, *words], timeout=TEST_SECONDS, OMP_NUM_THREADS="1")


def run_python(words: Sequence[str], *, timeout: float, **environment: str) -> Trial:
    """Runs Python with these arguments; survives and reports a crash or a hang there."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    # In a session of its own: a process that hangs may have started others.
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Trial(False, f"no answer in {timeout:.0f} s", is_late=True)
    code = process.returncode
    if code < 0:
        return Trial(False, f"it died of {signal.Signals(-code).name}", signal=-code)
    last_line = (out if code == 0 else err).strip().rpartition("\n")[2].strip()[:200]
    return Trial(code == 0, last_line or f"it ended with {code}")


def judge(trial: Trial, remedy: str) -> Finding:
    return Finding(OK, trial.message) if trial.is_good else Finding(BROKEN, trial.message, remedy)


def bfloat16(trial: Trial) -> Finding:
    """Some processors announce instructions (AMX) that the system does not let through."""
    if not trial.signal:
        return judge(trial, "install torch anew")
    remedy = "nothing for training, which takes float32 here; for code of your own set "
    remedy += "ONEDNN_MAX_CPU_ISA=AVX512_CORE"
    return Finding(MISSING, f"{trial.message} in a product", remedy)


def gpu_kernels(trial: Trial) -> Finding:
    if not torch.cuda.is_available():
        return Finding(MISSING, "not tried without a GPU", "nothing: the CPU has its own")
    return judge(trial, "pip install the triton that fits torch, and a C compiler (gcc)")


def torchrun(trial: Trial) -> Finding:
    if not dist.is_available():
        return Finding(MISSING, "torch.distributed is not built in", "one process still works")
    if not trial.is_good:
        remedy = "see that localhost has a name and ports are free; one process still works"
        if trial.is_late:
            remedy = (
                f"a firewall or a wrong network may hold them (GLOO_SOCKET_IFNAME=lo); {remedy}"
            )
        return Finding(BROKEN, trial.message, remedy)
    if torch.cuda.is_available() and not dist.is_nccl_available():
        return Finding(SLOW, f"{trial.message}, without NCCL", "install a torch with NCCL")
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < LITTLE_SHARED:
        found = f"{trial.message}; {gibibytes(free)} of {SHARED_MEMORY} free"
        return Finding(SLOW, found, "several GPUs need 1 GiB: docker run --shm-size=8g")
    return Finding(OK, trial.message)


def try_loops() -> str:
    """A numba loop against torch's own normalisation."""
    from evenhand.kernels.rows import unit

    vectors = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    error = float((unit(vectors) - torch.nn.functional.normalize(vectors)).abs().max())
    if not error < 1e-5:
        raise SystemExit(f"off by {error:.3g}")
    return f"agree with torch to {error:.0e}"


def try_bfloat16() -> str:
    """A product large enough for the library to take its fastest instructions."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    product = (left.bfloat16() @ right.bfloat16()).float()
    error = float((product - left @ right).abs().max())
    if not error < 1:  # of sums with a deviation of 16, rounded to 8 bits
        raise SystemExit(f"products are off by {error:.3g}")
    return f"products agree with float32 to {error:.2f} of 16"


def try_kernels() -> str:
    """A Triton kernel against its oracle: the means of some rows of a table."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU"
    from evenhand.kernels.gpu.bags import bag_vectors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.arange(12, dtype=torch.float32).view(4, 3)  # (F, D)
    offsets, ids = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 1, 0, 1, 2], dtype=torch.int32)
    documents = torch.tensor([2, 1, 0])
    vectors = torch.empty(3, 3, device=device)
    there, offsets, ids = table.to(device), offsets.to(device), ids.to(device)
    bag_vectors(there, offsets, ids, None, documents.to(device), out=vectors)
    expected = torch.stack([table[:3].mean(0), torch.zeros(3), table[[3, 1]].mean(0)])
    if not torch.allclose(vectors.cpu(), expected):
        raise SystemExit(f"a kernel answers {vectors.tolist()}, not {expected.tolist()}")
    return "they compile and agree with their oracle"


def try_ranks() -> str:
    """Every rank sends its number to the others, under torchrun."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if total.item() != world_size * (world_size + 1) / 2:
        raise SystemExit(f"{world_size} processes add up to {total.item():g}")
    return f"{world_size} processes started and talked"


SELF_TESTS: dict[str, Callable[[], str]] = {
    "loops": try_loops,
    "bfloat16": try_bfloat16,
    "kernels": try_kernels,
    "ranks": try_ranks,
}


# --- what is slow ---------------------------------------------------------------------------------


def threads() -> Finding:
    count, cores = torch.get_num_threads(), usable_cores()
    found = f"{count} for {cores:g} core{'s' * (cores != 1)}"
    if count <= max(1, cores):
        return Finding(OK, found)
    source = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "torch's default"
    remedy = f"OMP_NUM_THREADS={max(1, int(cores))}: they wait for each other"
    return Finding(SLOW, f"{found} ({source})", remedy)


def speed() -> Finding:
    """The best of many products: what the machine can do when undisturbed."""
    left, right = torch.ones(1024, 512), torch.ones(512, 1024)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    rate, abilities = 2 * 1024 * 1024 * 512 / best, torch.backends.cpu.get_cpu_capability()
    found = (
        f"{rate / 1e9:,.0f} GFLOP/s with {abilities}: the scores of a default step "
        f"({BATCH:,} x {SAMPLED:,} x {WIDTH}) take {2e3 * BATCH * SAMPLED * WIDTH / rate:,.0f} ms"
    )
    if abilities in ("DEFAULT", "NO AVX"):
        return Finding(SLOW, found, "take a processor with AVX2, or unset ATEN_CPU_CAPABILITY")
    if rate < SLOW_PRODUCT * min(torch.get_num_threads(), usable_cores()):
        return Finding(SLOW, found, "see what else runs here (top), and the line of threads")
    return Finding(OK, found)


if __name__ == "__main__":
    message = SELF_TESTS[sys.argv[1]]()
    if os.environ.get("RANK", "0") == "0":
        print(message)
