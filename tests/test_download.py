"""A file is fetched whole or not at all, whatever the server, the line and the disk do."""

import errno
import hashlib
import io
import os
import urllib.request
from unittest.mock import Mock

import numpy as np
import pytest

from evenhand.data import download
from evenhand.data.download import RemoteFile, fetch
from evenhand.errors import UserError
from evenhand.files import locked_file
from file_server import served

BODY = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(310_000)
PART = ["data.bin.part", "data.bin.part.json"]


def md5(body):
    return hashlib.md5(body).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # no proxy stands between the test and its server
    with served(BODY) as (url, server):
        server.url = url
        yield server


def fetched(server, folder, *, checksum=None, url=None, **settings):
    file = RemoteFile("data.bin", url or server.url, checksum)
    return fetch(file, folder, first_pause=0.001, **{"max_attempts": 3, **settings})


def assert_refused(match, server, folder, *, left=(), **settings):
    with pytest.raises(UserError, match=match) as caught:
        fetched(server, folder, **settings)
    assert "\n" not in str(caught.value)
    assert names(folder) == list(left)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def ranges(server):
    return [request.get("Range") for request in server.requests]


def test_a_file_is_fetched_and_nothing_else_is_left(server, tmp_path):
    seen = []
    path = fetched(
        server, tmp_path / "a/b", checksum=md5(BODY), progress_fn=lambda *call: seen.append(call)
    )
    assert path.read_bytes() == BODY
    assert names(path.parent) == ["data.bin"]
    assert seen[-1] == ("data.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert server.requests[0]["Accept-Encoding"] == "identity"


def test_a_file_that_is_there_is_checked_and_never_overwritten(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(BODY)
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    (tmp_path / "data.bin").write_bytes(b"mine")
    match = r"data\.bin is a file whose md5 is .* is published.*move it away"
    assert_refused(match, server, tmp_path, left=["data.bin"], checksum=md5(BODY))
    assert (tmp_path / "data.bin").read_bytes() == b"mine"
    assert not server.requests


@pytest.mark.parametrize("checksum", [None, md5(BODY)])
def test_a_file_that_is_cut_off_is_continued(server, tmp_path, checksum):
    server.cut_after = [100_000, 0]
    assert fetched(server, tmp_path, checksum=checksum).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=100000-", "bytes=100000-"]
    assert {request.get("If-Range") for request in server.requests[1:]} == {'"one"'}


def test_a_later_command_continues_too_and_the_pauses_grow_and_end(server, tmp_path, monkeypatch):
    server.cut_after = [100_000, 50_000]
    match = r"cut off 2 times \(150000 of 300000 bytes came\) with 150000 bytes in data\.bin\.part"
    assert_refused(match, server, tmp_path, left=PART, max_attempts=2)
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server)[-1] == "bytes=150000-"
    assert names(tmp_path) == ["data.bin"]
    pauses = []
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    server.cut_after = [1] * 20
    with pytest.raises(UserError):
        fetch(RemoteFile("new", server.url), tmp_path)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert (tmp_path / "new.part").read_bytes() == BODY[:8]


def test_a_server_that_does_not_know_ranges_sends_it_all_again(server, tmp_path):
    server.knows_ranges = False
    server.cut_after = [100_000, 200_000]
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=100000-", "bytes=200000-"]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_the_date_of_the_last_change_names_a_version_and_without_one_it_is_begun_anew(
    server, tmp_path, etag
):
    server.etag, server.last_modified = etag, "Wed, 21 Oct 2015 07:28:00 GMT"
    server.cut_after = [100_000]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert server.requests[1]["If-Range"] == server.last_modified
    server.last_modified, server.cut_after = None, [100_000]
    server.requests.clear()
    assert fetched(server, tmp_path / "b").read_bytes() == BODY
    assert ranges(server) == [None, None]


@pytest.mark.parametrize("ignores_if_range", [False, True])
def test_a_file_that_changes_between_the_parts_is_begun_anew(server, tmp_path, ignores_if_range):
    server.cut_after = [100_000]
    server.ignores_if_range = ignores_if_range

    def change():
        server.body, server.etag = OTHER, '"two"'

    server.after_answer = change
    assert fetched(server, tmp_path).read_bytes() == OTHER


