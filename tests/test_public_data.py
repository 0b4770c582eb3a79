"""Public data sets by name: found in a folder in every form, fetched, verified, opened."""

import gzip
import re
import zipfile

import pytest

import small
from evenhand.data import (
    PUBLIC_DATA,
    PublicData,
    load_public_extreme,
    open_dataset,
    read_extreme,
)
from evenhand.data.download import RemoteFile
from evenhand.data.public_data import find_public_data, stored_files
from evenhand.errors import UserError
from file_server import served

TRAIN = "4 5 3\n0,2 1:0.5 4:1\n1 0:1\n 2:2\n2 3:0.25\n"
TEST = "2 5 3\n1 1:1\n0 2:0.5\n"


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def texts_of(name):
    """File name -> text, as the archive of a data set holds them."""
    return dict(zip(PUBLIC_DATA[name].files, (TRAIN, TEST), strict=True))


def write_zip(path, texts, folder=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"{folder}{name}", text)


def assert_is_the_example(dataset, name):
    assert dataset.name == name
    assert (dataset.num_features, dataset.num_labels) == (5, 3)
    assert dataset.parts["train"].positives.ids.tolist() == [0, 2, 1, 2]
    assert dataset.parts["train"].features.offsets.tolist() == [0, 2, 3, 4, 5]
    assert dataset.parts["test"].positives.ids.tolist() == [1, 0]
    assert dataset.parts["test"].features.values.tolist() == [1, 0.5]
    assert PUBLIC_DATA[name].title in dataset.attribution
    assert "2016" in dataset.attribution


def opened(name, folder):
    return load_public_extreme(name, folder, validation_fraction=0)


# --- the catalogue --------------------------------------------------------------------------------


def test_the_promised_data_sets_are_known_however_they_are_written():
    assert list(PUBLIC_DATA) == [
        "amazoncat-13k", "eurlex-4k", "wiki10-31k", "amazon-670k", "wikilshtc-325k",
    ]  # fmt: skip
    assert find_public_data(" EURLex-4K ").name == "eurlex-4k"
    assert find_public_data("WikiLSHTC").name == "wikilshtc-325k"
    assert find_public_data("amazoncat13k").name == "amazoncat-13k"
    for data in PUBLIC_DATA.values():
        assert data.archive.url.startswith("https://")


# --- a folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["amazoncat-13k", "eurlex-4k"])
@pytest.mark.parametrize("where", ["flat", "own", "inner", "gz", "zip", "own zip", "inner zip"])
def test_a_set_is_opened_by_its_name_from_every_form(tmp_path, name, where):
    data, texts = PUBLIC_DATA[name], texts_of(name)
    inner = data.folders[0]
    if where.endswith("zip"):
        place = {"zip": f"{inner}.zip", "own zip": f"{name}/{name}.zip", "inner zip": f"{name}.zip"}
        write_zip(tmp_path / place[where], texts, "" if where == "own zip" else f"{inner}/")
    else:
        place = {"flat": ".", "own": name, "inner": f"{name}/{inner}", "gz": inner}
        folder = tmp_path / place[where]
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, text in texts.items():
            if where == "gz":
                (folder / f"{file_name}.gz").write_bytes(gzip.compress(text.encode()))
            else:
                (folder / file_name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert_is_the_example(opened(name.upper(), tmp_path), name)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was unpacked
    assert stored_files(data, tmp_path)


@pytest.mark.parametrize("name", ["amazoncat-13k", "wiki10-31k", "amazon-670k"])
def test_the_names_of_newer_archives_count_only_where_the_place_says_what_they_are(tmp_path, name):
    texts = {"train.txt": TRAIN, "test.txt": TEST}
    for file_name, text in texts.items():
        (tmp_path / file_name).write_text(text)
    with pytest.raises(UserError, match="has no"):
        opened(name, tmp_path)
    title = PUBLIC_DATA[name].title
    write_zip(tmp_path / f"{title}.bow.zip", texts, f"{title}.bow/")
    assert_is_the_example(opened(name, tmp_path), name)


def test_what_is_absent_or_damaged_is_named_with_where_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"has no amazonCat_train\.txt and .*data fetch amazoncat"):
        opened("AmazonCat-13K", tmp_path)
    path = tmp_path / "Eurlex.zip"
    write_zip(path, texts_of("eurlex-4k"))
    data = path.read_bytes()
    for changed in (data[:100], data[:60] + bytes([data[60] ^ 255]) + data[61:]):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"Eurlex\.zip"):
            opened("eurlex-4k", tmp_path)


def test_members_with_odd_paths_are_read_from_the_archive_or_not_at_all(tmp_path):
    outside = tmp_path / "eurlex_train.txt"
    outside.write_text("never read")
    folder = tmp_path / "a" / "b"
    path = folder / "Eurlex.zip"
    write_zip(path, texts_of("eurlex-4k"), "../../")
    assert_is_the_example(opened("eurlex-4k", folder), "eurlex-4k")
    write_zip(path, texts_of("eurlex-4k"), f"{tmp_path}/")
    with pytest.raises(UserError, match="has no"):
        opened("eurlex-4k", folder)
    write_zip(path, {**texts_of("eurlex-4k"), "again/eurlex_train.txt": TRAIN})
    with pytest.raises(UserError, match=r"holds more than one eurlex_train\.txt"):
        opened("eurlex-4k", folder)
    write_zip(path, {**texts_of("eurlex-4k"), "__MACOSX/eurlex_train.txt": "x"})
    assert_is_the_example(opened("eurlex-4k", folder), "eurlex-4k")


