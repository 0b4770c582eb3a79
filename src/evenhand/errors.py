"""Errors that a user can fix, and how a command ends: exit codes, signals, too little memory."""

import contextlib
import errno
import os
import re
import signal

FIXABLE, STOPPED, NO_READER = 2, 130, 141  # exit codes
# All but tab and newline; what reverses the text behind it; and surrogates, which stand for bytes
# of file names that are no UTF-8.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]")
GPU_ERROR = "OutOfMemoryError"  # torch's, which takes seconds to import
# Messages of libraries that have no exception of their own for it.
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|std::bad_alloc"
    r"|storage size calculation overflowed|CUBLAS_STATUS_ALLOC_FAILED|CUDA out of memory"
    r"|can't start new thread",
    re.IGNORECASE,
)


class UserError(Exception):
    """States where, what is wrong and what to do; the command line prints it and exits with 2."""


class StoppedError(Exception):
    """Work was stopped by the user; states how to continue, and the exit code is 130."""


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


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == GPU_ERROR:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def format_out_of_memory(error: BaseException) -> str:
    """What the library said, and what to do."""
    said = str(error).strip().partition("\n")[0].rstrip(".")[:200]
    request = f" ({said})" if said else ""
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
