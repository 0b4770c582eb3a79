"""Makes every mutant and runs the tests that must fail.

The package is never changed in place: each mutant is a folder of links to it, with one file
rewritten, first in the path of a process of its own. To import torch takes seconds, so this process
imports it and forks.

The package as it is must pass the same tests in the same time: so a mutant that runs out of time
runs for ever, and counts as killed.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

from .mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "evenhand"
SECONDS_FOR_A_MUTANT = 180  # many times what the tests of one take
OK, FAILED = 0, 1  # what pytest ends with; below 0 it is the signal that ended the process


class Job(NamedTuple):
    """A mutant, or None for the package as it is, and what is run on it."""

    mutant: Mutant | None
    test_file: str
    names: str  # pytest's -k

    def __str__(self) -> str:
        if self.mutant is None:
            return f"the package as it is: {self.test_file}"
        old, new = (" ".join(text.split()) for text in (self.mutant.old, self.mutant.new))
        return f"{self.mutant.file}: {old} -> {new or 'nothing'}"


def job_of(mutant: Mutant) -> Job:
    return Job(mutant, mutant.test_file, mutant.names)


def unchanged_jobs(jobs: list[Job]) -> list[Job]:
    """One for each test file: all of its tests that a mutant relies on."""
    names: dict[str, set[str]] = {}
    for job in jobs:
        names.setdefault(job.test_file, set()).add(job.names)
    return [
        Job(None, file, "" if "" in of else " or ".join(f"({name})" for name in sorted(of)))
        for file, of in sorted(names.items())
    ]


def find_stale(jobs: list[Job]) -> list[str]:
    """Mutants that cannot be made any more: each must be brought up to date, not dropped."""
    problems = []
    for job in jobs:
        assert job.mutant is not None
        count = (PACKAGE / job.mutant.file).read_text("utf-8").count(job.mutant.old)
        if count != 1 or job.mutant.old == job.mutant.new:
            problems.append(f"{job}: the old text occurs {count} times; it must once, and change")
    return problems


def write_package(folder: Path, mutant: Mutant | None) -> None:
    """Links to the package and to what is compiled of it, but for the file that is changed."""
    shutil.copytree(PACKAGE, folder / "evenhand", copy_function=os.symlink)
    if mutant is None:
        return
    path = folder / "evenhand" / mutant.file
    text = path.read_text("utf-8").replace(mutant.old, mutant.new)
    for link in (path, *path.parent.glob(f"__pycache__/{path.stem}.*")):
        link.unlink()
    path.write_text(text, "utf-8")


def run_tests(folder: Path, job: Job) -> None:
    """In a process of its own: pytest on the package in `folder`. Never returns."""
    os.setsid()
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ |= {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "EVENHAND_HYPOTHESIS_PROFILE": "quick",
    }
    options = ["-x", "-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider"]
    # No time for a single test: a busy machine would kill mutants that way.
    options += ["-k", job.names, "--timeout=0", "--basetemp", f"{folder}/tmp"]
    options += ["--assert=plain"]  # to rewrite the asserts of a file takes as long as to run them
    # A mutant is killed by a test that fails. What it leaves unclosed comes to light when the
    # garbage is collected: now or never, and after the last test as an error of pytest's own.
    options += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
    status = pytest.main([*options, str(ROOT / "tests" / job.test_file)])
    import evenhand

    assert Path(evenhand.__file__).is_relative_to(folder), evenhand.__file__
    os._exit(status)


def start_tests(folder: Path, job: Job) -> int:
    """The number of a new process that runs the tests of a job."""
    write_package(folder, job.mutant)
    process = os.fork()
    if not process:
        try:
            run_tests(folder, job)
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    return process


def exit_status(process: int, began: float) -> int | None:
    """How a process ended, None while it runs; one that is late is ended here."""
    found, wait_status = os.waitpid(process, os.WNOHANG)
    if not found and time.monotonic() - began < SECONDS_FOR_A_MUTANT:
        return None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)  # and those that its tests started
    if not found:
        _, wait_status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(wait_status)


def run_all(jobs: list[Job], work_dir: Path, num_processes: int) -> list[Job]:
    """Runs every job and says how it ended; returns those that ended wrong."""
    waiting, running, wrong = list(enumerate(jobs)), {}, []
    while waiting or running:
        while waiting and len(running) < num_processes:
            number, job = waiting.pop(0)
            folder = work_dir / str(number)
            running[start_tests(folder, job)] = job, folder, time.monotonic()
        for process, (job, folder, began) in list(running.items()):
            status = exit_status(process, began)
            if status is None:
                continue
            del running[process]
            is_right = status == OK if job.mutant is None else status == FAILED or status < 0
            if not is_right:
                wrong.append(job)
            word = "passes" if job.mutant is None else "killed"
            if not is_right:
                word = "SURVIVED" if status == OK else f"WRONG ({status})"
            said = last_line(folder) if status >= 0 else signal.Signals(-status).name
            print(f"{word:8} {time.monotonic() - began:5.1f} s  {job}  [{said}]")
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)
    return wrong


def last_line(folder: Path) -> str:
    """What the log says of the first failure, or else last."""
    lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines[-1:] or [""])[0][:160]


def run_mutants(words: list[str], num_processes: int) -> int:
    """Runs the mutants in whose line a word occurs, all without words; 0 if each is killed."""
    jobs = [job_of(mutant) for mutant in MUTANTS]
    jobs = [job for job in jobs if not words or any(word in str(job) for word in words)]
    if problems := find_stale(jobs):
        print(*problems, sep="\n")
        return 2

    import hypothesis  # noqa: F401  (imported here once, for every fork)
    import numba  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()  # or every fork would walk, and so copy, all of torch's objects
    began = time.monotonic()
    memory = Path("/dev/shm")  # thousands of links are made quickly there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        wrong = run_all([*unchanged_jobs(jobs), *jobs], Path(name), num_processes)
    num_wrong = sum(job.mutant is not None for job in wrong)
    print(
        f"{len(jobs) - num_wrong} of {len(jobs)} mutants killed in {time.monotonic() - began:.0f} s"
    )
    for job in wrong:
        print(f"wrong: {job}")
    return 1 if wrong else 0
