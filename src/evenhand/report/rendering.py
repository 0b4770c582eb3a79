"""Renders the templates, and formats numbers for them.

Query strings and names are whatever somebody typed. The templates escape every value
(`autoescape`) but the style and the script of the package, and fail on one that is missing.
"""

import base64
import datetime
import functools
import hashlib
import math
from collections.abc import Sequence

import jinja2

from evenhand.evaluation import Difference
from evenhand.version import __version__

NOTHING = "–"  # what a missing number is shown as
LONGEST_TEXT = 160
MARKS = (  # drawn around 0, 0
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M-4-4H4V4H-4z",
    "M0-5L5 4H-5z",
    "M0 5L5-4H-5z",
    "M-5-1.7H-1.7V-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5z",
)


def render(template: str, **values: object) -> str:
    """One HTML page with its style and script inside; it loads nothing from elsewhere."""
    environment = _environment()
    assert environment.loader is not None
    sources = [
        environment.loader.get_source(environment, f"report.{kind}")[0] for kind in ("css", "js")
    ]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in sources]
    policy = (  # only this very style and script count
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; base-uri 'none'; "
        "form-action 'none'"
    ).format(*digests)
    return environment.get_template(template).render(
        style=sources[0], script=sources[1], policy=policy, version=__version__, **values
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evenhand.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (percent, interval, signed, number, shorten, capitalize_first):
        environment.filters[function.__name__] = function
    environment.globals.update(MARKS=MARKS, NOTHING=NOTHING)
    return environment


# --- figures in words -----------------------------------------------------------------------------


def percent(value: float) -> str:
    """0.4123 -> '41.2'; NaN -> '–'. The unit stands in the heading."""
    if math.isnan(value):
        return NOTHING
    shown = f"{100 * value:.1f}"
    return shown if float(shown) else "0.0"  # not -0.0


def interval(low: float, high: float) -> str:
    """'38.2–43.9', or nothing at all where there is no interval."""
    return "" if math.isnan(low) or math.isnan(high) else f"{percent(low)}–{percent(high)}"


def signed(difference: float) -> str:
    """A difference in points, with the digits that `evenhand compare` prints: .0192 -> '+1.92'."""
    if math.isnan(difference):
        return NOTHING
    return f"{100 * float(f'{difference:.4f}'):+.2f}".replace("-", "−")


def span(row: Difference) -> str:
    """The 95 % interval of a difference: '+0.86 to +3.18'."""
    return f"{signed(row.low)} to {signed(row.high)}"


def number(count: int) -> str:
    """With commas between thousands: 34,006."""
    return f"{count:,}"


def shorten(text: str) -> str:
    """A text cut to what a cell can show, with an ellipsis."""
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def join_words(words: Sequence[str], *, most: int | None = None) -> str:
    """'a, b and c'; with `most`, 'a, b and 7 more'."""
    shown = list(words)
    if most is not None and len(shown) > most:
        shown = [*shown[:most], f"{len(words) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def format_duration(seconds: float) -> str:
    """'45 s', '12 min 5 s', '3 h 20 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (0 if hours else rest, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "under 1 s"


def format_time(text: str) -> str:
    """'2025-11-15 09:06 UTC' of an ISO time; anything else as it is."""
    try:
        return datetime.datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text
