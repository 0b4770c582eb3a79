"""Time that grows faster than the input: every word of a format, many thousand times."""

import time
import warnings
from collections.abc import Sequence

from .mutation import NUMBERS, SEPARATORS
from .registry import TARGETS
from .target import Target, forget_scratch

NUM_BYTES = 2**15
ENOUGH_SECONDS = 0.5  # for four times as many bytes; below it, nothing is told by a ratio
MOST_RATIO = 9.0  # of the times for four times as many bytes: 4 is linear, 16 quadratic


def run_growth(names: Sequence[str]) -> int:
    """0 where no input takes much more than four times as long when four times as long."""
    warnings.simplefilter("ignore")
    num_found = 0
    for name in names:
        for seed in TARGETS[name].seeds:  # what is compiled is compiled now
            TARGETS[name].check_fn(seed)
        began, worst = time.process_time(), (0.0, 0.0, b"", b"")
        for seed, word in _pairs(TARGETS[name]):
            spent = _seconds(TARGETS[name], seed, word, 4 * NUM_BYTES)
            ratio = 0.0
            if spent > ENOUGH_SECONDS:
                ratio = spent / max(_seconds(TARGETS[name], seed, word, NUM_BYTES), 1e-3)
            worst = max(worst, (ratio, spent, word[:40], seed[:40]))
            if ratio > MOST_RATIO:  # once more: another program may have been in the way
                spent = _seconds(TARGETS[name], seed, word, 4 * NUM_BYTES)
                ratio = spent / max(_seconds(TARGETS[name], seed, word, NUM_BYTES), 1e-3)
            if ratio > MOST_RATIO and spent > ENOUGH_SECONDS:
                num_found += 1
                print(f"FINDING {name}: {word[:60]!r} repeated: {spent:.2f} s, ratio {ratio:.1f}")
        print(f"{name}: {time.process_time() - began:.1f} s, worst {worst}", flush=True)
    forget_scratch()
    return 1 if num_found else 0


def _pairs(target: Target):
    words = {*target.words, *SEPARATORS, *(number for number in NUMBERS if len(number) < 30)}
    words |= {word + separator for word in target.words[:12] for separator in (b"\n", b" ", b",")}
    for word in sorted(word for word in words if word):
        yield target.seeds[0], word


def _seconds(target: Target, seed: bytes, word: bytes, num_bytes: int) -> float:
    """Of the word repeated at the start, in the middle and at the end; the longest."""
    repeated = word * (num_bytes // len(word))
    middle = len(seed) // 2
    times = []
    for data in (repeated + seed, seed[:middle] + repeated + seed[middle:], seed + repeated):
        began = time.process_time()
        target.check_fn(data)
        times.append(time.process_time() - began)
    return max(times)
