"""Evenhand from Python: train on a table, then search, evaluate, compare and report.

    run = evenhand.train(frame, query="title", label="category", groups=["country"])
    run.search(["red shoe"], 10)
    run.report()

Tables come out as pandas DataFrames where pandas is installed, and otherwise as pyarrow tables.
What a user can mend is raised as `evenhand.UserError`, in one sentence.
"""

import contextlib
import dataclasses
import html
import importlib.util
import itertools
import os
import threading
import webbrowser
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from evenhand.added_labels import add_labels
from evenhand.build import choose_device
from evenhand.cli.console import console
from evenhand.cli.search import AT_ONCE, Asked, result_rows
from evenhand.cli.train import show_results
from evenhand.config import Config, check_settings, read_preset, read_settings
from evenhand.data import Dataset, normalize
from evenhand.data.table import prepare_table, read_options
from evenhand.data.table_reader import is_path
from evenhand.errors import UserError
from evenhand.evaluation import Score
from evenhand.files import locked, read_text, write_text
from evenhand.progress import PipedConsole, stage_bar, stop_requested
from evenhand.report import write_report
from evenhand.report.headline import compare_runs, headline
from evenhand.report.page import render_charts
from evenhand.report.rendering import render
from evenhand.report.run_set import RunSet, make_run_set, open_results
from evenhand.result_tables import METRICS, main_rows, row_title, unseen_notes
from evenhand.run_folder import (
    is_evaluated,
    load_result,
    query_data_path,
    read_about,
    run_config,
)
from evenhand.run_search import load_searcher
from evenhand.runs import (
    begin_run,
    default_folder,
    evaluate_run,
    open_fitted,
    open_run_data,
    train_run,
)
from evenhand.search import Searcher

Frame = Any  # a pandas.DataFrame, or a pyarrow.Table where pandas is not installed


def train(
    source: Any,
    *,
    query: str | tuple[str, ...] | list[str] = (),
    label: str = "label",
    groups: str | tuple[str, ...] | list[str] = (),
    run: str | Path | None = None,
    method: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | str | Path | None = None,
    device: str | None = None,
    encoder: nn.Module | str | Path | None = None,
    progress: bool = True,
    **table: Any,
) -> "Run":
    """Trains a model on a table and evaluates it on the test part.

    Every setting that is not given is chosen to fit the data, as by `evenhand train`.

    Args:
        source: a pandas, polars or pyarrow table, a dict of lists, or the path of a table; or the
            folder of a data set, or "places".
        query: column of the texts, or several that are joined by a space; "query" if none is
            named, and no column where there are vectors.
        label: column of the right answers, each a text or a list of texts.
        groups: columns of subpopulations, only to look at the result.
        run: the new folder; runs/DATA-METHOD-seedN, with a number behind if it exists, if None.
        method: one of those that `evenhand --help` lists.
        settings: by name, {"training.num_steps": 500}; or a TOML file, or a preset's name.
        device: "cpu", "cuda", ...; the GPU if there is one, if None.
        encoder: a module, trained in place, from what it takes to vectors (B, D): a list of texts
            where the queries have texts, unless settings have "model.input": "features"; or the
            folder of a transformer.
        progress: False prints nothing.
        table: other fields of `evenhand.data.TableOptions`, such as split_time="day".

    Raises:
        UserError: the table, a setting or the folder will not do.
        KeyboardInterrupt: training was stopped; `evenhand train --resume --run FOLDER` continues.
    """
    own_console = _console(progress)
    if run is not None and Path(run).exists():
        raise UserError(
            f"{run} exists already; open it with evenhand.load({str(run)!r}), or give another run="
        )
    given = _read_settings(settings)
    named = {"mining": ("method", method), "training": ("seed", seed)}
    for section, (key, value) in named.items():
        if value is not None:
            given.setdefault(section, {})[key] = value
    given = check_settings(given)  # before a long table is read
    columns = {"query": query, "label": label, "groups": groups, **table}
    given["data"]["dataset"] = _data_folder(source, columns, own_console)
    own_device = choose_device(device)
    module = encoder if isinstance(encoder, nn.Module) else None
    if encoder is not None and module is None:
        given["model"]["encoder"] = str(encoder)
    own: Any = {"device": own_device, "encoder": module}
    dataset, config, choices = open_fitted(given, own_console, **own)
    for note in unseen_notes(dataset):
        own_console.print(note)
    folder = _free_folder(default_folder(config, dataset)) if run is None else Path(run)
    begin_run(folder, config, dataset, device=own_device, choices=choices)
    trained = Run(folder, device=device, encoder=module, progress=progress)
    trained.dataset = dataset
    trained.resume()
    own_console.print(f"run folder: {folder}")
    return trained


