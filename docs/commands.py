"""Writes docs/commands.md, the reference of all commands, from what `evenhand --help` knows.

python -m docs.commands
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from evenhand.cli import app

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Commands

Every command and its flags. `evenhand COMMAND --help` says the same in a terminal. A command ends
with 0 when it is done, 1 when something is broken, 2 when it is something you can mend (one
sentence says what), and 130 when it was stopped and can be continued.

This page is written by `python -m docs.commands` from the source.
"""


def page() -> str:
    """The whole page: the commands in the order and under the titles of `evenhand --help`."""
    parts, panel = [HEAD], ""
    for name, command in verbs(get_command(app), "evenhand"):
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            parts.append(f"## {panel}\n")
        words = [
            p.metavar if p.required else f"[{p.metavar.strip('[]')}]" for p in arguments(command)
        ]
        parts += [f"### {name}\n", f"```text\n{' '.join([name, *words, '[flags]'])}\n```\n"]
        parts.append(command.help.strip() + "\n")
        parts += [f"- `{p.metavar.strip('[]')}`: {p.help}" for p in arguments(command)]
        flags = [p for p in command.params if p.param_type_name == "option"]
        if flags:
            parts += ["\n| flag | default | meaning |\n|---|---|---|", *map(row, flags)]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """('evenhand data table', its command), and so for every verb."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def arguments(command: Any) -> list[Any]:
    """What a command takes without a flag."""
    return [p for p in command.params if p.param_type_name == "argument"]


def row(flag: Any) -> str:
    """A row of the table: the flag and what it takes, its default, what it means."""
    choices = getattr(flag.type, "choices", None)
    value = "" if flag.is_flag else f" {flag.metavar or ' or '.join(choices or [flag.type.name])}"
    shown = flag.show_default if isinstance(flag.show_default, str) else flag.default
    default = "" if shown is None or shown is False else f"`{shown}`"
    cells = (f"`{', '.join(flag.opts)}{value.lower()}`", default, flag.help)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
