"""Downloads one file over HTTP: resumed if partial, verified, then renamed into place.

What has arrived lies in `name.part`; `name.part.json` says of which address and version it is a
part, and how long the whole is. Continuing asks for the rest *if the file is still that version*
(Range and If-Range), and takes the whole again from a server that does not know ranges or does not
name versions. The complete part is held to the published checksum, if there is one, and then
renamed. So `name` is always a whole file.
"""

import contextlib
import functools
import http.client
import itertools
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

from evenhand.errors import UserError
from evenhand.files import (
    ProgressFn,
    check_is_file,
    file_digest,
    locked_file,
    read_json,
    sync,
    write_json,
)
from evenhand.version import __version__

BLOCK_BYTES = 2**18
MAX_BYTES = 16 * 2**30  # of a file
MAX_ATTEMPTS = 8
FIRST_PAUSE = 1.0  # seconds; each further one is twice as long
MAX_PAUSE = 30.0
TIMEOUT = 30.0  # seconds without a byte
SCHEMES = ("http", "https")
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
LASTING_FAILURES = (socket.gaierror, ssl.SSLCertVerificationError, ConnectionRefusedError)
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class RemoteFile(NamedTuple):
    """A file, where it can be fetched, and what is published about it."""

    name: str
    url: str
    md5: str | None = None


class _UnusableError(Exception):
    """This address does not give the file."""


class _CutOffError(Exception):
    """The line broke; to ask again may help."""


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    progress_fn: ProgressFn = lambda name, done, total: None,
    max_attempts: int = MAX_ATTEMPTS,
    first_pause: float = FIRST_PAUSE,
    max_bytes: int = MAX_BYTES,
) -> Path:
    """The file in the folder: the one that is there, if it is good, or else fetched.

    Whatever goes wrong is a `UserError`; a part that can be continued stays.
    """
    path = folder / file.name
    if path.exists():
        if file.md5 is not None and (md5 := file_digest(path, "md5")) != file.md5:
            raise UserError(
                f"{path} has the md5 {md5}, but {file.md5} is published; it is damaged or another "
                f"version: move it away and fetch it again"
            )
        return path
    part = part_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(path.with_name(f".{path.name}.lock"), path):  # two must not write one part
            if path.exists():  # by another process, a moment ago
                return path
            for attempt in itertools.count(1):
                try:
                    _download(file, part, progress_fn, max_bytes)
                    break
                except _CutOffError as error:
                    if attempt == max_attempts:
                        size = part.stat().st_size if part.exists() else 0
                        raise _UnusableError(
                            f"was cut off {max_attempts} times ({error}) with {size} bytes in "
                            f"{part.name}; the same command continues from there"
                        ) from error
                    time.sleep(min(first_pause * 2 ** (attempt - 1), MAX_PAUSE))
            if path.suffix == ".zip" and not zipfile.is_zipfile(part):
                _discard(part)
                raise _UnusableError("gave something that is not a .zip archive")
            if file.md5 is not None and (md5 := file_digest(part, "md5")) != file.md5:
                _discard(part)
                raise _UnusableError(
                    f"gave a file whose md5 is {md5}, but {file.md5} is published; it was removed"
                )
            sync(part)
            os.replace(part, path)
            _discard(part)
            sync(folder)
            return path
    except _UnusableError as error:
        raise UserError(f"{file.url} {error}; {path} was not written") from error
    except OSError as error:  # not of the network, whose errors were turned into others
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); what has come stays in "
            f"{part.name}, and the same command continues from there"
        ) from error


def _download(file: RemoteFile, part: Path, progress_fn: ProgressFn, max_bytes: int) -> None:
    """Asks once for what is missing of a part, and appends what comes."""
    have, total, validator = _read_progress(part, file.url)
    if have and have == total:  # all there, but not checked yet
        return
    headers = {"User-Agent": f"evenhand/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    with contextlib.closing(_ask(file.url, headers)) as answer:
        etag = answer.headers.get("ETag", "")  # only a strong one names a version
        version = etag if etag.startswith('"') else answer.headers.get("Last-Modified")
        is_rest = answer.status == 206 and have > 0
        if answer.status == 416 or (is_rest and version != validator):
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
            if total is None and file.md5 is None:
                raise _UnusableError("does not say how long the file is, and no checksum is known")
        else:
            raise _UnusableError(f"answers with the status {answer.status}")
        limit = max_bytes if total is None else total
        if limit > max_bytes:
            raise _UnusableError(f"has a file of {total} bytes; more than {max_bytes} are refused")
        if not have:
            _discard(part)
            write_json(_about_path(part), {"url": file.url, "validator": version, "total": total})
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


def part_path(path: Path) -> Path:
    """Where a file is while it is not complete."""
    return path.with_name(f"{path.name}.part")


def _about_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _about_path(part).unlink(missing_ok=True)


# --- the network ----------------------------------------------------------------------------------


def _ask(url: str, headers: dict[str, str]) -> Any:
    """The answer to a request; one of the status 416 (no such range) is an answer too."""
    if urllib.parse.urlsplit(url).scheme not in SCHEMES:
        raise _UnusableError("is not an http or https address; only those are fetched")
    try:
        return _opener().open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
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
    """The next bytes of an answer; none at its end."""
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
    """Asks by the proxies of the environment; `_ask` and `_Redirects` let http and https pass."""
    return urllib.request.build_opener(_Redirects)
