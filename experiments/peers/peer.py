"""Trains one peer once and writes what it retrieves. Run in the peer's own environment.

    PYTHON peer.py SYSTEM --fit FOLDER/PART --ask FOLDER/PART --out FILE.npz --settings JSON

A part is two sparse matrices, PART.x.npz (features, rows of length 1) and PART.y.npz (labels),
written by `compare.py`. The file holds `ids`, (Q, R) labels, best first, -1 where fewer were found,
their `scores` (Q, R), and the seconds taken.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time

import numpy as np
import scipy.sparse

PACKAGES = {"pecos": "libpecos", "napkinxc": "napkinxc"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=tuple(SYSTEMS))
    parser.add_argument("--fit", required=True)
    parser.add_argument("--ask", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--num-results", type=int, default=300)
    options = parser.parse_args()
    settings = json.loads(options.settings)
    fit_fn, ask_fn = SYSTEMS[options.system]
    features, labels, queries = (
        read(options.fit, "x"),
        read(options.fit, "y"),
        read(options.ask, "x"),
    )
    num_results = min(options.num_results, labels.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = fit_fn(features, labels, settings, folder)
        trained = time.perf_counter()
        ids, scores = ask_fn(model, queries, num_results, settings)
        answered = time.perf_counter()
    np.savez(
        options.out,
        ids=ids,
        scores=scores,
        train_seconds=trained - began,
        ask_seconds=answered - trained,
        version=importlib.metadata.version(PACKAGES[options.system.split("-")[0]]),
    )


def read(part, kind):
    matrix = scipy.sparse.load_npz(f"{part}.{kind}.npz").astype(np.float32).tocsr()
    matrix.sort_indices()
    return matrix


def best_first(rows, num_results):
    """(ids, scores) of each query, any number of them, as (Q, R) arrays."""
    ids = np.full((len(rows), num_results), -1, dtype=np.int32)
    scores = np.full((len(rows), num_results), -np.inf, dtype=np.float32)
    for number, (own_ids, own_scores) in enumerate(rows):
        order = np.argsort(-np.asarray(own_scores), kind="stable")[:num_results]
        ids[number, : len(order)] = np.asarray(own_ids, dtype=np.int32)[order]
        scores[number, : len(order)] = np.asarray(own_scores, dtype=np.float32)[order]
    return ids, scores


# --- PECOS XR-Linear ------------------------------------------------------------------------------


def fit_pecos(features, labels, settings, folder):
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    tree = settings.get("tree", {})
    means = LabelEmbeddingFactory.create(labels, features, method="pifa")
    chain = Indexer.gen(means, indexer_type="hierarchicalkmeans", seed=0, **tree)
    training = {"negative_sampling_scheme": "tfn", "threshold": 0.1, **settings.get("train", {})}
    return XLinearModel.train(features, labels, C=chain, **training)


def ask_pecos(model, queries, num_results, settings):
    found = model.predict(queries, only_topk=num_results, **settings.get("ask", {}))
    spans = [slice(*found.indptr[row : row + 2]) for row in range(found.shape[0])]
    return best_first([(found.indices[span], found.data[span]) for span in spans], num_results)


# --- napkinXC -------------------------------------------------------------------------------------


def fit_napkin(kind):
    def fit(features, labels, settings, folder):
        from napkinxc.models import OVR, PLT

        model = {"ovr": OVR, "plt": PLT}[kind](folder, threads=2, **settings.get("train", {}))
        model.fit(features, [labels[row].indices.tolist() for row in range(labels.shape[0])])
        return model

    return fit


def ask_napkin(model, queries, num_results, settings):
    rows = model.predict_proba(queries, top_k=num_results)
    return best_first([tuple(zip(*row, strict=True)) or ((), ()) for row in rows], num_results)


SYSTEMS = {
    "pecos": (fit_pecos, ask_pecos),
    "napkinxc-ovr": (fit_napkin("ovr"), ask_napkin),
    "napkinxc-plt": (fit_napkin("plt"), ask_napkin),
}

if __name__ == "__main__":
    sys.exit(main())
