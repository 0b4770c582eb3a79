"""Labels that a trained run did not know: read by its tower, and searched like all others.

They are kept beside the weights, in model/added_labels.safetensors; those stay as they were.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from evenhand.build import text_part, words_of_labels
from evenhand.data import FloatArray, Strings
from evenhand.data.csr import check_offsets, check_spans
from evenhand.data.table import load_labels
from evenhand.data.table_reader import Source
from evenhand.errors import UserError
from evenhand.files import open_arrays, save_arrays
from evenhand.models import Retriever, tower_rows
from evenhand.run_folder import load_model, query_data_path, run_config
from evenhand.search import QueryData
from evenhand.search.searcher import load_query_data

DTYPES = {"offsets": "int64", "utf8": "uint8", "values": "float32"}


class AddedLabels(NamedTuple):
    """n labels beyond those that were trained."""

    names: Strings  # (n,)
    rows: FloatArray  # (n, D) as those of `Retriever.label_table`

    def extend(self, data: QueryData) -> QueryData:
        """What a run keeps of its data, with these labels after the others."""
        assert data.label_names is not None
        counts = data.label_counts
        if counts is not None:
            counts = np.append(counts, np.zeros(len(self.names), counts.dtype))
        return data._replace(
            num_labels=data.num_labels + len(self.names),
            label_names=Strings.pack([*data.label_names, *self.names]),
            label_counts=counts,
            label_coordinates=None,  # a map would lack them
        )


def added_labels_path(folder: Path) -> Path:
    return folder / "model" / "added_labels.safetensors"


def load_added_labels(folder: Path) -> AddedLabels | None:
    """Those of a run; None: it has none."""
    path = added_labels_path(folder)
    if not path.exists():
        return None
    with open_arrays(path, DTYPES) as (arrays, _):
        names = Strings(arrays["names.offsets"], arrays["names.utf8"])
        check_spans("names", len(names), names.offsets, names.utf8)
        check_offsets("names", names.offsets)
        return AddedLabels(names, arrays["rows.values"].reshape(len(names), -1))


def with_added_labels(
    folder: Path, model: Retriever, data: QueryData
) -> tuple[Retriever, QueryData]:
    """A trained model and its data, with the labels that were added to the run."""
    added = load_added_labels(folder)
    if added is None:
        return model, data
    if added.rows.shape[1] != model.label_table.shape[1]:
        raise UserError(f"{added_labels_path(folder)} is of another model; add the labels again")
    rows = torch.from_numpy(added.rows).to(model.label_table)
    model.label_table.data = torch.cat([model.label_table.data, rows])
    if model.label_bias is not None:
        zeros = model.label_bias.new_zeros(len(rows), 1)
        model.label_bias.data = torch.cat([model.label_bias.data, zeros])
    return model, added.extend(data)


def add_labels(
    folder: Path, source: Source, *, device: torch.device, encoder: nn.Module | None = None
) -> int:
    """Makes the labels of a table searchable; returns how many labels were added so far.

    Args:
        source: a table of `id`, and if you like `name` and `text`. A label that was added before is
            replaced, one that was trained stays as it is.
        encoder: of a run with a module of your own.
    """
    config = run_config(folder)
    if config.model.labels == "table":
        raise UserError(
            f"the labels of {folder} have vectors of their own, which only training gives; train "
            f'with model.labels = "tower" (--set model.labels=tower), which reads their texts'
        )
    if config.search.num_neighbours or config.ranker.num_mined_labels:
        raise UserError(
            f"{folder} answers with votes or a ranker, which know nothing of new labels; train "
            f"with search.num_neighbours = 0 and ranker.num_mined_labels = 0"
        )
    data = load_query_data(query_data_path(folder))
    model = load_model(folder, data, device=device, config=config, encoder=encoder)
    assert model.tower is not None
    names, texts = load_labels(source)
    part = text_part(
        config, words_of_labels(names, texts), data.featurizer, data.feature_weights, model.tower
    )
    rows = torch.cat([rows for _, rows in tower_rows(model.tower, part, device=device)])
    before = load_added_labels(folder)
    found = {} if before is None else dict(zip(before.names, before.rows, strict=True))
    found |= dict(zip(names, rows.float().cpu().numpy(), strict=True))
    for name in data.label_names or ():
        found.pop(name, None)
    if not found:
        raise UserError(f"{folder} knows all {len(names):,} labels already")
    strings = Strings.pack(found)
    arrays = {"names.offsets": strings.offsets, "names.utf8": strings.utf8}
    values = np.stack(list(found.values())).ravel()
    save_arrays(added_labels_path(folder), {**arrays, "rows.values": values})
    return len(found)
