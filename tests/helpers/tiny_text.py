"""A small transformer with random weights that reads letters: nothing is downloaded."""

import string

import torch


def make_transformer(folder, *, width=32, num_layers=2, max_tokens=16, dropout=0.0):
    """A SentenceTransformer: BERT of a few layers, mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = string.ascii_lowercase + string.digits
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(words), "utf-8")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=num_layers,
        num_attention_heads=4, intermediate_size=2 * width, max_position_embeddings=max_tokens,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    transformer = Transformer(str(folder), max_seq_length=max_tokens)
    return SentenceTransformer(modules=[transformer, Pooling(width)], device="cpu")
