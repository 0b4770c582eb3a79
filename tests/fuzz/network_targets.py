"""Targets that read what a server answers, and what an interrupted transfer left."""

import hashlib
import http.client
import io
import shutil

from evenhand.data import download
from evenhand.data.download import RemoteFile

from .target import Target, answer, require, scratch, written

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


def _fetch(data: bytes) -> Exception | None:
    """kind, what .part.json and .part hold, and the answers of the server one after the other."""
    kind, about, part, *answers = (data.split(BREAK, 8) + [b""] * 3)[:8]
    file = FILES.get(kind[:1], FILES[b"c"])
    folder = scratch() / "fetched"
    shutil.rmtree(folder, ignore_errors=True)
    if about:
        written("fetched/file.txt.part.json", about)
    if part:
        written("fetched/file.txt.part", part)
    left = [text.replace(b"\n", b"\r\n") if b"\r" not in text else text for text in answers]

    def connect(connection: http.client.HTTPConnection) -> None:
        connection.host.encode("idna")  # what a real connection does with a name
        connection.sock = _Socket(left.pop(0) if left else b"")

    kinds = http.client.HTTPConnection, http.client.HTTPSConnection
    kept = [kind.connect for kind in kinds]
    for kind in kinds:
        kind.connect = connect
    try:
        path, refusal = answer(
            lambda: download.fetch(file, folder, max_attempts=3, first_pause=0.0, max_bytes=10**6)
        )
    finally:
        for kind, own in zip(kinds, kept, strict=True):
            kind.connect = own
    if refusal is None:
        require(not (folder / "file.txt.part").exists(), "a part is left")
        if file.md5 is not None:
            require(path.read_bytes() == CONTENT, "another file than the published one")
    else:
        require(not (folder / "file.txt").exists(), "refused, but the file is there")
    return refusal


def _input(kind: bytes, *answers: bytes, about: bytes = b"", part: bytes = b"") -> bytes:
    return BREAK.join([kind, about, part, *answers])


WHOLE = b"HTTP/1.1 200 OK\nContent-Length: 45\n\n" + CONTENT
ETAG = b'{"url": "http://host/file.txt", "validator": "\\"v1\\""}'
WITH_ETAG = b'HTTP/1.1 200 OK\nETag: "v1"\nContent-Length: 45\n\n' + CONTENT
REST = (
    b'HTTP/1.1 206 Partial\nContent-Range: bytes 10-44/45\nETag: "v1"\nContent-Length: 35\n\n'
    + CONTENT[10:]
)
CHUNKED = b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2d\n" + CONTENT + b"\n0\n\n"

FETCH = Target(
    "http",
    _fetch,
    (
        _input(b"c", WHOLE),
        _input(b"u", b"HTTP/1.0 200 OK\nContent-Length: 45\nETag: \"v1\"\n\n" + CONTENT),
        _input(b"c", REST, about=ETAG, part=CONTENT[:10]),
        _input(b"c", WITH_ETAG[:-35], REST),
        _input(b"c", b"HTTP/1.1 302 Found\nLocation: http://b.c/d\nContent-Length: 0\n\n", WHOLE),
        _input(b"c", CHUNKED),
        _input(b"c", b"HTTP/1.1 416 No\n\n", WHOLE, about=ETAG, part=CONTENT),
        _input(b"c", b"HTTP/1.1 503 No\n\n", WHOLE),
    ),
    (
        b"Location: http://[::1\n", b"Location: file:///etc/passwd\n", b"Content-Length: -1\n",
        BREAK,
        b"Content-Length: " + b"9" * 5000 + b"\n", b"Content-Range: bytes 0-44/45\n", b"200",
        b"206",
        b"Content-Encoding: gzip\n", b"Content-Type: text/html\n",
        b"Transfer-Encoding: chunked\n", b"301",
        b"Location: http://" + b"a" * 70 + b"/\n", b"Location: http://\xe9/\n",
        b"ffffffffffffffff\n", WHOLE,
        b"ETag: W/\"1\"\n", b"Last-Modified: \xff\n", b"HTTP/1.1 100 Continue\n\n", b"-2d\n",
        b"bytes */45",
        b'{"validator": "\\u20ac", "url": "http://host/file.txt"}', b"307",
        b"Location: https://b:99999/\n",
    ),
)  # fmt: skip


TARGETS = (FETCH,)
