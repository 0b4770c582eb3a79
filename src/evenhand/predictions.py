"""Any model's predictions, evaluated as a run is: from files into a run folder, or from arrays.

Predictions have a line for each result: query_id, label_id, score. The truth has a line for each
right answer: query_id, label_id and any columns of groups; or it is a data set, whose queries and
labels are then called by their numbers. The columns may also be called query and label, as in the
table of a data set: then texts and names are compared. Beside ids, they are what the ids stand for.

Ids are compared as texts, so that 7 is "7". Of equal scores the lower id comes first, as in
`search.exact`: numbers in their order, then texts in theirs.
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

TEXT_OF = {"query_id": "query", "label_id": "label"}  # what stands for an id, or in its place
UNUSED = ("rank",)  # what `evenhand search` writes and scores tell
WHOLE_NUMBER = r"^(0|-?[1-9][0-9]{0,17})$"


# --- tables ---------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The cells of a table of predictions or right answers, N of each."""

    where: str  # for errors
    keys: dict[str, str]  # "query_id" -> the column that it is read from, and so for labels
    ids: dict[str, pa.LargeStringArray]  # by "query_id" and "label_id"
    table: pa.Table


def read_columns(
    source: Source, where: str, known: Sequence[str] | None, progress_fn: ProgressFn | None
) -> Columns:
    """All of a table.

    Args:
        known: the columns it may have beside ids; None: any.
    """
    where = str(source) if is_path(source) else where
    batches = list(read_batches(source, None, progress_fn=progress_fn))
    if not sum(map(len, batches)):
        raise UserError(f"{where} has no rows; it must have a row for each (query, label) pair")
    table = pa.Table.from_batches(batches).combine_chunks()
    names = Counter(table.column_names)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise UserError(f"{where}: two columns are called {twice!r}; rename one")
    keys = {}
    for name, text in TEXT_OF.items():
        keys[name] = next((key for key in (name, text) if key in table.column_names), "")
        if not keys[name]:
            raise UserError(
                f"{where}: there is no column {name!r}, nor {text!r}; its columns are "
                f"{', '.join(map(repr, table.column_names))}; rename one"
            )
    allowed = {*TEXT_OF, *TEXT_OF.values(), *(known or table.column_names)}
    for name in table.column_names:
        if name not in allowed:
            raise UserError(
                f"{where}: a column {name!r} is not known here; leave it out: predictions have "
                f"{keys['query_id']}, {keys['label_id']} and score"
            )
    ids = {name: _id_texts(table, key, where) for name, key in keys.items()}
    return Columns(where, keys, ids, table)


def _id_texts(table: pa.Table, name: str, where: str) -> pa.LargeStringArray:
    column = _column(table, name)
    try:
        if pa.types.is_floating(column.type):  # as pandas has integers that once were missing
            column = column.cast(pa.int64())
        texts = column.cast(pa.large_string())
    except pa.ArrowException as error:
        raise UserError(
            f"{where}: column {name!r} holds {column.type}; ids must be texts or whole numbers"
        ) from error
    if texts.null_count or pc.any(pc.equal(texts, "")).as_py():
        row = int(pc.index(pc.equal(texts.fill_null(""), ""), True).as_py())
        raise UserError(f"{where}, row {row + 1}: {name} is empty; fill it or leave the row out")
    return texts


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _scores(columns: Columns) -> np.ndarray[Any, np.dtype[np.float64]]:
    if "score" not in columns.table.column_names:
        raise UserError(
            f"{columns.where}: there is no column 'score'; add one: the higher, the earlier in the "
            f"list (such as 1 / rank)"
        )
    column = _column(columns.table, "score")
    try:
        scores = column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise UserError(f"{columns.where}: column 'score' must hold numbers ({error})") from error
    is_usable = np.abs(scores) <= np.finfo(np.float32).max  # of NaN too
    if not is_usable.all():
        row = int(np.argmin(is_usable))
        raise UserError(
            f"{columns.where}, row {row + 1}: the score is {scores[row]}, by which nothing can be "
            f"ordered; give a finite number below 3e38 or leave the row out"
        )
    return np.asarray(scores)


def sorted_ids(ids: pa.LargeStringArray) -> pa.LargeStringArray:
    """The different ids: whole numbers in their order, then texts in theirs."""
    ids = ids.unique()
    is_number = pc.match_substring_regex(ids, WHOLE_NUMBER)
    numbers, texts = ids.filter(is_number), ids.filter(pc.invert(is_number))
    numbers = numbers.take(pc.sort_indices(numbers.cast(pa.int64())))
    return pa.concat_arrays([numbers, texts.take(pc.sort_indices(texts))])