@pytest.mark.parametrize(
    ("part", "about", "asked"),
    [
        (BODY, '{"url": "URL", "validator": "\\"one\\"", "total": 300000}', []),  # only checked
        (BODY + b"more", '{"url": "URL", "validator": "\\"one\\""}', ["bytes=300004-", None]),
        (b"some", '{"url": "http://other", "validator": "\\"one\\""}', [None]),
        (b"some", '{"url": "URL", "validator": 4}', [None]),
        (b"some", "", [None]),
        (b"some", None, [None]),
    ],
)
def test_a_part_is_used_only_as_far_as_it_is_known(server, tmp_path, part, about, asked):
    (tmp_path / "data.bin.part").write_bytes(part)
    if about is not None:
        (tmp_path / "data.bin.part.json").write_text(about.replace("URL", server.url))
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == asked


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_status_that_may_pass_is_asked_again_and_absent_is_said_once(server, tmp_path, status):
    server.status = [status, status, 404]
    match = r"data\.bin answers with the status 404 \(Not Found\); .*was not written"
    assert_refused(match, server, tmp_path)
    assert len(server.requests) == 3
    assert fetched(server, tmp_path).read_bytes() == BODY


def test_a_wrong_checksum_removes_the_part_and_says_both(server, tmp_path):
    wrong = md5(OTHER)
    match = f"md5 is {md5(BODY)}, but {wrong} is published"
    assert_refused(match, server, tmp_path, checksum=wrong)
    assert len(server.requests) == 1  # the same bytes would come again


@pytest.mark.parametrize(
    "said",
    ["bytes 0-299999/300000", "bytes 100001-299999/300000", "bytes 100000-299999/*", "", "x",
     "bytes 100000-300000/300000", "bytes 100000-99999/300000", "bytes 100000-1/1"],
)  # fmt: skip
def test_a_content_range_that_does_not_fit_is_refused(server, tmp_path, said):
    server.cut_after = [100_000]
    server.content_range = said or " "
    assert_refused("was asked for bytes 100000- and answers with", server, tmp_path, left=PART)
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[:100_000]


def test_without_a_length_only_a_checksum_tells_that_all_came(server, tmp_path):
    server.knows_length = False
    assert_refused("does not say how long the file is", server, tmp_path)
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY


def test_what_is_no_file_or_no_archive_does_not_get_the_name_of_one(server, tmp_path):
    with pytest.raises(UserError, match=r"gave a file that is not a \.zip archive"):
        fetch(RemoteFile("a.zip", server.url), tmp_path)
    server.content_type = "text/html; charset=utf-8"
    assert_refused("sends a web page instead of the file", server, tmp_path)


def test_a_redirect_from_https_to_http_is_refused(server, tmp_path):
    """So is one to another scheme; over http it is followed."""
    request = urllib.request.Request("https://host/a")
    with pytest.raises(Exception, match="redirects to 'http://host/b', which is refused"):
        download._Redirects().redirect_request(request, io.BytesIO(), 302, "", {}, "http://host/b")
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/a", "data:,a"):
        server.redirect = target
        assert_refused(f"'{target}'.* (is refused|is not allowed)", server, tmp_path)
    server.requests.clear()
    server.redirect, server.cut_after = "/moved", [100_000]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, None, "bytes=100000-", "bytes=100000-"]


def test_only_http_is_fetched(server, tmp_path, monkeypatch):
    for url in ("file:///etc/passwd", "ftp://host/a", "data.bin", "FTP://host"):
        assert_refused("is not an http or https address", server, tmp_path, url=url)
    with served(b"") as (url, _):
        pass
    assert_refused("cannot be reached", server, tmp_path, url=url)
    silent = Mock(side_effect=TimeoutError("timed out"))
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", silent)
    assert_refused(r"cut off 3 times \(timed out\)", server, tmp_path)


@pytest.mark.parametrize("place", ["sync", "open"])
def test_a_full_disk_is_one_sentence_and_what_has_come_is_kept(
    server, tmp_path, monkeypatch, place
):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Filling(io.FileIO):
        def write(self, block):
            if self.tell() > 0:
                raise error
            return super().write(block)

    with monkeypatch.context() as patched:
        replaced = Mock(side_effect=error) if place == "sync" else Filling
        patched.setattr(download, place, replaced, raising=False)
        match = r"data\.bin could not be written \(No space left.*stays in data\.bin\.part"
        assert_refused(match, server, tmp_path, left=PART)
    assert fetched(server, tmp_path).read_bytes() == BODY  # nothing was lost
    more = [] if place == "sync" else [f"bytes={download.BLOCK_BYTES}-"]
    assert ranges(server) == [None, *more]


def test_a_folder_that_cannot_be_made_or_is_in_use(server, tmp_path):
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match="could not be written"):
        fetched(server, tmp_path / "a")
    with (
        locked_file(tmp_path / ".data.bin.lock", tmp_path / "data.bin"),
        pytest.raises(UserError, match=rf"data\.bin is in use by process {os.getpid()} on"),
    ):
        fetched(server, tmp_path)
    assert fetched(server, tmp_path).read_bytes() == BODY
