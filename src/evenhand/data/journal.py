"""How far the conversion of a large text has come: what `journal.json` says."""

import dataclasses
from pathlib import Path
from typing import Any

from evenhand.data.spool import Sizes
from evenhand.errors import UserError
from evenhand.files import read_json, write_json

JOURNAL = "journal.json"


@dataclasses.dataclass
class Source:
    """How far a text was read."""

    end: int = 0  # bytes of its text
    line: int = 1  # the number of the next line
    rows: int = 0
    is_read: bool = False


@dataclasses.dataclass
class Journal:
    """What is done and on disk."""

    settings: dict[str, Any]
    num_shards: int = 0  # of the training part; 0: not known yet
    sources: dict[str, Source] = dataclasses.field(default_factory=dict)
    shards: dict[str, list[Sizes]] = dataclasses.field(default_factory=dict)  # by part
    num_written: dict[str, int] = dataclasses.field(default_factory=dict)  # shards, by part

    def parts(self) -> list[str]:
        return [part for part, shards in self.shards.items() if total_of(shards).rows]


def total_of(shards: list[Sizes]) -> Sizes:
    return Sizes(*map(sum, zip(*shards, strict=True))) if shards else Sizes()


def open_journal(folder: Path, settings: dict[str, Any]) -> Journal:
    """The journal of a folder, or a new one; that of other settings is refused."""
    path = folder / JOURNAL
    if not path.is_file():
        return Journal(settings)
    try:
        saved = read_json(path)
        journal = Journal(
            saved["settings"],
            saved["num_shards"],
            {name: Source(**source) for name, source in saved["sources"].items()},
            {part: [Sizes(*sizes) for sizes in of] for part, of in saved["shards"].items()},
            dict(saved["num_written"]),
        )
        _check_numbers(journal)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {folder} and begin anew") from error
    for key, value in settings.items():
        if journal.settings.get(key) != value:
            raise UserError(
                f"{folder} was begun with {key} = {journal.settings.get(key)!r}, and now it is "
                f"{value!r}; use the same, or remove that folder to begin anew"
            )
    return journal


def _check_numbers(journal: Journal) -> None:
    if not isinstance(journal.settings, dict):
        raise TypeError("its settings are none")
    numbers = [journal.num_shards, *journal.num_written.values()]
    numbers += [number for shards in journal.shards.values() for of in shards for number in of]
    for source in journal.sources.values():
        numbers += [source.end, source.line, source.rows]
        if not isinstance(source.is_read, bool):
            raise TypeError(f"is_read is {source.is_read!r}")
    for number in numbers:
        if type(number) is not int or number < 0:
            raise TypeError(f"{number!r} is no count")


def write_journal(folder: Path, journal: Journal) -> None:
    write_json(folder / JOURNAL, dataclasses.asdict(journal))
