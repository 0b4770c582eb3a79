"""Weights on disk: what safetensors itself reads, block by block, and files that do not fit."""

import pytest
import safetensors.torch
import torch

from evenhand.models import weights
from evenhand.models.weights import all_finite, read_weights, write_weights


@pytest.fixture(params=[2**26, 24])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_BYTES", request.param)


def tensors():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(13, 5, generator=generator)
    return {
        "table": drawn.bfloat16(),
        "encoder.weight": drawn.T,  # not contiguous
        "bias": drawn[:, :1].double(),
        "number": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
        "odd": torch.arange(3, dtype=torch.uint8),
    }


def test_the_library_reads_what_is_written(tmp_path, block_bytes):
    write_weights(tmp_path / "weights", tensors())
    found = safetensors.torch.load_file(tmp_path / "weights")
    assert set(found) == set(tensors())
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_the_library_writes_is_read_into_tensors_of_any_type(tmp_path, block_bytes):
    whole = {name: tensor.contiguous() for name, tensor in tensors().items()}
    safetensors.torch.save_file(whole, tmp_path / "weights")
    for dtype in (torch.float32, torch.float64):
        targets = {name: torch.full_like(t, 3, dtype=dtype) for name, t in whole.items()}
        read_weights(tmp_path / "weights", targets)
        for name, tensor in whole.items():
            assert torch.equal(targets[name], tensor.to(dtype))


def test_other_names_and_shapes_are_refused(tmp_path):
    write_weights(tmp_path / "weights", {"a": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match="it holds a, not b"):
        read_weights(tmp_path / "weights", {"b": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match=r"a is \(2, 3\) there, not \(3, 2\)"):
        read_weights(tmp_path / "weights", {"a": torch.zeros(3, 2)})


def test_a_damaged_file_is_refused(tmp_path):
    write_weights(tmp_path / "weights", {"a": torch.zeros(200, 3)})
    whole = (tmp_path / "weights").read_bytes()
    for cut in (whole[:-8], whole[:20], b"", b"\xff" * 100):
        (tmp_path / "weights").write_bytes(cut)
        with pytest.raises(safetensors.SafetensorError):
            read_weights(tmp_path / "weights", {"a": torch.zeros(200, 3)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(bad, block_bytes):
    table = torch.zeros(50, 3, dtype=torch.bfloat16)
    assert all_finite(table)
    assert all_finite(torch.zeros(0, 3))
    table[49, 2] = bad
    assert not all_finite(table)
    assert not all_finite(torch.tensor(bad))
