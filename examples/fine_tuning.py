"""Fine-tunes a model by the trainer of sentence-transformers. python -m examples.fine_tuning

The model is made on the spot; yours is SentenceTransformer("its folder"). Only the loss changes.
"""

import random
import tempfile
from pathlib import Path
from string import ascii_lowercase

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

from evenhand.integrations.sentence_transformers import S2MRankingLoss
from examples.two_towers import NAMES, misspell


def make_model(folder: Path) -> SentenceTransformer:
    letters = [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    (folder / "vocab.txt").write_text("\n".join(words), "utf-8")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    BertModel(BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32,
    )).save_pretrained(folder)  # fmt: skip
    reader = Transformer(str(folder), max_seq_length=32)
    return SentenceTransformer(modules=[reader, Pooling(64)], device="cpu")


def main() -> float:  # recall@1 of new misspelt names
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, generator = make_model(Path(folder)), random.Random(0)
        names = NAMES * 24
        pairs = {"anchor": [misspell(name, generator) for name in names], "positive": names}
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder, num_train_epochs=1, per_device_train_batch_size=32, seed=0,
            learning_rate=2e-3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        SentenceTransformerTrainer(
            model, arguments, Dataset.from_dict(pairs), loss=S2MRankingLoss(model)
        ).train()
        queries = model.encode([misspell(name, generator) for name in NAMES])
        found = (queries @ model.encode(NAMES).T).argmax(1)
        return float((found == range(len(NAMES))).mean())


if __name__ == "__main__":
    print(f"recall@1 of misspelt names: {main():.3f}")
