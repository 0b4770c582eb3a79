"""Evaluates the predictions of any model, from files or arrays, as a run is evaluated.

Predictions have a row for each result: query_id, label_id, score. The truth has a row for each
right answer: query_id, label_id and any columns of groups; or it is a data set, whose queries and
labels are then identified by their numbers. The columns may also be called query and label, as in
the table of a data set: texts and names are then compared. Next to ids, they are shown.

Ids are compared as text, so that 7 equals "7". Among equal scores the lower id comes first, as in
`search.exact`: whole numbers in numerical order, then texts in alphabetical order.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from evenhand.config import EvaluationConfig, build_config, toml_value
from evenhand.data import Dataset, IntArray, Part, Rows, Strings, normalize, save_dataset
from evenhand.data.splits import PARTS
from evenhand.data.table import make_parts
from evenhand.data.table_cells import as_texts, encode, group_name, join_codes
from evenhand.data.table_reader import Source, is_path, read_batches
from evenhand.errors import UserError
from evenhand.evaluation import Findings, Outcome, Score, evaluate, score_table, slices_of
from evenhand.evaluation.baselines import evaluate_baselines
from evenhand.evaluation.outcome import CUTOFFS
from evenhand.evaluation.slice_attributes import TEXTS_ARE_IDS
from evenhand.files import ProgressFn, atomic_folder, write_json, write_text
from evenhand.report import write_report
from evenhand.run_folder import (
    RunResult,
    about_run,
    check_trained_on,
    is_of_predictions,
    save_result,
)
from evenhand.search.exact import SearchResult

TEXT_OF = {"query_id": "query", "label_id": "label"}  # the text of an id, or a stand-in for it
NOT_GROUPS = {"score", "rank"}  # columns of predictions, such as `evenhand search` writes
PANDAS_INDEX = ("", "Unnamed: 0", "__index_level_0__")  # what pandas calls an index it has written
WHOLE_NUMBER = r"^(0|-?[1-9][0-9]{0,17})$"


# --- tables ---------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """A table of N predictions or right answers."""

    where: str  # for error messages
    keys: dict[str, str]  # "query_id" -> the column it is read from, and so for "label_id"
    ids: dict[str, pa.LargeStringArray]  # by "query_id" and "label_id"
    table: pa.Table

    def column(self, name: str) -> pa.Array:
        """One column as a single array of plain values."""
        chunks = self.table[name].chunks
        is_coded = pa.types.is_dictionary(self.table[name].type)
        return pa.concat_arrays([c.dictionary_decode() if is_coded else c for c in chunks])


def read_columns(source: Source, where: str, progress_fn: ProgressFn | None = None) -> Columns:
    """Reads a whole table of predictions or right answers and finds its ids."""
    where = str(source) if is_path(source) else where
    batches = list(read_batches(source, None, progress_fn=progress_fn))
    if not sum(map(len, batches)):
        raise UserError(f"{where} has no rows; it must have a row for each (query, label) pair")
    table = pa.Table.from_batches(batches)
    table = table.drop_columns([name for name in table.column_names if name in PANDAS_INDEX])
    names = table.column_names
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"{where}: two columns are called {twice!r}; rename one")
    keys = {}
    for name, text in TEXT_OF.items():
        keys[name] = name if name in names else text
        if keys[name] not in names:
            raise UserError(
                f"{where}: there is no column {name!r}, nor {text!r}; its columns are "
                f"{', '.join(map(repr, names))}; rename one"
            )
    columns = Columns(where, keys, {}, table)
    columns.ids.update({name: _id_texts(columns, key) for name, key in keys.items()})
    return columns


def _id_texts(columns: Columns, name: str) -> pa.LargeStringArray:
    """A column of ids as texts; whole numbers that pandas has made floats are whole again."""
    column = columns.column(name)
    try:
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column).cast(pa.int64())
        texts = column.cast(pa.large_string())
    except pa.ArrowException as error:
        raise UserError(
            f"{columns.where}: column {name!r} holds {column.type}; ids must be texts or whole "
            f"numbers, one in each row"
        ) from error
    is_empty = pc.equal(texts.fill_null(""), "")
    if pc.any(is_empty).as_py():
        row = is_empty.index(True).as_py()
        raise UserError(
            f"{columns.where}, row {row + 1}: {name} is empty; fill it or leave the row out"
        )
    if pc.all(pc.match_substring_regex(texts, r"^-?\d+\.0$")).as_py():  # of a CSV file
        texts = pc.utf8_slice_codeunits(texts, 0, -2)
    return texts


def _scores(columns: Columns) -> np.ndarray[Any, np.dtype[np.float64]]:
    if "score" not in columns.table.column_names:
        raise UserError(
            f"{columns.where}: there is no column 'score'; its columns are "
            f"{', '.join(map(repr, columns.table.column_names))}; rename one, or add one: the "
            f"higher, the earlier in the list (such as 1 / rank)"
        )
    column = columns.column("score")
    try:
        scores = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise UserError(f"{columns.where}: column 'score' must hold numbers ({error})") from error
    is_usable = np.abs(scores) <= np.finfo(np.float32).max  # False for NaN
    if not is_usable.all():
        row = int(np.argmin(is_usable))
        raise UserError(
            f"{columns.where}, row {row + 1}: the score {scores[row]} cannot be ranked; give a "
            f"finite number below 3e38 or leave the row out"
        )
    return np.asarray(scores)


def sorted_ids(ids: pa.LargeStringArray) -> pa.LargeStringArray:
    """The distinct ids: whole numbers in numerical order, then texts in alphabetical order."""
    ids = ids.unique()
    is_number = pc.match_substring_regex(ids, WHOLE_NUMBER)
    numbers, texts = ids.filter(is_number), ids.filter(pc.invert(is_number))
    numbers = numbers.take(pc.sort_indices(numbers.cast(pa.int64())))
    return pa.concat_arrays([numbers, texts.take(pc.sort_indices(texts))])


def positions(ids: pa.LargeStringArray, known: pa.LargeStringArray) -> IntArray:
    """The position of each id in `known`, -1 if it is not there."""
    found = pc.index_in(ids, value_set=known).fill_null(-1)
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


# --- the truth ------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """A part of a data set, and the names that predictions may use for its queries and labels."""

    dataset: Dataset
    part_name: str
    queries: dict[str, pa.LargeStringArray]  # column of predictions -> its name for each query
    labels: dict[str, pa.LargeStringArray]
    is_given: bool  # as a data set; False: it was made from tables
    folder: Path | None = None  # of the data set


def truth_of_dataset(dataset: Dataset, part_name: str, folder: Path | None = None) -> Truth:
    """The truth in a part of a data set; queries and labels have numbers, and maybe texts."""
    if part_name not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no {part_name} part; it has {', '.join(dataset.parts)}"
        )
    part = dataset.parts[part_name]

    def names(count: int, kind: str, strings: Strings | None) -> dict[str, pa.LargeStringArray]:
        numbers = pa.array(np.arange(count)).cast(pa.large_string())
        texts = {} if strings is None else {TEXT_OF[kind]: pa.array(strings, pa.large_string())}
        return {kind: numbers} | texts

    queries = names(len(part), "query_id", part.texts)
    labels = names(dataset.num_labels, "label_id", dataset.label_names)
    return Truth(dataset, part_name, queries, labels, is_given=True, folder=folder)


def truth_of_tables(
    truth: Source,
    train: Source | None = None,
    *,
    name: str = "truth",
    progress_fn: ProgressFn | None = None,
) -> Truth:
    """Makes a data set without features whose test part is a table of right answers.

    Args:
        train: the pairs the model was trained on, which say how frequent a label is.
    """
    tables = [read_columns(truth, "truth", progress_fn)]
    if train is not None:
        tables.append(read_columns(train, "train", progress_fn))
        if tables[1].keys != tables[0].keys:
            raise UserError(
                f"{tables[1].where} names its pairs by {' and '.join(tables[1].keys.values())}, "
                f"and {tables[0].where} by {' and '.join(tables[0].keys.values())}; use the same "
                f"columns in both"
            )
    own, keys = tables[0], tables[0].keys
    num_rows = [len(columns.table) for columns in tables]
    known, codes, texts = {}, {}, {}
    for kind, text in TEXT_OF.items():
        ids = pa.concat_arrays([columns.ids[kind] for columns in tables])
        known[kind] = sorted_ids(ids)
        codes[kind] = positions(ids, known[kind])
        shown = [  # the text where a table has one, the id elsewhere
            pc.coalesce(as_texts(columns.column(text), text, columns.where), columns.ids[kind])
            if text in columns.table.column_names
            else columns.ids[kind]
            for columns in tables
        ]
        texts[kind] = pa.concat_arrays(shown).take(np.unique(codes[kind], return_index=True)[1])
    groups = {}
    for column in own.table.column_names:
        if column not in {*TEXT_OF, *TEXT_OF.values(), *NOT_GROUPS}:
            cells = as_texts(own.column(column), column, own.where)
            rest = pa.nulls(sum(num_rows[1:]), pa.large_string())
            groups[column] = join_codes([encode(pa.concat_arrays([cells, rest]), group_name)])
    parts = make_parts(
        texts["query_id"],
        codes["query_id"],
        codes["label_id"],
        part_ids=np.repeat([PARTS.index("test"), PARTS.index("train")][: len(tables)], num_rows),
        groups=groups,
        features_fn=lambda _, query_ids: _no_features(len(query_ids)),
    )
    parts = {"train": Part(_no_features(0), _no_features(0)), **parts}
    parts["train"] = dataclasses.replace(parts["train"], groups={})
    dataset = Dataset(
        name=name,
        num_features=1,
        num_labels=len(known["label_id"]),
        parts=parts,
        label_names=Strings.from_arrow(texts["label_id"]),
        featurizer=None if "query" in own.table.column_names else TEXTS_ARE_IDS,
    )
    in_truth = known["query_id"].take(np.unique(codes["query_id"][: num_rows[0]]))
    names = {keys["query_id"]: in_truth}, {keys["label_id"]: known["label_id"]}
    return Truth(dataset, "test", *names, is_given=False)


def _no_features(num_rows: int) -> Rows:
    return Rows(np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int32))


# --- predictions ----------------------------------------------------------------------------------


class PredictedIndex:
    """Answers queries, given as row numbers, from lists of predictions."""

    def __init__(
        self, query_ids: IntArray, label_ids: IntArray, scores: Any, *, ties: IntArray, size: Any
    ) -> None:
        """Args:
        query_ids, label_ids, scores: (N,) predictions; label -1 is not in the data set.
        ties: (N,) among equal scores the lower comes first.
        size: numbers of queries and labels.
        """
        self.num_labels = size[1]
        order = np.lexsort((ties, -scores, query_ids))
        self.label_ids, self.scores = label_ids[order], scores[order].astype(np.float32)
        self.offsets = np.searchsorted(query_ids[order], np.arange(size[0] + 1))
        keys = query_ids[order] * self.num_labels + self.label_ids
        keys[self.label_ids < 0] = -1
        self.key_order = np.argsort(keys)
        self.keys = keys[self.key_order]

    def search(self, rows: Tensor, num_results: int) -> SearchResult:
        """The first R predictions of each query, -1 and -inf beyond the end of its list."""
        starts, stops = self.offsets[rows.numpy()], self.offsets[rows.numpy() + 1]
        places = starts[:, None] + np.arange(num_results)  # (Q, R)
        is_there = places < stops[:, None]
        places[~is_there] = 0
        label_ids = np.where(is_there, self.label_ids[places], -1)
        scores = np.where(label_ids >= 0, self.scores[places], np.float32(-np.inf))
        return SearchResult(torch.from_numpy(label_ids), torch.from_numpy(scores))

    def scores_of(self, rows: Tensor, label_ids: Tensor) -> Tensor:
        """Scores of any labels (Q, P), -inf where a label was not predicted."""
        keys = rows.numpy()[:, None] * self.num_labels + label_ids.numpy()  # (Q, P)
        found = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        is_there = (self.keys[found] == keys) & (label_ids.numpy() >= 0)
        scores = self.scores[self.key_order[found]]
        return torch.from_numpy(np.where(is_there, scores, np.float32(-np.inf)))


def evaluate_columns(
    predictions: Columns, truth: Truth, cutoffs: Sequence[int] = CUTOFFS
) -> "Evaluation":
    """Evaluates predictions against the truth, and counts those that could not be used."""
    scores, where = _scores(predictions), predictions.where
    known: dict[str, pa.LargeStringArray] = {}
    for kind, by_column in (("query_id", truth.queries), ("label_id", truth.labels)):
        key = predictions.keys[kind]
        if key not in by_column:
            raise UserError(
                f"{where} identifies its {TEXT_OF[kind]} by the column {key!r}, and the truth by "
                f"{' or '.join(map(repr, by_column))}; use the same column in both"
            )
        known[kind] = by_column[key]
        if len(known[kind].unique()) < len(known[kind]):
            raise UserError(
                f"several entries of the truth share one {key}; identify them in {where} by "
                f"{kind}, their number in the data set"
            )
    queries, labels = predictions.ids["query_id"], predictions.ids["label_id"]
    if truth.is_given and predictions.keys["query_id"] == "query":
        queries = encode(queries, normalize).dictionary_decode()
    query_ids = positions(queries, known["query_id"])  # (N,)
    names = sorted_ids(labels)
    name_ids = positions(labels, names)  # (N,)
    label_ids = positions(names, known["label_id"])  # (distinct labels,)
    ties = np.arange(len(names))
    if truth.is_given:  # its numbers need not be in the order of the names
        ties = np.where(label_ids >= 0, label_ids, truth.dataset.num_labels)
    for kind, ids, texts in (("query_id", query_ids, queries), ("label_id", label_ids, labels)):
        if (ids < 0).all():
            raise UserError(
                f"no {TEXT_OF[kind]} of {where} is in the truth: the first is "
                f"{texts[0].as_py()!r} here and {known[kind][0].as_py()!r} there; use the same "
                f"ids in both"
            )
    is_kept = query_ids >= 0
    query_ids, name_ids, scores = query_ids[is_kept], name_ids[is_kept], scores[is_kept]
    pairs, counts = np.unique(query_ids * len(names) + name_ids, return_counts=True)
    if (counts > 1).any():
        query, label = divmod(int(pairs[counts > 1][0]), len(names))
        raise UserError(
            f"{where} has query {known['query_id'][query].as_py()!r} with label "
            f"{names[label].as_py()!r} more than once; keep one score for each pair"
        )
    dataset, part = truth.dataset, truth.dataset.parts[truth.part_name]
    size = len(part), dataset.num_labels
    outcome = evaluate(
        torch.from_numpy,
        PredictedIndex(query_ids, label_ids[name_ids], scores, ties=ties[name_ids], size=size),
        part,
        dataset.label_counts(),
        num_results=max(cutoffs, default=0),
        cutoffs=cutoffs,
        num_train_queries=len(dataset.parts["train"]) or None,
    )
    lengths = np.bincount(query_ids, minlength=len(part))
    found = {
        "queries": len(part),
        "queries without predictions": int((lengths == 0).sum()),
        "predictions": len(scores),
        "longest list": int(lengths.max()),
        "predictions for other queries": int((~is_kept).sum()),
        "predictions of unknown labels": int((label_ids[name_ids] < 0).sum()),
    }
    min_pairs = EvaluationConfig().min_pairs
    table = score_table(outcome, dataset, truth.part_name, min_pairs=min_pairs)
    return Evaluation(found, truth, outcome, table)


# --- results --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Predictions held to the truth: scores of every subpopulation, slices, a report."""

    counts: dict[str, int]  # of queries and predictions
    truth: Truth = dataclasses.field(repr=False)
    outcome: Outcome = dataclasses.field(repr=False)
    scores: list[Score] = dataclasses.field(repr=False)

    def table(self) -> pa.Table:
        """Every score: metric, column, group, value, low, high, count; `.to_pandas()` it."""
        return pa.Table.from_pylist([dataclasses.asdict(score) for score in self.scores])

    def slices(self, **settings: Any) -> Findings:
        """The subpopulations that explain the failures: see `evaluation.find_slices`."""
        return slices_of(self.outcome, self.truth.dataset, self.truth.part_name, **settings)

    def report(self, path: str | Path, *, name: str = "predictions") -> None:
        """Writes the report: groups, slices, certificate and baselines on one page."""
        dataset, part_name = self.truth.dataset, self.truth.part_name
        baselines = evaluate_baselines(dataset, part_name, self.outcome.cutoffs)
        about: dict[str, Any] = {"predictions": self.counts, "dataset": {"name": dataset.name}}
        own = (part_name, self.scores, self.outcome)
        write_report([RunResult(name, about, "", *own, None, baselines)], dataset, Path(path))

    def notes(self) -> list[str]:
        """What a reader must know to judge the figures, a sentence each."""
        counts, longest = self.counts, self.counts["longest list"]
        without = counts["queries without predictions"]
        others = counts["predictions for other queries"]
        unknown = counts["predictions of unknown labels"]
        higher = ", ".join(f"@{cutoff}" for cutoff in self.outcome.cutoffs if cutoff > longest)
        notes = [
            f"queries without predictions: {without:,} of {counts['queries']:,}; they count as "
            f"failures"
        ]
        if others:
            notes.append(f"predictions for queries that the truth lacks: {others:,}; left out")
        if unknown:
            notes.append(
                f"predictions of labels that the truth lacks: {unknown:,} of "
                f"{counts['predictions']:,}; they count as wrong"
            )
        if higher:
            notes.append(f"the longest list has {longest}: metrics {higher} see no more than that")
        if not self.truth.dataset.label_counts().any():
            notes.append(
                "head, torso, tail and the popularity baseline are left out: they need the "
                "training pairs (--train)"
            )
        return notes

    def save(self, folder: str | Path, *, source: str = "") -> None:
        """Writes a folder that `evenhand compare`, `report` and `slices` read like a run's.

        Args:
            source: where the predictions come from, for the report.
        """
        folder = Path(folder)
        check_folder(folder, self.truth)
        if folder.exists():
            save_result(folder, self.truth.part_name, self.outcome, self.scores)
            return
        with atomic_folder(folder) as staging:
            dataset, place = self.truth.dataset, self.truth.folder
            if place is None:
                dataset, place = save_dataset(dataset, staging / "truth"), folder / "truth"
            config = build_config({"data": {"dataset": str(place)}})
            about = about_run(folder, config, dataset, torch.device("cpu"))
            about |= dict.fromkeys(("method", "seed", "device"))  # a run has these
            about |= {"predictions": {"from": source, **self.counts}, "is_complete": True}
            write_text(staging / "config.toml", f"[data]\ndataset = {toml_value(str(place))}\n")
            write_json(staging / "run.json", about)
            save_result(staging, self.truth.part_name, self.outcome, self.scores)


