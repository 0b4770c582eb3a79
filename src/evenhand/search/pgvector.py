"""Label vectors in PostgreSQL, searched by pgvector's HNSW index.

A table has a row a label: label_id, name, metadata (jsonb, column -> groups) and embedding. A load
is one transaction: a new table is filled by binary COPY, indexed, and takes the place of the old
one when all is there. Searchers see the old labels until then, and a load that stops leaves nothing
behind. The table's comment says whose vectors it holds.

The address is never written anywhere, nor is its password shown.
"""

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

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

EFFORT = 200  # labels kept in view (hnsw.ef_search)
MOST_EFFORT = 1000  # that pgvector allows; for more results than that, all rows are compared
MOST_INDEXED = 2000  # dimensions of an HNSW index; wider vectors are compared one by one
BUILD_KILOBYTES = 2**20  # 1 GiB for the graph while it is built; beyond it is slow
CONNECT_SECONDS = 10

try:
    import psycopg
    from pgvector.psycopg import register_vector
    from psycopg import sql
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.types.json import Jsonb
except ImportError as error:
    raise UserError("PostgreSQL needs its extra: pip install 'evenhand[postgres]'") from error


class PgvectorIndex:
    """Answers as an `ExactIndex` over the same labels does, but for the labels it misses.

    Threads may share it: each has its own connection.
    """

    def __init__(self, address: str, table: str, *, dim: int, has_bias: bool, model: str) -> None:
        """
        Args:
            address: postgresql://user:password@host:port/database.
            dim: of the stored vectors, a bias included.
            model: whose vectors these must be.
        """
        self.address, self.table, self.model = address, table, model
        self.dim, self.has_bias = dim, has_bias
        self.effort, self.most_effort = EFFORT, MOST_EFFORT
        self.num_labels = 0
        self._local = threading.local()
        self._opened: list[Any] = []
        weakref.finalize(self, _close, self._opened)
        with self._connection():
            pass
        self._count()

    def __str__(self) -> str:
        return f"the table {self.table} of PostgreSQL at {shown_address(self.address)}"

    def __len__(self) -> int:
        return self.num_labels

    @property
    def name(self) -> str:
        return f"{self}, ef_search {self.effort}"

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
        groups = storable_groups(where or {})
        conditions = [sql.SQL("true"), *[sql.SQL("metadata -> %s ?| %s")] * len(groups)]
        values = [cell for item in groups.items() for cell in item]
        statement = sql.SQL(
            "SELECT label_id, embedding <#> %s AS distance FROM {} WHERE {} ORDER BY distance "
            "LIMIT %s"
        ).format(sql.Identifier(self.table), sql.SQL(" AND ").join(conditions))
        settings = {
            "hnsw.ef_search": str(min(MOST_EFFORT, max(self.effort, num_results))),
            "hnsw.iterative_scan": "strict_order",  # else a filter leaves fewer than asked for
            "enable_indexscan": "off" if num_results > MOST_EFFORT else "on",
        }
        rows: list[list[tuple[int, float]]] = []
        if len(vectors):
            with self._connection() as connection, connection.cursor() as cursor:
                for name, value in settings.items():
                    cursor.execute("SELECT set_config(%s, %s, true)", [name, value])
                cursor.executemany(
                    statement,
                    [[vector, *values, num_results] for vector in vectors],
                    returning=True,
                )
                for _ in vectors:
                    rows.append([(label_id, -distance) for label_id, distance in cursor])
                    cursor.nextset()
        return filled(rows, num_results, queries.device)

    def upsert(self, labels: StoredLabels) -> None:
        """Writes some labels, new ones or in place of those with the same id: all or none."""
        if labels.vectors.shape[1:] != (self.dim,) or not np.isfinite(labels.vectors).all():
            raise ValueError(
                f"vectors must be (n, {self.dim}) finite numbers, got {labels.vectors.shape}"
            )
        statement = sql.SQL(
            "INSERT INTO {} (label_id, name, metadata, embedding) VALUES (%s, %s, %s, %s) "
            "ON CONFLICT (label_id) DO UPDATE SET name = EXCLUDED.name, "
            "metadata = EXCLUDED.metadata, embedding = EXCLUDED.embedding"
        ).format(sql.Identifier(self.table))
        with self._connection() as connection, connection.cursor() as cursor:
            cursor.executemany(statement, list(_cells(labels)))
        self._count()

    def _count(self) -> None:
        statement = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self.table))
        with self._connection() as connection:
            (self.num_labels,) = connection.execute(statement).fetchone() or (0,)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        """A transaction on this thread's connection, which is opened anew if it was lost.

        Checks the model at the end: the table that was used cannot be replaced before the commit.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            connection = connect(self.address)
            _register(connection, self.address)
            self._local.connection = connection
            self._opened.append(connection)
        try:
            with connection.transaction():
                yield connection
                self._check_model(connection)
        except psycopg.Error as error:
            if connection.broken or isinstance(error, psycopg.OperationalError):
                connection.close()
            raise UserError(f"{self} did not answer ({_line(error)}); ask again") from error

    def _check_model(self, connection: Any) -> None:
        found = connection.execute(
            "SELECT obj_description(c.oid, 'pg_class'), a.atttypmod FROM pg_class c "
            "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'embedding' "
            "WHERE c.relname = %s AND pg_table_is_visible(c.oid)",
            [self.table],
        ).fetchone()
        if found is None:
            raise UserError(f"{self} does not exist; load it: evenhand index push RUN --to ADDRESS")
        if found[0] != self.model:
            raise of_another_model(str(self))
        if found[1] != self.dim:
            raise UserError(
                f"{self} holds vectors of {found[1]} dimensions, and the model has {self.dim}; "
                f"load it anew: evenhand index push RUN --to ADDRESS"
            )


def load_pgvector(
    address: str,
    table: str,
    blocks: Iterable[StoredLabels],
    *,
    dim: int,
    model: str,
    progress_fn: Callable[[str, int], None] = lambda name, done: None,
) -> None:
    """Writes all labels as a table, in place of one that is there: all of them or none.

    Args:
        blocks: the labels, in any order.
        model: what the table's comment says, so that no other model is asked with these.
        progress_fn: called with what is done, and for how many labels.
    """
    staging = f"{table[:40]}_{uuid.uuid4().hex[:16]}"
    names = {
        "live": sql.Identifier(table),
        "staging": sql.Identifier(staging),
        "dim": sql.Literal(dim),
        "model": sql.Literal(model),
    }
    what = f"the table {table} of PostgreSQL at {shown_address(address)}"
    with connect(address) as connection:
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            connection.commit()
        except psycopg.Error:  # it may be there all the same: `_register` looks
            connection.rollback()
        _register(connection, address)
        try:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(
                    sql.SQL(
                        "CREATE TABLE {staging} (label_id bigint PRIMARY KEY, name text NOT NULL, "
                        "metadata jsonb NOT NULL, embedding vector({dim}) NOT NULL)"
                    ).format(**names)
                )
                num_labels = 0
                statement = "COPY {staging} FROM STDIN WITH (FORMAT BINARY)"
                with cursor.copy(sql.SQL(statement).format(**names)) as copy:
                    copy.set_types(["int8", "text", "jsonb", "vector"])
                    for block in blocks:
                        for row in _cells(block):
                            copy.write_row(row)
                        num_labels += len(block.label_ids)
                        progress_fn("loading (labels)", num_labels)
                if dim <= MOST_INDEXED:
                    progress_fn("building the HNSW index", 0)
                    kilobytes = min(BUILD_KILOBYTES, max(2**16, num_labels * (dim + 200) // 128))
                    cursor.execute(
                        "SELECT set_config('maintenance_work_mem', %s, true)", [str(kilobytes)]
                    )
                    statement = "CREATE INDEX ON {staging} USING hnsw (embedding vector_ip_ops)"
                    cursor.execute(sql.SQL(statement).format(**names))
                cursor.execute(sql.SQL("ANALYZE {staging}").format(**names))
                # Only from here on does a searcher wait, and only for the moment of the change.
                for statement in (
                    "DROP TABLE IF EXISTS {live}",
                    "ALTER TABLE {staging} RENAME TO {live}",
                    "COMMENT ON TABLE {live} IS {model}",
                ):
                    cursor.execute(sql.SQL(statement).format(**names))
        except psycopg.Error as error:
            raise stopped_half_way(what, _line(error)) from error


def shown_address(address: str) -> str:
    """user@host:port/database, without the password."""
    try:
        parts = conninfo_to_dict(address)
    except psycopg.ProgrammingError:  # whose text may hold the password
        raise UserError(
            "the address of PostgreSQL must be postgresql://user:password@host:port/database"
        ) from None
    host, port = parts.get("host", "localhost"), parts.get("port", 5432)
    return f"{parts.get('user', '')}@{host}:{port}/{parts.get('dbname', '')}".lstrip("@")


def connect(address: str) -> Any:
    """An open connection."""
    shown = shown_address(address)
    try:
        return psycopg.connect(address, connect_timeout=CONNECT_SECONDS)
    except psycopg.OperationalError as error:
        reason = str(error)
        if "authentication failed" in reason or "no password" in reason or "role " in reason:
            raise UserError(
                f"PostgreSQL at {shown} refuses this user or password; correct the address, or "
                f"set PGPASSWORD"
            ) from None
        raise UserError(
            f"PostgreSQL at {shown} cannot be reached ({_line(error)}); start it, or correct the "
            f"address"
        ) from None


def _register(connection: Any, address: str) -> None:
    """Teaches a connection vectors, for which the extension must be there."""
    try:
        register_vector(connection)
    except psycopg.ProgrammingError as error:
        connection.close()
        raise UserError(
            f"PostgreSQL at {shown_address(address)} has no pgvector; install it on the server, "
            f"and let a superuser say CREATE EXTENSION vector"
        ) from error


def _close(connections: list[Any]) -> None:
    for connection in connections:
        connection.close()


def _cells(labels: StoredLabels) -> Iterator[tuple[Any, ...]]:
    for label_id, name, metadata, vector in zip(
        labels.label_ids.tolist(), labels.names, labels.metadata, labels.vectors, strict=True
    ):
        yield label_id, storable(name), Jsonb(storable_groups(metadata)), vector


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
