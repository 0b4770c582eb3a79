"""`evenhand search`."""

from typing import Annotated

from evenhand.cli import options
from evenhand.cli.options import argument, choose_device, flag
from evenhand.errors import UserError


def search(
    run: options.RunFolder,
    queries: Annotated[list[str], argument("What to look for, in quotes.", "QUERY...")],
    results: Annotated[int, flag("Number of labels to show.", min=1)] = 5,
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Ask a trained model."""
    from rich.table import Table
    from rich.text import Text

    from evenhand.cli.console import console
    from evenhand.data import normalize
    from evenhand.runs import load_searcher, open_run_data, query_data_path

    for query in queries:
        if not normalize(query):
            raise UserError(f"a query must hold more than white space, got {query!r}")
    needs_data = data is not None or not query_data_path(run).exists()
    dataset = open_run_data(run, console, data=data) if needs_data else None
    searcher = load_searcher(run, device=choose_device(device), dataset=dataset)
    found = searcher.search(queries, results)
    for query, ids, scores in zip(
        queries, found.label_ids.tolist(), found.scores.tolist(), strict=True
    ):
        table = Table("score", "label", title=Text(f"“{query}”"), title_justify="left", box=None)
        for name, score in zip(searcher.label_names(ids), scores, strict=True):
            table.add_row(f"{score:.3f}", Text(name))
        console.print(table)
