"""Trains one peer once and writes what it retrieves. Run in the peer's own environment.

    PYTHON peer.py SYSTEM --fit FOLDER/PART --ask FOLDER/PART --out FILE.npy --settings JSON

A part is two sparse matrices, PART.x.npz (features) and PART.y.npz (labels), written by
`quality.py`. Rows of features are made to have length 1, which is what both systems do with
text by themselves or ask their users to do. The file holds (Q, R) label ids, best first, -1 where
fewer were found; the last line printed is a JSON object with the seconds taken.
"""

import argparse
import json
import sys
import tempfile
import time

import numpy as np
import scipy.sparse

NUM_RESULTS = 50


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=tuple(SYSTEMS))
    parser.add_argument("--fit", required=True)
    parser.add_argument("--ask", required=True, action="append")
    parser.add_argument("--out", required=True, action="append")
    parser.add_argument("--settings", default="{}")
    options = parser.parse_args()
    settings = json.loads(options.settings)
    fit_fn, ask_fn = SYSTEMS[options.system]
    features, labels = unit_rows(read(options.fit, "x")), read(options.fit, "y")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = fit_fn(features, labels, settings, folder)
        seconds = time.perf_counter() - began
        asking = []
        for part, out in zip(options.ask, options.out, strict=True):
            queries = unit_rows(read(part, "x"))
            began = time.perf_counter()
            found = ask_fn(model, queries, settings)
            asking.append(time.perf_counter() - began)
            np.save(out, found)
    print(json.dumps({"train_seconds": round(seconds, 2), "ask_seconds": asking}))


def read(part, kind):
    return scipy.sparse.load_npz(f"{part}.{kind}.npz").astype(np.float32).tocsr()


def unit_rows(matrix):
    lengths = np.sqrt(matrix.multiply(matrix).sum(axis=1)).A1
    inverse = 1 / np.where(lengths > 0, lengths, 1)
    rows = (scipy.sparse.diags(inverse.astype(np.float32)) @ matrix).tocsr().astype(np.float32)
    rows.sort_indices()
    return rows


# --- PECOS XR-Linear ------------------------------------------------------------------------------


def fit_pecos(features, labels, settings, folder):
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    tree = settings.get("tree", {})
    means = LabelEmbeddingFactory.create(labels, features, method="pifa")
    chain = Indexer.gen(means, indexer_type="hierarchicalkmeans", seed=0, **tree)
    training = {"negative_sampling_scheme": "tfn", "threshold": 0.1, **settings.get("train", {})}
    return XLinearModel.train(features, labels, C=chain, **training)


def ask_pecos(model, queries, settings):
    scores = model.predict(queries, only_topk=NUM_RESULTS, **settings.get("ask", {}))
    return best_first(scores)


def best_first(scores):
    found = np.full((scores.shape[0], NUM_RESULTS), -1, dtype=np.int64)
    for row in range(scores.shape[0]):
        start, stop = scores.indptr[row], scores.indptr[row + 1]
        order = np.argsort(-scores.data[start:stop], kind="stable")[:NUM_RESULTS]
        found[row, : len(order)] = scores.indices[start:stop][order]
    return found


# --- napkinXC -------------------------------------------------------------------------------------


def fit_napkin(kind):
    def fit(features, labels, settings, folder):
        from napkinxc.models import OVR, PLT

        model = {"ovr": OVR, "plt": PLT}[kind](folder, threads=2, **settings.get("train", {}))
        model.fit(features, [labels[row].indices.tolist() for row in range(labels.shape[0])])
        return model

    return fit


def ask_napkin(model, queries, settings):
    rows = model.predict(queries, top_k=NUM_RESULTS)
    found = np.full((queries.shape[0], NUM_RESULTS), -1, dtype=np.int64)
    for row, ids in enumerate(rows):
        found[row, : len(ids)] = ids
    return found


SYSTEMS = {
    "pecos": (fit_pecos, ask_pecos),
    "napkinxc-ovr": (fit_napkin("ovr"), ask_napkin),
    "napkinxc-plt": (fit_napkin("plt"), ask_napkin),
}

if __name__ == "__main__":
    sys.exit(main())