def places(ids: pa.LargeStringArray, known: pa.LargeStringArray) -> IntArray:
    """Where each id stands among those that are known, -1: nowhere."""
    found = pc.index_in(ids, value_set=known).fill_null(-1)
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


# --- the truth ------------------------------------------------------------------------------------


class Truth(NamedTuple):
    """A part of a data set, and what its queries and labels are called in predictions."""

    dataset: Dataset
    part_name: str
    queries: dict[str, pa.LargeStringArray]  # by the column they may be named in
    labels: dict[str, pa.LargeStringArray]
    is_given: bool  # as a data set; False: it was made of tables
    folder: Path | None = None  # where the data set lies


def truth_of_dataset(dataset: Dataset, part_name: str, folder: Path | None = None) -> Truth:
    """The truth that a data set holds; its queries and labels have numbers, and maybe texts."""
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
    """A data set whose test part is a table of right answers; it has no features.

    Args:
        train: the pairs that the model was trained on: how frequent a label is.
    """
    tables = [read_columns(truth, "truth", None, progress_fn)]
    if train is not None:
        tables.append(read_columns(train, "train", None, progress_fn))
        if tables[1].keys != tables[0].keys:
            raise UserError(
                f"{tables[1].where} names its pairs by {' and '.join(tables[1].keys.values())}, "
                f"and {tables[0].where} by {' and '.join(tables[0].keys.values())}; name the "
                f"columns alike"
            )
    own, keys = tables[0].table, tables[0].keys
    num_lines = [len(columns.table) for columns in tables]
    known, codes, texts = {}, {}, {}
    for kind in TEXT_OF:
        ids = pa.concat_arrays([columns.ids[kind] for columns in tables])
        known[kind] = sorted_ids(ids)
        codes[kind] = places(ids, known[kind])
        texts[kind] = _texts_of(kind, tables, codes[kind])
    used = {*TEXT_OF, *TEXT_OF.values(), "score", *UNUSED}
    groups = {}
    for column in (column for column in own.column_names if column not in used):
        cells = as_texts(_column(own, column), column, tables[0].where)
        rest = pa.nulls(sum(num_lines[1:]), pa.large_string())
        groups[column] = join_codes([encode(pa.concat_arrays([cells, rest]), group_name)])
    parts = make_parts(
        texts["query_id"],
        codes["query_id"],
        codes["label_id"],
        part_ids=np.repeat([PARTS.index("test"), PARTS.index("train")][: len(tables)], num_lines),
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
        featurizer=None if TEXT_OF["query_id"] in own.column_names else TEXTS_ARE_IDS,
    )
    in_truth = known["query_id"].take(np.unique(codes["query_id"][: num_lines[0]]))
    names = {keys["query_id"]: in_truth}, {keys["label_id"]: known["label_id"]}
    return Truth(dataset, "test", *names, is_given=False)


def _texts_of(kind: str, tables: Sequence[Columns], codes: IntArray) -> pa.LargeStringArray:
    """What each query or label is called: its text where a table tells it, or else its id."""
    texts = []
    for columns in tables:
        ids = columns.ids[kind]
        text = TEXT_OF[kind]
        if text in columns.table.column_names:
            ids = pc.coalesce(as_texts(_column(columns.table, text), text, columns.where), ids)
        texts.append(ids)
    _, firsts = np.unique(codes, return_index=True)
    return pa.concat_arrays(texts).take(firsts)


def _no_features(num_rows: int) -> Rows:
    return Rows(np.zeros(num_rows + 1, np.int64), np.zeros(0, np.int32))


# --- predictions ----------------------------------------------------------------------------------


