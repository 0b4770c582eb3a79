"""One contract for every index: exact search, FAISS, PostgreSQL and Milvus."""

import pytest
import torch

from evenhand.errors import UserError
from evenhand.search import ExactIndex, HybridIndex
from evenhand.search import faiss_index as fi
from evenhand.search.stored import stored_dim, stored_labels

NUM_LABELS, DIM, NUM_QUERIES = 600, 12, 40
MODEL = "0123456789abcdef" * 4
KINDS = ["exact", "hybrid", "flat", "hnsw", "ivf", "ivf-pq", "pgvector", "milvus"]
IS_EXACT = {"exact", "hybrid", "flat"}
LEAST_RECALL = 0.95  # of the others, at the effort below


def make_exact(num_labels=NUM_LABELS, *, has_bias=True, seed=0):
    """Labels in clusters, as a trained model has them, of which two are the same."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(30, DIM, generator=generator)
    vectors = centres[torch.randint(30, (num_labels,), generator=generator)]
    vectors = vectors + 0.5 * torch.randn(num_labels, DIM, generator=generator)
    vectors[1] = vectors[0]
    bias = torch.randn(num_labels, generator=generator) if has_bias else None
    if bias is None:
        vectors = vectors / vectors.norm(dim=1, keepdim=True)
    else:
        bias[1] = bias[0]
    return ExactIndex(vectors, label_bias=bias)


def some_queries(count=NUM_QUERIES, seed=1):
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def milvus(tmp_path_factory):
    """The path of a milvus-lite file."""
    pytest.importorskip("milvus_lite")
    return str(tmp_path_factory.mktemp("milvus") / "labels.db")


class Case:
    """An index of each kind over the same labels, and how it is made anew."""

    def __init__(self, kind, place, postgres=None, milvus=None):
        self.kind, self.place = kind, place
        self.address = {"pgvector": postgres, "milvus": milvus}.get(kind)
        self.exact = make_exact(fi.PQ_TRAINING if kind == "ivf-pq" else NUM_LABELS)
        self.index = self.make(self.exact)

    def make(self, exact, groups=None):
        if self.kind == "exact":
            return exact
        if self.kind == "hybrid":  # nothing is added to what the graph finds: candidates alone
            index = HybridIndex(exact, candidates=fi.build_faiss(exact, "flat"))
            index.prepared = lambda queries: index.prepare(queries, None)
            return index
        if self.address is None:
            return fi.build_faiss(exact, self.kind)
        self.load(stored_labels(exact, groups=groups), stored_dim(exact))
        return self.open(stored_dim(exact))

    def load(self, blocks, dim, model=MODEL):
        from evenhand.search import milvus, pgvector

        load = pgvector.load_pgvector if self.kind == "pgvector" else milvus.load_milvus
        load(self.address, "evenhand_test", blocks, dim=dim, model=model)

    def open(self, dim=DIM + 1, model=MODEL):
        from evenhand.search import milvus, pgvector

        kind = pgvector.PgvectorIndex if self.kind == "pgvector" else milvus.MilvusIndex
        has_bias = dim == DIM + 1
        return kind(self.address, "evenhand_test", dim=dim, has_bias=has_bias, model=model)

    def search(self, queries, num_results, index=None):
        index = index or self.index
        asked = index.prepared(queries) if self.kind == "hybrid" else queries
        return index.search(asked, num_results)


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    kind = request.param
    if kind in fi.KINDS or kind == "hybrid":
        pytest.importorskip("faiss")
    servers = {kind: request.getfixturevalue(kind)} if kind == "milvus" else {}
    if kind == "pgvector":
        servers["postgres"] = request.getfixturevalue("postgres")
    case = Case(kind, tmp_path_factory.mktemp(kind), **servers)
    if getattr(case.index, "effort", 0):
        case.index.set_effort(min(100, case.index.most_effort))
    return case


def recall(found, expected):
    """The share of expected labels found; a label of the same score counts as well."""
    found, expected = found.scores.sort(1).values, expected.scores.sort(1).values
    return (found >= expected - 1e-4 * expected.abs().clamp(min=1)).double().mean().item()


def check_found(found, exact, queries):
    """Best first, each label once, and the model's own score, bias included."""
    ids, scores = found
    assert ids.dtype == torch.int64
    assert ((ids < 0) == scores.isneginf()).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    for row in ids:
        kept = row[row >= 0]
        assert len(kept.unique()) == len(kept)
    torch.testing.assert_close(scores, exact.scores_of(queries, ids), rtol=1e-4, atol=1e-4)


def test_the_first_labels_are_those_of_exact_search(case):
    queries = some_queries()
    found, expected = case.search(queries, 10), case.exact.search(queries, 10)
    check_found(found, case.exact, queries)
    assert found.label_ids.shape == (NUM_QUERIES, 10)
    if case.kind in IS_EXACT:
        assert found.label_ids.equal(expected.label_ids)
    else:
        assert recall(found, expected) >= LEAST_RECALL
    one = case.search(queries[3:4], 10)
    assert one.label_ids[0].tolist() == found.label_ids[3].tolist()
    assert case.index.name
    assert len(case.index) == len(case.exact)


