"""One process at a time writes into a folder; readers are never kept out.

The lock is the operating system's own (flock) on the file `.lock` of the folder: it ends with the
process, however that ends, so a killed run leaves nothing to clear away. The file says who holds
it. It is removed with the lock; one that a killed process left means nothing.
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

from evenhand.errors import UserError

LOCK_NAME = ".lock"
# What a file system without locks answers: some network and user-space ones have none.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


class _Gone(Exception):  # noqa: N818
    """The file was removed by its last holder between our opening and locking it."""


def warn(sentence: str) -> None:
    print(f"evenhand: {sentence}", file=sys.stderr)


@contextlib.contextmanager
def locked(folder: Path, *, warn_fn: Callable[[str], None] = warn) -> Iterator[None]:
    """Keeps a folder for this process while the block runs; one that another keeps is refused."""
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
    """As `locked`, by a file that may lie elsewhere; `thing` is what the message is about."""
    handle = _acquired(path, thing, warn_fn)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held: whoever opens it from now on makes a new one
            os.close(handle)


def _acquired(path: Path, thing: Path, warn_fn: Callable[[str], None]) -> int | None:
    """An open file with the lock; None where there are no locks."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise UserError(
                f"{thing} could not be locked ({path}: {error.strerror}); make its folder "
                f"writable, or choose another"
            ) from error
        is_kept = False
        try:
            _lock(handle, path)
            _sign(handle)
            is_kept = True
            return handle
        except _Gone:
            continue
        except OSError as error:
            if error.errno in _BUSY:
                raise UserError(
                    f"{thing} is in use by {_holder(path)}; wait for it or stop it, or choose "
                    f"another folder"
                ) from None
            if error.errno not in NO_LOCKS:
                raise UserError(f"{thing} could not be locked ({error.strerror})") from error
            warn_fn(
                f"{thing} lies on a file system without locks ({error.strerror}): see to it "
                f"yourself that no other process writes there"
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        finally:
            if not is_kept:
                os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOTSUP, "no flock on this system") from error
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        is_current = os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        is_current = False
    if not is_current:
        raise _Gone


def _sign(handle: int) -> None:
    """Says in the file who holds it; a full disk is no reason to be without a lock."""
    about = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(about).encode())


def _holder(path: Path) -> str:
    try:
        if not path.is_file():  # to read anything else could take for ever
            return "another process"
        about = json.loads(path.read_text(encoding="utf-8"))
        pid, host, since = int(about["pid"]), str(about["host"]), str(about["since"])
    except (OSError, ValueError, KeyError, TypeError):  # not signed yet, or gone by now
        return "another process"
    return f"process {pid} on {host} (since {since})"
