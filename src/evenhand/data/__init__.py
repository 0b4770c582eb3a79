"""Files to examples: the on-disk form, text features, and the data sets it can read.

    dataset = load_table("pairs.parquet", query="title", label="category", groups=["country"])
    dataset = save_dataset(dataset, Path("datasets/pairs"))

`load_places` is the default data set, `load_table` reads one's own table, `load_extreme` the
Extreme Classification format (`stream_extreme`, of any size). All return a `Dataset`: parts (train,
validation, test) of queries with features, positives and groups.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenhand.data.csr import FloatArray, IntArray, Rows, Strings, pad_rows, pairs_of, take_rows
from evenhand.data.dataset import Dataset, Part, count_unseen_labels, open_dataset, save_dataset
from evenhand.data.groups import Groups, frequency_groups, memberships

if TYPE_CHECKING:
    from evenhand.data.extreme import load_extreme, read_extreme
    from evenhand.data.places import load_places
    from evenhand.data.stream import stream_extreme
    from evenhand.data.table import TableOptions, load_table
    from evenhand.data.text import (
        NgramFeaturizer,
        WordFeaturizer,
        featurizer_from,
        make_featurizer,
        normalize,
        script_of,
    )

__all__ = [
    "Dataset",
    "FloatArray",
    "Groups",
    "IntArray",
    "NgramFeaturizer",
    "Part",
    "Rows",
    "Strings",
    "TableOptions",
    "WordFeaturizer",
    "count_unseen_labels",
    "featurizer_from",
    "frequency_groups",
    "load_extreme",
    "load_places",
    "load_table",
    "make_featurizer",
    "memberships",
    "normalize",
    "open_dataset",
    "pad_rows",
    "pairs_of",
    "read_extreme",
    "save_dataset",
    "script_of",
    "stream_extreme",
    "take_rows",
]

_READERS = ("text", "table", "extreme", "places", "stream")

if not TYPE_CHECKING:  # else every name would pass the type check

    def __getattr__(name: str) -> Any:
        """A reader of files, when it is first asked for: most commands do without."""
        if name in __all__:
            for home in _READERS:
                module = import_module(f"evenhand.data.{home}")
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