def test_more_results_than_labels_are_as_many_as_there_are(case):
    queries, count = some_queries(3), len(case.exact)
    found = case.search(queries, count + 50)
    check_found(found, case.exact, queries)
    assert found.label_ids.shape == (3, count)
    least = count if case.kind in IS_EXACT | {"pgvector"} else LEAST_RECALL * 300
    assert ((found.label_ids >= 0).sum(1) >= least).all()


def test_labels_that_are_the_same_are_both_found(case):
    found = case.search(case.exact.label_vectors[:1], 50)
    ids = found.label_ids[0].tolist()
    assert (ids.index(0) + 1, found.scores[0, ids.index(0)]) == (
        ids.index(1), found.scores[0, ids.index(1)],
    )  # fmt: skip


def test_no_queries_find_nothing(case):
    found = case.search(some_queries(0), 5)
    assert found.label_ids.shape == found.scores.shape == (0, 5)
    assert found.label_ids.dtype == torch.int64


def test_what_is_no_query_is_refused(case):
    with pytest.raises(ValueError, match=rf"queries must be \(Q, {DIM}\), got \(2, {DIM + 1}\)"):
        case.search(torch.ones(2, DIM + 1), 5)
    for number in (torch.nan, torch.inf):
        queries = some_queries(3)
        queries[1, 2] = number
        with pytest.raises(UserError, match="a query vector is infinite or no number"):
            case.search(queries, 5)
    with pytest.raises(ValueError, match="num_results must be at least 1, got 0"):
        case.search(some_queries(1), 0)


def test_without_a_bias_nothing_is_added_to_the_vectors(case):
    exact, queries = make_exact(len(case.exact), has_bias=False), some_queries()
    index = case.make(exact)
    if getattr(index, "effort", 0):
        index.set_effort(min(100, index.most_effort))
    found = case.search(queries, 10, index)
    check_found(found, exact, queries)
    assert recall(found, exact.search(queries, 10)) >= LEAST_RECALL
    if case.address:  # what the other tests ask
        case.index = case.make(case.exact)


def test_saved_and_opened_again_it_answers_the_same(case):
    queries, before = some_queries(), case.search(some_queries(), 10)
    if case.kind in IS_EXACT - {"flat"}:
        pytest.skip("it is made of the model")
    if case.address is None:
        path = case.place / "labels.faiss"
        case.index.save(path)
        again = fi.load_faiss(path, case.kind, has_bias=True, effort=case.index.effort or 1)
        half = case.place / "half.faiss"
        half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(UserError, match="is damaged; build it again"):
            fi.load_faiss(half, case.kind, has_bias=True, effort=1)
    else:
        again = case.open()
        again.set_effort(case.index.effort)
    after = case.search(queries, 10, again)
    assert after.label_ids.equal(before.label_ids)
    assert after.scores.equal(before.scores)


def test_a_label_vector_that_is_no_number_is_not_stored(case):
    if case.kind in ("exact", "hybrid"):
        pytest.skip("nothing is stored")
    exact = make_exact(len(case.exact))
    exact.label_vectors[5, 1] = torch.inf
    with pytest.raises(UserError, match="is infinite or no number; train anew"):
        case.make(exact)
    if case.address:  # what was there before is
        assert recall(case.search(some_queries(), 5), case.exact.search(some_queries(), 5)) > 0.9


# --- databases: what goes wrong -------------------------------------------------------------------

databases = pytest.mark.parametrize("case", ["pgvector", "milvus"], indirect=True)
NASTY = [
    'a"b', "it's", "back\\slash", "\\", "new\nline", "null\0byte", "😀", "%s %(x)s", "{x}", "", "é",
    '"]) or true or json_contains_any(metadata["x"], ["', "'; DROP TABLE evenhand_test; --",
    "x' ?| array['a'] OR true --", "null\\u0000byte", "half \ud800 a pair",
]  # fmt: skip


def tables(case):
    """What a database holds of these tests, half-loaded or not."""
    if case.kind == "milvus":
        return case.index.client.list_collections()
    with case.index._connection() as connection:
        found = connection.execute("SELECT relname FROM pg_class WHERE relkind = 'r'").fetchall()
    return [name for (name,) in found if name.startswith("evenhand_test")]


@databases
def test_a_load_that_stops_half_way_is_not_seen(case):
    def blocks():
        yield from list(stored_labels(make_exact(seed=5), block_rows=200))[:2]
        assert len(case.open()) == NUM_LABELS  # while it is on its way
        raise OSError("pulled out")

    before = case.search(some_queries(), 10)
    with pytest.raises(OSError, match="pulled out"):
        case.load(blocks(), DIM + 1)
    for index in (case.index, case.open()):
        assert case.search(some_queries(), 10, index).scores.equal(before.scores)
    assert len(tables(case)) == 1


