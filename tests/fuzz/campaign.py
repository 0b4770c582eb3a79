"""A campaign: every target in child processes, watched, and what came of it in one JSON file."""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evenhand.files import write_json

from .registry import TARGETS
from .target import FOLDER_BASE, forget_scratch, own_scratch
from .worker import STATE_BYTES, _place, _tried, run_worker

ROOT = Path(__file__).parent.parent.parent
ROUND_SECONDS = 20.0  # of computing; then the next target has its turn, and later another seed
HANG_SECONDS = 10.0  # of computing, for one input
ASLEEP_SECONDS = 300.0  # on the clock, for one input, on a busy machine


def run_campaign(
    names: Sequence[str],
    *,
    seconds: float,
    num_inputs: int,
    seed: int,
    num_processes: int,
    out: Path,
    findings_folder: Path,
) -> dict[str, Any]:
    """Runs the targets in turn until the time, or the number of inputs, is reached.

    A figure file that is there is continued: its counts are added to.
    """
    results = _before(out, names)
    for name in names:  # what is compiled or opened once is inherited by the children
        TARGETS[name].check_fn(TARGETS[name].seeds[0])
    deadline, children = time.monotonic() + seconds, []
    turns = (name for _ in range(10**9) for name in names)
    while True:
        total = sum(result["inputs"] for result in results["targets"].values())
        is_over = time.monotonic() >= deadline or (num_inputs and total >= num_inputs)
        if is_over and not children:
            break
        while len(children) < num_processes and not is_over:
            name = next(turns)
            started = results["targets"][name]["rounds"] + sum(c.name == name for c in children)
            children.append(_start(name, seed + started))
        time.sleep(0.2)
        for child in [child for child in children if _is_over(child)]:
            children.remove(child)
            result = results["targets"][child.name]
            _add(result, _outcome(child, findings_folder), child.seed)
            results["total_inputs"] = sum(r["inputs"] for r in results["targets"].values())
            write_json(out, results)
            line = _line(child.name, result)
            print(f"{_now()} {line}, total {results['total_inputs']:,}", flush=True)
    forget_scratch()
    return results


def _before(out: Path, names: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"engine": "mutate", "python": platform.python_version()}
    results["started"] = datetime.now(UTC).isoformat(timespec="seconds")
    results["total_inputs"], results["targets"] = 0, {}
    if out.is_file():
        results = json.loads(out.read_text("utf-8"))
    for name in names:
        empty = {"inputs": 0, "read": 0, "cpu_seconds": 0.0, "rounds": 0, "seeds": []}
        results["targets"].setdefault(
            name, empty | {"slowest_seconds": 0.0, "lines_reached": [], "findings": []}
        )
    return results


def _add(result: dict[str, Any], found: dict[str, Any], seed: int) -> None:
    for key in ("inputs", "read", "cpu_seconds"):
        result[key] = round(result[key] + found[key], 1)
    result["rounds"] += 1
    result["seeds"].append(seed)
    result["slowest_seconds"] = round(max(result["slowest_seconds"], found["slowest_seconds"]), 3)
    result["lines_reached"] = sorted({*result["lines_reached"], *found["lines"]})
    known = {finding["what"] for finding in result["findings"]}
    result["findings"] += [f for f in found["findings"] if f["what"] not in known]


