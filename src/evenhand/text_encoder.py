"""Transformers from a local folder as query encoders. Extra: evenhand[text].

A folder of sentence-transformers is used as it is; of a bare transformer of Hugging Face, the
vectors of all tokens are averaged. Only files that cannot run code are read: weights are
safetensors, and a folder that brings Python of its own is refused.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenhand.data import FloatArray, Strings
from evenhand.errors import UserError
from evenhand.files import atomic_folder, open_npy, parse_json, read_text

BLOCK = 1024  # texts given to an encoder that is frozen
AT_ONCE = 64  # texts, where nothing is trained
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
COPIED = (".json", ".txt", ".model", ".safetensors")  # of a folder, into that of a run
# Names of the dropout of attention weights, which two passes cannot repeat in a fused kernel.
ATTENTION_DROPOUT = (
    "attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "attn_dropout"
)  # fmt: skip


class TextEncoder(nn.Module):
    """Texts to vectors (B, D), by the transformer of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        check_encoder(folder)
        try:
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging
        except ImportError as error:
            raise UserError(
                f"the encoder {folder} needs the extra: pip install 'evenhand[text]'"
            ) from error
        has_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # the weights of a local folder are there in a moment
        try:
            self.model = SentenceTransformer(
                str(folder),
                device="cpu",
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
                config_kwargs=dict.fromkeys(ATTENTION_DROPOUT, 0.0),
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"the encoder {folder} could not be read: {first}") from error
        finally:
            if has_bar:
                logging.enable_progress_bar()

    def forward(self, texts: list[str]) -> Tensor:
        if self.training or len(texts) <= AT_ONCE:
            return self._encode(texts)
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # little is padding
        blocks = [
            self._encode([texts[place] for place in order[start : start + AT_ONCE]])
            for start in range(0, len(order), AT_ONCE)
        ]
        return torch.cat(blocks)[torch.tensor(order).argsort()]

    def _encode(self, texts: list[str]) -> Tensor:
        device = next(self.model.parameters()).device
        # Before version 6 it is called tokenize.
        tokens_fn = getattr(self.model, "preprocess", None) or self.model.tokenize
        tokens: dict[str, Any] = tokens_fn(texts)
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in tokens.items()}
        return self.model(moved)["sentence_embedding"]  # type: ignore[no-any-return]


def check_encoder(folder: Path) -> None:
    """Refuses a folder that is no transformer, or that could run code when it is opened."""
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is no encoder: there is neither modules.json (sentence-transformers) nor "
            f"config.json (transformers) in it; give the folder of a model on this machine"
        )
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            raise UserError(f"{path}: an encoder that brings code of its own is not run")
        if path.suffix in PICKLED and not list(path.parent.glob("*.safetensors")):
            raise UserError(
                f"{path} is pickled, and could run code; convert the weights of {folder} to "
                f"safetensors (save_pretrained does) and remove it"
            )
    modules = folder / "modules.json"
    kinds = parse_json(read_text(modules)) if modules.is_file() else []
    for module in kinds if isinstance(kinds, list) else [kinds]:
        kind = module.get("type") if isinstance(module, dict) else module
        if not str(kind).startswith("sentence_transformers."):
            raise UserError(f"{modules}: {str(kind)[:80]!r} is not of sentence-transformers")


def copy_encoder(folder: Path, target: Path) -> None:
    """Copies what is needed to open the encoder, and nothing else."""
    check_encoder(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in COPIED and "checkpoint" not in path.parent.name:
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


@torch.no_grad()
def cached_vectors(
    texts: Strings,
    encoder: nn.Module,
    folder: Path,
    progress_fn: Callable[[int, int], None] = lambda done, total: None,
) -> FloatArray:
    """The vectors of texts (N, F), kept beside the data set for the next run.

    Args:
        folder: of the data set; where there is none, nothing is kept.
    """
    digest = hashlib.sha256(texts.utf8.tobytes() + repr(encoder).encode())
    for name, weights in sorted(encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(weights.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    path = folder / f"vectors-{digest.hexdigest()[:16]}" / "vectors.npy"
    if path.exists():
        return open_npy(path, is_empty=not len(texts))
    encoder.eval()
    blocks = []
    for start in range(0, len(texts), BLOCK):
        block = [texts[row] for row in range(start, min(start + BLOCK, len(texts)))]
        blocks.append(encoder(block).float().cpu().numpy())
        progress_fn(start + len(block), len(texts))
    vectors = np.concatenate(blocks)
    if (folder / "dataset.json").exists():
        with atomic_folder(path.parent) as staging:
            np.save(staging / path.name, vectors, allow_pickle=False)
    return vectors


@torch.no_grad()
def vector_width(encoder: nn.Module, features: Any) -> int:
    """The numbers in a vector of an encoder, found by encoding a query or two."""
    was_training = encoder.training
    encoder.eval()
    try:
        vectors = encoder(features)
    finally:
        encoder.train(was_training)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2:
        shape = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise UserError(f"an encoder must return vectors (queries, numbers), and gave {shape}")
    return int(vectors.shape[1])
