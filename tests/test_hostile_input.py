"""What nobody writes by mistake, and an attacker or a broken disk does: one sentence, no harm."""

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import small
from evenhand.tensor_store import open_store, save_tensors
from small import bytes_of, run_main

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a data set and an evaluated run."""
    return small.trained(tmp_path_factory, {"a": ["--keep-checkpoints"]})


@pytest.fixture
def copy(home, tmp_path, monkeypatch):
    """A copy of all of it as the working folder, which a test may damage."""
    folder = shutil.copytree(home, tmp_path / "copy")
    monkeypatch.chdir(folder)
    return folder


def in_a_process(folder, *arguments, **environment):
    """The command as a user starts it, for what is decided when Python starts."""
    answer = subprocess.run(
        [sys.executable, "-m", "evenhand", *arguments], cwd=folder, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment}, check=False, timeout=120,
    )  # fmt: skip
    out, err = (stream.decode("utf-8", "replace") for stream in (answer.stdout, answer.stderr))
    return small.Answer(answer.returncode, out, err)


# --- numbers --------------------------------------------------------------------------------------


def scale_weights(run, **factors):
    path = run / "model/weights"
    saved = open_store(path)
    tensors = {name: saved.load(name) for name in saved.entries}
    for name, largest in factors.items():
        name = name.replace("__", ".")
        tensors[name] = tensors[name] * (largest / tensors[name].abs().max())
    save_tensors(path, tensors)


def test_label_vectors_of_any_length_are_searched_by_their_direction(copy, capsys):
    before = run_main(capsys, "search", "runs/a", "badoki")
    scale_weights(copy / "runs/a", label_table=3e38)
    assert run_main(capsys, "search", "runs/a", "badoki").out == before.out


@pytest.mark.parametrize(
    "command",
    [("search", "runs/a", "badoki"), ("evaluate", "runs/a"),
     ("export", "runs/a", "--out", "new", "--queries", "test")],
    ids=lambda command: command[0],
)  # fmt: skip
def test_scores_that_are_no_numbers_are_refused(copy, capsys, command):
    scale_weights(copy / "runs/a", encoder__weight=3e38)
    run_main(capsys, *command).says("infinite or no number", "learning_rate")
    assert not (copy / "new").exists()


# --- names and terminals --------------------------------------------------------------------------

NO_UTF8 = "caf\udce9"  # as Python gives a file name whose bytes are no UTF-8
WITH_NAME = [
    ("train", f"{NO_UTF8}.toml"), ("train", "a.toml", "--run", NO_UTF8),
    ("train", "a.toml", "--data", NO_UTF8), ("evaluate", NO_UTF8), ("compare", "runs/a", NO_UTF8),
    ("report", "runs/a", "--out", f"{NO_UTF8}.html"), ("search", "runs/a", NO_UTF8),
    ("slices", NO_UTF8), ("export", "runs/a", "--out", NO_UTF8), ("tune", "--run", NO_UTF8),
    ("demo", "--run", NO_UTF8),
    ("data", "show", NO_UTF8), ("data", "check", NO_UTF8), ("data", "table", f"{NO_UTF8}.csv"),
    ("data", "extreme", "--train", NO_UTF8, "--test", NO_UTF8),
    ("data", "stream", "--train", NO_UTF8), ("data", "list", "--folder", NO_UTF8),
]  # fmt: skip


def test_a_name_that_is_no_utf8_is_refused(home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    before = bytes_of(home)
    for words in WITH_NAME:
        run_main(capsys, *words).says("caf\\xe9", "UTF-8", "rename")
    assert bytes_of(home) == before


def test_files_beside_ours_may_have_any_name(copy, capsys):
    for folder in ("data", "runs", "runs/a"):
        (copy / folder / NO_UTF8).write_text("x")
    for words in (["data", "show", "data"], ["evaluate", "runs/a"]):
        assert run_main(capsys, *words).code == 0


@pytest.mark.parametrize(
    ("encoding", "words"), [("latin-1", ["--help"]), ("ascii", ["search", "runs/a", "badoki"])]
)
def test_what_a_terminal_cannot_show_is_replaced(home, encoding, words):
    answer = in_a_process(home, *words, PYTHONIOENCODING=encoding)
    assert answer.code == 0, answer.err
    assert "?" in answer.out


# --- settings and environment ---------------------------------------------------------------------


ALL_OF_A_RUN = [
    ["search", "{0}", "badoki"], ["evaluate", "{0}"], ["slices", "{0}"], ["compare", "{0}", "{0}"],
    ["report", "{0}", "--out", "{1}/x.html"], ["export", "{0}", "--out", "{1}/vectors"],
    ["train", "--resume", "--run", "{0}"],
]  # fmt: skip


def test_a_run_is_used_from_any_folder(home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(home / "runs/a", tmp_path / "copy")
    small.unfinish(run)
    for words in ALL_OF_A_RUN:
        assert run_main(capsys, *(word.format(run, tmp_path) for word in words)).output


def test_data_that_moved_is_named_with_what_was_tried_and_the_flag(copy, tmp_path, capsys):
    about = json.loads((copy / "runs/a/run.json").read_text("utf-8"))
    about["dataset"]["folder"] = str(copy / "gone")
    (copy / "runs/a/run.json").write_text(json.dumps(about))
    small.unfinish(copy / "runs/a")
    (copy / "data").rename(copy / "elsewhere")
    for words in ALL_OF_A_RUN:
        words = [word.format("runs/a", tmp_path) for word in words]
        if words[0] in ("search", "export"):  # the run folder holds enough
            assert run_main(capsys, *words).code == 0
            shutil.rmtree(tmp_path / "vectors", ignore_errors=True)
        else:
            run_main(capsys, *words).says("runs/a", f"{copy}/data", f"{copy}/gone", "--data")
        run_main(capsys, *words, "--data", "nowhere").says("nowhere", "dataset.json")
        assert run_main(capsys, *words, "--data", "elsewhere").output
    assert not (copy / "nowhere").exists()


# --- data sets ------------------------------------------------------------------------------------

READERS = {
    "show": ("data", "show", "{data}"),
    "train": ("train", "a.toml", "--data", "{data}", "--run", "new"),
    "evaluate": ("evaluate", "runs/a"),
    "search": ("search", "runs/a", "badoki", "--data", "{data}"),
    "compare": ("compare", "runs/a", "runs/a"),
    "report": ("report", "runs/a"),
    "slices": ("slices", "runs/a", "--permutations", "19"),
    "export": ("export", "runs/a", "--out", "new", "--queries", "test"),
}


def reading(reader, data="data"):
    return [word.replace("{data}", str(data)) for word in READERS[reader]]


@pytest.mark.parametrize(
    ("reader", "name"),
    [(reader, "test.groups.style") for reader in READERS] + [("show", "labels.groups.region")],
)
def test_a_group_that_is_not_there_is_refused(copy, capsys, reader, name):
    ids = np.load(copy / f"data/{name}.npy")
    ids[7] = 99
    np.save(copy / f"data/{name}.npy", ids)
    column, part = name.split(".")[2], name.split(".")[0]
    run_main(capsys, *reading(reader)).says("data is damaged", f"{column} of {part}", "99", "again")


@pytest.mark.parametrize(
    ("reader", "name"),
    [(reader, "test.texts") for reader in READERS]
    + [("show", name) for name in ("labels.names", "train.features", "test.positives")],
)
def test_offsets_that_decrease_are_refused(copy, capsys, reader, name):
    offsets = np.load(copy / f"data/{name}.offsets.npy")
    offsets[5], offsets[6] = offsets[6], offsets[5] - 1
    np.save(copy / f"data/{name}.offsets.npy", offsets)
    offsets_of = name.replace("labels.names", "labels") + ".offsets"  # names and texts of labels
    run_main(capsys, *reading(reader)).says("data is damaged", offsets_of, "decrease", "again")


@pytest.mark.parametrize("reader", READERS)
def test_a_data_set_without_a_train_part_is_refused(copy, capsys, reader):
    change_about(copy / "data", parts=["validation", "test"])
    run_main(capsys, *reading(reader)).says("data/dataset.json", "no train part", "again")


def change_about(folder, **changes):
    about = json.loads((folder / "dataset.json").read_text("utf-8"))
    (folder / "dataset.json").write_text(json.dumps(about | changes))
    return about


# --- sizes that are promised ----------------------------------------------------------------------

MANY = 2**31 - 1


@pytest.mark.parametrize("command", ["extreme", "stream"])
@pytest.mark.parametrize(
    ("header", "kind"),
    [(f"2 4 {MANY}", "labels"), (f"2 {MANY} 3", "features"), (f"{MANY} 4 3", "documents")],
)
def test_a_header_that_promises_far_too_much_is_refused_at_once(
    tmp_path, capsys, command, header, kind
):
    text = tmp_path / "train.txt"
    text.write_text(f"{header}\n0 0:1\n1 1:1\n")
    words = ("--train", text, "--test", text, "--out", tmp_path / "out")
    says = [text, "line 1" if kind != "documents" else "line 3", f"{MANY} {kind}", "header"]
    run_main(capsys, "data", command, *words).says(*says)
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize("key", ["num_labels", "num_features"])
def test_a_data_set_that_promises_far_too_much_is_refused(copy, capsys, key):
    about = change_about(copy / "data", **{key: MANY})
    arrays = {name: of for name, of in about["arrays"].items() if not name.startswith("labels.")}
    names = about["group_names"] | {"labels": {}}
    change_about(copy / "data", arrays=arrays, group_names=names)
    run_main(capsys, "data", "show", "data").says("data/dataset.json", key, MANY, "again")


def test_a_result_that_swells_is_not_unpacked(copy, capsys):
    import tracemalloc

    path = copy / "runs/a/evaluation/test/outcome.npz"
    bomb = copy / "bomb.npz"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name != "ranks.npy":
                new.writestr(name, old.read(name))
        header = {"descr": "<i4", "fortran_order": False, "shape": (2**26,)}
        with new.open("ranks.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(2**8):
                file.write(bytes(2**20))
    bomb.replace(path)
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    run_main(capsys, "compare", "runs/a", "runs/a").says("outcome.npz", "compressed", "evaluate")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


# --- what is no file ------------------------------------------------------------------------------


def unix_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


SPECIAL = {
    "a pipe": os.mkfifo,
    "a socket": unix_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
}
INPUTS = [  # what is replaced, who reads it
    ("data/dataset.json", "show"), ("data/test.features.ids.npy", "show"),
    ("data/dataset.json", "evaluate"), ("data/train.positives.offsets.npy", "evaluate"),
    ("a.toml", "train"),
    ("runs/a/config.toml", "evaluate"), ("runs/a/run.json", "evaluate"),
    ("runs/a/run.json", "report"), ("runs/a/config.toml", "report"),
    ("runs/a/metrics.jsonl", "resume"),
    ("runs/a/model/weights/rank-0-file-0.safetensors", "search"),
    ("runs/a/model/weights/manifest.json", "search"),
    ("runs/a/evaluation/test/scores.json", "compare"),
    ("runs/a/evaluation/test/outcome.npz", "compare"),
    ("runs/a/checkpoints/step-00000020/manifest.json", "resume"),
    ("runs/a/checkpoints/step-00000020/rank-0-file-0.safetensors", "resume"),
    ("x.csv", "table"), ("x.csv.gz", "table"), ("x.txt", "extreme"), ("x.txt", "extreme test"),
    ("x.txt.xz", "extreme"), ("x.txt", "stream"), ("x.txt", "names"), ("x.tsv", "groups"),
    ("x.zip", "archive"), ("data/train.positives.ids.npy", "check"),
]  # fmt: skip
READERS_OF_FILES = {
    **READERS,
    "resume": ("train", "--resume", "--run", "runs/a"),
    "table": ("data", "table", "{path}", "--out", "new"),
    "extreme": ("data", "extreme", "--train", "{path}", "--test", "good.txt", "--out", "new"),
    "extreme test": ("data", "extreme", "--train", "good.txt", "--test", "{path}", "--out", "new"),
    "stream": ("data", "stream", "--train", "{path}", "--out", "new"),
    "names": ("data", "extreme", "--train", "good.txt", "--test", "good.txt", "--label-names",
              "{path}", "--out", "new"),
    "groups": ("data", "extreme", "--train", "good.txt", "--test", "good.txt", "--train-groups",
               "{path}", "--out", "new"),
    "archive": ("data", "extreme", "--train", "{path}/a.txt", "--test", "good.txt", "--out", "new"),
    "check": ("data", "check", "data"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "reader", "kind"),
    [(*words, "a pipe") for words in INPUTS]
    + [
        (*words, kind)
        for words in INPUTS[:2] + INPUTS[11:15] + INPUTS[17:19]
        for kind in SPECIAL
        if kind != "a pipe"
    ],
    ids=lambda word: word.replace("/", "."),
)
def test_what_is_no_file_is_refused_at_once(copy, capsys, name, reader, kind):
    (copy / "good.txt").write_text("2 4 3\n0 0:1\n1 1:1\n")
    path = copy / name
    path.parent.mkdir(exist_ok=True)
    if reader == "resume":
        small.unfinish(copy / "runs/a")
    path.unlink(missing_ok=True)
    if "checkpoints" in name:
        shutil.rmtree(copy / "runs/a/checkpoints/step-00000015")  # it would be used instead
    SPECIAL[kind](path)
    words = [
        word.replace("{path}", str(path)).replace("{data}", "data")
        for word in READERS_OF_FILES[reader]
    ]
    is_folder_of_tables = reader == "table" and kind == "a folder"  # which one without a table is
    says = "holds no table" if is_folder_of_tables else f"{kind}, not a file"
    run_main(capsys, *words).says(Path(name).name, says)
    assert not (copy / "new").exists()


# --- the same mistakes elsewhere ------------------------------------------------------------------


def test_a_working_folder_may_have_any_name(home, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(home, tmp_path / NO_UTF8)
    monkeypatch.chdir(folder)
    (folder / "x.txt").write_text("40 4 3\n" + "".join(f"{n % 3} {n % 4}:1\n" for n in range(40)))
    files = ["--train", "x.txt", "--test", "x.txt"]
    for words in (["data", "extreme", *files], ["data", "stream", *files, "--out", "streamed"],
                  ["train", "a.toml", "--run", "run"], ["compare", "run", "run"],
                  ["report", "run"], ["export", "run", "--out", "vectors"]):  # fmt: skip
        assert run_main(capsys, *words).output


SETTINGS = [
    ("mining.sampler_power=-1e300", ["mining.sampler_power", "-10 and 10", "-1e+300"]),
    ("mining.sampler_power=1e300", ["mining.sampler_power", "-10 and 10", "1e+300"]),
    ("evaluation.cutoffs=[10000000000]", ["evaluation.cutoffs", "1000000,", "10000000000"]),
    ("model.embedding_dim=9223372036854775807", ["out of memory", "model.embedding_dim"]),
    ("search.frequency_discount=1e300", ["infinite or no number", "[search]"]),
]


@pytest.mark.parametrize(("setting", "says"), SETTINGS)
def test_a_setting_however_large_is_refused(home, tmp_path, capsys, monkeypatch, setting, says):
    monkeypatch.chdir(home)
    words = ("--run", tmp_path / "run", "--steps", 3, "--set", setting)
    run_main(capsys, "train", "a.toml", *words).says(*says)
