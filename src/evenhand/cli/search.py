"""`evenhand search`: a few queries for people, or as many as a file holds for other programs."""

import contextlib
import json as json_format
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from evenhand.cli import options
from evenhand.cli.options import argument, flag
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.files import ProgressFn
    from evenhand.search import Searcher

AT_ONCE = 1024  # queries, and what is found for them, in memory
WRITTEN = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


class Asked(NamedTuple):
    queries: list[str]
    ids: list[str] | None = None  # where the table has a column query_id
    without: list[set[str]] | None = None  # names of labels that are no answer


def search(
    run: options.RunFolder,
    queries: Annotated[
        list[str] | None,
        argument("What to look for, in quotes; '-': the lines of standard input.", "[QUERY...]"),
    ] = None,
    results: Annotated[int, flag("Number of labels to show.", min=1)] = 5,
    input: Annotated[
        Path | None, flag("File of queries: one a line, or a table; '-': standard input.")
    ] = None,
    query: Annotated[
        str | None,
        flag(
            "Column of the queries in --input.",
            show_default="the only one, or those of the table that the run was trained on",
        ),
    ] = None,
    without: Annotated[
        str | None,
        flag("Column of labels that are no answer: lists, or texts such as 'a|b'; with --input."),
    ] = None,
    output: Annotated[
        Path | None, flag(f"File to write, a line a result: {', '.join(WRITTEN)}.")
    ] = None,
    json: Annotated[bool, flag("Write JSON, a line a result.", "--json")] = False,
    index: options.Index = None,
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Ask a trained model."""
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.progress import stage_bar
    from evenhand.run_folder import query_data_path, read_about
    from evenhand.run_search import load_searcher
    from evenhand.runs import open_run_data

    if queries and input:
        raise UserError(f"queries come as words or from --input, got both ({input})")
    if output is not None and output.suffix not in WRITTEN and not json:
        raise UserError(
            f"--output {output}: the ending must be {', '.join(WRITTEN)}; or add --json"
        )
    if output and input and output.exists() and input.exists() and output.samefile(input):
        raise UserError(f"--output {output} is the file of the queries; name another")
    if not queries and input is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("name a query, such as 'evenhand search RUN \"Wien\"', or --input FILE")
        input = Path("-")
    needs_data = data is not None or not query_data_path(run).exists()
    dataset = open_run_data(run, console, data=data) if needs_data else None
    searcher = load_searcher(run, device=choose_device(device), dataset=dataset, index=index)
    if not searcher.index.name.startswith("exact"):
        print(f"evenhand: answers of {searcher.index.name}", file=sys.stderr)
    num_found, num_blank = 0, 0
    with contextlib.ExitStack() as stack:
        advance: ProgressFn = lambda name, done, total: None  # noqa: E731
        if output is not None:
            advance = stack.enter_context(stage_bar(console))
        if output is not None or json:
            write_fn = stack.enter_context(_open_output(output, as_json=json))
        else:
            write_fn = _print_tables
        trained_on = read_about(run)["dataset"].get("query_columns")
        asked = _read_queries(queries or [], input, query, without, trained_on, advance)
        for batch in asked:
            kept, blank = _without_blank(batch)
            if blank and queries and "-" not in queries:
                raise UserError("a query must hold more than white space, got ''")
            num_blank += blank
            if kept.queries:
                write_fn(kept, searcher, results)
                num_found += len(kept.queries)
        if not num_found:
            where = "standard input" if input in (None, Path("-")) else input
            raise UserError(f"{where} holds no query; write one a line")
    if num_blank:
        print(f"evenhand: blank queries, left out: {num_blank:,}", file=sys.stderr)
    if output is not None:
        noun = "query" if num_found == 1 else "queries"
        console.print(f"{num_found:,} {noun} answered: {output}")


# --- queries --------------------------------------------------------------------------------------


def _read_queries(
    words: Sequence[str],
    path: Path | None,
    column: str | None,
    without: str | None,
    trained_on: Any,
    advance: "ProgressFn",
) -> Iterator[Asked]:
    """Queries, a batch at a time: of the command line, of lines or of a table.

    Args:
        column: of a table; None: its only one, or else those that the run was trained on.
        without: column of a table, with labels that are no answer.
    """
    from evenhand.data.table_cells import as_label_lists, as_texts, join_texts
    from evenhand.data.table_reader import find_column, is_table_path, read_batches
    from evenhand.data.text_io import read_lines

    if without is not None and (path is None or not is_table_path(path)):
        raise UserError(f"--without {without}: only for a table in --input")
    if str(path) == "-" or list(words) == ["-"]:
        yield from _in_batches(_standard_input(), advance)
    elif path is None:
        yield Asked(list(words))
    elif not is_table_path(path):
        yield from _in_batches(read_lines(path), advance)
    else:
        columns = None if column is None else [column]
        for rows in read_batches(path, None, progress_fn=advance):
            names = rows.schema.names
            if columns is None:
                columns = names if len(names) == 1 else list(trained_on or ["query"])
                if columns not in (names, ["query"]):
                    shown = ", ".join(columns)
                    print(f"evenhand: queries: {shown} of {path}, as in training", file=sys.stderr)
            for name in columns:
                if name not in names:
                    raise UserError(
                        f"{path}: there is no column {name!r}; name one of "
                        f"{', '.join(map(repr, names[:20]))} with --query"
                    )
            where = str(path)
            texts = join_texts([as_texts(rows[name], name, where) for name in columns])
            ids: list[str] | None = None
            lists: list[set[str]] | None = None
            if "query_id" in names:
                ids = as_texts(rows["query_id"], "query_id", where).fill_null("").to_pylist()
            if without is not None:
                lists = as_label_lists(rows[find_column(without, names, where)], without, where)
            for start in range(0, len(rows), AT_ONCE):
                span = slice(start, start + AT_ONCE)
                yield Asked(texts[span].to_pylist(), ids and ids[span], lists and lists[span])


def _in_batches(lines: Iterator[str], advance: "ProgressFn") -> Iterator[Asked]:
    done = 0
    while batch := list(islice(lines, AT_ONCE)):
        yield Asked(batch)
        done += len(batch)
        advance("queries", done, None)


def _standard_input() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"standard input, line {number}: is not UTF-8 text") from error


def _without_blank(batch: Asked) -> tuple[Asked, int]:
    """The queries that say something, and how many do not."""
    from evenhand.data.text import normalize

    kept = [place for place, text in enumerate(batch.queries) if normalize(text)]
    texts = [batch.queries[place] for place in kept]
    ids = batch.ids and [batch.ids[place] for place in kept]
    without = batch.without and [batch.without[place] for place in kept]
    return Asked(texts, ids, without), len(batch.queries) - len(kept)


# --- answers --------------------------------------------------------------------------------------

WriteFn = Callable[[Asked, "Searcher", int], None]


def _print_tables(asked: Asked, searcher: "Searcher", num_results: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from evenhand.cli.console import console

    found = searcher.search(asked.queries, num_results)
    for query, ids, scores in zip(
        asked.queries, found.label_ids.tolist(), found.scores.tolist(), strict=True
    ):
        table = Table("score", "label", title=Text(f"“{query}”"), title_justify="left", box=None)
        ids = [label_id for label_id in ids if label_id >= 0]  # an index may find fewer
        for name, score in zip(searcher.label_names(ids), scores, strict=False):
            table.add_row(f"{score:.3f}", Text(name))
        console.print(table)


@contextlib.contextmanager
def _open_output(path: Path | None, *, as_json: bool) -> Iterator[WriteFn]:
    """Writes a row a result, to a file that is there once it is whole, or to standard output."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    from evenhand.files import atomic_path

    def json_lines(rows: Any) -> str:
        lines = (json_format.dumps(row, ensure_ascii=False) for row in rows.to_pylist())
        return "".join(f"{line}\n" for line in lines)

    if path is None:
        yield lambda *asked: print(json_lines(result_rows(*asked)), end="")
        return
    writers: list[Any] = []
    with atomic_path(path) as staging, open(staging, "wb") as file, contextlib.ExitStack() as stack:

        def write(asked: Asked, searcher: "Searcher", num_results: int) -> None:
            rows = result_rows(asked, searcher, num_results)
            if as_json or path.suffix in (".jsonl", ".ndjson"):
                file.write(json_lines(rows).encode())
                return
            if not writers:  # the columns are known now
                if path.suffix == ".parquet":
                    writer = pa.parquet.ParquetWriter(file, rows.schema)
                else:
                    delimiter = "\t" if path.suffix == ".tsv" else ","
                    settings = pa.csv.WriteOptions(delimiter=delimiter)
                    writer = pa.csv.CSVWriter(file, rows.schema, write_options=settings)
                writers.append(stack.enter_context(writer))
            writers[0].write_table(rows)

        yield write


def result_rows(asked: Asked, searcher: "Searcher", num_results: int) -> Any:
    """A pyarrow table: query_id, where there are ids; query, rank, label and score."""
    import numpy as np
    import pyarrow as pa

    num_without = max(map(len, asked.without or []), default=0)
    found = searcher.search(asked.queries, num_results + num_without)
    label_ids, scores = found.label_ids.cpu().numpy(), found.scores.float().cpu().numpy()
    places, columns = np.nonzero(label_ids >= 0)
    names = searcher.label_names(label_ids[places, columns].tolist())
    if asked.without is not None:
        pairs = zip(places.tolist(), names, strict=True)
        kept = [n for n, (place, name) in enumerate(pairs) if name not in asked.without[place]]
        places, columns, names = places[kept], columns[kept], [names[n] for n in kept]
    ranks = np.arange(len(places)) - np.searchsorted(places, places)
    is_shown = ranks < num_results
    texts = {"query_id": asked.ids, "query": asked.queries}
    table = pa.table({name: cells for name, cells in texts.items() if isinstance(cells, list)})
    table = table.take(places)
    for name, cells in {
        "rank": ranks + 1,
        "label": names,
        "score": scores[places, columns],
    }.items():
        table = table.append_column(name, pa.array(cells))
    return table.filter(is_shown)
