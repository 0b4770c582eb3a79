"""Checkpoints: a folder for each, written whole or not at all; tensors as safetensors.

checkpoints/step-00001000/tensors.safetensors   weights, optimiser, feed and generator states
checkpoints/step-00001000/state.json            the step, the best so far, which run it is of
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from evenhand.errors import UserError
from evenhand.files import sync


class Checkpoint(NamedTuple):
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, step: int) -> None:
    """Writes folder/step-N and then removes the others."""
    target = folder / f"step-{step:08d}"
    staging = folder / f".step-{step:08d}"
    try:
        shutil.rmtree(staging, ignore_errors=True)  # what a crash may have left
        staging.mkdir(parents=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in checkpoint.tensors.items()}
        safetensors.torch.save_file(tensors, staging / "tensors.safetensors")
        (staging / "state.json").write_text(json.dumps(checkpoint.state), encoding="utf-8")
        for path in (staging / "tensors.safetensors", staging / "state.json", staging):
            sync(path)
        if target.exists():
            shutil.rmtree(target)
        os.replace(staging, target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(
            f"{target} could not be written ({error}); the checkpoint before it is untouched: "
            f"free some space, then continue with --resume"
        ) from error
    for other in [*_complete(folder), *folder.glob(".step-*")]:
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


def load_latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None where there is none yet."""
    complete = _complete(folder)
    if not complete:
        return None
    newest = complete[-1]
    try:
        tensors = safetensors.torch.load_file(newest / "tensors.safetensors")
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{newest} is damaged ({error}); remove that folder, and --resume will begin anew"
        ) from error
    return Checkpoint(tensors, state)


def _complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []
