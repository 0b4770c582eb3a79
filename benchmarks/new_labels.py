"""Labels that a run was never trained on: found by a label tower, and by tf-idf on the same text.

    python benchmarks/new_labels.py docs.jsonl --out benchmarks/results/new-labels.json

A line of the file is a document: {"id": ..., "split": "train" or "test", "labels": [...], "text":
...}, of debian-deps a package, what it depends on, and its description. A random tenth of the
labels is kept from training, then added to the run. A label's text is its name, and where a
document has that id, its text. Both ways read the same texts; recall is that of test pairs whose
label is new, among all labels. The run folder stays, and a finished one is not trained again.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

import evenhand
from evenhand.data import normalize
from evenhand.data.text_io import read_lines
from evenhand.files import write_json
from machine import processor

CUTOFF = 10
AT_ONCE = 512


def recall(found: list[list[str]], wanted: list[list[str]]) -> dict[str, Any]:
    """Share of the (query, label) pairs whose label is among the first ten found."""
    hits = sum(len(set(own) & set(names)) for own, names in zip(wanted, found, strict=True))
    count = sum(map(len, wanted))
    return {f"recall@{CUTOFF}": round(hits / max(1, count), 4), "pairs": count}


def by_tfidf(fitted_on: list[str], texts: list[str], queries: list[str]) -> Any:
    """The order of the texts for each query is that of cosines of tf-idf: (Q, L), in blocks."""
    vectorizer = TfidfVectorizer(sublinear_tf=True, preprocessor=normalize)
    vectorizer.fit(fitted_on)
    labels = vectorizer.transform(texts).T.tocsr()
    for start in range(0, len(queries), AT_ONCE):
        yield (vectorizer.transform(queries[start : start + AT_ONCE]) @ labels).toarray()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="settings, section.key=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, default=Path("runs/new-labels"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    documents = [json.loads(line) for line in read_lines(options.documents)]
    names = sorted({name for own in documents for name in own["labels"]})
    lots = np.random.default_rng(options.seed)
    new = {names[row] for row in lots.choice(len(names), len(names) // 10, replace=False)}
    text_of = {own["id"]: own["text"] for own in documents}
    texts = {name: text_of.get(name, "") for name in names}
    train = [own for own in documents if own["split"] == "train" and set(own["labels"]) - new]
    table = {
        "text": [own["text"] for own in train],
        "labels": [sorted(set(own["labels"]) - new) for own in train],
    }
    known = [name for name in names if name not in new]
    settings: dict[str, Any] = {"model.labels": "tower", "training.seed": options.seed}
    settings |= {
        key: json.loads(value) for key, _, value in (s.partition("=") for s in options.set)
    }
    if not (options.run / "run.json").exists():
        labels = {"id": known, "text": [texts[name] for name in known]}
        began = time.process_time()
        evenhand.train(
            table, query="text", label="labels", labels=labels, settings=settings, run=options.run,
            test_fraction=0.0, validation_fraction=0.02,
        )  # fmt: skip
        print(f"trained in {time.process_time() - began:.0f} s of CPU time")
    run = evenhand.load(options.run)
    run.add_labels({"id": sorted(new), "text": [texts[name] for name in sorted(new)]})
    test = [own for own in documents if own["split"] == "test" and set(own["labels"]) & new]
    queries, wanted = (
        [own["text"] for own in test],
        [sorted(set(own["labels"]) & new) for own in test],
    )
    assert run.searcher.data.label_names is not None
    order = list(run.searcher.data.label_names)
    is_new = np.array([name in new for name in order])
    found: dict[str, dict[str, list[list[str]]]] = {}

    def add(way: str, scores: Any) -> None:
        """The ten best of each query, of all labels and of the new ones alone."""
        for among, block in (("all", scores), ("new", np.where(is_new, scores, -np.inf))):
            best = torch.from_numpy(block).topk(CUTOFF, dim=1).indices.tolist()
            rows = found.setdefault(way, {}).setdefault(among, [])
            rows += [[order[place] for place in own] for own in best]

    vectors = torch.from_numpy(run.encode(queries))
    model = run.searcher.model
    for block in vectors.split(AT_ONCE):
        add("tower", (block @ model.label_vectors().float().cpu().T).numpy())
    label_texts = [f"{name} {texts[name]}" for name in order]
    for scores in by_tfidf([*table["text"], *label_texts], label_texts, queries):
        add("tf-idf", scores)
    has_text = {name for name in new if texts[name]}
    rows = []
    for way, lists in found.items():
        for among, own in lists.items():
            described = [[name for name in row if name in has_text] for row in wanted]
            rows.append(
                {"way": way, "among": among, **recall(own, wanted)}
                | {"described": recall(own, described)[f"recall@{CUTOFF}"]}
            )
            print(json.dumps(rows[-1]))
    other = [own for own in documents if own["split"] == "test" and set(own["labels"]) - new]
    seen = [[name for name in own["labels"] if name not in new] for own in other]
    vectors, best = torch.from_numpy(run.encode([own["text"] for own in other])), []
    for block in vectors.split(AT_ONCE):
        scores = block @ model.label_vectors().float().cpu().T
        best += [[order[p] for p in own] for own in scores.topk(CUTOFF, dim=1).indices.tolist()]
    rows.append({"way": "tower", "labels": "trained", "among": "all", **recall(best, seen)})
    print(json.dumps(rows[-1]))
    about = {
        "labels": len(names),
        "new": len(new),
        "new with a text": len(has_text),
        "test queries": len(test),
        "settings": settings,
        "seed": options.seed,
        "machine": {"processor": processor(), "python": platform.python_version()},
    }
    print(json.dumps(about))
    if options.out:
        write_json(options.out, {**about, "rows": rows})


if __name__ == "__main__":
    main()
