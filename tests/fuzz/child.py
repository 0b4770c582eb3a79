"""One target in a process of its own: `python -m tests.fuzz.child TARGET SECONDS SEED FOLDER`.

By atheris: libFuzzer, guided by the code that an input reaches. An input that raises, hangs, or
takes too much memory or time ends the process with another status than 0, and lies in the folder.
"""

import contextlib
import sys
import time
import warnings
from pathlib import Path

import atheris

SOURCE = Path(__file__).parents[2] / "src"


def instrumented() -> contextlib.AbstractContextManager[None]:
    """Imports within tell atheris of every branch, but where numba must compile the code."""
    compiled = [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if "numba" in path.read_text("utf-8") or "import jit" in path.read_text("utf-8")
    ]
    return atheris.instrument_imports(include=["evenhand"], exclude=compiled)


with instrumented():
    from .inputs import MOST_BYTES, corpus_of, words_of
    from .registry import TARGETS
    from .target import Target, forget_scratch

HANG_SECONDS = 60  # on the clock, for one input, on a busy machine
SLOW_SECONDS = 2.0  # of computing, for an input of a few kilobytes


def run_target(target: Target, seconds: int, seed: int, folder: Path) -> None:
    """Ends the process itself; what made it fail is left by libFuzzer."""
    seeds = folder / "seeds"
    seeds.mkdir(exist_ok=True)
    for number, data in enumerate([*target.seeds, *corpus_of(target.name)]):
        (seeds / str(number)).write_bytes(data)
    words = (word for word in words_of(target) if len(word) <= 128)
    quoted = ("".join(f"\\x{byte:02x}" for byte in word) for word in words)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in quoted))
    options = [
        f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={HANG_SECONDS}",
        f"-rss_limit_mb={4096}", f"-max_len={MOST_BYTES}", f"-artifact_prefix={folder}/found-",
        f"-dict={folder}/words", "-print_final_stats=1", str(seeds),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], lambda data: _check(target, data))
    atheris.Fuzz()


def _check(target: Target, data: bytes) -> None:
    began = time.thread_time()
    target.check_fn(data)
    spent = time.thread_time() - began
    assert spent <= SLOW_SECONDS, f"slow: {spent:.1f} s of computing"


def main() -> None:
    name, seconds, seed, folder = sys.argv[1:]
    target = TARGETS[name]
    warnings.simplefilter("ignore")  # of numpy, about what it reads
    for data in target.seeds:  # what is compiled is compiled now, and does not count as slow
        target.check_fn(data)
    try:
        run_target(target, int(seconds), int(seed), Path(folder))
    finally:
        forget_scratch()


if __name__ == "__main__":
    main()
