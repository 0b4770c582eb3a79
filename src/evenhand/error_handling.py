"""Error messages and exit codes for failures outside the program: memory, disk, signals, pipes.

0    success
1    `evenhand doctor` found something broken; or a bug in Evenhand, with a traceback
2    something a user can fix: a file, a setting, a full disk, too little memory
130  stopped by Ctrl-C, SIGTERM or SIGHUP; a run has written a checkpoint before
141  the reader of its output went away, as in `evenhand ... | head`
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

FIXABLE, STOPPED, NO_READER = 2, 130, 141
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip

# All but tab and newline; and surrogates, which stand for bytes of file names that are no UTF-8.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Messages of libraries that have no exception of their own for it.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|std::bad_alloc"
    r"|storage size calculation overflowed|CUBLAS_STATUS_ALLOC_FAILED|CUDA out of memory"
    r"|can't start new thread",
    re.IGNORECASE,
)
_REQUEST = re.compile(
    r"allocate (?:(?P<bytes>\d+) bytes|(?P<size>[\d.]+ [KMGT]i?B)(?: for an array with shape "
    r"(?P<shape>\([\d, ]*\)))?)",
    re.IGNORECASE,
)


def guard(command_fn: Callable[[], int]) -> int:
    """Runs a command; failures of the world around it become one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):  # print what a terminal cannot show as '?'
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    try:
        code, sentence = _outcome(command_fn)
        if sentence:
            say(sentence)
        with contextlib.suppress(ValueError, AttributeError):  # one closed on purpose
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return NO_READER
    except OSError as error:
        silence(sys.stdout)
        say(f"the output could not be written ({error.strerror})")
        return FIXABLE


def _outcome(command_fn: Callable[[], int]) -> tuple[int, str]:
    """The exit code of a command, and a sentence where it failed; a bug is raised."""
    try:
        return command_fn(), ""
    except UserError as error:
        return FIXABLE, str(error)
    except StoppedError as error:
        return STOPPED, str(error)
    except KeyboardInterrupt:
        insist()
        return STOPPED, "interrupted"
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return FIXABLE, format_out_of_memory(error)
        if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
            place = error.filename or "a file, or the output,"
            return FIXABLE, (
                f"{place} could not be opened or written ({error.strerror}); what was complete "
                f"before is untouched"
            )
        raise


def say(sentence: str) -> None:
    """Prints one line to stderr, if that is still open."""
    lines = map(str.strip, without_controls(sentence).splitlines())
    with contextlib.suppress(OSError):
        print("evenhand:", *lines, file=sys.stderr, flush=True)


def without_controls(text: str) -> str:
    """Replaces control characters: names come from data and must not command the terminal."""
    return CONTROLS.sub("\ufffd", text)


def insist() -> None:
    """Makes the next Ctrl-C end the process at once."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(STOPPED))


def silence(stream: object) -> None:
    """Redirects a stream that nobody reads, or that cannot be written, to the null device."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        handle = stream.fileno()  # type: ignore[attr-defined]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, handle)
        os.close(nothing)


# --- memory ---------------------------------------------------------------------------------------


GPU_ERROR = "OutOfMemoryError"  # torch's, which takes seconds to import


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == GPU_ERROR:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def format_out_of_memory(error: BaseException) -> str:
    """The error message: how much was requested, what to do."""
    match = _REQUEST.search(str(error))
    request = ""
    if match is not None:
        amount = gibibytes(int(match["bytes"])) if match["bytes"] else match["size"]
        request = f": {amount} more were asked for and could not be had"
        request += f" (an array of shape {match['shape']})" if match["shape"] else ""
    where = " on the GPU" if type(error).__name__ == GPU_ERROR else ""
    return (
        f"out of memory{where}{request}; lower mining.batch_size, mining.num_sampled_labels or "
        f"model.embedding_dim, or take a machine with more; what was complete before, checkpoints "
        f"among it, is untouched"
    )


def gibibytes(num_bytes: float) -> str:
    """'3.8 GiB', '512.0 MiB', '20.0 kiB'."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} kiB"