class PredictedIndex:
    """Answers the rows of a part from lists that were made beforehand; see `search.exact.Index`."""

    def __init__(
        self, query_ids: IntArray, label_ids: IntArray, scores: Any, *, ties: IntArray, size: Any
    ) -> None:
        """Args:
        query_ids, label_ids, scores: (N,) of the predictions; label -1 is none of the data set.
        ties: (N,) of equal scores the lower comes first.
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
        positions = starts[:, None] + np.arange(num_results)  # (Q, R)
        is_there = positions < stops[:, None]
        positions[~is_there] = 0
        label_ids = np.where(is_there, self.label_ids[positions], -1)
        scores = np.where(label_ids >= 0, self.scores[positions], np.float32(-np.inf))
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
    """What the predictions find of the truth, and how many of them could not be used."""
    scores, where = _scores(predictions), predictions.where
    found: dict[str, pa.LargeStringArray] = {}
    for kind, known in (("query_id", truth.queries), ("label_id", truth.labels)):
        key = predictions.keys[kind]
        if key not in known:
            raise UserError(
                f"{where} names its {TEXT_OF[kind]} by the column {key!r}, and the truth by "
                f"{' or '.join(map(repr, known))}; name both alike"
            )
        found[kind] = known[key]
        if len(found[kind].unique()) < len(found[kind]):
            raise UserError(
                f"the truth calls several by one {key}; name them in {where} by {kind}, their "
                f"number in the data set"
            )
    queries, labels = predictions.ids["query_id"], predictions.ids["label_id"]
    if truth.is_given and predictions.keys["query_id"] == "query":
        queries = encode(queries, normalize).dictionary_decode()
    query_ids = places(queries, found["query_id"])  # (N,)
    names = sorted_ids(labels)
    name_ids = places(labels, names)  # (N,)
    label_ids = places(names, found["label_id"])  # (different labels,)
    ties = np.arange(len(names))
    if truth.is_given:  # its numbers need not be in the order of the names
        ties = np.where(label_ids >= 0, label_ids, truth.dataset.num_labels)
    for kind, ids, texts in (("query_id", query_ids, queries), ("label_id", label_ids, labels)):
        if (ids < 0).all():
            raise UserError(
                f"no {TEXT_OF[kind]} of {where} is in the truth: it has {texts[0].as_py()!r}, the "
                f"truth {found[kind][0].as_py()!r}; give both the same ids"
            )
    is_kept = query_ids >= 0
    query_ids, name_ids, scores = query_ids[is_kept], name_ids[is_kept], scores[is_kept]
    pairs = query_ids * len(names) + name_ids
    in_order = np.sort(pairs)
    if (in_order[1:] == in_order[:-1]).any():
        query, label = divmod(int(in_order[1:][in_order[1:] == in_order[:-1]][0]), len(names))
        raise UserError(
            f"{where} has query {found['query_id'][query].as_py()!r} with label "
            f"{names[label].as_py()!r} more than once; keep one score for each pair"
        )
    part, dataset = truth.dataset.parts[truth.part_name], truth.dataset
    num_train_queries = len(dataset.parts["train"])
    outcome = evaluate(
        torch.from_numpy,
        PredictedIndex(
            query_ids,
            label_ids[name_ids],
            scores,
            ties=ties[name_ids],
            size=(len(part), dataset.num_labels),
        ),
        part,
        dataset.label_counts(),
        num_results=max(cutoffs),
        cutoffs=cutoffs,
        num_train_queries=num_train_queries or None,
    )
    lengths = np.bincount(query_ids, minlength=len(part))
    counts = {
        "queries": len(part),
        "queries without predictions": int((lengths == 0).sum()),
        "predictions": len(scores),
        "longest list": int(lengths.max()),
        "predictions for other queries": int((~is_kept).sum()),
        "predictions of unknown labels": int((label_ids[name_ids] < 0).sum()),
    }
    min_pairs = EvaluationConfig().min_pairs
    found_scores = score_table(outcome, dataset, truth.part_name, min_pairs=min_pairs)
    return Evaluation(truth, outcome, found_scores, counts)


# --- what is found --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Predictions held to the truth: scores of every subpopulation, and what else a run has."""

    truth: Truth
    outcome: Outcome
    scores: list[Score]
    counts: dict[str, int]  # of queries and predictions

    def table(self) -> pa.Table:
        """Every score: metric, column, group, value, low, high, count; `.to_pandas()` it."""
        return pa.Table.from_pylist([dataclasses.asdict(score) for score in self.scores])

    def slices(self, **settings: Any) -> Findings:
        """The subpopulations that explain the failures: see `evaluation.find_slices`."""
        return slices_of(self.outcome, self.truth.dataset, self.truth.part_name, **settings)

    def report(self, path: str | Path, *, name: str = "predictions") -> None:
        """Writes one page: whom the predictions serve, the slices and the certificate."""
        dataset, part_name = self.truth.dataset, self.truth.part_name
        baselines = evaluate_baselines(dataset, part_name, self.outcome.cutoffs)
        about: dict[str, Any] = {"predictions": self.counts, "dataset": {"name": dataset.name}}
        own = (part_name, self.scores, self.outcome)
        write_report([RunResult(name, about, "", [], *own, None, baselines)], dataset, Path(path))

    def notes(self) -> list[str]:
        """What there is to know before the figures are read."""
        counts, cutoffs = self.counts, self.outcome.cutoffs
        without, longest = counts["queries without predictions"], counts["longest list"]
        others, unknown = (
            counts[f"predictions {which}"] for which in ("for other queries", "of unknown labels")
        )
        higher = ", ".join(f"@{cutoff}" for cutoff in cutoffs if cutoff > longest)
        notes = {
            f"queries without predictions: {without:,} of {counts['queries']:,}; they count as "
            f"failures": True,
            f"predictions for queries that the truth does not have: {others:,}; they are left "
            f"out": others,
            f"predictions of labels that the truth does not have: {unknown:,} of "
            f"{counts['predictions']:,}; they count as wrong": unknown,
            f"the longest list has {longest}: metrics {higher} see no more than that": higher,
            "head, torso and tail are left out: they need the training pairs (--train)":
                not self.truth.dataset.label_counts().any(),
        }  # fmt: skip
        return [note for note, is_so in notes.items() if is_so]

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
            about |= dict.fromkeys(("method", "seed", "device"))  # those of a run
            about |= {"predictions": {"from": source, **self.counts}, "is_complete": True}
            write_text(staging / "config.toml", f"[data]\ndataset = {toml_value(str(place))}\n")
            write_json(staging / "run.json", about)
            save_result(staging, self.truth.part_name, self.outcome, self.scores)


