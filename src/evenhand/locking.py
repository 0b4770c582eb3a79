"""One process at a time writes into a folder; readers are never locked out.

`filelock` takes the operating system's own lock, which ends with its process, so a killed run
leaves nothing to clean up. The lock file names its holder, for the error of a second writer.
"""

import contextlib
import errno
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from evenhand.errors import UserError

LOCK_NAME = ".lock"
# What file systems without locks answer: some network and user-space ones have none.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
RETRY_SECONDS = 0.1  # a holder that is just leaving removes the file under our hands


def warn(sentence: str) -> None:
    print(f"evenhand: {sentence}", file=sys.stderr)


@contextlib.contextmanager
def locked(folder: Path, *, warn_fn: Callable[[str], None] = warn) -> Iterator[None]:
    """Makes the folder and locks it for the block; a `UserError` if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} could not be made ({error.strerror})") from error
    with locked_file(folder / LOCK_NAME, folder, warn_fn=warn_fn):
        yield


@contextlib.contextmanager
def locked_file(
    path: Path, thing: Path, *, warn_fn: Callable[[str], None] = warn
) -> Iterator[None]:
    """Locks `thing` by a lock file at any path; see `locked`."""
    lock = FileLock(path, timeout=RETRY_SECONDS, poll_interval=0.01, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{thing} is in use by {_holder(path)}; wait for it or stop it, or choose another "
            f"folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise UserError(
                f"{thing} could not be locked ({path}: {error.strerror}); make its folder "
                f"writable, or choose another"
            ) from error
        warn_fn(
            f"{thing} lies on a file system without locks ({error.strerror}): make sure that no "
            f"other process writes there"
        )
    try:
        if lock.is_locked:
            about = {
                "pid": os.getpid(),
                "host": platform.node(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
                path.write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        # Before the release: a process that has opened this file already finds it unlinked.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        if not path.is_file():  # reading a pipe could block for ever
            return "another process"
        about = json.loads(path.read_text(encoding="utf-8"))
        pid, host, since = int(about["pid"]), str(about["host"]), str(about["since"])
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or gone by now
        return "another process"
    return f"process {pid} on {host} (since {since})"
