"""What a check finds, and the processes in which those checks run that may crash or hang."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import evenhand

OK, SLOW, MISSING, BROKEN = "ok", "slow", "missing", "broken"
STATES = (OK, SLOW, MISSING, BROKEN)


class Finding(NamedTuple):
    state: str
    found: str
    remedy: str = ""


class Check(NamedTuple):
    name: str
    look_fn: Callable[[], Finding]


class Trial(NamedTuple):
    """How a process of `doctor.trial` ended."""

    is_good: bool
    told: str  # its last line, or how it ended
    signal: int = 0  # that killed it
    is_late: bool = False


def run_trial(words: Sequence[str], *, timeout: float, **environment: str) -> Trial:
    """Runs Python with these words; a crash or a hang there is only reported."""
    paths = [str(Path(evenhand.__file__).parents[1]), *sys.path]
    # Its own session: what hangs may have started others.
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
    if code == 0:
        return Trial(True, _last_line(out))
    if code < 0:
        return Trial(False, f"it died of {signal.Signals(-code).name}", signal=-code)
    return Trial(False, _last_line(err) or f"it ended with {code}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
