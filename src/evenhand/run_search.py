"""How a run is searched: by its folder alone, exactly or by an index of its own or a database's.

index/labels.faiss   what FAISS wrote
index/index.json     its kind and effort, whose vectors it holds, and its recall by group

A database's table or collection is named after the run's folder.
"""

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from evenhand.added_labels import added_labels_path, with_added_labels
from evenhand.build import check_neighbours
from evenhand.config import Config
from evenhand.data import Dataset, Rows, memberships, pairs_of
from evenhand.data.text import TEXTS
from evenhand.data.weighting import feature_weights
from evenhand.errors import UserError
from evenhand.evaluation.groups import group_columns
from evenhand.files import file_digest, read_json, write_json
from evenhand.models import Retriever, inputs_of
from evenhand.run_folder import (
    check_trained_on,
    load_model,
    open_weights,
    query_data_path,
    run_config,
)
from evenhand.search import (
    ExactIndex,
    FaissIndex,
    HybridIndex,
    LinearRanker,
    Neighbours,
    QueryData,
    Searcher,
    VectorIndex,
    label_index,
)  # fmt: skip
from evenhand.search.faiss_index import KINDS as FAISS_KINDS
from evenhand.search.faiss_index import build_faiss, choose_kind, load_faiss
from evenhand.search.index_quality import (
    CUTOFF,
    FEWEST_QUERIES,
    GroupRecall,
    QueryGroup,
    choose_effort,
    recall_by_group,
    recall_of_queries,
)
from evenhand.search.reranker import load_ranker
from evenhand.search.searcher import KINDS, load_query_data
from evenhand.search.stored import stored_dim, stored_labels

if TYPE_CHECKING:  # of extras that may not be installed
    from evenhand.search.milvus import MilvusIndex
    from evenhand.search.pgvector import PgvectorIndex

LARGE_TABLE = 100_000  # labels, from which on a run's own index is used unasked
QUERIES_OF_ALL = 2000  # at random from a part: recall over all is measured on them
QUERIES_OF_GROUP = 200  # at random from each group
AT_ONCE = 1024  # queries
EXACT, OWN = "exact", "faiss"  # instead of a database's address
FORMAT_VERSION = 1

ProgressFn = Callable[[str, int, int | None], None]
AnyStored: TypeAlias = "FaissIndex | PgvectorIndex | MilvusIndex"


class StoredAs(NamedTuple):
    """What every index outside of the model is asked to be."""

    num_labels: int
    dim: int  # of the stored vectors, a bias included
    has_bias: bool
    model: str  # see `model_digest`


def stored_as(folder: Path, exact: ExactIndex) -> StoredAs:
    has_bias = exact.label_bias is not None
    return StoredAs(len(exact), stored_dim(exact), has_bias, model_digest(folder))


def index_file(folder: Path) -> Path:
    return folder / "index" / "labels.faiss"


def model_digest(folder: Path) -> str:
    """A checksum of what a run's label vectors and biases are made of."""
    known = [dict(open_weights(folder).files), run_config(folder).search.frequency_discount]
    if added_labels_path(folder).exists():
        known.append(file_digest(added_labels_path(folder), "sha256"))
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


# --- searching ------------------------------------------------------------------------------------


def query_data_of(dataset: Dataset, config: Config, *, weighs_features: bool = True) -> QueryData:
    """What a run with these settings takes from its data set to answer queries.

    Args:
        weighs_features: False for queries that are weighted already, as those of `dataset` are.
    """
    train, weighting = dataset.parts["train"], config.data.weighting
    shared = (*KINDS, "label_names")
    data = QueryData(**{name: getattr(dataset, name) for name in shared})
    if config.model.input == "texts":
        data = data._replace(is_sparse=False, featurizer=TEXTS)
    coordinates = dataset.label_coordinates
    if coordinates is not None and np.isfinite(coordinates).all():
        data = data._replace(label_coordinates=np.asarray(coordinates))
    if weighs_features and weighting in ("unit", "tf-idf"):
        weights = train.feature_weights
        if weights is None:
            weights = feature_weights(train.features, dataset.num_features, weighting)
        data = data._replace(feature_weights=weights)
    if config.search.frequency_discount:
        data = data._replace(label_counts=dataset.label_counts())
    if config.search.num_neighbours:
        check_neighbours(config, dataset)
        assert isinstance(train.features, Rows)
        data = data._replace(train_features=train.features, train_positives=train.positives)
    return data


