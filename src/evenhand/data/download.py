"""Downloads a file over HTTP: continued where it was cut off, verified, then renamed into place.

`name.part` holds what has arrived, and `name.part.json` which address and version it is a part of.
The rest is asked for *if the file is still that version* (Range and If-Range); a server that knows
no ranges, or names no version, sends the whole again. So `name` is always a whole file.
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
from evenhand.files import ProgressFn, file_digest, locked_file, read_json, sync, write_json
from evenhand.version import __version__

BLOCK_BYTES = 2**18
MAX_ATTEMPTS = 8
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0  # seconds; each pause is twice as long as the one before
TIMEOUT = 30.0  # seconds without a byte
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
LASTING_FAILURES = (socket.gaierror, ssl.SSLCertVerificationError, ConnectionRefusedError)
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class RemoteFile(NamedTuple):
    """A file, where it can be fetched, and what is published about it."""

    name: str
    url: str
    md5: str | None = None


class _UnusableError(Exception):
    """The address does not give the file."""


class _CutOffError(Exception):
    """The connection broke; asking again may help."""


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    progress_fn: ProgressFn = lambda name, done, total: None,
    max_attempts: int = MAX_ATTEMPTS,
    first_pause: float = FIRST_PAUSE,
) -> Path:
    """The file in the folder: the one that is there, if it is good, or else fetched.

    Whatever goes wrong is a `UserError`; a part that can be continued stays.
    """
    path, part = folder / file.name, folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(path.with_name(f".{path.name}.lock"), path):  # two must not write one part
            if path.exists():
                if problem := _checksum_problem(path, file):
                    raise UserError(
                        f"{path} is a file {problem}; it is damaged or another version: move it "
                        f"away and fetch it again"
                    )
                return path
            for attempt in itertools.count(1):
                try:
                    _download(file, part, progress_fn)
                    break
                except _CutOffError as error:
                    if attempt == max_attempts:
                        size = part.stat().st_size if part.exists() else 0
                        raise _UnusableError(
                            f"was cut off {max_attempts} times ({error}) with {size} bytes in "
                            f"{part.name}; the same command continues from there"
                        ) from error
                    time.sleep(min(first_pause * 2 ** (attempt - 1), MAX_PAUSE))
            problem = _checksum_problem(part, file)
            if path.suffix == ".zip" and not zipfile.is_zipfile(part):
                problem = "that is not a .zip archive"
            if problem:
                _discard(part)
                raise _UnusableError(f"gave a file {problem}; it was removed")
            sync(part)
            os.replace(part, path)
            _discard(part)
            sync(folder)
            return path
    except _UnusableError as error:
        raise UserError(f"{file.url} {error}; {path} was not written") from error
    except OSError as error:  # of the disk: those of the network were turned into others
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); what has come stays in "
            f"{part.name}, and the same command continues from there"
        ) from error


def _checksum_problem(path: Path, file: RemoteFile) -> str:
    """How a file differs from the published checksum; "" if it does not, or none is published."""
    if file.md5 is None or (md5 := file_digest(path, "md5")) == file.md5:
        return ""
    return f"whose md5 is {md5}, but {file.md5} is published"


def _download(file: RemoteFile, part: Path, progress_fn: ProgressFn) -> None:
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
            _discard(part)
            about = {"url": file.url, "validator": version, "total": total}
            write_json(part.with_name(f"{part.name}.json"), about)
        else:
            raise _UnusableError(f"answers with the status {answer.status}")
        with open(part, "ab") as opened:  # which has `have` bytes
            while block := _receive(answer):
                have += len(block)
                opened.write(block)
                progress_fn(file.name, have, total)
        if total is not None and have < total:
            raise _CutOffError(f"{have} of {total} bytes came")


def _read_progress(part: Path, url: str) -> tuple[int, int | None, str]:
    """How many bytes there are to go on from, how long the whole is, and of which version."""
    about: Any = None
    with contextlib.suppress(OSError, UserError):
        about = read_json(part.with_name(f"{part.name}.json"))
    if not part.exists() or not isinstance(about, dict) or about.get("url") != url:
        return 0, None, ""
    validator = about.get("validator")
    if not isinstance(validator, str) or not (validator.isascii() and validator.isprintable()):
        return 0, None, ""  # the server names no version
    return part.stat().st_size, about.get("total"), validator


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)


# --- the network ----------------------------------------------------------------------------------


def _ask(url: str, headers: dict[str, str]) -> Any:
    """The answer to a request; one of the status 416 (no such range) is an answer too."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
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
    except (ValueError, OverflowError) as error:  # of a redirection: no host, an absurd length
        raise _UnusableError(f"leads to an address that cannot be asked ({error})") from error


def _receive(answer: Any) -> bytes:
    """The next bytes of an answer; none at its end."""
    try:
        block: bytes = answer.read(BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _CutOffError(str(error) or type(error).__name__) from error
    return block


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Never leaves https; urllib itself follows to http, https and ftp alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme == "ftp" or (req.type == "https" and scheme == "http"):
            fp.close()
            raise _UnusableError(f"redirects to {newurl!r}, which is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@functools.cache  # the certificates of a system are read once, which takes long on some
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)
