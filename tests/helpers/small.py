"""Data sets that train in a moment, and the command `evenhand` in processes that may be killed.

Importing torch takes seconds, so one process imports it and forks for every command: run as a
script, this file is that process. What it forks are processes like any other: they have a working
folder, an exit code, two streams, and can be killed.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import pkgutil
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error",
}

# --- data -----------------------------------------------------------------------------------------

NUM_LABELS = 60
SYLLABLES = ("ba", "do", "ki", "lu", "mar", "nes", "or", "pet", "sa", "tiv", "um", "wel")
SIZES = {"train": 420, "validation": 120, "test": 120}


def text_dataset(seed=0, name="small", featurizer=None):
    """Misspelt names of 60 towns: texts, features, two kinds of groups and coordinates."""
    import numpy as np

    from evenhand.data import Dataset, Groups, NgramFeaturizer, Strings

    generator = np.random.default_rng(seed)
    names = ["".join(generator.choice(SYLLABLES, 3)) + str(label) for label in range(NUM_LABELS)]
    featurizer = featurizer or NgramFeaturizer(max_length=3, num_buckets=512)
    parts = {}
    for part_name, size in SIZES.items():
        labels = generator.integers(NUM_LABELS, size=size)
        texts = [names[label] + generator.choice(SYLLABLES) for label in labels]
        others = (labels + 1) % NUM_LABELS  # every fourth query has a second positive
        both = enumerate(zip(labels, others, strict=True))
        rows = [[y, z] if q % 4 == 0 else [y] for q, (y, z) in both]
        style = {"style": Groups((labels % 3).astype(np.int32), ("plain", "odd", "rare"))}
        features, texts = featurizer.featurize(texts), Strings.pack(texts)
        parts[part_name] = part_of(rows, features, groups=style, texts=texts)
    region = Groups((np.arange(NUM_LABELS) % 4).astype(np.int32), tuple("NESW"))
    return Dataset(
        name=name,
        num_features=512,
        num_labels=NUM_LABELS,
        parts=parts,
        label_names=Strings.pack(names),
        label_groups={"region": region},
        label_coordinates=generator.uniform(-60, 60, (NUM_LABELS, 2)).astype(np.float32),
        featurizer=featurizer.settings(),
    )


def part_of(labels, features=None, *, groups=None, texts=None):
    """A part whose queries have these lists of labels, and a zero each if there are no features."""
    import numpy as np

    from evenhand.data import Part
    from evenhand.data.csr import rows_from_lists

    features = np.zeros((len(labels), 1), dtype=np.float32) if features is None else features
    return Part(features, rows_from_lists(labels), groups or {}, texts)


def tagged_dataset(seed=0):
    """`text_dataset` whose training pairs have up to two tags each, and some of them none."""
    import numpy as np

    from evenhand.data import Groups, Rows

    dataset = text_dataset(seed)
    train = dataset.parts["train"]
    sets = Rows(np.array([0, 1, 3, 4]), np.array([0, 0, 2, 1], dtype=np.int32))
    ids = (np.arange(len(train.positives.ids)) % 4 - 1).astype(np.int32)
    tags = Groups(ids, ("new", "old", "used"), sets)
    return with_parts(dataset, train=dataclasses.replace(train, groups={"tag": tags}))


def dense_dataset(seed=0, name="dense"):
    """Noisy copies of 60 points in 12 dimensions."""
    import numpy as np

    from evenhand.data import Dataset

    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(NUM_LABELS, 12))
    parts = {}
    for part_name, size in SIZES.items():
        labels = generator.integers(NUM_LABELS, size=size).astype(np.int32)
        noise = 0.3 * generator.normal(size=(size, 12))
        features = (centres[labels] + noise).astype(np.float32)
        parts[part_name] = part_of(labels[:, None], features)
    return Dataset(name=name, num_features=12, num_labels=NUM_LABELS, parts=parts)


def with_parts(dataset, **parts):
    """The data set with some parts replaced, or with None left out."""
    kept = {name: part for name, part in (dataset.parts | parts).items() if part is not None}
    return dataclasses.replace(dataset, parts=kept)


def settings(folder, **changes):
    """The settings of a run that takes a tenth of a second; changes are named section__key."""
    values = {
        "data": {"dataset": str(folder)},
        "model": {"embedding_dim": 8},
        "mining": {
            "method": "s2m-annealed",
            "batch_size": 32,
            "num_sampled_labels": 40,
            "num_hard_labels": 5,
            "num_hard_examples": 8,
        },
        "training": {
            "num_steps": 60,
            "learning_rate": 0.05,
            "log_every": 5,
            "evaluate_every": 10,
            "checkpoint_every": 15,
        },
        "evaluation": {"cutoffs": [1, 5, 10], "num_resamples": 20, "min_pairs": {"style": 20}},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return values


def config(folder, **changes):
    from evenhand.config import build_config

    return build_config(settings(folder, **changes))


def settings_file(path, folder, **changes):
    """Writes a TOML file of these settings, and returns its path."""
    from evenhand.config import toml_value

    lines = []
    for section, values in settings(folder, **changes).items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(v)}" for key, v in values.items()), ""]
    path.write_text("\n".join(lines), "utf-8")
    return path


def bytes_of(folder):
    """Every file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fruits_of(run):
    """What must not depend on how often a run was stopped: weights, checkpoint, metrics, scores."""
    changing = ("run.json", "config.toml", "report.html")
    fruits = {name: data for name, data in bytes_of(run).items() if name not in changing}
    # A zip archive holds the time it was made at: only what is in it counts.
    return {
        name: unzipped(run / name) if name.endswith(".npz") else data
        for name, data in fruits.items()
    }