def ranker_path(folder: Path) -> Path:
    return folder / "model" / "ranker.safetensors"


def load_run_ranker(folder: Path, config: Config, data: Dataset | QueryData) -> LinearRanker | None:
    """The ranker of a run; None where its settings ask for none."""
    if not config.ranker.num_mined_labels:
        return None
    if not ranker_path(folder).exists():
        raise UserError(
            f"{folder} holds no fitted ranker yet; finish it: "
            f"evenhand train --resume --run {folder}"
        )
    sizes = {"num_features": data.num_features, "num_labels": data.num_labels}
    return load_ranker(ranker_path(folder), **sizes)


def load_searcher(
    folder: Path,
    *,
    device: torch.device,
    dataset: Dataset | None = None,
    index: str | None = EXACT,
    encoder: nn.Module | None = None,
) -> Searcher:
    """A trained run, ready to be asked, from its folder alone.

    Args:
        dataset: of the run, for a folder of an earlier version, which needs it.
        index: "exact", "faiss", a database's address, or None: see `open_index`.
        encoder: a module of your own, which gets the weights of the run.
    """
    config, path = run_config(folder), query_data_path(folder)
    if dataset is not None:
        data = query_data_of(dataset, config)
    elif path.exists():
        data = load_query_data(path)
    else:
        raise UserError(
            f"{folder} does not hold {path.name}, without which it needs its data set; write it: "
            f"evenhand train --resume --run {folder}"
        )
    check_trained_on(folder, data)
    model = load_model(folder, data, device=device, config=config, encoder=encoder)
    ranker = load_run_ranker(folder, config, data)
    model, data = with_added_labels(folder, model, data)
    found = None
    if index != EXACT:
        has_bias = model.label_bias is not None or bool(config.search.frequency_discount)
        dim = model.label_table.shape[1] + has_bias
        wanted = StoredAs(data.num_labels, dim, has_bias, model_digest(folder))
        found = open_index(folder, index, wanted)
    return build_searcher(model, data, config, ranker, found)


def build_searcher(
    model: Retriever,
    data: QueryData,
    config: Config,
    ranker: LinearRanker | None = None,
    index: VectorIndex | None = None,
) -> Searcher:
    """A model with what its settings add to its scores: handicap, votes, and a ranker if given.

    Args:
        index: of the model's labels, handicap included; None: exact search.
    """
    search = config.search
    if index is not None and not search.num_neighbours and ranker is None:
        return Searcher(model, index, data)
    exact = label_index(
        model, label_counts=data.label_counts, frequency_discount=search.frequency_discount
    )
    neighbours = None
    if search.num_neighbours:
        if data.train_features is None or data.train_positives is None:
            raise UserError("search.num_neighbours needs the training queries, which are not there")
        neighbours = Neighbours(
            data.train_features,
            data.train_positives,
            num_features=data.num_features,
            num_neighbours=search.num_neighbours,
            power=search.neighbour_power,
        )
    if neighbours is None and ranker is None:
        return Searcher(model, exact, data)
    hybrid = HybridIndex(
        exact,
        neighbours=neighbours,
        vote_weight=search.neighbour_weight,
        ranker=ranker,
        ranker_weight=config.ranker.weight,
        num_candidates=config.ranker.num_candidates,
        candidates=index,
    )
    return Searcher(model, hybrid, data)


# --- the index of a run, opened -------------------------------------------------------------------


def open_index(folder: Path, where: str | None, wanted: StoredAs) -> "AnyStored | None":
    """The index of a run that is asked for; None: exact search.

    Args:
        where: "exact", "faiss" (that of `evenhand index build`) or a database's address; None: the
            run's own if there is one and exact search would take long, and else exact.
    """
    if where is None:
        is_large = wanted.num_labels >= LARGE_TABLE
        where = OWN if is_large and index_file(folder).exists() else EXACT
    if where == EXACT:
        return None
    if where == OWN:
        return _open_own(folder, wanted)
    kept: Any = {"dim": wanted.dim, "has_bias": wanted.has_bias, "model": wanted.model}
    index: AnyStored
    if is_postgres(where):
        from evenhand.search.pgvector import PgvectorIndex

        index = PgvectorIndex(where, database_name(folder), **kept)
    else:
        from evenhand.search.milvus import MilvusIndex

        index = MilvusIndex(where, database_name(folder), **kept)
    if len(index) < wanted.num_labels:
        raise UserError(
            f"{index} holds {len(index):,} labels, and the model has {wanted.num_labels:,}; load "
            f"it anew: evenhand index push {folder} --to ADDRESS"
        )
    return index


