"""The command: all checks, a bar, a table or JSON, and the exit code."""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenhand.doctor import installed, speed, usable
from evenhand.doctor.findings import BROKEN, STATES, Check, Finding
from evenhand.progress import count_bar

COLOURS = dict(zip(STATES, ("green", "yellow", "dim", "bold red"), strict=True))
T = TypeVar("T")


def doctor(options: argparse.Namespace, *, console: Console) -> int:
    """1 if something is broken: what is slow or missing still works."""
    screen = Console(stderr=True, quiet=not console.is_terminal) if options.json else console
    findings = examine(Path(options.folder), console=screen)
    num_broken = sum(finding.state == BROKEN for _, finding in findings)
    if options.json:
        rows = [{"check": name, **finding._asdict()} for name, finding in findings]
        print(json.dumps({"is_sound": not num_broken, "findings": rows}, indent=1))
        return 1 if num_broken else 0
    console.print(findings_table(findings))
    counts = [(state, sum(f.state == state for _, f in findings)) for state in STATES]
    console.print(", ".join(f"{count} {state}" for state, count in counts if count))
    return 1 if num_broken else 0


def examine(folder: Path, *, console: Console) -> list[tuple[str, Finding]]:
    """Every check, in order; one that fails itself has found something broken."""
    with ThreadPoolExecutor() as pool, count_bar(console, "looking") as advance:
        checks = all_checks(folder, pool)
        findings = []
        for number, check in enumerate(checks):
            advance(number, len(checks))
            findings.append((check.name, looked(check)))
        advance(len(checks), len(checks))
    return findings


def all_checks(folder: Path, pool: ThreadPoolExecutor) -> list[Check]:
    """Trials in other processes begin now, side by side; rates are measured when they are over."""
    bfloat16, talk = pool.submit(usable.bfloat16_trial), pool.submit(usable.talk_trial)
    kernels = pool.submit(usable.kernels_trial)
    return [
        Check("evenhand", installed.evenhand_itself),
        Check("python", installed.python),
        *(Check(name, _bound(installed.package, name)) for name in installed.NEEDED),
        Check("triton", installed.triton),
        *(Check(f"{name} (extra)", _bound(installed.extra, name)) for name in installed.EXTRAS),
        Check("processor", usable.processor),
        Check("compiled loops", usable.compiled_kernels),
        Check("gpu", usable.gpu),
        Check("distributed", usable.backends),
        Check("shared memory", usable.shared_memory),
        Check("disk", _bound(usable.disk, folder)),
        Check("open files", usable.open_files),
        Check("locks", _bound(usable.locks, folder)),
        Check("compiled code", speed.kept_code),
        Check("threads", speed.threads),
        Check("bfloat16 on the CPU", _after(bfloat16, usable.bfloat16)),
        Check("GPU kernels", _after(kernels, usable.triton_kernels)),
        Check("torchrun", _after(talk, usable.torchrun)),
        Check("matrix product", speed.product_rate),
        Check("memory", speed.memory_rate),
        Check("writing", _bound(speed.disk_rate, folder)),
    ]


def looked(check: Check) -> Finding:
    try:
        return check.look_fn()
    except Exception as error:
        return Finding(BROKEN, f"the check failed: {type(error).__name__}: {error}", "report this")


def findings_table(findings: Sequence[tuple[str, Finding]]) -> Table:
    table = Table("", "state", "found", "remedy")
    for name, finding in findings:
        state = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(name, state, Text(finding.found), Text(finding.remedy))
    return table


def _bound(look_fn: Callable[[T], Finding], value: T) -> Callable[[], Finding]:
    return lambda: look_fn(value)


def _after(future: Future[T], look_fn: Callable[[T], Finding]) -> Callable[[], Finding]:
    return lambda: look_fn(future.result())
