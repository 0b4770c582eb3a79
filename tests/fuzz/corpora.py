"""The corpus that is kept: of all inputs that reached something, a few that reach it all."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from .registry import TARGETS
from .target import forget_scratch
from .worker import _place, _tried

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 2000  # of an input that is kept for what it reaches
MOST_OF_TARGET = 8000  # of all that are kept of a target


def save_corpus(reached: Path, names: Sequence[str]) -> None:
    """The shortest inputs first: each that reaches a line, or an answer, none before it did."""
    for name in names:
        folder, num_bytes = CORPUS / name, 0
        folder.mkdir(parents=True, exist_ok=True)
        lines: set[str] = set()
        for data in TARGETS[name].seeds:
            _tried(TARGETS[name], data, lines)
        candidates = {path.read_bytes() for path in (reached / name).glob("*")}
        for data in sorted(candidates, key=lambda data: (len(data), data)):
            before = len(lines)
            kind, error = _tried(TARGETS[name], data, lines)
            lines.add(f"{kind} {_place(error)}")
            if len(lines) == before or len(data) > MOST_BYTES:
                continue
            num_bytes += len(data)
            if num_bytes <= MOST_OF_TARGET:
                (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
        print(f"{name}: {len(list(folder.glob('*')))} inputs, {len(lines)} lines and answers")
    forget_scratch()
