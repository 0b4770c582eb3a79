"""One file over HTTP: continued where it was cut off, checked, and only then given its name.

What has arrived lies in `name.part`; `name.part.json` says of which address and version it is a
part. Continuing asks for the rest *if the file is still that version* (Range and If-Range), takes
the whole again from a server that does not know ranges, and believes no answer that does not fit.
The checksum is taken of the complete part; then it is renamed. So `name` is always a whole file.
"""

import contextlib
import functools
import hashlib
import http.client
import io
import os
import re
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from evenhand.errors import UserError
from evenhand.files import (
    check_is_file,
    open_input,
    parse_json,
    read_text,
    sync,
    write_json,
    write_text,
)
from evenhand.locking import locked_file
from evenhand.version import __version__

ProgressFn = Callable[[str, int, int | None], None]  # name, bytes there are, bytes in all

BLOCK_BYTES = 2**18
MAX_BYTES = 16 * 2**30  # of a file whose size is not published
MAX_ATTEMPTS = 8  # for one address, in all
FIRST_PAUSE = 1.0  # seconds; each further one is twice as long
MAX_PAUSE = 30.0
TIMEOUT = 30.0  # seconds without a byte
SCHEMES = ("http", "https")
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
LASTING_FAILURES = (socket.gaierror, ssl.SSLCertVerificationError, ConnectionRefusedError)
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class Checksum(NamedTuple):
    """What a file's bytes must come to."""

    kind: str  # md5 or sha256
    digest: str


class RemoteFile(NamedTuple):
    """A file, where it can be fetched, and what is published about it."""

    name: str
    urls: tuple[str, ...] = ()  # tried in this order
    checksum: Checksum | None = None
    num_bytes: int | None = None


class _Unusable(Exception):  # noqa: N818
    """This address does not give the file; another one may."""


class _CutOff(Exception):  # noqa: N818
    """The line broke; to ask again may help."""


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    progress_fn: ProgressFn | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    first_pause: float = FIRST_PAUSE,
    timeout: float = TIMEOUT,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """The file in the folder: the one that is there, if it is good, or else fetched.

    A file without a published checksum is held to the sha256 that was seen first, which is
    written beside it. Whatever goes wrong is a `UserError`; a part that can be continued stays.
    """
    path = folder / file.name
    if path.exists():
        check_file(path, file.checksum, progress_fn=progress_fn)
        return path
    for url in file.urls:
        if urllib.parse.urlsplit(url).scheme not in SCHEMES:
            raise UserError(f"{url} is not an http or https address; only those are fetched")
    reasons = []
    with _disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(path.with_name(f".{path.name}.lock"), path):  # two must not write one part
            for url in () if path.exists() else file.urls:
                transfer = _Transfer(file, path, url, progress_fn, timeout, max_bytes)
                try:
                    transfer.run(max_attempts, first_pause)
                    return path
                except _Unusable as error:
                    reasons.append(f"{url} {error}")
    if not reasons and path.exists():  # by another process, a moment ago
        return path
    raise UserError("; ".join(reasons) + f"; {path} was not written")


