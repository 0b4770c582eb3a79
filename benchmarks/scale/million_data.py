"""A data set of very many labels, of which a few million occur: made in seconds, and learnable.

Labels are drawn by Zipf's law. A query's features are what a text would tell of its label: digits
of its number, pairs of them and the number itself, hashed into buckets, beside two of noise.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenhand.data import Dataset, Part, Rows, save_dataset

NUM_BUCKETS = 2**18
NUM_NOISE = 2
_SPREAD = 2_654_435_761  # prime and above any number of labels: ranks are spread over the table
_HASH = np.uint64(0x9E3779B97F4A7C15)

Ids = NDArray[np.int64]


def make_dataset(folder: Path, *, num_labels: int, num_pairs: int, num_test: int) -> Dataset:
    generator = np.random.default_rng(0)
    sizes = {"train": num_pairs, "test": num_test}
    parts = {name: _part(zipf_labels(size, num_labels, generator), generator)
             for name, size in sizes.items()}  # fmt: skip
    name = f"zipf-{num_labels}"
    return save_dataset(Dataset(name, NUM_BUCKETS, num_labels, parts), folder)


def zipf_labels(count: int, num_labels: int, generator: np.random.Generator) -> Ids:
    """(count,) labels; that of rank r has a share of about 1 / (r log L), and lies anywhere."""
    ranks = np.exp(generator.random(count) * np.log(num_labels)).astype(np.int64) - 1
    return np.minimum(ranks, num_labels - 1) * _SPREAD % num_labels


def features_of_labels(labels: Ids, generator: np.random.Generator) -> NDArray[np.int32]:
    """(N, 9) buckets: three digits of the label to the base 1000, three pairs, itself, noise."""
    digits = [labels // 10**6, labels // 1000 % 1000, labels % 1000]
    tokens = [*digits, *(1000 * digits[a] + digits[b] for a, b in ((0, 1), (1, 2), (0, 2))), labels]
    columns = [_bucket(token, kind) for kind, token in enumerate(tokens)]
    noise = generator.integers(NUM_BUCKETS, size=(len(labels), NUM_NOISE), dtype=np.int32)
    return np.concatenate([np.stack(columns, axis=1), noise], axis=1)


def _bucket(tokens: Ids, kind: int) -> NDArray[np.int32]:
    words = (tokens.astype(np.uint64) * np.uint64(16) + np.uint64(kind)) * _HASH
    words ^= words >> np.uint64(29)
    return (words * _HASH >> np.uint64(46)).astype(np.int32)  # the upper 18 bits


def _part(labels: Ids, generator: np.random.Generator) -> Part:
    features = features_of_labels(labels, generator)
    count, width = features.shape
    return Part(
        features=Rows(np.arange(count + 1) * width, features.ravel()),
        positives=Rows(np.arange(count + 1), labels.astype(np.int32)),
    )
