"""A folder that is continued must be of the same data and settings, or figures would be mixed."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenhand.errors import UserError
from evenhand.files import read_json, write_json


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Notes in a new folder what it is of; refuses one that was begun with something else."""
    path = folder / "settings.json"
    settings = json.loads(json.dumps(settings))  # as they will be read again
    if not path.exists():
        write_json(path, settings)
        return
    before = read_json(path)
    if not isinstance(before, dict):
        raise UserError(f"{path} is damaged (it holds no settings); choose another --out")
    for name, value in settings.items():
        if before.get(name) != value:
            raise UserError(
                f"{folder} was begun with {name} = {before.get(name)}, and now {name} = {value}; "
                f"choose another --out, or remove the folder to begin anew"
            )


def digest_of(arrays: Iterable[NDArray[Any]]) -> str:
    """What tells this data from any other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