class _Transfer:
    """The attempts to get one file from one address."""

    def __init__(
        self,
        file: RemoteFile,
        path: Path,
        url: str,
        progress_fn: ProgressFn | None,
        timeout: float,
        max_bytes: int,
    ) -> None:
        self.file, self.path, self.url = file, path, url
        self.progress_fn, self.timeout, self.max_bytes = progress_fn, timeout, max_bytes
        self.part = part_path(path)
        self.about = self.part.with_name(f"{self.part.name}.json")

    def run(self, max_attempts: int, first_pause: float) -> None:
        """Asks until the part is complete; then checks it and gives it its name."""
        reason = ""
        for attempt in range(max_attempts):
            if attempt:
                time.sleep(min(first_pause * 2 ** (attempt - 1), MAX_PAUSE))
            try:
                self.ask()
                self.finish()
                return
            except _CutOff as error:
                reason = str(error)
        size = self.part.stat().st_size if self.part.exists() else 0
        raise _Unusable(
            f"was cut off {max_attempts} times ({reason}) with {size} bytes in {self.part.name}; "
            f"the same command continues from there"
        )

    def ask(self) -> None:
        """One request, and what it brings, appended to the part."""
        have, validator = self.resumable()
        headers = {"User-Agent": f"evenhand/{__version__}", "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if validator:
                headers["If-Range"] = validator
        try:
            request = urllib.request.Request(self.url, headers=headers)
            answer = _opener().open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and have:
                self.after_416(error.headers.get("Content-Range", ""), have)
                return
            raise _http_failure(error) from error
        except (OSError, http.client.HTTPException) as error:
            raise _connection_failure(error) from error
        except ValueError as error:  # of a redirection: no host, or one that no host can have
            raise _Unusable(f"leads to an address that cannot be asked ({error})") from error
        with contextlib.closing(answer):
            if answer.status == 206 and validator not in (None, _validator(answer.headers)):
                self.discard()
                raise _CutOff("the file has changed there: begun anew")
            have, total = self.start_and_total(answer, have)
            self.receive(answer, have, total)

    def resumable(self) -> tuple[int, str | None]:
        """How many bytes of this version there are, and what the server calls the version."""
        about: Any = None
        with contextlib.suppress(OSError, ValueError):
            about = parse_json(read_text(self.about))
        check_is_file(self.part)
        size = self.part.stat().st_size if self.part.exists() else 0
        if not isinstance(about, dict):
            return 0, None
        validator = about.get("validator") if about.get("url") == self.url else None
        if isinstance(validator, str) and validator.isascii() and validator.isprintable():
            return size, validator
        # Without a name for the version, only a checksum can tell if both parts are of the same.
        return (size, None) if self.file.checksum else (0, None)

    def after_416(self, content_range: str, have: int) -> None:
        """There is nothing after the bytes we have: they are all, or they are of something else."""
        if content_range != f"bytes */{have}":
            self.discard()
            raise _CutOff(f"the server has no byte {have}: begun anew")

    def start_and_total(self, answer: Any, have: int) -> tuple[int, int | None]:
        """Where the answer's first byte belongs, and how long the whole file is."""
        if answer.headers.get_content_type() == "text/html":
            raise _Unusable("sends a web page instead of the file")
        coding = answer.headers.get("Content-Encoding", "identity")
        if coding != "identity" and self.file.checksum is None:  # else the checksum will tell
            raise _Unusable(f"sends the file in the coding {coding!r}, which was not asked for")
        if answer.status == 206:
            text = answer.headers.get("Content-Range", "")
            match = CONTENT_RANGE.fullmatch(text)
            start, end, total = map(int, match.groups()) if match else (-1, -1, None)
            if total is None or start != have or not start <= end < total:
                raise _Unusable(f"was asked for bytes {have}- and answers with {text!r}")
        elif answer.status == 200:  # all of it: ranges are not known there, or the file is new
            have, length = 0, answer.headers.get("Content-Length")
            total = int(length) if re.fullmatch("[0-9]{1,18}", length or "") else None
        else:
            raise _Unusable(f"answers with the status {answer.status}")
        self.check_size(total, answer)
        if have == 0:
            self.discard()
            self.part.touch()
            write_json(self.about, {"url": self.url, "validator": _validator(answer.headers)})
        return have, total

    def check_size(self, total: int | None, answer: Any) -> None:
        published = self.file.num_bytes
        if total is None:
            is_chunked = answer.headers.get("Transfer-Encoding", "").lower() == "chunked"
            if published is None and self.file.checksum is None and not is_chunked:
                raise _Unusable("does not say how long the file is, and no checksum is published")
            return
        if published is not None and total != published:
            raise _Unusable(f"has a file of {total} bytes, but the published one has {published}")
        if total > self.max_bytes:
            raise _Unusable(f"has a file of {total} bytes; more than {self.max_bytes} are refused")
        have = self.part.stat().st_size if self.part.exists() else 0
        free = shutil.disk_usage(self.path.parent).free
        if total - have > free:
            raise UserError(
                f"{self.path} needs {total - have} more bytes, but the disk has {free}; make room "
                f"or choose another --folder"
            )

    def receive(self, answer: Any, have: int, total: int | None) -> None:
        limit = self.max_bytes if total is None else total
        with open(self.part, "ab") as part:  # which has `have` bytes
            while block := _read(answer):
                have += len(block)
                if have > limit:
                    self.discard()
                    raise _Unusable(f"sends more than {limit} bytes")
                part.write(block)
                if self.progress_fn is not None:
                    self.progress_fn(self.file.name, have, total)
        if total is not None and have < total:
            raise _CutOff(f"{have} of {total} bytes came")

    def finish(self) -> None:
        """Checks the complete part, and only then gives it its name."""
        published, size = self.file.num_bytes, self.part.stat().st_size
        if published is not None and size != published:
            self.discard()
            raise _Unusable(f"gave {size} bytes, but the published file has {published}")
        if self.path.suffix == ".zip" and not zipfile.is_zipfile(self.part):
            self.discard()
            raise _Unusable("gave something that is not a .zip archive")
        expected = self.file.checksum or recorded_checksum(self.path)
        kind = expected.kind if expected else "sha256"
        digest = digest_of(self.part, kind)
        if expected is not None and digest != expected.digest:
            self.discard()
            where = "published" if self.file.checksum else f"that of {record_path(self.path).name}"
            raise _Unusable(
                f"gave a file whose {kind} is {digest}, {where} is {expected.digest}; it was "
                f"removed" + ("" if self.file.checksum else ", and so may be the record if the "
                "publisher has a new version")
            )  # fmt: skip
        sync(self.part)
        os.replace(self.part, self.path)
        self.about.unlink(missing_ok=True)
        sync(self.path.parent)
        if expected is None:
            record_checksum(self.path, digest)

    def discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.about.unlink(missing_ok=True)


# --- checksums ------------------------------------------------------------------------------------


def part_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def record_path(path: Path) -> Path:
    """Where the sha256 of a file without a published checksum is written when first seen."""
    return path.with_name(f"{path.name}.sha256")


def record_checksum(path: Path, digest: str) -> None:
    write_text(record_path(path), f"{digest}  {path.name}\n")  # `sha256sum --check` reads it too


def recorded_checksum(path: Path) -> Checksum | None:
    record = record_path(path)
    if not record.exists():
        return None
    with open_input(record) as file:
        digest = file.read(2**10).decode("utf-8", "replace").split(" ")[0]
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise UserError(f"{record} does not start with a sha256; remove it to take a new one")
    return Checksum("sha256", digest)


def digest_of(path: Path, kind: str, progress_fn: ProgressFn | None = None) -> str:
    hashed = hashlib.new(kind, usedforsecurity=False)
    total, done = path.stat().st_size, 0
    with open_input(path) as file:
        while block := file.read(2**20):
            hashed.update(block)
            done += len(block)
            if progress_fn is not None:
                progress_fn(path.name, done, total)
    return hashed.hexdigest()


def check_file(
    path: Path, published: Checksum | None, *, progress_fn: ProgressFn | None = None
) -> str:
    """A sentence on what the file was held to, or a `UserError` if it is another one."""
    expected = published or recorded_checksum(path)
    if expected is None:
        digest = digest_of(path, "sha256", progress_fn)
        try:
            record_checksum(path, digest)
        except UserError:  # a folder that is only to be read
            return f"no checksum is published, and its sha256 {digest} could not be kept"
        return f"no checksum is published; its sha256 was written to {record_path(path).name}"
    digest = digest_of(path, expected.kind, progress_fn)
    if digest != expected.digest:
        source = "published" if published else f"in {record_path(path).name}"
        raise UserError(
            f"{path} has the {expected.kind} {digest}, but {expected.digest} is {source}; it is "
            f"damaged or another version: move it away and fetch it again"
        )
    return f"{expected.kind} as " + ("published" if published else "when it was first seen")


# --- the network ----------------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https alone, and never from https to http."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any
    ) -> Any:
        target = urllib.parse.urljoin(req.full_url, headers.get("Location", ""))
        scheme = urllib.parse.urlsplit(target).scheme
        if scheme not in SCHEMES or (req.type == "https" and scheme == "http"):
            fp.close()
            raise _Unusable(f"redirects to {target!r}, which is refused")
        fp.close()  # and not read, however long it says it is
        return super().http_error_302(req, io.BytesIO(), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


@functools.cache  # the certificates of a system are read once, which takes long on some
def _opener() -> urllib.request.OpenerDirector:
    """HTTP and nothing else: no ftp, no file, no data addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _http_failure(error: urllib.error.HTTPError) -> Exception:
    if error.code in PASSING_STATUS:
        return _CutOff(f"status {error.code}")
    return _Unusable(f"answers with the status {error.code} ({error.reason})")


def _connection_failure(error: Exception) -> Exception:
    reason = getattr(error, "reason", None) or error
    told = str(reason) or type(reason).__name__
    if isinstance(reason, LASTING_FAILURES):
        return _Unusable(f"cannot be reached ({told})")
    return _CutOff(told)


def _read(answer: Any) -> bytes:
    try:
        block: bytes = answer.read(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _CutOff(str(error) or type(error).__name__) from error
    return block


def _validator(headers: Any) -> str | None:
    """What If-Range accepts: a strong ETag, or else the date of the last change."""
    etag: str = headers.get("ETag", "")
    if etag.startswith('"'):
        return etag
    return headers.get("Last-Modified")  # type: ignore[no-any-return]


# --- the disk -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Errors of the network were turned into others before: what is left is the disk."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); what has come stays in "
            f"{part_path(path).name}, and the same command continues from there"
        ) from error