def check_folder(folder: Path, truth: Truth) -> None:
    """Refuses an existing folder, unless it holds predictions on the same data set."""
    if not folder.exists() and not folder.is_symlink():
        return
    if truth.is_given and (folder / "run.json").exists() and is_of_predictions(folder):
        check_trained_on(folder, truth.dataset)
        return
    raise UserError(f"{folder} exists already; choose another --run folder, or remove it first")


# --- from arrays ----------------------------------------------------------------------------------


def evaluate_predictions(
    query_ids: Sequence[Any],
    label_ids: Sequence[Any],
    scores: Sequence[float],
    *,
    truth: Any,
    groups: Mapping[str, Sequence[Any]] | None = None,
    train: Any = None,
    cutoffs: Sequence[int] = CUTOFFS,
) -> Evaluation:
    """Evaluates the predictions of any model, given as arrays of one length.

    Args:
        query_ids, label_ids, scores: (N,) one result for one query each, in any order.
        truth: the right answers: a pair of arrays (query_ids, label_ids), or a table (a path, a
            DataFrame, a pyarrow table or a dict of lists) with these columns and any columns of
            groups.
        groups: columns of groups for a pair of arrays: a value for each right answer.
        train: the pairs the model was trained on, in the form of `truth`: for head, torso and tail.

    Example:
        >>> truth = ["a", "b"], ["cat", "dog"]
        >>> found = evaluate_predictions(["a", "a"], ["dog", "cat"], [0.9, 0.1], truth=truth)
        >>> found.outcome.ranks.tolist(), found.counts["queries without predictions"]
        ([2, 0], 1)
    """
    predictions = _as_table({"query_id": query_ids, "label_id": label_ids, "score": scores})
    return evaluate_columns(
        read_columns(predictions, "the predictions"),
        truth_of_tables(
            _pairs("truth", truth, groups or {}),
            None if train is None else _pairs("train", train, {}),
        ),
        cutoffs,
    )


def _pairs(name: str, pairs: Any, groups: Mapping[str, Sequence[Any]]) -> Source:
    """A table, as it is; or a pair of arrays, as a table with columns of groups."""
    if isinstance(pairs, tuple) and len(pairs) == 2:
        return _as_table({"query_id": pairs[0], "label_id": pairs[1], **groups})
    if isinstance(pairs, tuple | list):
        raise ValueError(f"{name} must be a table or a tuple (query_ids, label_ids)")
    if groups:
        raise ValueError("groups belong to truth=(query_ids, label_ids); a table has its own")
    return pairs


def _as_table(columns: Mapping[str, Any]) -> pa.Table:
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values.tolist() if isinstance(values, Tensor) else values)
        except (pa.ArrowException, TypeError) as error:
            raise UserError(
                f"{name} cannot be read ({error}); give one value in each row, all of one type"
            ) from error
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{', '.join(columns)} must be of one length, got {lengths}")
    return pa.table(arrays)