# --- members of an archive as files ---------------------------------------------------------------


def test_a_path_through_an_archive_is_a_member_of_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:  # stored: only the checksum can tell
        archive.writestr("in/train.txt", TRAIN)
    _, documents = read_extreme(tmp_path / "a.zip/in/train.txt")
    assert documents.positives.ids.tolist() == [0, 2, 1, 2]
    changed = (tmp_path / "a.zip").read_bytes().replace(b"0.25", b"0.35")
    for name, content, said in (
        ("a.zip/train.txt", None, r"a\.zip has no member 'train\.txt'"),
        ("b.txt/train.txt", b"x", r"b\.txt/train\.txt does not exist"),
        ("c.zip/train.txt", b"x", r"c\.zip is not a whole \.zip archive \(File is not a zip"),
        ("d.zip/in/train.txt", changed, r"d\.zip/in/train\.txt.*Bad CRC-32"),
    ):
        if content is not None:
            (tmp_path / name.partition("/")[0]).write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_extreme(tmp_path / name)


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: small.run_main(capsys, *words)


def serve(monkeypatch, url):
    """The catalogue says that archives are at this address."""
    archive = property(lambda data: RemoteFile(f"{data.name}.zip", url))
    monkeypatch.setattr(PublicData, "archive", archive)


def test_list_shows_what_is_known_and_what_is_here(user, tmp_path):
    write_zip(tmp_path / "downloads/wiki10-31k/Wiki10.zip", texts_of("wiki10-31k"), "Wiki10/")
    (tmp_path / "downloads/eurlex-4k").mkdir()
    (tmp_path / "downloads/eurlex-4k/eurlex-4k.zip.part").touch()
    answer = user("data", "list")
    assert (answer.code, answer.err) == (0, "")
    for data in PUBLIC_DATA.values():
        assert data.title in answer.out
    assert re.search(r"Wiki10-31K .* downloads/wiki10-31k", answer.out)
    assert re.search(r"EURLex-4K .* not complete", answer.out)
    assert re.search(r"AmazonCat-13K .* - ", answer.out)


def test_fetch_then_open_then_show(user, tmp_path, monkeypatch):
    write_zip(tmp_path / "served.zip", texts_of("eurlex-4k"), "Eurlex/")
    with served((tmp_path / "served.zip").read_bytes()) as (url, server):
        serve(monkeypatch, url)
        server.cut_after = [100]
        monkeypatch.setattr("evenhand.data.download.time.sleep", lambda seconds: None)
        answer = user("data", "fetch", "EURLex-4K")
        assert (answer.code, answer.err) == (0, "")
        assert "every member is whole" in answer.out
        assert "this is another version" in answer.out  # six documents are not 19,348
        assert "Cite: Bhatia" in answer.out
        assert len(server.requests) == 2
        assert user("data", "fetch", "EURLex-4K").code == 0
        assert len(server.requests) == 2  # it is there
    opens = re.search("open it with: evenhand (.*)", answer.out)[1].split()
    answer = user(*opens, "--validation-fraction", "0")
    assert (answer.code, answer.err) == (0, "")
    assert "written to datasets/eurlex-4k" in answer.out
    assert_is_the_example(open_dataset(tmp_path / "datasets/eurlex-4k"), "eurlex-4k")


def test_a_failed_fetch_tells_the_way_by_hand(user, tmp_path, monkeypatch):
    with served(b"") as (url, server):
        server.content_type = "text/html"
        serve(monkeypatch, url)
        sentence = user("data", "fetch", "eurlex-4k").sentence
    assert "sends a web page instead of the file" in sentence
    assert "by hand: http://manikvarma.org" in sentence
    assert list((tmp_path / "downloads/eurlex-4k").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["extreme"], "needs the name of a public data set"),
        (["extreme", "--train", "a"], "or --train and --test"),
        (["extreme", "eurlex-4k", "--train", "a"], "give the name alone, or files alone"),
        (["extreme", "eurlex-4"], "no public data set 'eurlex-4'; did you mean 'eurlex-4k'?"),
        (["extreme", "mnist"], "no public data set 'mnist'; known: amazoncat-13k, eurlex-4k"),
    ],
)
def test_what_cannot_be_done_is_refused(user, words, said):
    assert said in user("data", *words).sentence


def test_fetch_verifies_what_is_here_also_what_came_by_hand(user, tmp_path):
    damaged = tmp_path / "downloads/amazoncat-13k/AmazonCat.zip"
    write_zip(damaged, texts_of("amazoncat-13k"), "AmazonCat/")
    changed = bytearray(damaged.read_bytes())
    changed[60] ^= 255
    damaged.write_bytes(changed)
    write_zip(tmp_path / "downloads/eurlex-4k/Eurlex.zip", texts_of("eurlex-4k"), "Eurlex/")
    answer = user("data", "fetch", "eurlex-4k", "amazoncat-13k")
    assert answer.code == 2
    assert re.search(r"AmazonCat\.zip.*(is damaged|not a whole)", answer.err)
    assert "Eurlex.zip: every member is whole" in answer.out
