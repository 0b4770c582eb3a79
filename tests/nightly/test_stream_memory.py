"""A conversion, and training on what it made, hold far less than the data."""

import subprocess
import sys
from pathlib import Path

import pytest

from test_stream import NUM_FEATURES, NUM_LABELS, text_of


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_conversion_and_feed_hold_far_less_than_the_data(tmp_path):
    code = """
import sys, threading, pathlib, numpy as np, torch
from evenhand.data.stream import stream_extreme
from evenhand.training.feed import PairFeed

def anonymous():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def use(path, folder):
    data = stream_extreme(path, folder, name="x", memory_bytes=2**22, validation_fraction=0)
    assert data.label_counts().sum() > 0
    feed = PairFeed(data.parts["train"], batch_size=256, masks_all_positives=True,
                    generator=torch.Generator(), device=torch.device("cpu"))
    for _ in range(200):
        feed.next_batch()
    feed.close()
    return data

small, large, out = map(pathlib.Path, sys.argv[1:])
use(small, out / "small")  # what is compiled and loaded on the way
before, peak, is_over = anonymous(), [0], threading.Event()
def look():
    while not is_over.wait(0.002):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=look)
thread.start()
data = use(large, out / "large")
is_over.set()
thread.join()
print(peak[0] - before, sum(path.stat().st_size for path in (out / "large").iterdir()))
"""
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_text(text_of(2000))
    body = text_of(5_000, seed=3).split("\n", 1)[1]
    with open(large, "w") as file:
        file.write(f"{5_000 * 240} {NUM_FEATURES} {NUM_LABELS}\n")
        for _ in range(240):
            file.write(body)
    command = [sys.executable, "-c", code, str(small), str(large), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    growth, size = map(int, answer.stdout.split())
    assert size > 60e6
    assert growth < size / 2, f"{growth / 1e6:.0f} MB held of {size / 1e6:.0f} MB"
