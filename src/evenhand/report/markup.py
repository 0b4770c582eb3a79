"""Building HTML so that text cannot become markup: what is not `Html` is escaped.

Query strings and names are whatever somebody typed. `element` escapes every child and attribute
that is not already finished markup, so forgetting to escape is not possible.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NOTHING = "–"  # what a missing number is shown as
LONGEST_TEXT = 160


class Html(NamedTuple):
    """Finished markup."""

    text: str


Child = Html | str
Attributes = Mapping[str, str | float | None]  # None: not written


def element(name: str, attributes: Attributes, *children: Child) -> Html:
    """One element: `element("b", {"class": "x"}, "1 < 2")` is `<b class="x">1 &lt; 2</b>`."""
    written = "".join(
        f' {key}="{html.escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{fragment(*children).text}</{name}>")


def fragment(*children: Child) -> Html:
    """Children one after the other, without an element around them."""
    return Html("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    return child.text if isinstance(child, Html) else html.escape(child, quote=False)


def _attribute(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


def user_text(text: str) -> Html:
    """Text in any script, in either direction, that does not disturb its surroundings."""
    shown = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
    return element("bdi", {"dir": "auto"}, shown)


def section(name: str, title: str, *children: Child) -> Html:
    heading = element("h2", {"id": f"{name}-title"}, title)
    return element("section", {"id": name, "aria-labelledby": f"{name}-title"}, heading, *children)


def paragraph(*children: Child) -> Html:
    return element("p", {}, *children)


def note(*children: Child) -> Html:
    return element("p", {"class": "note"}, *children)


def folded(summary: Child, *children: Child, is_open: bool = False) -> Html:
    """A part that opens on a click; it is printed open."""
    opening = {"open": "open"} if is_open else {}
    return element("details", opening, element("summary", {}, summary), *children)


def table(
    caption: Child, head: Sequence[Html], rows: Sequence[Html], *, css_class: str = ""
) -> Html:
    """A table in a box of its own, which scrolls where the table is wider than the page."""
    whole = element(
        "table",
        {"class": css_class or None},
        element("caption", {}, caption),
        element("thead", {}, *head),
        element("tbody", {}, *rows),
    )
    box = {"class": "wide", "tabindex": "0", "role": "region", "aria-label": "table"}
    return element("div", box, whole)


def head_row(*titles: Child) -> Html:
    return element("tr", {}, *(element("th", {"scope": "col"}, title) for title in titles))


def data_row(title: Child, *cells: Child, css_class: str | None = None) -> Html:
    """A row whose first cell is its heading; bare cells become <td>."""
    return element(
        "tr",
        {"class": css_class},
        element("th", {"scope": "row"}, title),
        *(element("td", {}, cell) for cell in cells),
    )


def percent(value: float) -> str:
    """0.4123 -> '41.2'; NaN -> '–'. The unit stands in the heading."""
    return NOTHING if math.isnan(value) else f"{100 * value:.1f}"


def interval(low: float, high: float) -> str:
    """'38.2–43.9', or nothing at all where there is no interval."""
    return "" if math.isnan(low) or math.isnan(high) else f"{percent(low)}–{percent(high)}"


def points(difference: float) -> str:
    """A difference of two shares: '+7.0 points'."""
    return f"{100 * difference:+.1f} points".replace("-", "−")


def number(count: int) -> str:
    return f"{count:,}"


def listed(names: Sequence[str], *, most: int | None = None) -> str:
    """'a, b and c'; with `most`, 'a, b and 7 more'."""
    shown = list(names)
    if most is not None and len(shown) > most:
        shown = [*shown[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
