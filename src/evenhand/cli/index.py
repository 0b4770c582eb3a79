"""`evenhand index`: faster search than exact search, and what it costs whom."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from evenhand.cli import options
from evenhand.cli.options import flag
from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data import Dataset
    from evenhand.search import Searcher
    from evenhand.search.index_quality import GroupRecall

ADDRESS = options.INDEX_VARIABLE
WORST_SHOWN = 5  # groups of a column

Target = Annotated[float, flag("Share of exact search's first 10 that each group is to have.")]


def build(
    run: options.RunFolder,
    kind: Annotated[
        Literal["flat", "hnsw", "ivf", "ivf-pq"] | None,
        flag("Kind of index.", show_default="by the number of labels"),
    ] = None,
    effort: Annotated[
        int | None,
        flag(
            "efSearch or nprobe: more finds more, and takes longer.",
            min=1,
            show_default="the least that reaches --target in every group",
        ),
    ] = None,
    target: Target = 0.99,
    part: options.Part = "validation",
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Build a FAISS index into a run folder, tuned by the group that fares worst."""
    from evenhand.cli.console import console
    from evenhand.progress import stage_bar
    from evenhand.run_search import Judge, build_run_index, index_file

    _check_target(target)
    searcher, dataset = _open(run, data, device)
    with stage_bar(console) as advance:
        judge = Judge(searcher, dataset, part, progress_fn=advance)
        index, rows = build_run_index(run, searcher, judge, kind=kind, effort=effort, target=target)
    _print_recalls(rows, f"{index.name}, {part} queries")
    for line in _warnings(rows, target):
        console.print(line)
    size = index_file(run).stat().st_size / 1e6
    console.print(f"written to {index_file(run).parent}: {len(index):,} labels, {size:,.1f} MB")
    console.print(f"ask it: evenhand search {run} QUERY --index faiss")


def check(
    run: options.RunFolder,
    index: Annotated[
        str,
        flag(
            "faiss, the index of the run; or the address of a database.",
            envvar=ADDRESS,
            show_envvar=False,
        ),
    ] = "faiss",
    effort: Annotated[
        int | None,
        flag("Another efSearch, ef_search or nprobe.", min=1, show_default="that of the index"),
    ] = None,
    target: Target = 0.98,
    strict: Annotated[bool, flag("Fail if there is a warning.", "--strict")] = False,
    part: options.Part = "test",
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Measure what an index misses, by group, and warn where one group pays more than the rest."""
    from evenhand.cli.console import console
    from evenhand.progress import stage_bar
    from evenhand.run_search import Judge, exact_of, open_index, stored_as
    from evenhand.search.index_quality import recall_by_group

    _check_target(target)
    searcher, dataset = _open(run, data, device)
    found = open_index(run, index, stored_as(run, exact_of(searcher)))
    if found is None:
        raise UserError("--index exact misses nothing; name faiss or the address of a database")
    if effort is not None:
        found.set_effort(effort)
    with stage_bar(console) as advance:
        judge = Judge(searcher, dataset, part, progress_fn=advance)
        rows = recall_by_group(judge.recalls(found, "the index (queries)"), judge.groups)
    _print_recalls(rows, f"{found.name}, {part} queries")
    warnings = _warnings(rows, target)
    for line in warnings or ["no group pays more than the rest, and all reach the target"]:
        console.print(line)
    if warnings and strict:
        raise UserError(
            f"{len(warnings)} warnings about the index; give it more --effort, or build it again"
        )


def push(
    run: options.RunFolder,
    to: Annotated[
        str,
        flag(
            f"postgresql://..., a file that ends in .db, or http://...; or set {ADDRESS}.",
            envvar=ADDRESS,
            show_envvar=False,
        ),
    ],
    part: options.Part = "test",
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Load a run's labels into PostgreSQL or Milvus, and compare a sample with exact search."""
    from evenhand.cli.console import console
    from evenhand.progress import stage_bar
    from evenhand.run_search import Judge, push_run
    from evenhand.search import HybridIndex
    from evenhand.search.index_quality import recall_by_group

    searcher, dataset = _open(run, data, device)
    with stage_bar(console) as advance:
        index = push_run(run, searcher, to, dataset=dataset, progress_fn=advance)
        judge = Judge(searcher, dataset, part, by_group=False, progress_fn=advance)
        (row,) = recall_by_group(judge.recalls(index, "a sample (queries)"), judge.groups)
    console.print(f"{len(index):,} labels are in {index}")
    console.print(
        f"of exact search's first 10 it finds {row.recall:.2%} ({row.num_queries:,} {part} "
        f"queries); by group: evenhand index check {run} --index ADDRESS"
    )
    if isinstance(searcher.index, HybridIndex):
        console.print(
            "a database alone answers with the model's vectors only; what this run adds to them, "
            "votes or a ranker, is added to its candidates by: "
            f"evenhand search {run} QUERY --index ADDRESS"
        )


def _open(run: Path, data: Path | None, device: str | None) -> "tuple[Searcher, Dataset]":
    """The run with exact search, and its data set."""
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.run_search import load_searcher
    from evenhand.runs import open_run_data

    dataset = open_run_data(run, console, data=data)
    return load_searcher(run, device=choose_device(device), dataset=dataset), dataset


def _check_target(target: float) -> None:
    if not 0 < target <= 1:
        raise UserError(f"--target must be above 0 and at most 1, got {target}")


def _print_recalls(rows: "list[GroupRecall]", title: str) -> None:
    """A table of all queries and of the groups that fare worst in every column."""
    from rich.table import Table

    from evenhand.cli.console import console

    table = Table(
        "group", "queries", "recall@10", "the others", title=title, title_justify="left", box=None
    )
    columns: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row.recall):
        columns.setdefault(row.column, []).append(row)
    for column in dict.fromkeys(row.column for row in rows):
        for row in columns[column][:WORST_SHOWN]:
            rest = "" if row.rest != row.rest else f"{row.rest:.4f}"  # NaN: nobody else
            table.add_row(row.title, f"{row.num_queries:,}", f"{row.recall:.4f}", rest)
    console.print(table)


def _warnings(rows: "list[GroupRecall]", target: float) -> list[str]:
    from evenhand.search.index_quality import worst_recall

    failed = sorted((row for row in rows if row.is_failed), key=lambda row: row.recall - row.rest)
    lines = [
        f"warning: the index costs {row.title} more than the rest: recall {row.recall:.3f} against "
        f"{row.rest:.3f}"
        for row in failed
    ]
    worst = worst_recall(rows)
    if worst.recall < target:
        lines.append(
            f"warning: {worst.title} has recall {worst.recall:.3f}, below the target {target}"
        )
    return lines
