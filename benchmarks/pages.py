"""README.md and pages of docs/ whose tables come from committed results: a mark, then a table.

    python benchmarks/pages.py      writes the tables of all of them anew

A test compares each page with what this writes.
"""

import re
from collections.abc import Callable
from pathlib import Path

import readme_tables
import reproduction_tables
import scaling_tables
import speed_tables

DOCS = Path(__file__).parents[1] / "docs"
Tables = dict[str, list[str]]  # lines of a table, by its mark
PAGES: dict[str, Callable[[], Tables]] = {
    "../README.md": readme_tables.readme_tables,
    "results.md": readme_tables.results_tables,
    "speed.md": speed_tables.tables,
    "reproduction.md": reproduction_tables.tables,
    "scaling.md": scaling_tables.tables,
}


def with_tables(page: str, tables: Tables) -> str:
    """The page, with every marked table replaced by that of the results."""
    for mark, lines in tables.items():
        marked = f"<!-- {mark} -->\n" + "\n".join(lines) + "\n"
        parts = re.split(rf"<!-- {re.escape(mark)} -->\n(?:\|.*\n)+", page)
        assert len(parts) == 2, f"{mark}: {len(parts) - 1} tables"
        page = marked.join(parts)
    return page


if __name__ == "__main__":
    for name, tables_fn in PAGES.items():
        path = DOCS / name
        path.write_text(with_tables(path.read_text("utf-8"), tables_fn()), "utf-8")