def is_postgres(address: str) -> bool:
    """Whether an address is one of PostgreSQL; else it is one of Milvus, or refused."""
    if address.startswith(("postgresql://", "postgres://")):
        return True
    if address.startswith(("http://", "https://")) or address.endswith(".db"):
        return False
    raise UserError(
        "an index is 'exact', 'faiss', postgresql://USER@HOST/DATABASE, a file of milvus-lite that "
        "ends in .db, or http://HOST:PORT of Milvus"
    )


def database_name(folder: Path) -> str:
    """The table or collection of a run: letters, digits and underscores alone."""
    return "evenhand_" + re.sub(r"\W", "_", folder.resolve().name, flags=re.ASCII)[:40]


def _open_own(folder: Path, wanted: StoredAs) -> FaissIndex:
    path, rebuild = index_file(folder), f"evenhand index build {folder}"
    if not path.exists():
        raise UserError(f"{folder} has no index; build it: {rebuild}")
    about = read_json(path.with_name("index.json"))
    kinds = {"kind": str, "effort": int, "has_bias": bool, "model": str, "num_bytes": int}
    if not isinstance(about, dict) or any(
        not isinstance(about.get(name), kind) for name, kind in kinds.items()
    ):
        raise UserError(f"{path.with_name('index.json')} is damaged; build it again: {rebuild}")
    is_wrong = about["kind"] not in FAISS_KINDS or about["has_bias"] != wanted.has_bias
    if is_wrong or about["num_bytes"] != path.stat().st_size:
        raise UserError(f"{path} is damaged; build it again: {rebuild}")
    if about["model"] != wanted.model:
        raise UserError(f"the index of {folder} is of another model; build it again: {rebuild}")
    index = load_faiss(
        path, about["kind"], has_bias=about["has_bias"], effort=max(1, about["effort"])
    )
    if (len(index), index.index.d) != (wanted.num_labels, wanted.dim):
        raise UserError(f"{path} is damaged; build it again: {rebuild}")
    return index


# --- building and checking ------------------------------------------------------------------------


def exact_of(searcher: Searcher) -> ExactIndex:
    """Exact search by the model alone, in a searcher opened with it."""
    index = searcher.index.exact if isinstance(searcher.index, HybridIndex) else searcher.index
    assert isinstance(index, ExactIndex)
    return index


class Judge:
    """Exact answers to some queries of a run's own data, by which an index is judged.

    Of all queries, and of every group with FEWEST_QUERIES or more, a random sample is asked.
    """

    def __init__(
        self,
        searcher: Searcher,
        dataset: Dataset,
        part_name: str,
        *,
        by_group: bool = True,
        progress_fn: ProgressFn = lambda name, done, total: None,
    ) -> None:
        if part_name not in dataset.parts:
            raise UserError(f"{dataset.name} has no {part_name} part; name another with --part")
        part, self.progress_fn = dataset.parts[part_name], progress_fn
        part = dataclasses.replace(part, is_read_as_text=searcher.data.featurizer == TEXTS)
        self.part_name = part_name
        groups = sampled_groups(dataset, part_name, by_group=by_group)
        chosen = np.unique(np.concatenate([group.query_ids for group in groups]))  # (Q,)
        self.groups = [
            group._replace(
                query_ids=np.searchsorted(chosen, group.query_ids),
                rest_ids=np.searchsorted(chosen, group.rest_ids),
            )
            for group in groups
        ]
        vectors, found = [], []
        for start in range(0, len(chosen), AT_ONCE):
            features = inputs_of(part, chosen[start : start + AT_ONCE])
            queries = searcher.vectors(features)
            vectors.append(queries.cpu())
            found.append(exact_of(searcher).search(queries, CUTOFF).label_ids.cpu())
            progress_fn("exact search (queries)", start + len(queries), len(chosen))
        self.queries, self.exact_ids = torch.cat(vectors), torch.cat(found)  # (Q, D), (Q, 10)

    def recalls(self, index: VectorIndex, title: str) -> Any:
        """The recall of every query (Q,)."""
        found = []
        for start in range(0, len(self.queries), AT_ONCE):
            queries = self.queries[start : start + AT_ONCE]
            found.append(index.search(queries, CUTOFF).label_ids)
            self.progress_fn(title, start + len(queries), len(self.queries))
        return recall_of_queries(torch.cat(found), self.exact_ids)


