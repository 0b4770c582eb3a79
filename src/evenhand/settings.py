"""One setting at a time: of the right type, in range, spelt right? If not, say what would be."""

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.errors import UserError

MAX_DOTS = 1000  # in a line of TOML


def typed(name: str, value: Any, kind: Any) -> Any:
    """The value as the type of its setting, where nothing is lost by it."""
    plain = typing.get_origin(kind) or kind
    if isinstance(value, int) and abs(value) >= 2**63:  # as in every other reader of TOML
        raise UserError(f"{name} must be a finite number below 2**63, got {told(value)}")
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if plain is tuple and isinstance(value, list):
        inner = typing.get_args(kind)[0]
        return tuple(typed(name, item, inner) for item in value)
    if plain is dict and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return {
            typed(name, key, str): typed(f"{name}.{key}", item, inner)
            for key, item in value.items()
        }
    if isinstance(value, plain) and not (isinstance(value, bool) and plain is not bool):
        if plain is str and not value.isascii() and not _is_unicode(value):
            raise UserError(f"{name} must be UTF-8 text, got {value!r}; rename what it names")
        if plain is float and not abs(value) < float("inf"):
            raise UserError(f"{name} must be a finite number, got {value}")
        return value
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    if isinstance(kind, types.GenericAlias):
        wanted = plain.__name__
    raise UserError(f"{name} must be of type {wanted}, got {told(value)}")


def parsed_toml(text: str) -> dict[str, Any]:
    """The sections of a TOML text; one that is wrong, or that no one writes, is a `ValueError`."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MAX_DOTS:  # a key of so many parts takes the square of their number
            raise ValueError(f"line {number} has more than {MAX_DOTS} dots")
    if text.count(".") > 10 * MAX_DOTS:
        raise ValueError(f"it has more than {10 * MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def told(value: Any) -> str:
    """A value from a file, fit for a message; Python writes no number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    try:
        words = repr(value)
    except ValueError:  # such a number somewhere inside
        words = f"a {type(value).__name__}"
    return words if len(words) <= 200 else f"{words[:200]}..."


def _is_unicode(text: str) -> bool:
    """False of half a surrogate pair, as bytes become that are no UTF-8 on a command line."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def hint(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def check_positive(section: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise UserError(f"{section}.{name} must be above 0, got {value}")
