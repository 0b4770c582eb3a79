"""The benchmark of 10^8 labels, in small: killed, resumed, and equal to the last bit."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale"
SMALL = {
    "labels": 3000, "width": 8, "pairs": 4000, "test-queries": 60, "batch-size": 32,
    "sampled": 40, "steps": 12, "log-every": 1, "checkpoint-every": 6, "kill-at": 9,
}  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(SCALE))
    return importlib.import_module


def test_labels_follow_a_law_of_zipf_and_are_spread_over_the_table(module):
    labels = module("million_data").zipf_labels(200_000, 10**6, np.random.default_rng(0))
    assert labels.min() >= 0
    assert labels.max() < 10**6
    counts = np.sort(np.bincount(labels))[::-1]
    for rank in (1, 2, 4, 8):  # a share of log((r + 1) / r) / log L
        expected = len(labels) * np.log((rank + 1) / rank) / np.log(10**6)
        assert abs(counts[rank - 1] - expected) < 5 * np.sqrt(expected)
    assert 0.49 < (np.unique(labels) > 5 * 10**5).mean() < 0.51


def test_features_tell_the_label_but_for_the_noise(module):
    data = module("million_data")
    labels = np.array([5, 123_456_789, 5, 99_999_999])
    features = data.features_of_labels(labels, np.random.default_rng(0))
    assert features.shape == (4, 9)
    assert 0 <= features.min() <= features.max() < data.NUM_BUCKETS
    telling = features[:, : -data.NUM_NOISE]
    assert (telling[0] == telling[2]).all()
    assert (telling[0] != telling[1]).sum() >= 6


def test_a_digest_sees_every_bit_and_every_place(module):
    worker = module("million_worker")
    table = torch.randn(101, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = table.clone()
    changed.view(torch.int16)[100, 2] ^= 1
    swapped = table.flip(0)
    digests = {worker.digest(t) for t in (table, changed, swapped, table.view(3, 101))}
    assert len(digests) == 4
    assert worker.digest(table.clone()) == worker.digest(table)
    assert worker.digest(table[:0]) != worker.digest(table)


def test_blocks_of_a_digest_are_in_order(module, monkeypatch):
    worker = module("million_worker")
    monkeypatch.setattr(worker, "BLOCK", 64)
    table = torch.arange(64)
    assert worker.digest(table) != worker.digest(torch.cat([table[8:16], table[:8], table[16:]]))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_run_resumes_and_ends_as_one_that_was_not(module, tmp_path):
    flags = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    flags += ["--device", "cpu", "--folder", str(tmp_path / "home"), "--keep"]
    module("hundred_million").main([*flags, "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert all(result["checks"].values())
    assert len(result["checks"]) == 5
    assert [int(step) for step in result["losses"]] == list(range(1, 13))
    killed = (tmp_path / "home/metrics-killed.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in killed] == list(range(1, 10))
    phases = result["phases"]
    assert "load the checkpoint" not in phases["train"]["seconds"]
    assert "load the checkpoint" in phases["resume"]["seconds"]
    assert phases["resume"]["digests"].keys() >= {"label_table", "optimizer.labels.sums"}
    assert "recall@10, all" in phases["evaluate"]["scores"]


def test_a_disk_too_small_is_said_before_anything_is_trained(module, tmp_path):
    flags = ["--device", "cpu", "--folder", str(tmp_path), "--labels", str(10**13)]
    with pytest.raises(SystemExit, match=r"GiB free, and .* GiB are needed"):
        module("hundred_million").main([*flags, "--phases", "train"])
