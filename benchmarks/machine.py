"""What the machine is, and how much memory a process holds, as /proc tells it."""

import contextlib
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.02


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def proc_bytes(key: str, file: str = "self/status") -> int:
    """A size from a file of /proc, such as VmRSS, VmHWM and RssAnon of a process's status."""
    for line in Path(f"/proc/{file}").read_text("utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/{file} has no {key}")


@contextlib.contextmanager
def peak_anonymous_memory(pid: int) -> Iterator[dict[int, int]]:
    """The largest RssAnon of a process and of each of its children, while the block runs.

    That is memory of its own, without what is mapped from files.
    """
    peaks: dict[int, int] = {pid: 0}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(SECONDS_BETWEEN_LOOKS):
            for each in _family(pid):
                with contextlib.suppress(OSError, SystemExit):  # it has ended
                    peaks[each] = max(peaks.get(each, 0), proc_bytes("RssAnon", f"{each}/status"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _family(int(child)))]