def _line(name: str, result: dict[str, Any]) -> str:
    rate = result["inputs"] / max(result["cpu_seconds"], 0.001)
    return (
        f"{name}: {int(result['inputs']):,} inputs, {rate:,.0f} a second of computing, "
        f"{len(result['lines_reached'])} lines, {len(result['findings'])} findings"
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S")


# --- one child ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Child:
    """A process that tries inputs, and what is known of its progress."""

    name: str
    seed: int
    pid: int
    folder: Path  # its log and its figures
    shared: mmap.mmap  # what it is trying
    last_count: int = -1
    since_cpu: float = 0.0  # when it came to this input, in seconds of its computing, ...
    since: float = 0.0  # ... and on the clock
    death: str = ""


def _start(name: str, seed: int) -> Child:
    folder = Path(tempfile.mkdtemp(prefix="evenhand-campaign-", dir=FOLDER_BASE))
    shared = mmap.mmap(-1, STATE_BYTES)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            own_scratch()
            run_worker(name, seed=seed, seconds=ROUND_SECONDS, shared=shared, out=folder / "out")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            forget_scratch()
            sys.stderr.flush()
            os._exit(code)
    return Child(name, seed, pid, folder, shared, since=time.monotonic())


def _is_over(child: Child) -> bool:
    """Whether the child has ended, by itself or because it hung."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid:
        code = os.waitstatus_to_exitcode(status)
        child.death = f"crash: ended with {code}" if code else ""
        return True
    count, cpu = struct.unpack("<Q", child.shared[:8])[0], _cpu_seconds(child.pid)
    if count != child.last_count:
        child.last_count, child.since, child.since_cpu = count, time.monotonic(), cpu
    is_busy = cpu - child.since_cpu > HANG_SECONDS
    if is_busy or time.monotonic() - child.since > ASLEEP_SECONDS:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.death = "hang: " + ("computes for ever" if is_busy else "waits for ever")
        return True
    return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _outcome(child: Child, findings_folder: Path) -> dict[str, Any]:
    """What a child wrote; if it died or hung, what it was trying is the finding."""
    try:
        if not child.death:
            found: dict[str, Any] = json.loads((child.folder / "out").read_text("utf-8"))
            _remember(child.name, found["kept"], findings_folder)
            found["findings"] = [
                _saved(child.name, what, bytes.fromhex(it["input"]), it["told"], findings_folder)
                for what, it in found["findings"].items()
            ]
            return found
        count, length = struct.unpack("<QQ", child.shared[:16])
        log = (child.folder / "log").read_text("utf-8", "replace")[-1500:]
        data = child.shared[16 : 16 + length]
        finding = _saved(child.name, child.death, data, log, findings_folder)
        empty = {"read": 0, "cpu_seconds": 0.0, "slowest_seconds": 0.0, "lines": []}
        return {"inputs": count, "findings": [finding], **empty}
    finally:
        shutil.rmtree(child.folder, ignore_errors=True)
        for left in (FOLDER_BASE or Path(tempfile.gettempdir())).glob(
            f"evenhand-fuzz-{child.pid}-*"
        ):
            shutil.rmtree(left, ignore_errors=True)


def _remember(name: str, kept: Sequence[str], findings_folder: Path) -> None:
    """What reached something new, for `--save-corpus` to choose from."""
    folder = findings_folder / "reached" / name
    folder.mkdir(parents=True, exist_ok=True)
    for text in kept:
        data = bytes.fromhex(text)
        (folder / f"{_digest(data)}").write_bytes(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _saved(name: str, what: str, data: bytes, told: str, folder: Path) -> dict[str, str]:
    """The finding, made as small as it can be, with its input in a file."""
    is_death = what.startswith(("crash", "hang"))
    if is_death:
        print(f"{_now()} {name}: {what}; its input is made smaller, for minutes", flush=True)
        data = smallest(data, lambda shorter: _dies(name, shorter, folder), most_tries=60)
    elif not what.startswith("slow"):
        data = smallest(data, lambda shorter: _kind_of(name, shorter) == what, most_tries=3000)
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / _digest(data)
    path.write_bytes(data)
    print(f"FINDING {name}: {what}, input in {path}\n{told}", flush=True)
    return {"what": what, "input": repr(data[:300]), "told": told.strip()[-300:]}


def _kind_of(name: str, data: bytes) -> str:
    kind, error = _tried(TARGETS[name], data, None)
    return f"{kind} at {_place(error)}"


def _dies(name: str, data: bytes, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trying"
    path.write_bytes(data)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "tests.fuzz", "--try", name, str(path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=30).returncode < 0
    return True


def smallest(data: bytes, is_same_fn: Callable[[bytes], bool], *, most_tries: int) -> bytes:
    """Leaves out what can be left out: halves, quarters, ... single bytes."""
    size, tries = max(1, len(data) // 2), 0
    while size and tries < most_tries:
        start = 0
        while start < len(data) and tries < most_tries:
            shorter = data[:start] + data[start + size :]
            tries += 1
            if is_same_fn(shorter):
                data = shorter
            else:
                start += size
        size //= 2
    return data
