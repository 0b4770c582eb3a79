"""One setting at a time: of the right type, in range, spelt right? If not, say what would be."""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from evenhand.errors import UserError


def typed(name: str, value: Any, kind: Any) -> Any:
    """The value as the type of its setting, where nothing is lost by it."""
    plain = typing.get_origin(kind) or kind
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 2**1023:
            raise UserError(f"{name} must be a finite number, got one of {len(str(value))} digits")
        return float(value)
    if plain is tuple and isinstance(value, list):
        inner = typing.get_args(kind)[0]
        return tuple(typed(name, item, inner) for item in value)
    if plain is dict and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return {key: typed(f"{name}.{key}", item, inner) for key, item in value.items()}
    if isinstance(value, plain) and not (isinstance(value, bool) and plain is not bool):
        if plain is float and not abs(value) < float("inf"):
            raise UserError(f"{name} must be a finite number, got {value}")
        return value
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    if isinstance(kind, types.GenericAlias):
        wanted = plain.__name__
    raise UserError(f"{name} must be of type {wanted}, got {value!r}")


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
