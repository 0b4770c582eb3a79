"""One file over HTTP: continued where it was cut off, checked, and only then given its name.

What has arrived lies in `name.part`; `name.part.json` says of which address and version it is a
part, and how long the whole is. Continuing asks for the rest *if the file is still that version*
(Range and If-Range), and takes the whole again from a server that does not know ranges or does not
name versions. The checksum is taken of the complete part; then it is renamed. So `name` is always a
whole file.
"""

import contextlib
import functools
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from evenhand.data.checksums import ProgressFn, file_digest
from evenhand.errors import UserError
from evenhand.files import (
    check_is_file,
    locked_file,
    open_input,
    read_json,
    sync,
    write_json,
    write_text,
)
from evenhand.version import __version__

BLOCK_BYTES = 2**18
MAX_BYTES = 16 * 2**30  # of a file
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


class _UnusableError(Exception):
    """This address does not give the file; another one may."""


class _CutOffError(Exception):
    """The line broke; to ask again may help."""


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    progress_fn: ProgressFn = lambda name, done, total: None,
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
    part, reasons = part_path(path), []

    def attempt(url: str) -> None:
        _download(url, part, file, progress_fn, timeout, max_bytes)
        _finish(file, path)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(path.with_name(f".{path.name}.lock"), path):  # two must not write one part
            if path.exists():  # by another process, a moment ago
                return path
            for url in file.urls:
                try:
                    _repeat(functools.partial(attempt, url), max_attempts, first_pause)
                    return path
                except _CutOffError as error:
                    size = part.stat().st_size if part.exists() else 0
                    reasons.append(
                        f"{url} was cut off {max_attempts} times ({error}) with {size} bytes in "
                        f"{part.name}; the same command continues from there"
                    )
                except _UnusableError as error:
                    reasons.append(f"{url} {error}")
    except OSError as error:  # not of the network, whose errors were turned into others
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); what has come stays in "
            f"{part.name}, and the same command continues from there"
        ) from error
    raise UserError("; ".join(reasons) + f"; {path} was not written")


def _repeat(attempt_fn: Callable[[], None], max_attempts: int, pause: float) -> None:
    """Tries again while the line breaks; the last `_CutOffError` is raised."""
    for _ in range(max_attempts - 1):
        try:
            return attempt_fn()
        except _CutOffError:
            time.sleep(min(pause, MAX_PAUSE))
            pause *= 2
    return attempt_fn()


