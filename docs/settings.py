"""Writes docs/settings.md, the reference of all settings, from the source of `evenhand.config`.

    python -m docs.settings

A setting's meaning is the comment beside it there, or the comment lines above it; its range comes
from the checks of its type.
"""

import ast
import dataclasses
import inspect
import io
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from evenhand import config

PAGE = Path(__file__).with_suffix(".md")
HEAD = """\
# Settings

Every setting, by section. Each can stand in a TOML file (`evenhand train settings.toml`) or be
given as `--set section.key=value`; one that is not given has the default, unless training finds
that another fits the data, and says so. A run folder's `config.toml` lists them all as they were
used. Which ones matter: [choosing](choosing.md).

This page is written by `python -m docs.settings` from the comments in `src/evenhand/config.py`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, cls in config.SECTIONS.items():
        doc = cls.__doc__ or ""
        summary = "" if doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)
        parts.append(f"## {section}\n")
        if summary:
            parts.append(f"{summary}\n")
        parts.append("| setting | values | default | meaning |\n|---|---|---|---|")
        parts += [*rows(cls), ""]
    return "\n".join(parts).rstrip() + "\n"


def rows(cls: type[Any]) -> Iterator[str]:
    """A row of the table for each setting of a section."""
    kinds, meanings = get_type_hints(cls, include_extras=True), comments_of(cls)
    for field in dataclasses.fields(cls):
        is_made = field.default is dataclasses.MISSING
        default = field.default_factory() if is_made else field.default  # type: ignore[misc]
        cells = (
            f"`{field.name}`",
            values_of(kinds[field.name]),
            f"`{config.toml_value(default)}`",
            meanings.get(field.name, ""),
        )
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def values_of(kind: Any) -> str:
    """What a setting of this type may be, in words."""
    checks = getattr(kind, "__metadata__", ())
    plain = getattr(kind, "__origin__", kind) if checks else kind
    for check_fn in checks:
        if isinstance(check_fn, partial) and check_fn.func is config.check_choice:
            return ", ".join(f"`{choice}`" for choice in check_fn.keywords["choices"])
    names = {
        int: "whole number", float: "number", str: "text", bool: "`true` or `false`",
        tuple[int, ...]: "list of whole numbers", dict[str, int]: "table of whole numbers",
    }  # fmt: skip
    words, is_above_0 = names[plain], config.check_positive in checks
    for check_fn in checks:
        if isinstance(check_fn, partial) and check_fn.func is config.check_range and not is_above_0:
            words += f" from {check_fn.keywords['low']}"
        if isinstance(check_fn, partial) and "high" in check_fn.keywords:
            words += f" to {check_fn.keywords['high']}"
    return words.replace("number", "number above 0", 1) if is_above_0 else words


def comments_of(cls: type[Any]) -> dict[str, str]:
    """The comments of the fields of a class: those on their lines, and the lines above them."""
    source = inspect.getsource(cls)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}  # by line
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in comments and comments[first - 1].line.lstrip().startswith("#"):
                first -= 1
            lines = range(first, (node.end_lineno or first) + 1)
            texts = [comments[line].string.removeprefix("# ") for line in lines if line in comments]
            found[node.target.id] = " ".join(texts)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
