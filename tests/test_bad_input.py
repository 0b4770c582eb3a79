"""Whatever a user can get wrong is answered in one sentence, and costs nothing that was there."""

import errno
import gzip
import os
import shutil

import pytest

import small
from evenhand.data import save_dataset
from small import bytes_of, run_main, settings_file


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a data set, a settings file and an evaluated run, which no test may change."""
    folder = small.trained(tmp_path_factory, {"a": ["--keep-checkpoints"]})
    save_dataset(small.text_dataset(seed=1), folder / "other")
    save_dataset(small.dense_dataset(), folder / "dense")
    settings_file(folder / "dense.toml", "dense", training__num_steps=20)
    words = ("--set", "model.hidden_widths=[9]", "--run", "runs/dense")
    assert small.run(folder, "train", "dense.toml", *words).output
    return folder


@pytest.fixture
def here(home, monkeypatch):
    """That folder as the working folder; what was in it must be there, unchanged, at the end."""
    monkeypatch.chdir(home)
    before = bytes_of(home)
    yield home
    after = bytes_of(home)
    assert {name: after.get(name) for name in before} == before


@pytest.fixture
def copy(home, tmp_path, monkeypatch):
    """A copy of the run that a test may damage."""
    monkeypatch.chdir(home)
    return shutil.copytree(home / "runs/a", tmp_path / "copy")


# --- settings -------------------------------------------------------------------------------------


TRAIN = ("train", "a.toml", "--run", "new")
SETTINGS = [  # settings, what the sentence must hold; test_config.py has those without data
    ("training.learning_rate=inf", ["training.learning_rate", "finite", "inf"]),
    ("training.select_by=recal@10", ["'recal@10'", "did you mean 'recall@10'?"]),
    ("training.select_by=recall@10 on worst 3 of stile", ["'stile'", "did you mean 'style'?"]),
    ("seed=1", ["section.key=value", "'seed=1'"]),
]
RESUME = ("train", "--resume", "--run")
REFUSED = [  # words, what the sentence must hold
    *(((*TRAIN, "--set", assignment), fragments) for assignment, fragments in SETTINGS),
    ((*TRAIN, "--set", "mining.sampler=in-batch", "--set", "mining.num_sampled_labels=31"),
     ["mining.batch_size", "31", "'in-batch'", "32"]),
    ((*TRAIN, "--set", "mining.sampler=mixed"), ["mining.batch_size", "20", "'mixed'", "32"]),
    ((*TRAIN, "--device", "gpu"), ["--device gpu cannot be used here", "it is called cuda"]),
    (("train", "none.toml"), ["none.toml", "does not exist"]),
    (("train", "debian"), ["'debian' is no preset and no file; the presets are ", "debian-deps"]),
    (("train", "none.parquet"), ["none.parquet", "does not exist"]),
    (("train", "data", "--data", "data"), ["data and --data data", "give one"]),
    (("train", "data", "--query", "title"), ["--query: only for a table, and data is none"]),
    (("train", "a.toml", "--skip-missing"), ["--skip-missing: only for a table, and none is"]),
    ((*TRAIN, "--device", "nonsense"), ["--device", "nonsense"]),
    ((*TRAIN, "--device", "cuda:99"), ["--device", "cuda:99"]),
    (("search", "runs/a", "x", "--device", "cuda:99"), ["cuda:99"]),
    (("train", "a.toml", "--run", "runs/a"), ["runs/a exists already", "--resume", "remove"]),
    (("train", "a.toml", "--run", "a.toml/inside"), ["a.toml", "Not a directory"]),
    (("train", "a.toml", "--run", "x" * 300), ["too long"]),
    ((*RESUME, "runs/a", "--learning-rate", 0.7),
     ["runs/a", "training.learning_rate", "0.05", "0.7", "another --run"]),
    ((*RESUME, "runs/a", "--set", "loss.margin=0.1"), ["loss.margin", "0.3", "0.1"]),
    (("train", "dense.toml", *RESUME[1:], "runs/a"), ["data.dataset", "'data'", "'dense'"]),
    (("train", "--resume"), ["--resume needs the folder"]),
    ((*RESUME, "data"), ["data", "cannot be resumed", "config.toml"]),
    ((*RESUME, "nowhere"), ["nowhere", "cannot be resumed"]),
    (("compare", "runs/a", "runs/dense"), ["runs/dense", "different data sets"]),
    (("report", "runs/a", "runs/dense"), ["runs/dense", "different data sets"]),
    (("compare", "runs/a"), ["two runs or more", "runs/a"]),
    (("compare", "runs/a", "runs/a", "--metric", "recall@7"),
     ["--metric", "recall@1, recall@5, recall@10", "'recall@7'"]),
    (("search", "runs/a", "badoki", ""), ["''"]),
    (("search", "runs/a", "badoki", "  \t"), ["white space"]),
    (("search", "runs/a", "x", "--results", 0), ["--results", "0"]),
    (("search", "runs/dense", "x"), ["cannot turn a text into features", "table of texts"]),
    (("data", "show", "nowhere"), ["nowhere", "dataset.json"]),
    (("data", "show", "runs/a"), ["runs/a", "is not an Evenhand data set"]),
    (("train", "--data", "nowhere"), ["nowhere", "dataset.json"]),
    (("train", "--data", "places", "--set", "data.min_population=7"),
     ["min_population of places must be one of"]),
    (("train", "--data", "runs/a"), ["runs/a", "is not an Evenhand data set"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "fragments"), REFUSED)
def test_what_is_wrong_is_refused_before_anything_is_made(here, capsys, words, fragments):
    run_main(capsys, *words).says(*fragments)
    assert not (here / "new").exists()


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_wrong_line_is_named_and_nothing_is_made(here, tmp_path, capsys, suffix):
    """Which lines are wrong is tested with the parsers."""
    text, bad, good = b"2 4 3\n0 0:1.0 2:0.5\n1 1:1\n", tmp_path / f"bad{suffix}", tmp_path / "good"
    wrong = text.replace(b"1 1:1", b"1 1=1")
    bad.write_bytes(gzip.compress(wrong) if suffix == ".txt.gz" else wrong)
    good.write_bytes(text)
    table = tmp_path / "pairs.csv"
    table.write_text("query,label\nx,\n")
    out = ("--out", tmp_path / "out")
    for train, test in ((bad, good), (good, bad)):
        run_main(capsys, "data", "extreme", "--train", train, "--test", test, *out).says(
            bad, "line 3", "'1=1'", "id:value"
        )
    run_main(capsys, "data", "table", table, *out).says(table, "row 1", "of label", "empty")
    assert sorted(tmp_path.iterdir()) == sorted([bad, good, table])


# --- runs -----------------------------------------------------------------------------------------


COMMANDS = {
    "evaluate": ("evaluate", "{}"),
    "compare": ("compare", "runs/a", "{}"),
    "compare first": ("compare", "{}", "runs/a"),
    "report": ("report", "{}", "--out", "{}/../new.html"),
    "search": ("search", "{}", "x"),
    "resume": ("train", "--resume", "--run", "{}"),
}


def on(command, folder):
    return [word.replace("{}", str(folder)) for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_no_run_is_named(here, tmp_path, capsys, command):
    for folder in (tmp_path, here / "data", here / "nowhere"):
        run_main(capsys, *on(command, folder)).says(folder, "it holds no")


@pytest.mark.parametrize(
    ("gone", "commands", "says"),
    [
        ("evaluation", ["compare", "compare first", "report"],
         ["not been evaluated on the test", "evenhand evaluate {}"]),
        ("model", ["evaluate", "search"], ["no trained model", "evenhand train --resume --run {}"]),
    ],
)  # fmt: skip
def test_what_a_run_lacks_is_named_with_the_command_for_it(copy, capsys, gone, commands, says):
    shutil.rmtree(copy / gone)
    for command in commands:
        fragments = [fragment.format(copy) for fragment in says]
        run_main(capsys, *on(command, copy)).says(copy, *fragments)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "search"])
def test_a_data_set_other_than_the_one_trained_on_is_refused(
    home, copy, tmp_path, capsys, monkeypatch, command
):
    shutil.copytree(home / "other", tmp_path / "work/data")  # same name and sizes, other content
    shutil.copytree(home / "runs", tmp_path / "work/runs")
    monkeypatch.chdir(tmp_path / "work")
    run_main(capsys, *on(command, copy)).says(
        "was trained on another data set", "fingerprint", "restore"
    )


CHANGES = {
    "shorten": lambda data: data[:-20],
    "flip": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "lengthen": lambda data: data + b"\xff\xfe",
    "empty": lambda data: b"",
    "list instead": lambda data: b"[3]\n",
}
DAMAGES = [  # file, damage, command, what the sentence must hold beside the file's name
    ("model/weights/rank-0-file-0.safetensors", "shorten", "evaluate", "damaged"),
    ("model/weights/rank-0-file-0.safetensors", "flip", "search", "SHA-256"),
    ("model/weights/manifest.json", "list instead", "search", "damaged"),
    ("checkpoints/step-00000020/manifest.json", "list instead", "resume", "damaged"),
    ("checkpoints/step-00000020/manifest.json", "empty", "resume", "damaged"),
    ("checkpoints/step-00000020/rank-0-file-0.safetensors", "shorten", "resume", "damaged"),
    ("checkpoints/step-00000020/rank-0-file-0.safetensors", "empty", "resume", "damaged"),
    ("evaluation/test/scores.json", "shorten", "compare", "damaged"),
    ("evaluation/test/scores.json", "lengthen", "report", "damaged"),
    ("evaluation/test/scores.json", "list instead", "report", "damaged"),
    ("evaluation/test/outcome.npz", "shorten", "compare", "damaged"),
    ("evaluation/test/outcome.npz", "empty", "report", "damaged"),
    ("run.json", "shorten", "resume", "damaged"),
    ("run.json", "list instead", "report", "damaged"),
    ("run.json", "empty", "evaluate", "damaged"),
    ("config.toml", "lengthen", "evaluate", "not valid TOML"),
    ("config.toml", "lengthen", "compare", "damaged"),
    ("config.toml", "lengthen", "resume", "not valid TOML"),
    ("metrics.jsonl", "lengthen", "resume", "damaged"),
    ("metrics.jsonl", "list instead", "resume", "damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "command", "problem"), DAMAGES)
def test_a_damaged_file_of_a_run_is_named(copy, capsys, name, damage, command, problem):
    if command == "resume":
        small.unfinish(copy)
    (copy / name).write_bytes(CHANGES[damage]((copy / name).read_bytes()))
    if name.startswith("checkpoints"):
        shutil.rmtree(copy / "checkpoints/step-00000015")  # it would be used instead
    folder, _, file_name = name.rpartition("/")  # a store is named, and then its file
    places = [folder, file_name] if folder.startswith(("checkpoints", "model")) else [name]
    run_main(capsys, *on(command, copy)).says(*places, problem)


# --- a disk that is full --------------------------------------------------------------------------


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_metrics(here, tmp_path, capsys, monkeypatch):
    run, place = tmp_path / "run", "evenhand.training.loop.open"
    with monkeypatch.context() as patch:
        patch.setattr(place, full, raising=False)
        run_main(capsys, "train", "a.toml", "--run", run).says(
            run / "metrics.jsonl", "No space left", "--resume"
        )
    assert run_main(capsys, "train", "--keep-checkpoints", "--resume", "--run", run).code == 0
    assert small.fruits_of(run) == small.fruits_of(here / "runs/a")


FULL = [  # function, its n-th call, what the sentence names
    ("evenhand.tensor_store.write_file", 1, "model/weights"),
    ("evenhand.tensor_store.write_file", 2, "checkpoints/step-00000015"),
    ("evenhand.tensor_store.write_file", 3, "model/weights"),
    ("evenhand.tensor_store.sync", 6, "checkpoints/step-00000015"),
    ("numpy.savez", 1, "evaluation/test/outcome.npz"),
    ("os.rename", 1, ""),
    ("evenhand.files.sync", 1, "config.toml"),
]


@pytest.mark.parametrize(("function", "call", "name"), FULL)
def test_a_full_disk_costs_nothing_that_was_complete(here, tmp_path, function, call, name):
    run = tmp_path / "run"
    train = ("train", "--keep-checkpoints")
    words = (*train, "a.toml", "--run", run)
    answer = small.run(here, *words, disturb=[function, call, errno.ENOSPC])
    answer.says(name, "No space left")
    names = [path.name for path in tmp_path.rglob("*")]
    assert not [name for name in names if "partial" in name or ".step" in name]
    again = small.run(here, *((*train, "--resume", "--run", run) if run.exists() else words))
    assert again.code == 0, again.err
    assert small.fruits_of(run) == small.fruits_of(here / "runs/a")
