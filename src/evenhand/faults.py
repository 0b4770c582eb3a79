"""What the command says, and which exit code it has, when the world around it fails.

0    it did what was asked
1    `evenhand doctor` found something broken; or a mistake in Evenhand itself, with a traceback
2    something a user can mend: a file, a setting, a full disk, too little memory
130  it was asked to stop (Ctrl-C, SIGTERM, SIGHUP); a run has written a checkpoint before
141  whoever read its output went away, as in `evenhand ... | head`
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable

from evenhand.errors import StoppedError, UserError

MENDABLE, STOPPED, NO_READER = 2, 130, 141
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip

# All but tab and end of line; and bytes of file names that are no UTF-8, which none can show.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# What those say that have no exception of their own for it.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|std::bad_alloc"
    r"|storage size calculation overflowed|CUBLAS_STATUS_ALLOC_FAILED|CUDA out of memory"
    r"|can't start new thread",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"allocate (?:(?P<bytes>\d+) bytes|(?P<size>[\d.]+ [KMGT]i?B)(?: for an array with shape "
    r"(?P<shape>\([\d, ]*\)))?)",
    re.IGNORECASE,
)


def guarded(command_fn: Callable[[], int]) -> int:
    """Runs a command; what it could not help is one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):  # a character that a terminal does not have is no fault
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    try:
        try:
            return _guarded(command_fn)
        finally:  # after `--help` too, which ends by SystemExit
            with contextlib.suppress(ValueError, AttributeError):  # one closed on purpose
                sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    except BrokenPipeError:
        silence(sys.stdout)
        return NO_READER
    except OSError as error:
        silence(sys.stdout)
        say(f"the output could not be written ({error.strerror})")
        return MENDABLE


def _guarded(command_fn: Callable[[], int]) -> int:
    try:
        return command_fn()
    except UserError as error:
        say(str(error))
        return MENDABLE
    except StoppedError as error:
        say(str(error))
        return STOPPED
    except KeyboardInterrupt:
        insist()
        say("interrupted")
        return STOPPED
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            sentence = out_of_memory(error)
        elif isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
            sentence = (
                f"{error.filename or 'a file, or the output,'} could not be opened or written "
                f"({error.strerror}); what was complete before is untouched"
            )
        else:
            raise
        say(sentence)
        return MENDABLE


def say(sentence: str) -> None:
    """One line for people, where there still are any."""
    lines = map(str.strip, without_controls(sentence).splitlines())
    with contextlib.suppress(OSError):
        print("evenhand:", *lines, file=sys.stderr, flush=True)


def without_controls(text: str) -> str:
    """The text without what would move a cursor or change a terminal: names come from data."""
    return _CONTROLS.sub("\ufffd", text)


def insist() -> None:
    """From now on a Ctrl-C ends the process at once: it was asked for before."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(STOPPED))


def silence(stream: object) -> None:
    """Lets a stream that nobody reads, or that cannot be written, end in nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        handle = stream.fileno()  # type: ignore[attr-defined]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, handle)
        os.close(nothing)


# --- memory ---------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or _is_of_gpu(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def _is_of_gpu(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's; to import it takes seconds


def out_of_memory(
    error: BaseException,
    *,
    largest: str = "",
    remedy: str = "lower mining.batch_size, model.embedding_dim or mining.num_sampled_labels, or "
    "take a machine with more; what was complete before is untouched",
) -> str:
    """The sentence: what was asked for, what is large, what to do."""
    match = _ASKED.search(str(error))
    asked = ""
    if match is not None:
        amount = gibibytes(int(match["bytes"])) if match["bytes"] else match["size"]
        asked = f": {amount} more were asked for and could not be had"
        asked += f" (an array of shape {match['shape']})" if match["shape"] else ""
    where = "on the GPU " if _is_of_gpu(error) else ""
    return f"out of memory {where}".rstrip() + asked + f"; {largest and largest + '; '}{remedy}"


def gibibytes(num_bytes: float) -> str:
    """'3.8 GiB', '512.0 MiB', '20.0 kiB'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} kiB"