def load(
    folder: str | Path,
    *,
    data: str | Path | None = None,
    device: str | None = None,
    encoder: nn.Module | None = None,
    progress: bool = True,
) -> "Run":
    """Opens a run that was trained before, here or elsewhere; its folder alone is enough to search.

    Args:
        data: where its data set is now, if it has moved; evaluation and reports need it.
        encoder: of a run that was trained with a module of your own, such a module; it gets the
            weights of the run.
    """
    return Run(folder, data=data, device=device, encoder=encoder, progress=progress)


class Run:
    """A trained model in its folder; see `train` and `load`.

    Attributes:
        folder: what `evenhand search`, `report`, ... take.
        config: every setting.
        part: the part of the data that it is judged on, "test" if there is one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        data: str | Path | None = None,
        device: str | None = None,
        encoder: nn.Module | None = None,
        progress: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.about = read_about(self.folder)
        self.config: Config = run_config(self.folder)
        counts = self.about["dataset"].get("num_queries") or {}
        self.part = "validation" if "test" not in counts and "validation" in counts else "test"
        self._data, self._device, self._encoder = data, choose_device(device), encoder
        self._console = _console(progress)

    @cached_property
    def dataset(self) -> Dataset:
        """The data set it was trained on."""
        return open_run_data(self.folder, self._console, data=self._data)

    @cached_property
    def searcher(self) -> Searcher:
        """The model and its index, on tensors."""
        needs_data = not query_data_path(self.folder).exists()
        dataset = self.dataset if needs_data else None
        own: Any = {"device": self._device, "encoder": self._encoder}
        return load_searcher(self.folder, dataset=dataset, **own)

    def resume(self) -> "Run":
        """Trains on from the newest checkpoint, as if it had never stopped, and evaluates.

        Raises:
            KeyboardInterrupt: it was stopped again.
        """
        is_main = threading.current_thread() is threading.main_thread()  # signals are for it alone
        stopping = stop_requested() if is_main else contextlib.nullcontext(lambda: False)
        own: Any = {"device": self._device, "console": self._console, "encoder": self._encoder}
        title = f"training {self.config.mining.method}"
        with locked(self.folder), stopping as should_stop_fn:
            is_complete = train_run(
                self.folder,
                self.config,
                self.dataset,
                title=title,
                should_stop_fn=should_stop_fn,
                **own,
            )
        if not is_complete:
            again = f"evenhand train --resume --run {self.folder}"
            if self._encoder is not None:
                again = f"evenhand.load({str(self.folder)!r}, encoder=module).resume()"
            raise KeyboardInterrupt(f"stopped; continue: {again}")
        show_results(self.folder, self.dataset, **own)
        self.about = read_about(self.folder)
        return self

    def search(
        self,
        queries: Any,
        num_results: int = 10,
        *,
        without: Iterable[Iterable[str]] | None = None,
    ) -> Frame:
        """The best labels of each query: columns query, rank (from 1), label and score.

        Args:
            queries: texts in a list, an array or a column, or a single text; or features (Q, F) of
                a data set that has no texts: the column is then query_id, their row.
            without: for each query the labels that are no answer, such as items taken before.
        """
        batches = list(_batches(queries))
        num_queries = sum(map(len, batches))
        given = None if without is None else list(without)
        if given is not None and (
            len(given) != num_queries or any(isinstance(labels, str) for labels in given)
        ):
            raise UserError(
                f"without must hold a list of labels for each query: {num_queries} lists, got "
                f"{given if num_queries == 1 else len(given)}"
            )
        lists = None if given is None else [set(labels) for labels in given]
        tables, done = [], 0
        for batch in batches:
            span = slice(done, done := done + len(batch))
            ids = None if isinstance(batch, list) else list(map(str, range(span.start, done)))
            asked = Asked(batch, ids, lists and lists[span])
            tables.append(result_rows(asked, self.searcher, num_results))
        return _frame(pa.concat_tables(tables))

    def add_labels(self, labels: Any) -> int:
        """Makes new labels searchable: how many were added to the run so far.

        Args:
            labels: a table, in memory or by its path, of id, and if you like name and text.
        """
        own: Any = {"device": self._device, "encoder": self._encoder}
        count = add_labels(self.folder, labels, **own)
        self.__dict__.pop("searcher", None)
        return count

    def encode(self, queries: Any) -> NDArray[np.float32]:
        """(Q, D) vectors of queries: their product with the label vectors is the model's score."""
        batches = [self.searcher.encode(batch).cpu().numpy() for batch in _batches(queries)]
        return np.concatenate(batches)

    @property
    def scores(self) -> Frame:
        """The scores on the part it is judged on, evaluated once: see `evaluate`."""
        return self.evaluate()

    def evaluate(self, part: str | None = None) -> Frame:
        """A row for each metric and group of a column: value, low, high, count, is_judged, members.

        low and high are a 95 % interval; count is the number of pairs or queries; is_judged says
        whether they are enough; members are the groups that a row such as "worst 3" is about.

        Args:
            part: "test", "validation" or "train"; that of `self.part` if None.
        """
        scores = self._scores(part or self.part)
        rows = [vars(score) | {"members": ", ".join(score.members)} for score in scores]
        return _frame(pa.Table.from_pylist(rows))

    def compare(
        self, baseline: "Run | str | Path", *, metric: str | None = None, part: str | None = None
    ) -> "Comparison":
        """This run minus a baseline, query by query: all, head and tail, worst groups, groups.

        Args:
            metric: recall at a cut-off; None: recall@10, or recall@1 of up to 20 labels.
        """
        runs = self._open_runs(baseline, metric, part)
        comparisons = compare_runs(runs)
        rows = [
            {name: value for name, value in vars(row).items() if name in COMPARED}
            for found in comparisons
            for row in (*found.rows, *(row for group in found.groups.values() for row in group))
        ]
        return Comparison(headline(runs, comparisons), _frame(pa.Table.from_pylist(rows)))

    def report(
        self,
        baseline: "Run | str | Path | None" = None,
        *,
        path: str | Path | None = None,
        metric: str | None = None,
        part: str | None = None,
        show: bool = False,
    ) -> Path:
        """Writes the report, beside a baseline if there is one, and returns its path.

        Args:
            path: report.html in the folder if None.
            show: opens it in the browser.
        """
        runs = self._open_runs(baseline, metric, part)
        path = self.folder / "report.html" if path is None else Path(path)
        with self._console.status("writing the report"):
            write_report(runs.results, runs.dataset, path, metric=runs.metric)
        if show:
            webbrowser.open(path.resolve().as_uri())
        return path

    def plot(
        self,
        baseline: "Run | str | Path | None" = None,
        *,
        metric: str | None = None,
        part: str | None = None,
    ) -> "Chart":
        """The first picture of the report: recall by group, or who gains and who loses."""
        return Chart(render_charts(self._open_runs(baseline, metric, part)))

    def _scores(self, part: str) -> list[Score]:
        if is_evaluated(self.folder, part):
            return load_result(self.folder, part).scores
        own: Any = {"device": self._device, "console": self._console, "encoder": self._encoder}
        return evaluate_run(self.folder, self.dataset, part, **own)

    def _open_runs(
        self, baseline: "Run | str | Path | None", metric: str | None, part: str | None
    ) -> RunSet:
        """This run behind its baseline, both evaluated."""
        runs = [self]
        if baseline is not None:
            runs = [baseline if isinstance(baseline, Run) else Run(baseline, progress=False), self]
        part = part or self.part
        for run in runs:
            run._scores(part)
        if "validation" in self.dataset.parts:  # by which the first one's worst groups are chosen
            runs[0]._scores("validation")
        folders = [run.folder for run in runs]
        results = open_results(
            folders, self.dataset, part, metric=metric, device=self._device, console=self._console
        )
        return make_run_set(results, self.dataset, metric)

    def __repr__(self) -> str:
        data = self.about["dataset"].get("name")
        return f"<evenhand.Run {str(self.folder)!r}: {self.config.mining.method} on {data}>"

    def _repr_html_(self) -> str:
        """Recall by group, and the settings with their reasons."""
        is_known = is_evaluated(self.folder, self.part)
        scores = main_rows(load_result(self.folder, self.part).scores) if is_known else []
        rows: dict[str, dict[str, Score]] = {}
        for score in scores:
            rows.setdefault(row_title(score), {})[score.metric] = score
        metrics = [name for name in METRICS if any(name in row for row in rows.values())]
        settings = read_text(self.folder / "config.toml")
        return render("run.html", run=self, rows=rows, metrics=metrics, settings=settings)


