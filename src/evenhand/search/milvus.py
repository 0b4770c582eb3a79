"""Label vectors in Milvus: in a milvus-lite file of this machine, or in a cluster, by one code.

A load fills a collection of its own, and when all is there an alias is turned to it, in one step.
Searchers ask the alias: they see the old labels until then, and never a part of the new ones. A
collection that a load left behind when it stopped is removed by the next load.

A milvus-lite file belongs to one process at a time; a cluster has no such limit.
"""

import contextlib
import json
import logging
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from torch import Tensor

from evenhand.data import FloatArray
from evenhand.errors import UserError
from evenhand.search.exact import SearchResult
from evenhand.search.stored import (
    StoredLabels,
    Where,
    filled,
    of_another_model,
    stopped_half_way,
    storable,
    storable_groups,
    stored_queries,
)

EFFORT = 200  # labels kept in view (ef)
MOST_EFFORT = 16_384  # that Milvus allows, as many as results of a query
INDEX = {"index_type": "HNSW", "metric_type": "IP", "params": {"M": 16, "efConstruction": 200}}
NAME_BYTES = 1024  # of a label, that are kept
TIMEOUT = 10.0  # seconds to find the server

try:
    from pymilvus import DataType, MilvusClient
    from pymilvus.exceptions import MilvusException
except ImportError as error:
    raise UserError("Milvus needs its extra: pip install 'evenhand[milvus]'") from error

logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # errors are raised as well


class MilvusIndex:
    """Answers as an `ExactIndex` over the same labels does, but for the labels it misses."""

    def __init__(self, address: str, alias: str, *, dim: int, has_bias: bool, model: str) -> None:
        """
        Args:
            address: http://user:password@host:port, or the path of a file that ends in .db.
            dim: of the stored vectors, a bias included.
            model: whose vectors these must be.
        """
        self.address, self.alias, self.model = address, alias, model
        self.dim, self.has_bias = dim, has_bias
        self.effort, self.most_effort = EFFORT, MOST_EFFORT
        self.client = connect(address)
        weakref.finalize(self, self.client.close)
        with _errors(str(self)):
            collection = _collection_of(self.client, alias)
            if collection is None:
                raise UserError(
                    f"{self} does not exist; load it: evenhand index push RUN --to ADDRESS"
                )
            self._check_model(collection)
            fields = self.client.describe_collection(collection)["fields"]
            (width,) = (f["params"]["dim"] for f in fields if f["name"] == "embedding")
            if int(width) != dim:
                raise UserError(
                    f"{self} holds vectors of {width} dimensions, and the model has {dim}; load "
                    f"it anew: evenhand index push RUN --to ADDRESS"
                )
            self.client.load_collection(collection)
            self.num_labels = _count(self.client, alias)

    def __str__(self) -> str:
        return f"the collection {self.alias} of Milvus at {shown_address(self.address)}"

    def __len__(self) -> int:
        return self.num_labels

    @property
    def name(self) -> str:
        return f"{self}, ef {self.effort}"

    def set_effort(self, effort: int) -> None:
        """More finds more and takes longer."""
        if not 1 <= effort <= MOST_EFFORT:
            raise UserError(f"effort must be between 1 and {MOST_EFFORT}, got {effort}")
        self.effort = effort

    def search(self, queries: Tensor, num_results: int, where: Where | None = None) -> SearchResult:
        """The labels of the highest score that it finds: (Q, D) -> (Q, R), R = min(that, L).

        Args:
            where: of each column that is named, a label must be in one of these groups.
        """
        vectors = stored_queries(queries, num_results, dim=self.dim, has_bias=self.has_bias)
        num_results = min(num_results, len(self))
        limit = min(num_results, MOST_EFFORT)
        # JSON's texts are Milvus's, but that it knows no escape for other alphabets.
        write = partial(json.dumps, ensure_ascii=False)
        condition = " and ".join(
            f"json_contains_any(metadata[{write(column)}], {write(groups)})"
            for column, groups in storable_groups(where or {}).items()
        )
        rows: list[list[tuple[int, float]]] = []
        if len(vectors):
            with _errors(str(self)):
                found = self.client.search(
                    self.alias,
                    data=list(vectors),
                    limit=limit,
                    filter=condition,
                    search_params={"params": {"ef": max(self.effort, limit)}},
                )
                rows = [[(hit.id, hit.distance) for hit in hits] for hits in found]
                if condition and any(len(row) < limit for row in rows):
                    rows = self._search_passed(vectors, limit, condition) or rows
                # Afterwards: a load may have turned the alias to another model's meanwhile.
                self._check_model(self.client.describe_alias(self.alias)["collection_name"])
        return filled(rows, num_results, queries.device)

    def _search_passed(
        self, vectors: FloatArray, limit: int, condition: str
    ) -> list[list[tuple[int, float]]]:
        """Compares all labels that pass a filter: milvus-lite's graph misses some of a few.

        Returns nothing if none pass, or too many to be read.
        """
        passed = self.client.query(
            self.alias,
            filter=condition,
            output_fields=["label_id", "embedding"],
            limit=MOST_EFFORT,
        )
        if not 0 < len(passed) < MOST_EFFORT:
            return []
        label_ids = [row["label_id"] for row in passed]
        scores = vectors @ np.array([row["embedding"] for row in passed], np.float32).T  # (Q, n)
        return [
            sorted(zip(label_ids, row, strict=True), key=lambda item: -item[1])[:limit]
            for row in scores.tolist()
        ]

    def upsert(self, labels: StoredLabels) -> None:
        """Writes some labels, new ones or in place of those with the same id."""
        if labels.vectors.shape[1:] != (self.dim,) or not np.isfinite(labels.vectors).all():
            raise ValueError(
                f"vectors must be (n, {self.dim}) finite numbers, got {labels.vectors.shape}"
            )
        with _errors(str(self)):
            self._check_model(self.client.describe_alias(self.alias)["collection_name"])
            self.client.upsert(self.alias, _rows(labels))
            self.num_labels = _count(self.client, self.alias)

    def _check_model(self, collection: str) -> None:
        if not collection.startswith(_prefix(self.alias, self.model)):
            raise of_another_model(str(self))