@databases
def test_vectors_of_another_model_or_width_are_not_asked(case):
    for dim, model, sentence in (
        (DIM + 1, "f" * 64, "holds the vectors of another model; load this one"),
        (DIM + 3, MODEL, f"holds vectors of {DIM + 1} dimensions, and the model has {DIM + 3}"),
    ):
        with pytest.raises(UserError, match=sentence):
            case.open(dim, model)
    case.load(stored_labels(case.exact), DIM + 1, model="f" * 64)  # while a searcher is open
    with pytest.raises(UserError, match="another model"):
        case.search(some_queries(), 10)
    with pytest.raises(UserError, match="another model"):
        case.index.upsert(next(stored_labels(case.exact)))
    case.index = case.make(case.exact)
    assert recall(case.search(some_queries(), 5), case.exact.search(some_queries(), 5)) > 0.9


@databases
def test_names_of_labels_and_groups_are_never_taken_for_commands(case):
    size = len(NASTY)
    (labels,) = stored_labels(case.exact)
    of_groups = [{column: [group]} for column in NASTY for group in NASTY]
    assert len(of_groups) < NUM_LABELS
    metadata = of_groups + [{}] * (NUM_LABELS - len(of_groups))
    names = [NASTY[label % size] for label in range(NUM_LABELS)]
    case.load([labels._replace(names=names, metadata=metadata)], DIM + 1)
    index, query = case.open(), some_queries(1)
    for column in range(size):
        for group in (0, column, size - 1):
            found = index.search(query, 5, {NASTY[column]: [NASTY[group]]}).label_ids[0]
            assert found[found >= 0].tolist() == [column * size + group]
    assert (index.search(query, 5, {"nobody": NASTY}).label_ids < 0).all()
    case.index = case.make(case.exact)


@databases
def test_a_table_that_was_never_loaded_is_named(case):
    from evenhand.search import milvus, pgvector

    kind = pgvector.PgvectorIndex if case.kind == "pgvector" else milvus.MilvusIndex
    with pytest.raises(UserError, match=r"evenhand_none of .* does not exist; load it: evenhand"):
        kind(case.address, "evenhand_none", dim=DIM, has_bias=False, model=MODEL)


@pytest.fixture
def deaf():
    """The port of a server that accepts and says nothing, and of one that is not there."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield silent.getsockname()[1], closed.getsockname()[1]


def test_a_database_that_is_down_or_silent_is_named_without_the_password(deaf, monkeypatch):
    from evenhand.search import milvus, pgvector

    monkeypatch.setattr(pgvector, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(milvus, "TIMEOUT", 1.0)
    for port in deaf:
        for connect, address in (
            (pgvector.connect, f"postgresql://me:secret@127.0.0.1:{port}/x"),
            (milvus.connect, f"http://me:secret@127.0.0.1:{port}"),
        ):
            with pytest.raises(UserError, match="cannot be reached") as raised:
                connect(address)
            assert str(port) in str(raised.value)
            assert "secret" not in str(raised.value)
            assert raised.value.__cause__ is None


def test_a_wrong_user_or_password_is_told(postgres):
    import psycopg

    from evenhand.search import pgvector

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS asker")
        connection.execute("CREATE ROLE asker LOGIN PASSWORD 'right'")
        (rules,) = connection.execute("SHOW hba_file").fetchone()
        with open(rules, "r+", encoding="utf-8") as file:
            text = file.read()
            file.seek(0)
            file.write("local all asker scram-sha-256\n" + text)
        connection.execute("SELECT pg_reload_conf()")
    assert "postgres:@" in postgres
    for user in ("asker:wrong@", "asker:@", "nobody:wrong@"):
        with pytest.raises(UserError, match="refuses this user or password; correct") as raised:
            pgvector.connect(postgres.replace("postgres:@", user))
        assert "wrong" not in str(raised.value)
    small_rights = postgres.replace("postgres:@", "asker:right@")
    pgvector.connect(small_rights).close()
    with pytest.raises(UserError, match=r"stopped half-way .*permission denied"):
        pgvector.load_pgvector(
            small_rights, "evenhand_x", stored_labels(make_exact()), dim=DIM + 1, model=MODEL
        )


@pytest.mark.parametrize("case", ["pgvector"], indirect=True)
def test_a_lost_connection_is_told_once_and_opened_anew(case):
    import psycopg

    def end_others():
        with psycopg.connect(case.address, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    def blocks():
        yield from list(stored_labels(case.exact, block_rows=200))[:2]
        end_others()
        yield from list(stored_labels(case.exact, block_rows=200))[2:]

    before = case.search(some_queries(), 5)
    end_others()
    with pytest.raises(UserError, match=r"did not answer .*; ask again"):
        case.search(some_queries(), 5)
    assert case.search(some_queries(), 5).scores.equal(before.scores)
    with pytest.raises(UserError, match=r"stopped half-way .* the same command begins anew"):
        case.load(blocks(), DIM + 1)
    with pytest.raises(UserError, match="did not answer"):
        case.search(some_queries(), 5)
    assert case.search(some_queries(), 5).scores.equal(before.scores)
    assert len(tables(case)) == 1
