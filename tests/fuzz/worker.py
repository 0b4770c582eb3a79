"""One target in a process of its own: input after input, for some seconds.

What is being tried lies in a file shared with the parent, so that an input that ends the process,
or never ends, is not lost.
"""

import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random

from .mutation import mutated
from .registry import TARGETS
from .target import Target, forget_scratch

STATE_BYTES = 2**16  # of the shared file: a count, a length, the input
MORE_MEMORY = 2**31  # bytes that a process may take beyond what it has when it starts
SLOW_SECONDS = 2.0  # of computing, for inputs of a few kilobytes
TRACED = 50  # every so many inputs, the lines that it reaches are looked at
KEPT = 400  # inputs that reached something new, of one process
SOURCE = f"{os.sep}evenhand{os.sep}"


def run_worker(name: str, *, seed: int, seconds: float, shared: mmap.mmap, out: Path) -> None:
    """Tries inputs for some seconds of computing, and writes to `out` what came of them."""
    target, rng = TARGETS[name], Random(f"{name} {seed}")
    warnings.simplefilter("ignore")  # of numpy, about what it reads
    _limit_memory()
    inputs = [*target.seeds, *corpus_of(name)]
    num_given, count, num_read, slowest = len(inputs), 0, 0, 0.0
    lines: set[str] = set()
    answers: set[str] = set()
    findings: dict[str, dict[str, str]] = {}
    started = time.process_time()
    while count % 64 or time.process_time() - started < seconds:
        data = mutated(rng, inputs, target.words)
        shared[: 16 + len(data)] = struct.pack("<QQ", count, len(data)) + data
        is_traced = count % TRACED == 0
        began = time.thread_time()
        kind, error = _tried(target, data, lines if is_traced else None)
        spent = time.thread_time() - began
        count += 1
        num_read += kind == "read"
        if kind in ("read", "refused"):
            slowest = max(slowest, 0.0 if is_traced else spent)
            if spent > SLOW_SECONDS and not is_traced:
                _add(findings, "slow", data, f"{spent:.1f} s of computing")
            place = _place(error)
            if place not in answers and len(answers) < KEPT:
                answers.add(place)
                inputs.append(data)
        else:
            _add(findings, f"{kind} at {_place(error)}", data, _told(error))
    summary = {
        "inputs": count,
        "read": num_read,
        "cpu_seconds": time.process_time() - started,
        "slowest_seconds": slowest,
        "findings": findings,
        "lines": sorted(lines),
        "kept": [data.hex() for data in inputs[num_given:]],
    }
    out.write_text(json.dumps(summary), encoding="utf-8")


def corpus_of(name: str) -> list[bytes]:
    folder = Path(__file__).parent / "corpus" / name
    return [path.read_bytes() for path in sorted(folder.glob("*"))]


def _tried(target: Target, data: bytes, lines: set | None) -> tuple[str, BaseException | None]:
    """Whether the input was read or refused, or the name of the error that should not be."""

    def trace(frame, event, argument):
        if SOURCE not in frame.f_code.co_filename:
            return None
        lines.add(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}")
        return trace

    try:
        if lines is not None:
            sys.settrace(trace)
        refusal = target.check_fn(data)
        return ("read" if refusal is None else "refused"), refusal
    except Exception as error:
        return type(error).__name__, error
    finally:
        sys.settrace(None)


def _short(file_name: str) -> str:
    return file_name.rpartition(SOURCE)[2]


def _place(error: BaseException | None) -> str:
    """Where in the package an error was raised; the deepest place."""
    if error is None:
        return "read"
    place, step = type(error).__name__, error.__traceback__
    while step is not None:
        file_name = step.tb_frame.f_code.co_filename
        if SOURCE in file_name or SOURCE not in place:
            place = f"{SOURCE * (SOURCE in file_name)}{_short(file_name)}:{step.tb_lineno}"
        step = step.tb_next
    return place.removeprefix(SOURCE)


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-1500:]


def _add(findings: dict[str, dict], key: str, data: bytes, told: str) -> None:
    """The shortest input of each kind."""
    if key not in findings or len(data) < len(bytes.fromhex(findings[key]["input"])):
        findings[key] = {"input": data.hex(), "told": told}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def try_one(name: str, path: Path) -> int:
    """0: read or refused; 1: an error that should not be; ended by a signal: worse."""
    signal.alarm(20)
    warnings.simplefilter("ignore")
    _limit_memory()
    kind, error = _tried(TARGETS[name], path.read_bytes(), None)
    print(f"{kind} {_place(error)} {error or ''}"[:500])
    forget_scratch()
    return 0 if kind in ("read", "refused") else 1
