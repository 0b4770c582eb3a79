"""A trained run in memory: texts in, what is sent to clients out."""

from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenhand.data.text import TEXTS, NgramFeaturizer, featurizer_from
from evenhand.errors import UserError
from evenhand.models import BagEncoder
from evenhand.run_folder import read_about
from evenhand.run_search import load_searcher

MOST_MATCHED = 5  # n-grams shown with a result
SOUTH, NORTH = -60, 80  # degrees of latitude that the map shows
UNITS = 5  # of its drawing, to a degree


class ServedRun:
    """Loaded once and never changed: to reload is to put another one in its place."""

    def __init__(self, folder: Path, *, device: torch.device, index: str | None = None) -> None:
        """
        Args:
            index: see `open_index`.
        """
        self.folder, self.name = folder, folder.resolve().name
        self.searcher = load_searcher(folder, device=device, index=index)
        self.data, self.about = self.searcher.data, read_about(folder)
        if self.data.featurizer is None:
            raise UserError(
                f"{folder} cannot be served: it was trained on features, not on texts; to use its "
                f"vectors elsewhere: evenhand export {folder} --out FOLDER"
            )
        is_hashed = self.data.featurizer != TEXTS
        self.featurizer = featurizer_from(self.data.featurizer) if is_hashed else None
        self.loaded = datetime.now(UTC).isoformat(timespec="seconds")
        # The first search looks up or compiles code; no client should wait for that.
        self.search(["warm"], 1, explains=True)

    def search(
        self, texts: list[str], num_results: int, *, explains: bool = False
    ) -> list[list[dict[str, Any]]]:
        """The answers to each text, best first."""
        found = self.searcher.search(texts, num_results)
        places = self.data.label_coordinates
        lists = []
        for ids, scores in zip(found.label_ids.tolist(), found.scores.tolist(), strict=True):
            names = self.searcher.label_names(ids)
            answers: list[dict[str, Any]] = [
                {"id": label, "label": name, "score": round(score, 5)}
                for label, name, score in zip(ids, names, scores, strict=True)
                if label >= 0
            ]
            if places is not None:
                for answer in answers:
                    answer["place"] = [round(float(angle), 3) for angle in places[answer["id"]]]
            lists.append(answers)
        if explains:
            for text, answers in zip(texts, lists, strict=True):
                matched = self._matched(text, [answer["id"] for answer in answers])
                for answer, ngrams in zip(answers, matched, strict=True):
                    answer["matched"] = ngrams
        return lists

    def encode(self, texts: list[str]) -> list[list[float]]:
        """A vector for each text."""
        vectors: list[list[float]] = self.searcher.encode(texts).tolist()
        return vectors

    @torch.no_grad()
    def _matched(self, text: str, label_ids: list[int]) -> list[list[dict[str, Any]]]:
        """The n-grams that add most to the score of each label, and what they add.

        A query's vector is the mean of the vectors of its n-grams, as long as the model makes it,
        so the product with a label's vector is a sum over n-grams. Other encoders show nothing.
        """
        encoder, model = self.searcher.encoder, self.searcher.model
        if not isinstance(self.featurizer, NgramFeaturizer) or not isinstance(encoder, BagEncoder):
            return [[] for _ in label_ids]
        ids = torch.from_numpy(self.featurizer.featurize([text]).ids.astype(np.int64))  # (n,)
        device = model.label_table.device
        rows = encoder.weight[ids.to(device)]  # (n, D)
        labels = model.label_vectors(torch.tensor(label_ids, device=device)).float()  # (R, D)
        mean = rows.mean(0)
        length = mean.norm().clamp(min=1e-12) if model.is_cosine else 1.0
        parts = (model.scale / len(rows) / length) * (rows @ labels.T)  # (n, R)
        names = self.featurizer.ngrams(text)
        best: list[list[dict[str, Any]]] = []
        for column in parts.T.tolist():
            sums: dict[str, float] = {}
            for name, part in zip(names, column, strict=True):
                sums[name] = sums.get(name, 0.0) + part
            largest = sorted(sums.items(), key=lambda item: -item[1])[:MOST_MATCHED]
            best.append([{"ngram": n, "score": round(s, 5)} for n, s in largest if s > 0])
        return best

    def describe(self) -> dict[str, Any]:
        """What GET /runs says of it."""
        return {
            "name": self.name,
            "method": str(self.about.get("method", "")),
            "dataset": self.data.name,
            "fingerprint": self.data.fingerprint,
            "num_labels": self.data.num_labels,
            "dimension": self.searcher.model.label_table.shape[1],
            "loaded": self.loaded,
            "has_map": self.data.label_coordinates is not None,
            "has_report": self.report_path() is not None,
            "attribution": str(self.about["dataset"].get("attribution", "")),
        }

    def report_path(self) -> Path | None:
        """Its own report, or that of the folder it lies in, as the demo writes it."""
        folder = self.folder.resolve()
        paths = [folder / "report.html", folder.parent / "report.html"]
        return next((path for path in paths if path.is_file()), None)

    @cached_property
    def world_map(self) -> dict[str, Any] | None:
        """A dot for every label that has a place, as the path of an SVG; None: there are none."""
        places = self.data.label_coordinates
        if places is None:
            return None
        # A dot is a zero-length stroke with round ends, relative to the one before; those on one
        # spot are drawn once.
        latitudes, longitudes = np.asarray(places, dtype=np.float64).T
        with np.errstate(invalid="ignore"):  # a label without a place is NaN: not shown
            is_shown = (latitudes >= SOUTH) & (latitudes <= NORTH) & (np.abs(longitudes) <= 180)
        spots = np.stack([longitudes[is_shown] + 180, NORTH - latitudes[is_shown]], axis=1)
        points = np.unique(np.rint(UNITS * spots).astype(np.int64), axis=0)  # from west to east
        steps = np.diff(points, axis=0, prepend=[[0, 0]])
        path = "".join(f"m{x}{'' if y < 0 else ' '}{y}h0" for x, y in steps.tolist())
        size = {"width": 360 * UNITS, "height": (NORTH - SOUTH) * UNITS}
        return {**size, "north": NORTH, "units": UNITS, "path": path}