def unfinish(run):
    """Makes a finished run one that was killed before run.json said that it is."""
    about = json.loads((run / "run.json").read_text("utf-8"))
    (run / "run.json").write_text(json.dumps(about | {"is_complete": False}), "utf-8")


def weights_file(run):
    """The only file with the weights of a small run."""
    return run / "model/weights/rank-0-file-0.safetensors"


def unzipped(path):
    import numpy as np

    with np.load(path) as file:
        return {name: file[name].tobytes() for name in file.files}


# --- the command ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    code: int  # minus the number of the signal that ended it
    out: str
    err: str

    @property
    def output(self):
        """What a command printed, checked to have succeeded."""
        assert self.code == 0, self.err
        return self.out

    @property
    def sentence(self):
        """What a refused command says, checked to be one line for people, and nothing else."""
        assert self.code == 2, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert self.err.startswith("evenhand: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err + self.out
        return self.err.removeprefix("evenhand: ").strip()

    def says(self, *fragments):
        """The sentence of a refused command, checked to hold every fragment."""
        for fragment in fragments:
            assert str(fragment) in self.sentence, f"{fragment!r} is not in: {self.sentence}"
        return self.sentence


def parse_words(words):
    """(verb, its parameters by name) of a command line, and nothing is run."""
    from typer.core import TyperGroup
    from typer.main import get_command

    from evenhand.cli import app

    command, context, name, words = get_command(app), None, "evenhand", list(words)
    while True:
        context = command.make_context(name, words, parent=context)
        if not isinstance(command, TyperGroup):
            return context.command_path.removeprefix("evenhand "), context.params
        words = [*context._protected_args, *context.args]
        if not words:
            context.fail("Missing command.")
        name, command, words = command.resolve_command(context, words)


def all_verbs():
    """'data table' -> its command, and so for all verbs, of typer."""
    from typer.main import get_command

    from evenhand.cli import app

    def walk(command, path):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}".strip())

    return dict(walk(get_command(app), ""))


def run_main(capsys, *arguments):
    """The command in this process."""
    from evenhand.cli import main

    capsys.readouterr()
    try:
        code = main([str(word) for word in arguments])
    except SystemExit as exit_:
        code = exit_.code
    return Answer(code, *capsys.readouterr())


@dataclasses.dataclass
class Process:
    """A running `evenhand`."""

    pid: int
    streams: Path  # a folder with the files `out` and `err`

    def wait(self):
        code = _ask({"wait": self.pid})
        texts = [(self.streams / name).read_text("utf-8") for name in ("out", "err")]
        shutil.rmtree(self.streams)
        return Answer(code, *texts)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)


