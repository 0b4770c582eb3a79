"""`evenhand data`: prepares data sets and looks at them."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from evenhand.cli.options import TableFlags, argument, flag, takes_flags

if TYPE_CHECKING:
    from evenhand.data import Dataset

Out = Annotated[Path | None, flag("Folder to write.", show_default="datasets/NAME")]
Folder = Annotated[Path, argument("Folder of the data set.", "FOLDER")]
ValidationFraction = Annotated[float, flag("Share of the training rows.")]
ValidationBlock = Annotated[int, flag("Rows that are split together.")]
LabelNames = Annotated[Path | None, flag("File with a name a line.")]
Train = Annotated[Path, flag("Training part: a file, or archive.zip/member.")]
Name = Annotated[str | None, flag("Name of the data set.", show_default="the folder of --train")]

# --- prepare --------------------------------------------------------------------------------------


def places(
    min_population: Annotated[int, flag("Smallest population of a city.")] = 15000,
    num_buckets: Annotated[int, flag("Number of hash buckets for n-grams.")] = 2**18,
    out: Out = None,
) -> None:
    """Cities by their names, from GeoNames (CC BY 4.0)."""
    from evenhand.cli.console import console
    from evenhand.config import DataConfig
    from evenhand.data import load_places

    DataConfig(min_population=min_population, num_buckets=num_buckets)  # checks both
    with console.status("preparing places"):
        dataset = load_places(min_population=min_population, num_buckets=num_buckets)
    _save(dataset, out)


def extreme(
    train: Train,
    test: Annotated[Path, flag("The same for the test part.")],
    name: Name = None,
    label_names: LabelNames = None,
    train_groups: Annotated[Path | None, flag("TSV: id, group; a line a document.")] = None,
    test_groups: Annotated[Path | None, flag("The same for the test part.")] = None,
    validation_block: ValidationBlock = 1,
    validation_fraction: ValidationFraction = 0.1,
    out: Out = None,
) -> None:
    """The Extreme Classification text format."""
    from evenhand.cli.console import console
    from evenhand.data import load_extreme
    from evenhand.progress import stage_bar

    with stage_bar(console) as advance:
        dataset = load_extreme(
            train,
            test,
            name=name or _name_of_folder(train),
            label_names_path=label_names,
            train_groups_path=train_groups,
            test_groups_path=test_groups,
            validation_fraction=validation_fraction,
            validation_block=validation_block,
            progress_fn=advance,
        )
    _save(dataset, out)


def stream(
    train: Train,
    test: Annotated[Path | None, flag("The same for the test part.")] = None,
    name: Name = None,
    label_names: LabelNames = None,
    seed: Annotated[int, flag("Seed of the shuffle.")] = 0,
    memory: Annotated[int, flag("Memory to use, in megabytes, about.", min=64)] = 512,
    validation_block: ValidationBlock = 1,
    validation_fraction: ValidationFraction = 0.1,
    out: Out = None,
) -> None:
    """The same format, of any size, in bounded memory, shuffled."""
    from evenhand.cli.console import console
    from evenhand.data.stream import stream_extreme
    from evenhand.progress import stage_bar

    name = name or _name_of_folder(train)
    folder = out or Path("datasets") / name
    with stage_bar(console) as advance:
        dataset = stream_extreme(
            train,
            folder,
            name=name,
            test_path=test,
            label_names_path=label_names,
            validation_fraction=validation_fraction,
            validation_block=validation_block,
            seed=seed,
            memory_bytes=memory * 2**20,
            progress_fn=advance,
        )
    _show(dataset, folder)


@takes_flags
def table(
    table: Annotated[Path, argument("CSV, JSON lines, Parquet or Arrow, or a folder.", "TABLE")],
    flags: TableFlags,
    name: Annotated[str | None, flag("Name of the data set.", show_default="that of TABLE")] = None,
    out: Out = None,
) -> None:
    """A table of queries and labels."""
    from evenhand.cli.console import console
    from evenhand.data.table import load_table, table_name
    from evenhand.progress import stage_bar

    name = name or table_name(table)
    folder = out or Path("datasets") / name
    with stage_bar(console) as advance:
        dataset = load_table(
            table,
            flags.options(),
            name=name,
            folder=folder,
            note_fn=console.print,
            progress_fn=advance,
        )
    _show(dataset, folder)


# --- look -----------------------------------------------------------------------------------------


def show(folder: Folder) -> None:
    """What a prepared data set holds: parts, repeats, rare labels, groups."""
    from evenhand.data import open_dataset
    from evenhand.data.dataset import check_all_ids

    dataset = open_dataset(folder)
    check_all_ids(dataset, folder)
    _show(dataset)
    _show_overview(dataset)


def check(folder: Folder) -> None:
    """Compare all of a data set with its fingerprint, as after a copy."""
    from evenhand.cli.console import console
    from evenhand.data.dataset import check_content
    from evenhand.progress import stage_bar

    with stage_bar(console) as advance:
        check_content(folder, progress_fn=advance)
    console.print(f"{folder}: all is as it was written")


# --- helpers --------------------------------------------------------------------------------------


def _name_of_folder(path: Path) -> str:
    from evenhand.errors import without_controls

    return without_controls(path.resolve().parent.name)


def _save(dataset: "Dataset", out: Path | None) -> None:
    from evenhand.data import save_dataset

    folder = out or Path("datasets") / dataset.name
    _show(save_dataset(dataset, folder), folder)


def _show(dataset: "Dataset", written_to: Path | None = None) -> None:
    from evenhand.cli.console import console
    from evenhand.result_tables import group_notes, parts_table, unseen_notes

    console.print(parts_table(dataset))
    columns = ", ".join(f"{name} ({len(g.names)})" for name, g in dataset.label_groups.items())
    console.print(
        f"{dataset.num_labels:,} labels, {dataset.num_features:,} features"
        + (f"; labels are grouped by {columns}" if columns else "")
    )
    for note in (*group_notes(dataset), *unseen_notes(dataset)):
        console.print(note)
    if dataset.attribution:
        console.print(dataset.attribution)
    if written_to is not None:
        console.print(
            f"written to {written_to}; train on it with: "
            f"evenhand train --data {shlex.quote(str(written_to))}"
        )


def _show_overview(dataset: "Dataset") -> None:
    """What is worth knowing before training, as tables."""
    from rich.table import Table
    from rich.text import Text

    from evenhand.cli.console import console
    from evenhand.data import overview

    if dataset.is_read_in_blocks:
        console.print("repeated queries are not looked for: the data may be larger than memory")
    else:
        table = Table("part", "repeated queries", "queries that train too", "pairs that train too")
        for row in overview.find_repeats(dataset):
            leaks = [f"{count:,}" for count in (row.queries_in_train, row.pairs_in_train)]
            table.add_row(
                row.part, f"{row.within:,}", *(["–"] * 2 if row.part == "train" else leaks)
            )
        console.print(table)
    frequencies = overview.label_frequencies(dataset)
    most = max(bin.num_labels for bin in frequencies)
    num_pairs = sum(bin.num_pairs for bin in frequencies)
    table = Table("training pairs of a label", "labels", "", "share of the pairs")
    for bin in frequencies:
        bar = "█" * max(1, round(30 * bin.num_labels / most))
        table.add_row(bin.counts, f"{bin.num_labels:,}", bar, f"{bin.num_pairs / num_pairs:.1%}")
    console.print(table)
    if groups := overview.group_sizes(dataset):
        table = Table("groups by", "number", "largest, in training pairs", "smallest", "in none")
        for sizes in groups:
            largest, smallest = (
                Text(", ".join(f"{name} {count:,}" for name, count in named) or "–")
                for named in (sizes.largest, sizes.smallest)
            )
            table.add_row(
                Text(sizes.column),
                f"{sizes.num_groups:,}",
                largest,
                smallest,
                f"{sizes.num_without:,}",
            )
        console.print(table)
    console.print(Text(f"what to expect of mining: {overview.mining_outlook(dataset)}"))