def sampled_groups(dataset: Dataset, part_name: str, *, by_group: bool) -> list[QueryGroup]:
    """All queries first, then the groups with enough of them: a random sample of each, by row.

    A query is in the groups of its right labels as well as in its own.
    """
    part = dataset.parts[part_name]
    query_ids, lots = pairs_of(part.positives).query_ids, np.random.default_rng(0)
    order = lots.permutation(len(part))  # the first of a group in this order are its sample
    everyone = np.sort(order[:QUERIES_OF_ALL])
    groups = [QueryGroup("all", "all", everyone, everyone[:0])]
    for column in group_columns(dataset, part_name)[1:] if by_group else []:
        pair_ids, group_ids = memberships(column.groups)
        for group_id, name in enumerate(column.group_names):
            is_member = np.zeros(len(part), dtype=bool)
            is_member[query_ids[pair_ids[group_ids == group_id]]] = True
            if is_member.sum() >= FEWEST_QUERIES:
                own = np.sort(order[is_member[order]][:QUERIES_OF_GROUP])
                groups.append(QueryGroup(column.name, name, own, everyone[~is_member[everyone]]))
    return groups


def build_run_index(
    folder: Path,
    searcher: Searcher,
    judge: Judge,
    *,
    kind: str | None = None,
    effort: int | None = None,
    target: float = 0.99,
) -> tuple[FaissIndex, list[GroupRecall]]:
    """Builds, measures and writes the index of a run; also its recall by group.

    Args:
        searcher: the run with exact search.
        kind, effort: None: chosen by the number of labels, and by the group that fares worst.
        target: recall that every group is to have.
    """
    exact, began = exact_of(searcher), time.monotonic()
    kind = kind or choose_kind(len(exact))
    judge.progress_fn(f"building {kind} (labels)", 0, None)
    index = build_faiss(exact, kind)
    seconds = round(time.monotonic() - began, 1)
    judge.progress_fn(f"building {kind} (labels)", len(exact), len(exact))

    def recalls(effort: int) -> Any:
        if effort:
            index.set_effort(effort)
        return judge.recalls(index, f"{index.name} (queries)")

    if not index.most_effort or effort is not None:
        rows = recall_by_group(recalls(effort or 0), judge.groups)
    else:
        limits = {"first": FAISS_KINDS[kind].first_effort, "most": index.most_effort}
        chosen, rows = choose_effort(recalls, judge.groups, **limits, target=target)
        index.set_effort(chosen)
    index.save(index_file(folder))
    about = {
        "version": FORMAT_VERSION,
        "kind": kind,
        "parameter": FAISS_KINDS[kind].parameter,
        "effort": index.effort,
        "has_bias": index.has_bias,
        "model": model_digest(folder),
        "num_labels": len(index),
        "num_bytes": index_file(folder).stat().st_size,
        "seconds": seconds,
        "target": target,
        "part": judge.part_name,
        "recalls": [row._asdict() for row in rows],
    }
    write_json(index_file(folder).with_name("index.json"), about)
    return index, rows


# --- databases ------------------------------------------------------------------------------------


def push_run(
    folder: Path,
    searcher: Searcher,
    address: str,
    *,
    dataset: Dataset | None = None,
    progress_fn: ProgressFn = lambda name, done, total: None,
) -> AnyStored:
    """Loads a run's labels into a database, and opens them there.

    Args:
        searcher: the run with exact search.
        dataset: whose groups of labels can then be filtered by.
    """
    exact = exact_of(searcher)
    wanted, table = stored_as(folder, exact), database_name(folder)
    load: Callable[..., None]
    if is_postgres(address):
        from evenhand.search.pgvector import load_pgvector

        load = load_pgvector
    else:
        from evenhand.search.milvus import load_milvus

        load = load_milvus
    blocks = stored_labels(
        exact, searcher.data.label_names, None if dataset is None else dataset.label_groups
    )
    load(
        address,
        table,
        blocks,
        dim=wanted.dim,
        model=wanted.model,
        progress_fn=lambda name, done: progress_fn(name, done, wanted.num_labels if done else None),
    )
    index = open_index(folder, address, wanted)
    assert index is not None
    return index