def start(folder, *arguments, disturb=None, environment=None):
    """Starts `evenhand` in a folder.

    Args:
        disturb: [name of a function, number of its call, what happens then]; see `_disturb`.
        environment: variables to set, such as those by which torchrun tells a rank its number.
    """
    streams = tempfile.mkdtemp()
    words = [str(word) for word in arguments]
    request = {"arguments": words, "folder": str(folder), "streams": streams, "disturb": disturb}
    request["environment"] = environment or {}
    return Process(_ask(request), Path(streams))


def run(folder, *arguments, disturb=None):
    return start(folder, *arguments, disturb=disturb).wait()


def start_ranks(folder, *arguments, num_ranks, num_restarts=0):
    """Starts `evenhand` once for each rank, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
    }
    return [
        start(folder, *arguments, environment={**common, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(num_ranks)
    ]


def trained(tmp_path_factory, runs=None, **changes):
    """A folder with the data set `data`, the settings a.toml, and runs: name -> further words."""
    from evenhand.data import save_dataset

    folder = tmp_path_factory.mktemp("home")
    save_dataset(text_dataset(), folder / "data")
    settings_file(folder / "a.toml", "data", **{"training__num_steps": 20} | changes)
    for name, words in ({"a": []} if runs is None else runs).items():
        assert run(folder, "train", "a.toml", "--run", f"runs/{name}", *words).output
    return folder


def wait_for(condition_fn):
    deadline = time.monotonic() + 60
    while not condition_fn():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def last_step(run_folder):
    """The last step that metrics.jsonl tells of, 0 if there is none."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@functools.cache
def _forker():
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    atexit.register(_end, process)
    return process


def _end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _ask(request):
    process = _forker()
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


# --- the process that forks -----------------------------------------------------------------------


def _disturb(name, call, what):
    """Makes the n-th call of a function go wrong: `kill`, `kill after`, `sleep` or an errno.

    The name `file size` limits instead what this process may write to a file, to `call` bytes;
    the name `memory`, what it may have beyond what it has; the name `output` leads what it prints
    to a file, or to a pipe that nobody reads.
    """
    if name == "output":
        read_end, handle = os.pipe()
        os.close(read_end)
        os.dup2(handle if what == "closed pipe" else os.open(what, os.O_WRONLY), 1)
        return
    if name == "memory":
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
        limit = pages * resource.getpagesize() + call
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return
    if name == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (call, call))
        return
    module_name, _, function_name = name.rpartition(".")
    module = importlib.import_module(module_name)
    function, calls = getattr(module, function_name), [0]

    def disturbed(*arguments, **options):
        calls[0] += 1
        if calls[0] != call:
            return function(*arguments, **options)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill after":
            function(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "sleep":
            Path("asleep").touch()
            time.sleep(50)
        if isinstance(what, int):
            raise OSError(what, os.strerror(what))
        raise AssertionError(what)

    setattr(module, function_name, disturbed)


def _run_command(request):
    """In a process of its own; never returns."""
    from evenhand.cli import main

    os.chdir(request["folder"])
    os.environ |= request["environment"]
    for handle, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['streams']}/{name}", os.O_CREAT | os.O_WRONLY), handle)
    code = 1
    try:
        if request["disturb"]:
            _disturb(*request["disturb"])
        code = main(request["arguments"])
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _warm_up():
    """A first run, for all that is imported, looked up and compiled the first time."""
    import torch

    import evenhand
    from evenhand.cli import main
    from evenhand.data import save_dataset

    for module in pkgutil.walk_packages(evenhand.__path__, "evenhand."):  # what verbs load
        if not module.name.startswith("evenhand.kernels.gpu") and "__main__" not in module.name:
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1)])  # imports half of torch
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        save_dataset(text_dataset(), folder / "data")
        path = settings_file(folder / "settings.toml", folder / "data", training__num_steps=2)
        main(["train", str(path), "--run", str(folder / "run")])


def _serve():
    answers = os.fdopen(os.dup(1), "w", closefd=False)
    os.dup2(2, 1)
    _warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                _run_command(request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
