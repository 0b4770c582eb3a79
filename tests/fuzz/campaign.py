"""A campaign: every target in child processes, watched, and what came of it in one JSON file."""

import contextlib
import json
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from evenhand.files import write_json

from .registry import TARGETS
from .worker import STATE_BYTES

ROOT = Path(__file__).parent.parent.parent
HANG_SECONDS = 60.0  # of a process that does not come to its next input, on a busy machine
ROUND_SECONDS = 150.0  # a child is started anew after this, with another seed
MAX_FINDINGS = 20  # of a target, before it is left


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
    """Runs the targets round by round until the time, or the number of inputs, is reached.

    A figure file that is there is continued: its counts are added to.
    """
    results = _before(out, names)
    deadline, lock = time.monotonic() + seconds, Lock()
    for round_number in range(10**6):
        is_enough = (
            num_inputs and sum(r["inputs"] for r in results["targets"].values()) >= num_inputs
        )
        if time.monotonic() >= deadline or is_enough:
            break

        def run(name: str, round_seed: int = seed + 1000 * round_number) -> None:
            left = deadline - time.monotonic()
            result = results["targets"][name]
            if left < 5 or len(result["findings"]) >= MAX_FINDINGS:
                return
            used = round_seed + result["rounds"]
            found = _round(name, used, min(ROUND_SECONDS, left), findings_folder)
            with lock:
                _add(result, found, used)
                results["total_inputs"] = sum(r["inputs"] for r in results["targets"].values())
                write_json(out, results)
                print(
                    f"{_now()} {_line(name, result)}, total {results['total_inputs']:,}", flush=True
                )

        with ThreadPoolExecutor(num_processes) as pool:
            list(pool.map(run, names))
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


def _round(name: str, seed: int, seconds: float, findings_folder: Path) -> dict[str, Any]:
    """A child for some seconds; if it dies or hangs, what it was trying is the finding."""
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(prefix="evenhand-campaign-", dir=memory if memory.is_dir() else None)
    )
    try:
        state, out = folder / "state", folder / "out.json"
        state.write_bytes(bytes(STATE_BYTES))
        options = {
            "name": name, "seed": seed, "seconds": seconds, "num_inputs": 10**9,
            "state": str(state), "out": str(out),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.worker", json.dumps(options)]
        with open(folder / "log", "wb") as log:
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            reason = _watched(child, state)
        if reason is None:
            found = json.loads(out.read_text("utf-8"))
            _remember(name, found["kept"], findings_folder)
            found["findings"] = [
                _saved(name, what, bytes.fromhex(about["input"]), about["told"], findings_folder)
                for what, about in found["findings"].items()
            ]
            return found
        count, length = struct.unpack("<QQ", state.read_bytes()[:16])
        data = state.read_bytes()[16 : 16 + length]
        told = (folder / "log").read_text("utf-8", "replace")[-1500:]
        finding = _saved(name, reason, data, told, findings_folder)
        empty = {"read": 0, "cpu_seconds": 0.0, "slowest_seconds": 0.0, "lines": []}
        return {"inputs": count, "findings": [finding], **empty}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in (memory if memory.is_dir() else folder).glob(f"evenhand-fuzz-{child.pid}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _watched(child: subprocess.Popen[bytes], state: Path) -> str | None:
    """Why a child is not to be believed, or None."""
    last, since = -1, time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        count = struct.unpack("<Q", state.read_bytes()[:8])[0]
        if count != last:
            last, since = count, time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:
            child.kill()
            child.wait()
            return f"hang: no answer in {HANG_SECONDS:.0f} s"
    return None if child.returncode == 0 else f"crash: ended with {child.returncode}"


def _remember(name: str, kept: Sequence[str], findings_folder: Path) -> None:
    """What reached something new, for `--save-corpus` to choose from."""
    folder = findings_folder / "reached" / name
    folder.mkdir(parents=True, exist_ok=True)
    for text in kept:
        data = bytes.fromhex(text)
        (folder / f"{_digest(data)}").write_bytes(data)


def _digest(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()[:12]


def _saved(name: str, what: str, data: bytes, told: str, folder: Path) -> dict[str, str]:
    """The finding, made as small as it can be, with its input in a file."""
    is_death = what.startswith(("crash", "hang"))
    if is_death:
        data = smallest(data, lambda shorter: _dies(name, shorter, folder), most_tries=60)
    elif not what.startswith("slow"):
        data = smallest(data, lambda shorter: _kind_of(name, shorter) == what, most_tries=3000)
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / _digest(data)
    path.write_bytes(data)
    print(f"FINDING {name}: {what}, input in {path}\n{told}", flush=True)
    return {"what": what, "input": repr(data[:300]), "told": told.strip().splitlines()[-1][:300]}


def _kind_of(name: str, data: bytes) -> str:
    from .worker import _place, _tried

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
