"""Arguments and flags that several verbs take, and what they stand for."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from evenhand.errors import UserError

if TYPE_CHECKING:
    from evenhand.data import TableOptions


def flag(help: str, *names: str, **more: Any) -> Any:
    """A flag, called as its parameter is, or by these names."""
    if "min" in more:
        more = {"metavar": "<int>", **more}
    return typer.Option(*names, help=help, **more)


def argument(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar)


RunFolder = Annotated[Path, argument("Run folder.", "RUN")]
RunFolders = Annotated[list[Path], argument("Run folders.", "RUN...")]
PartName = Literal["train", "validation", "test"]
Part = Annotated[PartName, flag("Part of the data to look at.")]
MovedData = Annotated[
    Path | None, flag("Where the data set is now, if it has moved since training.")
]
Device = Annotated[
    str | None, flag("cpu, cuda, cuda:1, ...", show_default="the GPU if there is one")
]

INDEX_VARIABLE = "EVENHAND_INDEX"  # may hold a database's address, so that no command shows it
Index = Annotated[
    str | None,
    flag(
        "exact, faiss (that of `evenhand index build`), or the address of a database.",
        envvar=INDEX_VARIABLE,
        show_envvar=False,
        show_default="faiss if it is built and the labels are many, else exact",
    ),
]


def _check_timeout(seconds: float) -> float:
    if not seconds > 0:  # nor is what is no number
        raise UserError(f"--rank-timeout must be above 0 seconds, got {seconds}")
    return seconds


RankTimeout = Annotated[
    float,
    flag(
        "Seconds that a rank waits for the others before it ends.",
        callback=_check_timeout,
    ),
]

# --- settings, as `train` and `tune` take them ----------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsFlags:
    """What `train` and `tune` were told about settings; None: not given."""

    source: Annotated[
        Path | None, argument("A table, a data set, TOML settings or a preset's name.", "[SOURCE]")
    ] = None
    data: Annotated[str | None, flag("'places', a folder made by `evenhand data`, or a table.")] = (
        None
    )
    method: Annotated[str | None, flag("Method; `evenhand --help` lists them.")] = None
    hard_labels: Annotated[int | None, flag("k: hardest labels kept for an example.")] = None
    hard_examples: Annotated[int | None, flag("k': hardest examples kept of a batch.")] = None
    encoder: Annotated[
        Path | None, flag("Folder of a transformer that reads the texts; it is fine-tuned.")
    ] = None
    freeze_encoder: Annotated[
        bool, flag("Train a linear layer over its vectors instead.", "--freeze-encoder")
    ] = False
    init_from: Annotated[
        Path | None, flag("Run whose weights to begin with; its labels keep theirs, by name.")
    ] = None
    steps: Annotated[int | None, flag("Training steps.")] = None
    learning_rate: Annotated[float | None, flag("Highest learning rate.")] = None
    assignments: Annotated[
        list[str] | None,
        flag(
            "Any setting, such as loss.name=softmax or model.embedding_dim=512; repeatable.",
            "--set",
            metavar="SECTION.KEY=VALUE",
        ),
    ] = None
    seed: int | None = None  # a flag of `train` alone: that of `tune` is the search's

    def words(self) -> list[str]:
        """The flags as assignments; those of --set have the last word."""
        from evenhand.config import toml_value

        flags = {
            "data.dataset": self.data,
            "mining.method": self.method,
            "model.encoder": None if self.encoder is None else str(self.encoder.absolute()),
            "model.input": None if self.encoder is None else "texts",
            "model.init_from": None if self.init_from is None else str(self.init_from.absolute()),
            "model.freeze_encoder": self.freeze_encoder or None,
            "mining.num_hard_labels": self.hard_labels,
            "mining.num_hard_examples": self.hard_examples,
            "training.num_steps": self.steps,
            "training.learning_rate": self.learning_rate,
            "training.seed": self.seed,
        }
        given = [f"{name}={toml_value(flag)}" for name, flag in flags.items() if flag is not None]
        return [*given, *(self.assignments or [])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """What is said of a table; None: not given."""

    query: Annotated[
        list[str] | None,
        flag(
            "Column of the queries; repeatable: joined by a space.",
            show_default="query, or none with --vectors",
        ),
    ] = None
    label: Annotated[
        str | None, flag("Column of the labels: texts, or lists.", show_default="label")
    ] = None
    group: Annotated[list[str] | None, flag("A column of groups; repeatable.")] = None
    label_separator: Annotated[str | None, flag("Between the labels of a cell, such as '|'.")] = (
        None
    )
    labels: Annotated[
        Path | None, flag("Table of the labels: id, and name, text or columns of groups.")
    ] = None
    vectors: Annotated[
        str | None, flag("Column of lists of numbers, or a .npy file, instead of text features.")
    ] = None
    split_time: Annotated[
        str | None, flag("Column of times: the latest rows are for the test.")
    ] = None
    split_entity: Annotated[
        str | None,
        flag("Column of users or such: all rows of one on a side; with --split-time, its last."),
    ] = None
    split_column: Annotated[str | None, flag("Column that says train, validation or test.")] = None
    test: Annotated[Path | None, flag("Table of the test part.")] = None
    validation: Annotated[Path | None, flag("Table of the validation part.")] = None
    test_fraction: Annotated[float | None, flag("Share of the test part.", show_default="0.2")] = (
        None
    )
    validation_fraction: Annotated[
        float | None, flag("Share of the validation part.", show_default="0.1")
    ] = None
    skip_missing: Annotated[
        bool, flag("Leave out rows with an empty query or label.", "--skip-missing")
    ] = False
    features: Annotated[
        Literal["ngrams", "words"] | None,
        flag("Of the texts: n-grams of characters, or words.", show_default="words for sentences"),
    ] = None
    num_buckets: Annotated[
        int | None,
        flag(
            "How many features they are hashed into.", show_default="2**18, fewer for small tables"
        ),
    ] = None
    min_length: Annotated[int | None, flag("Shortest n-gram.")] = None
    max_length: Annotated[int | None, flag("Longest n-gram.")] = None
    max_words: Annotated[int | None, flag("Longest run of words.")] = None

    def given(self) -> list[str]:
        """The flags that are given."""
        values = vars(self).items()
        return [
            f"--{name.replace('_', '-')}" for name, value in values if value not in (None, False)
        ]

    def options(self) -> "TableOptions":
        from evenhand.data import TableOptions

        given = {name: value for name, value in vars(self).items() if value is not None}
        if "group" in given:
            given["groups"] = given.pop("group")
        return TableOptions(**given)


def takes_flags(verb_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the flags of `SettingsFlags` and `TableFlags` in place of parameters of these types."""
    hints = get_type_hints(verb_fn, include_extras=True)
    bundles = {name: kind for name, kind in hints.items() if kind in (SettingsFlags, TableFlags)}
    fields = {
        name: [field for field in dataclasses.fields(kind) if field.name != "seed"]
        for name, kind in bundles.items()
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb_fn).parameters.values():
        new = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        if kind := bundles.get(parameter.name):
            types = get_type_hints(kind, include_extras=True)
            new = [
                new[0].replace(name=f.name, default=f.default, annotation=types[f.name])
                for f in fields[parameter.name]
            ]
        parameters += new

    @functools.wraps(verb_fn)
    def command(**given: Any) -> Any:
        for name, kind in bundles.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields[name]})
        return verb_fn(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def read_flags(
    flags: SettingsFlags,
    table: TableFlags | None = None,
    *,
    base: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """The settings that are given: those of the TOML file or preset, with the flags on top.

    Args:
        table: says which columns of a table are what; the data set made of it is then the data.
        base: settings below both.
    """
    import evenhand.config as config

    settings: Mapping[str, Any] = {}
    source, data = flags.source, flags.data
    if source is not None and source.suffix == ".toml":
        settings = config.read_settings(source)
    elif source is not None and not (source.exists() or source.suffix or str(source) == "places"):
        settings = config.read_preset(str(source))
    elif source is not None:
        if source.suffix and not source.exists():
            raise UserError(f"{source} does not exist")
        if data is not None:
            raise UserError(f"{source} and --data {data} are both data to train on; give one")
        data = str(source)
    config.check_settings(config.with_assignments(settings, flags.words()))  # tables may take long
    flags = dataclasses.replace(flags, data=_data_folder(data, table or TableFlags()))
    given = config.check_settings(config.with_assignments(settings, flags.words()))
    for section, values in (base or {}).items():
        given[section] = {**values, **given[section]}
    return given


def _data_folder(data: str | None, table: TableFlags) -> str | None:
    """The folder of a data set; that of a table is made first, unless it was made before."""
    from evenhand.cli.console import console
    from evenhand.data.table import prepare_table
    from evenhand.data.table_reader import is_table_path
    from evenhand.progress import stage_bar

    path = Path(data or "places")
    is_ours = data is None or any((path / name).exists() for name in ("dataset.json", "run.json"))
    if is_ours or not (path.is_file() or is_table_path(path)):
        if table.given():
            raise UserError(
                f"{', '.join(table.given())}: only for a table, and "
                f"{'none is named' if data is None else f'{data} is none'}; give one, such as: "
                f"evenhand train data.parquet --query title --label category"
            )
        return data
    with stage_bar(console) as advance:
        folder = prepare_table(path, table.options(), note_fn=console.print, progress_fn=advance)
    console.print(f"data set: {folder}")
    return str(folder)
