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
    from evenhand.data import featurizer_from, normalize
    from evenhand.evaluation import check_scores
    from evenhand.models.encoders import bags_of
    from evenhand.pipeline import label_index, open_run_data
    from evenhand.saved_models import load_model, run_config

    for query in queries:
        if not normalize(query):
            raise UserError(f"a query must hold more than white space, got {query!r}")
    config = run_config(run)
    dataset = open_run_data(run, console, data=data)
    featurizer = featurizer_from(dataset.featurizer)
    own_device = choose_device(device)
    model = load_model(run, dataset, device=own_device)
    index = label_index(model, dataset, config)  # texts have no values
    bags = bags_of(featurizer.featurize(queries), device=own_device)
    found = index.search(model.query_vectors(bags), results)
    check_scores(found.label_ids, found.scores)
    for query, ids, scores in zip(
        queries, found.label_ids.tolist(), found.scores.tolist(), strict=True
    ):
        table = Table("score", "label", title=Text(f"“{query}”"), title_justify="left", box=None)
        for label_id, score in zip(ids, scores, strict=True):
            table.add_row(f"{score:.3f}", Text(dataset.label_name(label_id)))
        console.print(table)
