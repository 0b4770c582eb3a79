"""No parser takes much more than four times as long for an input four times as long."""

import contextlib
import time

import pytest

from fuzz.inputs import words_of
from fuzz.registry import TARGETS
from fuzz.target import FindingError, forget_scratch, scratch

pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's remarks
NUM_BYTES = 2**15
ENOUGH_SECONDS = 0.5  # for four times as many bytes; below it, nothing is told by a ratio
MOST_RATIO = 9.0  # of the times for four times as many bytes: 4 is linear, 16 quadratic


@pytest.fixture(scope="module", autouse=True)
def no_files_left():
    scratch()
    yield
    forget_scratch()


def seconds(target, word, num_bytes):
    """Of the word repeated at the start, in the middle and at the end of a seed; the longest."""
    seed, repeated = target.seeds[0], word * (num_bytes // len(word))
    middle, times = len(seed) // 2, []
    for data in (repeated + seed, seed[:middle] + repeated + seed[middle:], seed + repeated):
        began = time.process_time()
        with contextlib.suppress(FindingError):  # as of a message as long as the input: fine here
            target.check_fn(data)
        times.append(time.process_time() - began)
    return max(times)


def growth(target, word):
    """Of the time, for four times as many bytes; 0 where there is too little to tell."""
    spent = seconds(target, word, 4 * NUM_BYTES)
    if spent < ENOUGH_SECONDS:
        return 0.0
    return spent / max(seconds(target, word, NUM_BYTES), 1e-3)


# A command line of thousands of flags is slow in the library that parses it, and harms no one.
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "arguments"])
def test_time_grows_no_faster_than_the_input(name):
    target = TARGETS[name]
    for seed in target.seeds:  # what is compiled is compiled now
        target.check_fn(seed)
    words = [word for word in words_of(target) if len(word) < 30]
    words += [word + end for word in words[::20] for end in (b"\n", b" ", b",")]
    for word in words:
        # Twice, as another program may have been in the way.
        is_slow = growth(target, word) > MOST_RATIO and growth(target, word) > MOST_RATIO
        assert not is_slow, f"{word[:60]!r}, repeated"
