"""debian-deps from its raw texts, to be compared with its tf-idf file.

    python -m experiments.raw_text FOLDER datasets/raw
    evenhand train debian-deps --data datasets/raw --set data.weighting=tf-idf --run runs/raw

FOLDER holds docs.jsonl.xz and the files in the Extreme Classification format. The same from the
tf-idf file: `evenhand data extreme --train FOLDER/train.txt.xz --test FOLDER/test.txt.xz
--validation-block 50 --out datasets/file`, then `evenhand train debian-deps --data datasets/file`.
Documents, labels and split are those of the file; the features alone are made anew.
"""

import argparse
import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np

from evenhand.data import Dataset, Strings, load_extreme, make_featurizer, save_dataset
from evenhand.data.splits import choose_validation_rows

BLOCK, SHARE = 50, 0.1  # documents of one source package stand together


def load_raw(folder: Path, *, features: str = "words", **settings: int | None) -> Dataset:
    """The data set, with features of the texts."""
    dataset = load_extreme(
        folder / "train.txt.xz",
        folder / "test.txt.xz",
        name="debian-deps-raw",
        validation_fraction=SHARE,
        validation_block=BLOCK,
    )
    texts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    with lzma.open(folder / "docs.jsonl.xz", "rt", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    trained = [document["text"] for document in documents if document["split"] == "train"]
    is_held_out = choose_validation_rows(np.arange(len(trained)), fraction=SHARE, block=BLOCK)
    for text, is_out in zip(trained, is_held_out.tolist(), strict=True):
        texts["validation" if is_out else "train"].append(text)
    texts["test"] = [document["text"] for document in documents if document["split"] == "test"]
    featurizer = make_featurizer(features, **settings)
    parts = {}
    for name, part in dataset.parts.items():
        rows = featurizer.featurize(texts[name])
        if len(rows) != len(part):
            raise ValueError(f"{name}: {len(rows)} texts, and {len(part)} rows in the file")
        parts[name] = dataclasses.replace(part, features=rows, texts=Strings.pack(texts[name]))
    return dataclasses.replace(
        dataset,
        num_features=featurizer.num_buckets,
        parts=parts,
        featurizer=featurizer.settings(),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    save_dataset(load_raw(options.folder), options.out)
