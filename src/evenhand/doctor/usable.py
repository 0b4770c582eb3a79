"""What is usable: processor, GPU, processes that talk, memory between them, disk and locks."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from evenhand.doctor.findings import BROKEN, MISSING, OK, SLOW, Finding, Trial, run_trial
from evenhand.errors import UserError
from evenhand.faults import gibibytes
from evenhand.kernels.rows import unit
from evenhand.locking import locked

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
TRIAL_SECONDS = 40.0  # torch alone may take several to import
LEAST_SHARED = 2**30  # bytes of /dev/shm: NCCL and loaders in processes pass data through it
LEAST_DISK, LITTLE_DISK = 100 * 2**20, 2 * 2**30
LEAST_FILES = 1024


# --- processor ------------------------------------------------------------------------------------


def usable_cores() -> float:
    """Cores this process may use: those it may run on, or a part of them by a quota."""
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup, or no quota
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, int(quota) / int(period))
    return cores


def processor() -> Finding:
    cores, abilities = usable_cores(), torch.backends.cpu.get_cpu_capability()
    found = f"{cores:g} core{'s' * (cores != 1)}, torch computes with {abilities}"
    if abilities in ("DEFAULT", "NO AVX"):
        return Finding(SLOW, found, "take a processor with AVX2, or unset ATEN_CPU_CAPABILITY")
    return Finding(OK, found)


def compiled_kernels() -> Finding:
    """A loop of numba beside torch's own."""
    vectors = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 33)).astype(np.float32))
    error = float((unit(vectors) - F.normalize(vectors)).abs().max())
    if not error < 1e-5:
        return Finding(BROKEN, f"off by {error:.3g}", "remove numba's cache (__pycache__/*.nbi)")
    return Finding(OK, f"agree with torch to {error:.0e}")


def bfloat16_trial() -> Trial:
    return run_trial(["-m", "evenhand.doctor.trial", "bfloat16"], timeout=TRIAL_SECONDS)


def bfloat16(trial: Trial) -> Finding:
    """Some processors announce instructions for it (AMX) that the system does not let through."""
    if trial.is_good:
        return Finding(OK, trial.told)
    if trial.signal:
        return Finding(
            MISSING,
            f"{trial.told} in a product",
            "nothing for training, which takes float32 here; for code of your own set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
        )
    return Finding(BROKEN, trial.told, "install torch anew")


# --- GPU ------------------------------------------------------------------------------------------


def gpu() -> Finding:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Finding(MISSING, "torch is built without CUDA", "training goes on the CPU")
        return Finding(
            MISSING, "no GPU is seen", "see that nvidia-smi finds one; training goes on the CPU"
        )
    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    found = f"{torch.cuda.get_device_name()}, {gibibytes(free)} of {gibibytes(total)} free"
    found += f", and {count - 1} more" if count > 1 else ""
    if free < total / 2:
        return Finding(SLOW, found, "another program has most of its memory: see nvidia-smi")
    return Finding(OK, found)


def kernels_trial() -> Trial | None:
    if not torch.cuda.is_available():
        return None
    return run_trial(["-m", "evenhand.doctor.trial", "kernels"], timeout=TRIAL_SECONDS)


def triton_kernels(trial: Trial | None) -> Finding:
    if trial is None:
        return Finding(MISSING, "not tried without a GPU", "nothing: the CPU has its own")
    if trial.is_good:
        return Finding(OK, trial.told)
    return Finding(
        BROKEN, trial.told, "see that triton fits torch, and that a C compiler is there (gcc)"
    )


# --- processes that talk --------------------------------------------------------------------------


def backends() -> Finding:
    if not dist.is_available():
        return Finding(MISSING, "torch.distributed is not built in", "one process still works")
    names = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name for name, is_there in names.items() if is_there) or "none"
    if not names["gloo"]:
        return Finding(BROKEN, found, "install a torch with gloo to train in several processes")
    if torch.cuda.is_available() and not names["nccl"]:
        return Finding(SLOW, found, "install a torch with NCCL: gloo goes through the CPU")
    return Finding(OK, found)


def talk_trial() -> Trial:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_trial(
        [*words, "-m", "evenhand.doctor.trial", "talk"], timeout=TRIAL_SECONDS, OMP_NUM_THREADS="1"
    )


def torchrun(trial: Trial) -> Finding:
    if trial.is_good:
        return Finding(OK, trial.told)
    remedy = "see that localhost has a name and ports are free; one process still works"
    if trial.is_late:
        remedy = "a firewall or a wrong network (GLOO_SOCKET_IFNAME=lo) may hold them: " + remedy
    return Finding(BROKEN, trial.told, remedy)


def shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding(MISSING, f"no {SHARED_MEMORY}", "nothing, outside of Linux")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{gibibytes(usage.free)} of {gibibytes(usage.total)} free"
    if usage.free < LEAST_SHARED:
        return Finding(SLOW, found, "several GPUs need 1 GiB: docker run --shm-size=8g")
    return Finding(OK, found)


# --- disk and limits ------------------------------------------------------------------------------


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )


def disk(folder: Path) -> Finding:
    usage = shutil.disk_usage(existing(folder))
    found = f"{gibibytes(usage.free)} free in {folder}"
    if usage.free < LEAST_DISK:
        return Finding(BROKEN, found, "make room: not even a small checkpoint fits")
    if usage.free < LITTLE_DISK:
        return Finding(SLOW, found, "make room: a checkpoint has three times its tables' size")
    return Finding(OK, found)


def open_files() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding(MISSING, "not known on this system", "nothing")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        return Finding(SLOW, f"{soft:,} at once", "ulimit -n 4096: many processes need many")
    return Finding(OK, "without limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at once")


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing(folder)) as name:
        yield Path(name)


def locks(folder: Path) -> Finding:
    """Takes a lock twice: the second must be refused."""
    said: list[str] = []
    try:
        with own_folder(folder) as place, locked(place, warn_fn=said.append):
            try:
                with locked(place, warn_fn=said.append):
                    pass
            except UserError:
                return Finding(OK, f"a second run in {folder} is refused")
    except OSError as error:
        return Finding(
            BROKEN, f"{folder} cannot be written ({error.strerror})", "choose a folder that can"
        )
    found = "this file system has no locks" if said else "a lock is given twice"
    return Finding(MISSING, found, "see to it yourself that two runs do not share a folder")
