"""What the machine is, and how much memory a process holds, as /proc tells it."""

import platform
from pathlib import Path


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def proc_bytes(key: str, process: int | str = "self") -> int:
    """A size of this process or another, such as VmRSS and VmHWM."""
    for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/{process}/status has no {key}")
