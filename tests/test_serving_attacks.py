"""What an attacker, or bad luck, does to the sockets and signals of `evenhand serve`."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

import small

BODY = json.dumps({"queries": ["badoki7"]}).encode()
HEAD = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SEARCH = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small.trained(tmp_path_factory, {"one": [], "two": ["--set", "mining.method=snm"]})


class Served:
    """A running server."""

    def __init__(self, process):
        self.process, self.log, out = process, "", process.streams / "out"
        small.wait_for(lambda: out.exists() and "\n" in out.read_text("utf-8"))
        self.port = int(out.read_text("utf-8").split("http://127.0.0.1:")[1].split()[0])

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, *pieces):
        """Everything that comes back until the server closes, or is silent for a while."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # it may be refused before all of it is sent
                for piece in pieces:
                    connection.sendall(piece)
            return everything(connection)

    def status(self, *pieces):
        return statuses(self.send(*pieces))[:1]


def everything(connection, silence=0.3):
    found = b""
    connection.settimeout(silence)
    with contextlib.suppress(OSError):
        while piece := connection.recv(2**16):
            found += piece
    return found


def statuses(answer):
    """The status of each answer on a connection."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@contextlib.contextmanager
def serving(home, *words, environment=None):
    """A server, ended by SIGTERM; afterwards its log is that of both streams."""
    process = small.start(home, "serve", "runs/one", "--port", 0, *words, environment=environment)
    served = None
    try:
        served = Served(process)
        yield served
    finally:
        process.kill(signal.SIGTERM)
        answer = process.wait()
        log = answer.out + answer.err
        if served is not None:
            served.log = log
    assert answer.code == 0, log
    assert "Traceback" not in log


@pytest.fixture(scope="module")
def served(home):
    with serving(home, "--timeout", 0.5, "--max-connections", 30) as served:
        yield served
    assert "secret" not in served.log


MANY = b"0" * 200_000
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
WRONG = {  # name: (what is sent, statuses of the answers)
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + MANY, [400]),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", [400]),
    "two hosts": (GET % (b"/", b"host: localhost\r\n"), [400]),
    "huge header": (GET % (b"/", b"x-a: %s\r\n" % MANY), [400]),
    "many headers": (GET % (b"/", b"x-a: 1\r\n" * 20_000), [400]),
    "huge path": (GET % (b"/" + MANY, b""), [400]),
    "long path": (GET % (b"/" + b"a" * 5000, b"connection: close\r\n"), [404]),
    "null in a path": (GET % (b"/%00", b"connection: close\r\n"), [404]),
    "newline in a path": (GET % (b"/%0d%0aset-cookie:%20secret", b"connection: close\r\n"), [404]),
    "half a character in a path": (GET % (b"/%ff%c3", b"connection: close\r\n"), [404]),
    "folder above": (GET % (b"/../server.py", b"connection: close\r\n"), [404]),
    "folder above, hidden": (GET % (b"/%2e%2e%2fserver.py", b"connection: close\r\n"), [404]),
    "folder above, twice hidden": (GET % (b"/..%252fserver.py", b"connection: close\r\n"), [404]),
    "folder above, backslash": (GET % (b"/..%5cserver.py", b"connection: close\r\n"), [404]),
    "folder from the root": (GET % (b"//etc/passwd", b"connection: close\r\n"), [404]),
    "run above": (GET % (b"/runs/..%2f..%2fdata/map", b"connection: close\r\n"), [404]),
    "unknown method": (b"SECRET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", [405]),
    "two lengths": (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY, [400]),
    "length below zero": (HEAD + b"content-length: -1\r\n\r\n", [400]),
    "length of many digits": (HEAD + b"content-length: %s\r\n\r\n" % (b"9" * 5000), [400]),
    "length beyond the limit": (HEAD + b"content-length: 10000000\r\n\r\n", [413]),
    "length that is expected": (
        HEAD + b"expect: 100-continue\r\ncontent-length: 10000000\r\n\r\n", [413]
    ),
    "chunks that are none": (CHUNKED + b"zz\r\n", [400]),
    "unknown encoding": (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", [400]),
    "upgrade": (GET % (b"/health", b"connection: upgrade\r\nupgrade: websocket\r\n"), [200]),
    "two at once": (SEARCH + SEARCH, [200, 200]),
    "a good one and garbage": (SEARCH + b"\x00garbage\r\n\r\n", [200, 400]),
    "chunks without end": (CHUNKED, CHUNK * 20, [413]),
    "garbage after an answer": (CHUNKED, CHUNK * 20, b"zz\r\n" * 99, [413]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_proper_request_is_refused_and_the_next_is_answered(served, name):
    *pieces, wanted = WRONG[name]
    answer = served.send(*pieces)
    assert statuses(answer) == wanted, answer[:300]
    assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0]
    assert served.status(SEARCH) == [200]


def test_who_sends_slowly_or_does_not_read_is_cut_off(served):
    """After 2 * 0.5 seconds; others are answered."""

    def flood():
        with contextlib.suppress(OSError):
            while True:
                deaf.sendall(GET % (b"/page.js", b""))

    files = Path(f"/proc/{served.process.pid}/fd")
    began, num_files = time.monotonic(), len(list(files.iterdir()))
    with served.connect() as half, served.connect() as quiet, served.connect() as deaf:
        thread = threading.Thread(target=flood)
        thread.start()
        with contextlib.suppress(OSError):
            half.sendall(HEAD)
            while time.monotonic() < began + 5:
                half.sendall(b"x-a: 1\r\n")
                assert served.status(SEARCH) == [200]
        assert everything(quiet) == b""
        small.wait_for(lambda: len(list(files.iterdir())) <= num_files)
        assert time.monotonic() - began < 4
        with contextlib.suppress(OSError):
            deaf.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_connections_beyond_the_limit_are_told_so_and_the_others_are_answered(served):
    async def connect():
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            writer.write(SEARCH)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            await asyncio.sleep(0.5)  # it is held for a while
            return int(head[9:12])
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0  # refused before it had been sent
        finally:
            writer.close()

    async def connect_all():
        return await asyncio.gather(*(connect() for _ in range(300)))

    found = asyncio.run(connect_all())
    assert set(found) <= {0, 200, 503}
    assert 1 <= found.count(200) <= 30
    assert served.status(SEARCH) == [200]


def test_another_name_for_this_machine_is_not_answered(served):
    """A page elsewhere may lead its own name here, and would read what it is answered."""
    for host, status in (
        (b"localhost:8000", 200), (b"127.0.0.1", 200), (b"[::1]:1", 200), (b"LOCALHOST", 200),
        (b"elsewhere.example", 421), (b"localhost.elsewhere.example:80", 421), (b"", 421),
        (b"[", 421), (b"127.0.0.1.elsewhere.example", 421), (b"a@localhost", 200),
    ):  # fmt: skip
        message = b"GET /runs HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % host
        assert served.status(message) == [status], host


def test_a_key_is_in_no_log(home):
    with serving(home, "--api-key-env", "KEY", environment={"KEY": "secret"}) as served:
        for header, status in ((b"", 401), (b"Bearer secret1", 401), (b"Bearer secret", 200)):
            more = b"authorization: %s\r\nconnection: close\r\n" % header
            assert served.status(GET % (b"/runs?secret", more)) == [status]
        other = GET.replace(b"localhost", b"elsewhere.example")  # with a key any name will do
        assert served.status(other % (b"/runs", b"authorization: Bearer secret\r\n")) == [200]
    assert "secret" not in served.log


# --- under load -----------------------------------------------------------------------------------


async def ask_until(port, is_over_fn, num_connections=8):
    """Statuses of requests by connections that stay open; a refused one is a status of 0."""
    found = []

    async def client():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not is_over_fn():
            writer.write(SEARCH)
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
            except (ConnectionError, asyncio.IncompleteReadError):
                found.append(0)
                break
            found.append(int(head[9:12]))
            if b"\r\nconnection: close" in head.lower():
                break
        writer.close()

    await asyncio.gather(*(client() for _ in range(num_connections)))
    return found


def reloads(served):
    return (served.process.streams / "err").read_text("utf-8").count("runs reloaded")


def test_no_request_fails_while_runs_are_reloaded(home, tmp_path):
    shutil.copytree(home / "runs/one", tmp_path / "runs/one")
    with serving(tmp_path) as served:

        def reload():
            for count in range(1, 6):
                if count == 4:  # what lies there now is damaged
                    small.weights_file(tmp_path / "runs/one").write_bytes(b"broken")
                    names = tmp_path / "runs/one/model/query_data.safetensors"
                    names.write_bytes(names.read_bytes()[:-100])
                if count == 5:
                    shutil.rmtree(tmp_path / "runs/one")
                served.process.kill(signal.SIGHUP)
                small.wait_for(lambda count=count: reloads(served) == count)

        thread = threading.Thread(target=reload)
        thread.start()
        found = asyncio.run(ask_until(served.port, lambda: not thread.is_alive()))
        assert len(found) > 50
        assert set(found) == {200}
    assert served.log.count("one is served as it was") == 2


def test_requests_in_flight_finish_when_the_server_is_told_to_stop(home):
    with serving(home) as served:

        async def stop_under_load():
            clients = asyncio.create_task(ask_until(served.port, lambda: False, 32))
            await asyncio.sleep(1)
            served.process.kill(signal.SIGTERM)
            return await clients

        found = asyncio.run(stop_under_load())
    assert len(found) > 50
    assert set(found) == {200}