COMPARED = ("metric", "group", "baseline", "contender", "difference", "low", "high", "count")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs compared; low and high of the table are a 95 % interval of the difference."""

    sentence: str  # who gains, who loses: that of the report
    table: Frame  # metric, group, baseline, contender, difference, low, high, count

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        has_html = hasattr(self.table, "to_html")
        table = self.table.to_html(index=False) if has_html else f"<pre>{self.table}</pre>"
        return f"<p>{html.escape(self.sentence)}</p>{table}"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A page that a notebook shows."""

    html: str

    def save(self, path: str | Path) -> None:
        """Writes the chart as a page that loads nothing."""
        write_text(Path(path), self.html)

    def _repr_html_(self) -> str:
        style = "width:100%;height:32rem;border:0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'


# --- helpers --------------------------------------------------------------------------------------


def _console(progress: bool) -> Console:
    return console if progress else PipedConsole(quiet=True)


def _data_folder(source: Any, columns: Mapping[str, Any], own_console: Console) -> str:
    """The folder of a data set; that of a table is made first, unless it was made before."""
    if is_path(source):
        if str(source) == "places" or (Path(source) / "dataset.json").exists():
            return str(source)
        if not Path(source).exists():
            raise UserError(f"{source} does not exist")
    options, note_fn = read_options(columns), own_console.print
    with stage_bar(own_console) as advance:
        return str(prepare_table(source, options, note_fn=note_fn, progress_fn=advance))