def _download(
    url: str, part: Path, file: RemoteFile, progress_fn: ProgressFn, timeout: float, max_bytes: int
) -> None:
    """Asks once for what is missing of a part, and appends what comes."""
    have, total, validator = _read_progress(part, url)
    if have and have == total:  # all there, but not checked yet
        return
    headers = {"User-Agent": f"evenhand/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    with contextlib.closing(_ask(url, headers, timeout)) as answer:
        is_rest = answer.status == 206 and have > 0
        if answer.status == 416 or (is_rest and _validator(answer.headers) != validator):
            _discard(part)
            raise _CutOffError("the file has changed there: begun anew")
        if answer.headers.get_content_type() == "text/html":
            raise _UnusableError("sends a web page instead of the file")
        if is_rest:
            text = answer.headers.get("Content-Range", "")
            match = CONTENT_RANGE.fullmatch(text)
            start, end, total = map(int, match.groups()) if match else (-1, -1, -1)
            if start != have or not start <= end < total:
                raise _UnusableError(f"was asked for bytes {have}- and answers with {text!r}")
        elif answer.status == 200:  # all of it: ranges are not known there, or the file is new
            have, length = 0, answer.headers.get("Content-Length") or ""
            total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
            if total is None and file.checksum is None:
                raise _UnusableError("does not say how long the file is, and no checksum is known")
        else:
            raise _UnusableError(f"answers with the status {answer.status}")
        limit = max_bytes if total is None else total
        if limit > max_bytes:
            raise _UnusableError(f"has a file of {total} bytes; more than {max_bytes} are refused")
        if not have:
            _discard(part)
            known = {"url": url, "validator": _validator(answer.headers), "total": total}
            write_json(_about_path(part), known)
        with open(part, "ab") as opened:  # which has `have` bytes
            while block := _receive(answer):
                have += len(block)
                if have > limit:
                    _discard(part)
                    raise _UnusableError(f"sends more than {limit} bytes")
                opened.write(block)
                progress_fn(file.name, have, total)
        if total is not None and have < total:
            raise _CutOffError(f"{have} of {total} bytes came")


def _read_progress(part: Path, url: str) -> tuple[int, int | None, str]:
    """How many bytes there are to go on from, how long the whole is, and of which version."""
    check_is_file(part)
    about: Any = None
    with contextlib.suppress(OSError, UserError):
        about = read_json(_about_path(part))
    if not isinstance(about, dict) or about.get("url") != url or not part.exists():
        return 0, None, ""
    validator, total = about.get("validator"), about.get("total")
    if not isinstance(validator, str) or not (validator.isascii() and validator.isprintable()):
        return 0, None, ""  # of no version, or of none that can be asked for
    return part.stat().st_size, total if type(total) is int else None, validator


def _finish(file: RemoteFile, path: Path) -> None:
    """Checks the complete part, and only then gives it its name."""
    part = part_path(path)
    if path.suffix == ".zip" and not zipfile.is_zipfile(part):
        _discard(part)
        raise _UnusableError("gave something that is not a .zip archive")
    expected = file.checksum or read_record(path)
    kind = expected.kind if expected else "sha256"
    digest = file_digest(part, kind)
    if expected is not None and digest != expected.digest:
        _discard(part)
        source = "published" if file.checksum else f"in {record_path(path).name}"
        raise _UnusableError(
            f"gave a file whose {kind} is {digest}, but {expected.digest} is {source}; it was "
            f"removed"
        )
    sync(part)
    os.replace(part, path)
    _discard(part)
    sync(path.parent)
    if expected is None:
        write_record(path, digest)


def part_path(path: Path) -> Path:
    """Where a file is while it is not complete."""
    return path.with_name(f"{path.name}.part")


def _about_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _about_path(part).unlink(missing_ok=True)


# --- the network ----------------------------------------------------------------------------------


def _ask(url: str, headers: dict[str, str], timeout: float) -> Any:
    """The answer to a request; one of the status 416 (no such range) is an answer too."""
    if urllib.parse.urlsplit(url).scheme not in SCHEMES:
        raise _UnusableError("is not an http or https address; only those are fetched")
    try:
        return _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and "Range" in headers:
            return error
        error.close()
        kind = _CutOffError if error.code in PASSING_STATUS else _UnusableError
        raise kind(f"answers with the status {error.code} ({error.reason})") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        words = str(reason) or type(reason).__name__
        if isinstance(reason, LASTING_FAILURES):
            raise _UnusableError(f"cannot be reached ({words})") from error
        raise _CutOffError(words) from error
    except ValueError as error:  # of a redirection: no host, or one that no host can have
        raise _UnusableError(f"leads to an address that cannot be asked ({error})") from error


def _receive(answer: Any) -> bytes:
    try:
        block: bytes = answer.read(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _CutOffError(str(error) or type(error).__name__) from error
    return block


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https alone, and never from https to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        fp.close()  # and not read, however long it says it is
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in SCHEMES or (req.type == "https" and scheme == "http"):
            raise _UnusableError(f"redirects to {newurl!r}, which is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


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


def _validator(headers: Any) -> str | None:
    """What If-Range accepts: a strong ETag, or else the date of the last change."""
    etag: str = headers.get("ETag", "")
    if etag.startswith('"'):
        return etag
    return headers.get("Last-Modified")  # type: ignore[no-any-return]


# --- checksums ------------------------------------------------------------------------------------


def record_path(path: Path) -> Path:
    """Where the sha256 of a file without a published checksum is written when first seen."""
    return path.with_name(f"{path.name}.sha256")


def write_record(path: Path, digest: str) -> None:
    write_text(record_path(path), f"{digest}  {path.name}\n")  # `sha256sum --check` reads it too


def read_record(path: Path) -> Checksum | None:
    record = record_path(path)
    if not record.exists():
        return None
    with open_input(record) as file:
        digest = file.read(2**10).decode("utf-8", "replace").split(" ")[0]
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise UserError(f"{record} does not start with a sha256; remove it to take a new one")
    return Checksum("sha256", digest)


def check_file(
    path: Path, published: Checksum | None, *, progress_fn: ProgressFn | None = None
) -> str:
    """A sentence on what the file was held to, or a `UserError` if it is another one."""
    expected = published or read_record(path)
    digest = file_digest(path, expected.kind if expected else "sha256", progress_fn=progress_fn)
    if expected is None:
        try:
            write_record(path, digest)
        except UserError:  # a folder that is only to be read
            return f"no checksum is published, and its sha256 {digest} could not be kept"
        return f"no checksum is published; its sha256 was written to {record_path(path).name}"
    if digest != expected.digest:
        source = "published" if published else f"in {record_path(path).name}"
        raise UserError(
            f"{path} has the {expected.kind} {digest}, but {expected.digest} is {source}; it is "
            f"damaged or another version: move it away and fetch it again"
        )
    return f"{expected.kind} as " + ("published" if published else "when it was first seen")
