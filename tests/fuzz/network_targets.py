"""Targets that read what a server answers, and what an interrupted transfer left."""

import hashlib
import http.client
import io
import shutil
from unittest.mock import patch

from evenhand.data import download
from evenhand.data.download import RemoteFile

from .target import answer, require, scratch, target, write

CONTENT = b"The quick brown fox jumps over the lazy dogs."
URL = "http://host/file.txt"
BREAK = b"\n====\n"  # between the parts of an input
FILES = {
    b"c": RemoteFile("file.txt", URL, hashlib.md5(CONTENT).hexdigest()),
    b"u": RemoteFile("file.txt", URL),
}


class _Socket:
    """Gives the next prepared answer, whatever is asked."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def makefile(self, *_, **__):
        return io.BytesIO(self.text)

    def sendall(self, *_) -> None:
        pass

    def close(self) -> None:
        pass

    setsockopt = settimeout = close


def make_input(kind: bytes, *answers: bytes, about: bytes = b"", part: bytes = b"") -> bytes:
    return BREAK.join([kind, about, part, *answers])


WHOLE = b"HTTP/1.1 200 OK\nContent-Length: 45\n\n" + CONTENT
ETAG = b'{"url": "http://host/file.txt", "validator": "\\"v1\\""}'
WITH_ETAG = b'HTTP/1.1 200 OK\nETag: "v1"\nContent-Length: 45\n\n' + CONTENT
REST = (
    b'HTTP/1.1 206 Partial\nContent-Range: bytes 10-44/45\nETag: "v1"\nContent-Length: 35\n\n'
    + CONTENT[10:]
)
CHUNKED = b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2d\n" + CONTENT + b"\n0\n\n"


@target(
    "http",
    make_input(b"c", WHOLE),
    make_input(b"u", b'HTTP/1.0 200 OK\nContent-Length: 45\nETag: "v1"\n\n' + CONTENT),
    make_input(b"c", REST, about=ETAG, part=CONTENT[:10]),
    make_input(b"c", WITH_ETAG[:-35], REST),
    make_input(b"c", b"HTTP/1.1 302 Found\nLocation: http://b.c/d\nContent-Length: 0\n\n", WHOLE),
    make_input(b"c", CHUNKED),
    make_input(b"c", b"HTTP/1.1 416 No\n\n", WHOLE, about=ETAG, part=CONTENT),
    make_input(b"c", b"HTTP/1.1 503 No\n\n", WHOLE),
)
def fetch(data: bytes) -> Exception | None:
    """kind, what .part.json and .part hold, and the answers of the server one after the other."""
    kind, about, part, *answers = (data.split(BREAK, 8) + [b""] * 3)[:8]
    file = FILES.get(kind[:1], FILES[b"c"])
    folder = scratch() / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    if about:
        write("fetched/file.txt.part.json", about)
    if part:
        write("fetched/file.txt.part", part)
    left = [text.replace(b"\n", b"\r\n") if b"\r" not in text else text for text in answers]

    def connect(connection: http.client.HTTPConnection) -> None:
        connection.host.encode("idna")  # what a real connection does with a name
        connection.sock = _Socket(left.pop(0) if left else b"")

    with (
        patch.object(http.client.HTTPConnection, "connect", connect),
        patch.object(http.client.HTTPSConnection, "connect", connect),
    ):
        path, refusal = answer(
            lambda: download.fetch(file, folder, max_attempts=3, first_pause=0.0)
        )
    if refusal is None:
        require(not (folder / "file.txt.part").exists(), "a part is left")
        if file.md5 is not None:
            require(path.read_bytes() == CONTENT, "another file than the published one")
    else:
        require(not (folder / "file.txt").exists(), "refused, but the file is there")
    return refusal