def load_milvus(
    address: str,
    alias: str,
    blocks: Iterable[StoredLabels],
    *,
    dim: int,
    model: str,
    progress_fn: Callable[[str, int], None] = lambda name, done: None,
) -> None:
    """Writes all labels as a collection and turns the alias to it: all of them or none.

    Args:
        blocks: the labels, in any order.
        model: is part of the collection's name, so that no other model is asked with these.
        progress_fn: called with what is done, and for how many labels.
    """
    client = connect(address)
    collection = f"{_prefix(alias, model)}{uuid.uuid4().hex[:12]}"
    what = f"the collection {alias} of Milvus at {shown_address(address)}"
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("label_id", DataType.INT64, is_primary=True)
    schema.add_field("name", DataType.VARCHAR, max_length=NAME_BYTES)
    schema.add_field("metadata", DataType.JSON)
    schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=dim)
    try:
        before, num_labels = _collection_of(client, alias), 0
        try:
            client.create_collection(collection, schema=schema, consistency_level="Strong")
            for block in blocks:
                client.insert(collection, _rows(block))
                num_labels += len(block.label_ids)
                progress_fn("loading (labels)", num_labels)
            progress_fn("building the HNSW index", 0)
            client.flush(collection)
            params = client.prepare_index_params()
            params.add_index("embedding", **INDEX)
            client.create_index(collection, params)
            client.load_collection(collection)
            if _count(client, collection) != num_labels:
                raise UserError(f"{what} did not keep all labels that were sent; push again")
        except BaseException:
            with contextlib.suppress(MilvusException):
                client.drop_collection(collection)
            raise
        if before is None:
            client.create_alias(collection, alias)
        else:
            client.alter_alias(collection, alias)
        for other in client.list_collections():  # the one before, and what loads left that stopped
            if other.startswith(f"{alias}__") and other != collection:
                client.drop_collection(other)
    except MilvusException as error:
        raise stopped_half_way(what, _line(error)) from error
    finally:
        client.close()


def shown_address(address: str) -> str:
    """The address without user and password."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else address


def connect(address: str) -> Any:
    """A client of a cluster, or of a file."""
    parts, shown = urlsplit(address), shown_address(address)
    if not parts.netloc and not address.endswith(".db"):
        raise UserError(f"a file of Milvus must end in .db, got {address}")
    try:
        return MilvusClient(
            shown,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            timeout=TIMEOUT,
            # While milvus-lite builds a large index it hangs up on a client that asks every 10 s
            # whether it lives, and the second attempt finds the index made by the first.
            grpc_options={"grpc.keepalive_time_ms": 3_600_000},
        )
    except (MilvusException, OSError, RuntimeError) as error:
        reason = _line(error)
        if "auth" in reason.lower():
            raise UserError(
                f"Milvus at {shown} refuses this user or password; correct the address"
            ) from None
        raise UserError(
            f"Milvus at {shown} cannot be reached ({reason}); start it or correct the address, "
            f"and of a file see that no other process has it open"
        ) from None


def _prefix(alias: str, model: str) -> str:
    return f"{alias}__{model[:16]}__"


def _collection_of(client: Any, alias: str) -> str | None:
    """The collection that an alias stands for, if there is one."""
    for collection in client.list_collections():
        if alias in client.list_aliases(collection)["aliases"]:
            return str(collection)
    return None


def _count(client: Any, collection: str) -> int:
    (row,) = client.query(collection, filter="", output_fields=["count(*)"])
    return int(row["count(*)"])


def _rows(labels: StoredLabels) -> list[dict[str, Any]]:
    return [
        {
            "label_id": label_id,
            "name": storable(name).encode()[:NAME_BYTES].decode(errors="ignore"),
            "metadata": storable_groups(metadata),
            "embedding": vector,
        }
        for label_id, name, metadata, vector in zip(
            labels.label_ids.tolist(), labels.names, labels.metadata, labels.vectors, strict=True
        )
    ]


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except MilvusException as error:
        raise UserError(f"{what} did not answer ({_line(error)}); ask again") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
