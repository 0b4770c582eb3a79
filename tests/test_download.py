"""A file is fetched whole or not at all, whatever the server, the line and the disk do."""

import errno
import hashlib
import io
import os
import urllib.request

import numpy as np
import pytest

from evenhand.data import download
from evenhand.data.download import Checksum, RemoteFile, check_file, fetch
from evenhand.errors import UserError
from evenhand.locking import locked_file
from file_server import served

BODY = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(310_000)


def md5(body):
    return Checksum("md5", hashlib.md5(body).hexdigest())


def sha256(body):
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def server():
    with served(BODY) as (url, server):
        server.url = url
        yield server


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    """No proxy of this machine stands between the test and its server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def fetched(server, folder, *, checksum=None, num_bytes=None, urls=None, **settings):
    urls = (server.url,) if urls is None else urls
    file = RemoteFile("data.bin", urls, checksum, num_bytes)
    return fetch(file, folder, first_pause=0.001, **{"max_attempts": 3, **settings})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def ranges(server):
    return [request.get("Range") for request in server.requests]


def test_a_file_is_fetched_and_nothing_else_is_left(server, tmp_path):
    seen = []
    path = fetched(
        server, tmp_path / "a/b", checksum=md5(BODY), progress_fn=lambda *told: seen.append(told)
    )
    assert path.read_bytes() == BODY
    assert names(path.parent) == ["data.bin"]
    assert seen[-1] == ("data.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert server.requests[0]["Accept-Encoding"] == "identity"


def test_without_a_published_checksum_the_first_one_seen_is_recorded_and_held_to(server, tmp_path):
    path = fetched(server, tmp_path)
    record = tmp_path / "data.bin.sha256"
    assert record.read_text() == f"{sha256(BODY)}  data.bin\n"
    path.unlink()
    server.body = OTHER
    with pytest.raises(UserError, match=f"sha256 is {sha256(OTHER)}, that of data.bin.sha256 is"):
        fetched(server, tmp_path)
    assert names(tmp_path) == ["data.bin.sha256"]
    record.unlink()
    assert fetched(server, tmp_path).read_bytes() == OTHER


def test_a_good_file_is_not_fetched_again(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(BODY)
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    assert not server.requests


def test_a_file_that_is_another_one_is_neither_taken_nor_overwritten(server, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"data\.bin has the md5 .* is published.*move it away"):
        fetched(server, tmp_path, checksum=md5(BODY))
    assert (tmp_path / "data.bin").read_bytes() == b"mine"
    assert not server.requests


# --- cut off --------------------------------------------------------------------------------------


@pytest.mark.parametrize("checksum", [None, md5(BODY)])
def test_a_file_that_is_cut_off_is_continued(server, tmp_path, checksum):
    server.cut_after = [100_000, 0]
    assert fetched(server, tmp_path, checksum=checksum).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=100000-", "bytes=100000-"]
    assert {request.get("If-Range") for request in server.requests[1:]} == {'"one"'}


def test_a_later_command_continues_too(server, tmp_path):
    server.cut_after = [100_000, 50_000]
    with pytest.raises(UserError, match=r"cut off 2 times \(150000 of 300000 bytes came\)"):
        fetched(server, tmp_path, max_attempts=2)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.json"]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server)[-1] == "bytes=150000-"
    assert names(tmp_path) == ["data.bin", "data.bin.sha256"]


def test_a_file_that_is_always_cut_off_is_given_up_and_the_part_kept(server, tmp_path):
    server.cut_after = [10] * 20
    with pytest.raises(
        UserError, match=r"cut off 5 times .* with 50 bytes in data\.bin\.part; the "
    ):
        fetched(server, tmp_path, max_attempts=5)
    assert len(server.requests) == 5
    assert not (tmp_path / "data.bin").exists()
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[:50]


def test_the_pauses_grow_and_end(server, tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    server.cut_after = [1] * 20
    with pytest.raises(UserError):
        fetch(RemoteFile("data.bin", (server.url,)), tmp_path)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_server_that_does_not_know_ranges_sends_it_all_again(server, tmp_path):
    server.knows_ranges = False
    server.cut_after = [100_000, 200_000]
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=100000-", "bytes=200000-"]


def test_a_version_without_a_name_is_continued_only_if_a_checksum_will_tell(server, tmp_path):
    server.etag = None
    server.cut_after = [100_000]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, None]
    server.requests.clear()
    server.cut_after = [100_000]
    assert fetched(server, tmp_path / "b", checksum=md5(BODY)).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=100000-"]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_the_date_of_the_last_change_names_a_version_too(server, tmp_path, etag):
    server.etag, server.last_modified = etag, "Wed, 21 Oct 2015 07:28:00 GMT"
    server.cut_after = [100_000]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert server.requests[1]["If-Range"] == server.last_modified


@pytest.mark.parametrize("ignores_if_range", [False, True])
def test_a_file_that_changes_between_the_parts_is_begun_anew(server, tmp_path, ignores_if_range):
    server.cut_after = [100_000]
    server.ignores_if_range = ignores_if_range

    def change():
        server.body, server.etag = OTHER, '"two"'

    server.after_answer = change
    assert fetched(server, tmp_path).read_bytes() == OTHER


def test_a_part_that_is_all_there_is_only_checked(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(BODY)
    (tmp_path / "data.bin.part.json").write_text("{}")
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    assert ranges(server) == ["bytes=300000-"]


def test_a_part_that_is_longer_than_the_file_is_begun_anew(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(BODY + b"more")
    (tmp_path / "data.bin.part.json").write_text("{}")
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY
    assert ranges(server) == ["bytes=300004-", None]


@pytest.mark.parametrize("about", [None, "", "[]", "{}", '{"url": 3, "validator": 4}'])
def test_a_part_of_which_nothing_is_known_is_not_continued(server, tmp_path, about):
    (tmp_path / "data.bin.part").write_bytes(b"something else")
    if about is not None:
        (tmp_path / "data.bin.part.json").write_text(about)
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None]


def test_what_one_address_gave_is_continued_from_the_next(server, tmp_path):
    server.status = [200] * 0
    with served(BODY) as (first_url, first):
        first.cut_after = [100_000] + [0] * 9
        path = fetched(server, tmp_path, urls=(first_url, server.url), checksum=md5(BODY))
    assert path.read_bytes() == BODY
    assert ranges(server) == ["bytes=100000-"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_status_that_may_pass_is_asked_again(server, tmp_path, status):
    server.status = [status, status]
    assert fetched(server, tmp_path).read_bytes() == BODY


# --- wrong answers --------------------------------------------------------------------------------


def test_a_wrong_checksum_removes_the_part_and_says_both(server, tmp_path):
    wrong = md5(OTHER)
    with pytest.raises(UserError, match=f"md5 is {md5(BODY).digest}, published is {wrong.digest}"):
        fetched(server, tmp_path, checksum=wrong)
    assert names(tmp_path) == []
    assert len(server.requests) == 1  # the same bytes would come again


def test_after_a_wrong_checksum_the_next_address_is_asked(server, tmp_path):
    with served(OTHER[: len(BODY)]) as (first_url, _):
        path = fetched(server, tmp_path, urls=(first_url, server.url), checksum=md5(BODY))
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    "told",
    ["bytes 0-299999/300000", "bytes 100001-299999/300000", "bytes 100000-299999/*", "", "x",
     "bytes 100000-300000/300000", "bytes 100000-99999/300000", "bytes 100000-1/1"],
)  # fmt: skip
def test_a_content_range_that_does_not_fit_is_refused(server, tmp_path, told):
    server.cut_after = [100_000]
    server.content_range = told or " "
    with pytest.raises(UserError, match="was asked for bytes 100000- and answers with"):
        fetched(server, tmp_path)
    assert not (tmp_path / "data.bin").exists()
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[:100_000]


def test_another_size_than_published_is_refused_before_anything_is_read(server, tmp_path):
    with pytest.raises(UserError, match="has a file of 300000 bytes, but the published one has 5"):
        fetched(server, tmp_path, num_bytes=5)
    assert names(tmp_path) == []


def test_a_file_beyond_the_limit_is_refused(server, tmp_path):
    with pytest.raises(UserError, match="300000 bytes; more than 1000 are refused"):
        fetched(server, tmp_path, max_bytes=1000)
    server.knows_length = False
    with pytest.raises(UserError, match="sends more than 1000 bytes"):
        fetched(server, tmp_path, max_bytes=1000, checksum=md5(BODY))
    assert names(tmp_path) == []


def test_without_a_length_only_a_checksum_tells_that_all_came(server, tmp_path):
    server.knows_length = False
    with pytest.raises(UserError, match="does not say how long the file is"):
        fetched(server, tmp_path)
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY


def test_a_page_in_place_of_the_file_is_refused(server, tmp_path):
    server.content_type = "text/html; charset=utf-8"
    with pytest.raises(UserError, match="sends a web page instead of the file"):
        fetched(server, tmp_path)
    assert names(tmp_path) == []


def test_a_coding_that_was_not_asked_for_is_refused_unless_a_checksum_tells(server, tmp_path):
    server.coding = "gzip"
    with pytest.raises(UserError, match="in the coding 'gzip', which was not asked for"):
        fetched(server, tmp_path)
    assert fetched(server, tmp_path, checksum=md5(BODY)).read_bytes() == BODY


def test_what_is_no_archive_does_not_get_the_name_of_one(server, tmp_path):
    with pytest.raises(UserError, match=r"gave something that is not a \.zip archive"):
        fetch(RemoteFile("a.zip", (server.url,)), tmp_path)
    assert names(tmp_path) == []


def test_absent_is_said_once(server, tmp_path):
    server.status = [404]
    with pytest.raises(UserError, match=r"data\.bin answers with the status 404 \(Not Found\); "):
        fetched(server, tmp_path)
    assert len(server.requests) == 1
    assert names(tmp_path) == []


def test_a_server_that_is_not_there(server, tmp_path):
    with served(b"") as (url, _):
        pass
    with pytest.raises(UserError, match="cannot be reached"):
        fetched(server, tmp_path, urls=(url,))


def test_a_redirect_over_http_is_followed(server, tmp_path):
    server.redirect = "/moved"
    server.cut_after = [100_000]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, None, "bytes=100000-", "bytes=100000-"]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a", "data:,a"])
def test_a_redirect_to_another_scheme_is_refused(server, tmp_path, target):
    server.redirect = target
    with pytest.raises(UserError, match=f"redirects to '{target}', which is refused"):
        fetched(server, tmp_path)
    assert names(tmp_path) == []


def test_a_redirect_from_https_to_http_is_refused():
    handler = download._Redirects()
    request = urllib.request.Request("https://host/a")
    with pytest.raises(download._Unusable, match="redirects to 'http://host/b', which is refused"):
        handler.http_error_302(request, io.BytesIO(), 302, "", {"Location": "http://host/b"})


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/a", "data.bin", "FTP://host"])
def test_only_http_is_fetched(server, tmp_path, url):
    with pytest.raises(UserError, match="is not an http or https address"):
        fetched(server, tmp_path, urls=(url,))


def test_a_silent_server_is_not_waited_for_for_ever(server, tmp_path, monkeypatch):
    def too_late(*arguments, **settings):
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", too_late)
    with pytest.raises(UserError, match=r"cut off 3 times \(timed out\)"):
        fetched(server, tmp_path)


# --- the disk -------------------------------------------------------------------------------------


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(server, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(download, "sync", full)
        with pytest.raises(
            UserError, match=r"data\.bin could not be written \(No space left.*stays"
        ):
            fetched(server, tmp_path)
    assert not (tmp_path / "data.bin").exists()
    assert fetched(server, tmp_path).read_bytes() == BODY  # nothing was lost
    assert ranges(server) == [None, "bytes=300000-"]


def test_a_disk_that_fills_while_writing_keeps_what_it_has(server, tmp_path, monkeypatch):
    def filling(path, mode):
        file = open(path, mode)  # noqa: SIM115
        if path.name == "data.bin.part":
            blocks = []

            class Filling:
                def write(self, block):
                    blocks.append(block)
                    if len(blocks) == 2:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return file.write(block)

                def __getattr__(self, name):
                    return getattr(file, name)

                def __enter__(self):
                    return self

                def __exit__(self, *error):
                    file.close()

            return Filling()
        return file

    with monkeypatch.context() as patched:
        patched.setattr(download, "open", filling, raising=False)
        with pytest.raises(UserError, match="No space left"):
            fetched(server, tmp_path)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.json"]
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[: download.BLOCK_BYTES]
    assert fetched(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, f"bytes={download.BLOCK_BYTES}-"]


def test_too_little_room_is_said_before_anything_is_read(server, tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match="needs 300000 more bytes, but the disk has 1000"):
        fetched(server, tmp_path)
    assert not (tmp_path / "data.bin").exists()


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match="could not be written"):
        fetched(server, tmp_path / "a")


def test_two_processes_do_not_write_one_part(server, tmp_path):
    with (
        locked_file(tmp_path / ".data.bin.lock", tmp_path / "data.bin"),
        pytest.raises(UserError, match=rf"data\.bin is in use by process {os.getpid()} on"),
    ):
        fetched(server, tmp_path)
    assert fetched(server, tmp_path).read_bytes() == BODY


# --- checks ---------------------------------------------------------------------------------------


def test_a_check_says_what_the_file_was_held_to(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(BODY)
    assert check_file(path, md5(BODY)) == "md5 as published"
    assert "no checksum is published" in check_file(path, None)
    assert check_file(path, None) == "sha256 as when it was first seen"
    path.write_bytes(OTHER)
    with pytest.raises(UserError, match=r"a has the sha256 .* is in a\.sha256"):
        check_file(path, None)
    (tmp_path / "a.sha256").write_text("nonsense")
    with pytest.raises(UserError, match=r"a\.sha256 does not start with a sha256"):
        check_file(path, None)