def _read_settings(settings: Mapping[str, Any] | str | Path | None) -> dict[str, dict[str, Any]]:
    """The sections of settings by name, of a TOML file or of a preset."""
    if isinstance(settings, str | os.PathLike):
        path = Path(settings)
        return read_settings(path) if path.suffix == ".toml" else read_preset(str(settings))
    sections: dict[str, dict[str, Any]] = {}
    for name, value in (settings or {}).items():
        section, dot, key = name.partition(".")
        if not dot:
            raise UserError(
                f"a setting is called section.key, such as training.num_steps, got {name!r}"
            )
        sections.setdefault(section, {})[key] = list(value) if isinstance(value, tuple) else value
    return sections


def _free_folder(folder: Path) -> Path:
    """The folder, or with the first number behind it that is free."""
    names = itertools.chain([folder.name], (f"{folder.name}-{n}" for n in itertools.count(2)))
    return next(path for path in map(folder.with_name, names) if not path.exists())


def _batches(queries: Any) -> Iterator[Any]:
    """Texts or rows of features, some at a time; at least one batch."""
    if isinstance(queries, str):
        queries = [queries]
    if isinstance(queries, Iterable) and not (
        isinstance(queries, np.ndarray) and queries.dtype.kind in "fiu"
    ):
        queries = queries.to_pylist() if hasattr(queries, "to_pylist") else list(queries)
        for place, text in enumerate(queries):
            if not isinstance(text, str) or not normalize(text):
                raise UserError(f"query {place} is {text!r}; it must be text, and not white space")
    for start in range(0, max(1, len(queries)), AT_ONCE):
        batch = queries[start : start + AT_ONCE]
        # A copy of what cannot be written to, which tensors do without.
        yield np.require(batch, requirements="W") if isinstance(batch, np.ndarray) else batch


def _frame(table: pa.Table) -> Frame:
    return table.to_pandas() if importlib.util.find_spec("pandas") else table
