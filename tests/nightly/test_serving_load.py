"""A server under load for long: no error, no growing memory, 10,000 connections."""

import asyncio
import contextlib
import importlib
import resource
from pathlib import Path

import pytest

import small

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_REQUESTS, NUM_CONNECTIONS = 100_000, 10_000
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def serving():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("serving")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small.trained(tmp_path_factory)


def test_a_hundred_thousand_requests_leave_no_error_and_no_memory(serving, home, monkeypatch):
    monkeypatch.chdir(home)
    row = serving.measure(home / "runs/a", NUM_REQUESTS, 32)
    assert row["errors"] == 0
    assert row["mb_at_the_end"] <= 1.05 * row["mb_after_a_tenth"]


def test_of_ten_thousand_connections_those_within_the_limit_are_answered(serving, home):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_CONNECTIONS + 500:
        pytest.skip(f"this system allows {hard:,} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_CONNECTIONS + 500, hard))

    async def ask(port):
        """The status of an answer; 0: the connection was refused before it had been read."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(writer):
                    writer.write(GET)
                    status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
                    await asyncio.sleep(3 if status == 200 else 0)  # it is held
                    return status
        return 0

    async def ask_all(port):
        return await asyncio.gather(*(ask(port) for _ in range(NUM_CONNECTIONS)))

    try:
        with serving.started_server(home / "runs/a") as (_, port):
            found = asyncio.run(ask_all(port))
            assert set(found) <= {0, 200, 503}
            assert found.count(200) >= 1000
            assert asyncio.run(ask(port)) == 200  # the next one
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_requests_by_the_schema_break_nothing(home):
    import torch

    from evenhand.serving.server import Runs, make_app
    from test_serving import check_schema

    runs = Runs([home / "runs/a"], device=torch.device("cpu"))
    check_schema(make_app(runs), max_examples=1000)