def check_folder(folder: Path, truth: Truth) -> None:
    """Refuses a folder that is there, but for other predictions on a part of the same data set."""
    if not folder.exists() and not folder.is_symlink():
        return
    if truth.is_given and (folder / "run.json").exists() and is_of_predictions(folder):
        check_trained_on(folder, truth.dataset)
        return
    raise UserError(f"{folder} exists already; choose another --run folder, or remove it first")


# --- from files, and from arrays ------------------------------------------------------------------

PREDICTION_COLUMNS = ("score", *UNUSED)


def read_predictions(path: Path, progress_fn: ProgressFn | None = None) -> Columns:
    """A file of predictions."""
    return read_columns(path, "predictions", PREDICTION_COLUMNS, progress_fn)


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
        query_ids, label_ids, scores: (N,) one result of one query each, in any order.
        truth: the right answers: (query_ids, label_ids), or a table (a path, a DataFrame, a
            pyarrow table or a dict of lists) with these columns and any columns of groups.
        groups: columns of groups, with a value for each right answer.
        train: the pairs that the model was trained on, as `truth`: for head, torso and tail.

    Example:
        >>> truth = ["a", "b"], ["cat", "dog"]
        >>> found = evaluate_predictions(["a", "a"], ["dog", "cat"], [0.9, 0.1], truth=truth)
        >>> found.outcome.ranks.tolist(), found.counts["queries without predictions"]
        ([2, 0], 1)
    """
    predictions = {"query_id": query_ids, "label_id": label_ids, "score": scores}
    return evaluate_columns(
        read_columns(_as_table(predictions), "the predictions", PREDICTION_COLUMNS, None),
        truth_of_tables(_pairs(truth, groups), None if train is None else _pairs(train, None)),
        cutoffs,
    )


def _pairs(pairs: Any, groups: Mapping[str, Sequence[Any]] | None) -> Any:
    if isinstance(pairs, tuple):
        pairs = _as_table({"query_id": pairs[0], "label_id": pairs[1]})
    for name, values in (groups or {}).items():
        if is_path(pairs) or hasattr(pairs, "iloc") or isinstance(pairs, Mapping):
            pairs = pa.Table.from_batches(read_batches(pairs, None))
        pairs = pairs.append_column(name, _as_array(name, values))
    return pairs


def _as_table(columns: Mapping[str, Any]) -> pa.Table:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{', '.join(columns)} must be of one length, got {lengths}")
    return pa.table({name: _as_array(name, values) for name, values in columns.items()})


def _as_array(name: str, values: Any) -> pa.Array:
    try:
        return pa.array(values.tolist() if isinstance(values, Tensor) else values)
    except pa.ArrowException as error:
        raise UserError(f"{name} cannot be read ({error}); make all values of one type") from error
