"""What the source never does, read without importing: raw writes, pickles, code from data."""

import ast
import re
from collections import Counter
from pathlib import Path

import evenhand

ROOT = Path(evenhand.__file__).parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}

# --- writing --------------------------------------------------------------------------------------

# Whatever makes, changes or names a file, by the last word of the call.
WRITES = {
    "write_bytes", "touch", "tofile", "savetxt", "savez", "savez_compressed", "save_file",
    "savefig", "to_csv", "to_parquet", "mkdir", "makedirs", "mkdtemp", "mkstemp",
    "NamedTemporaryFile",
    "TemporaryDirectory", "memmap", "open_memmap", "copyfile", "copytree", "move", "rename",
    "symlink", "symlink_to", "truncate", "ftruncate",
}  # fmt: skip
WRITES_BY_FULL_NAME = {"np.save", "torch.save", "json.dump", "os.replace", "os.open", "os.write"}
WHOLE = {"atomic_path", "atomic_folder"}  # what is written within a block of these is safe
# (file, call): why it is no danger there. The number of such calls is counted, so that a new one
# beside an old one is seen.
ALLOWED = {
    ("files.py", "os.replace"): (1, "atomic_path itself"),
    ("files.py", "rename"): (1, "atomic_folder itself"),
    ("files.py", "mkdir"): (3, "of a file, of a lock, and atomic_folder's temporary one"),
    ("files.py", "os.open"): (1, "for fsync, to read"),
    ("files.py", "open"): (3, "called within atomic_folder, which syncs all"),
    ("files.py", "write_text"): (1, "who holds a lock; half of that is nobody's loss"),
    ("errors.py", "os.open"): (1, "/dev/null"),
    ("data/dataset.py", "open"): (2, "called within atomic_folder, which syncs all"),
    ("data/dataset.py", "np.save"): (1, "the same"),
    ("data/dataset.py", "json.dump"): (1, "the same"),
    ("data/stream.py", "mkdir"): (1, "the same"),
    ("data/stream.py", "open"): (1, "the same"),
    ("data/stream.py", "np.save"): (1, "the same"),
    ("data/vector_writer.py", "open"): (1, "called within atomic_folder, which syncs all"),
    ("tensor_store.py", "mkdir"): (1, "a folder that is synced and renamed when whole"),
    ("tensor_store.py", "open"): (1, "the same"),
    ("tensor_store.py", "write_text"): (1, "the same"),
    ("tensor_store.py", "os.replace"): (3, "the same, and out of its way"),
    ("text_encoder.py", "mkdir"): (1, "called within atomic_folder, by begin_run"),
    ("text_encoder.py", "copyfile"): (1, "the same"),
    ("training/loop.py", "open"): (1, "an append; readers leave out a line cut short"),
    ("tuning/time_budget.py", "rename"): (1, "of a whole trial, which is made again if it is lost"),
}  # fmt: skip


def full_name(node):
    """np.save -> 'np.save'; anything more than names and dots ends in its last word."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def opens_to_write(call):
    """open(path, "w"), path.open("ab"): any mode that is not only for reading."""
    values = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [set(v.value) for v in values if isinstance(getattr(v, "value", None), str)]
    return any(mode <= set("rwaxbt+") and mode & set("wax+") for mode in modes)


def raw_writes(tree):
    """The names of all calls that write, outside the blocks of `atomic_path` and its like."""
    found = []

    def visit(node, is_safe):
        if isinstance(node, ast.With):
            calls = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
            is_safe |= any(full_name(call.func).split(".")[-1] in WHOLE for call in calls)
        if isinstance(node, ast.Call) and not is_safe:
            name = full_name(node.func)
            last = name.split(".")[-1]
            if name in WRITES_BY_FULL_NAME:
                found.append(name)
            elif (
                last in WRITES
                or (last == "write_text" and isinstance(node.func, ast.Attribute))
                or (last == "open" and opens_to_write(node))
            ):
                found.append(last)
        for child in ast.iter_child_nodes(node):
            visit(child, is_safe)

    visit(tree, False)
    return found


def test_every_write_is_whole_or_has_a_reason():
    counts = Counter((place, name) for place, tree in TREES.items() for name in raw_writes(tree))
    expected = Counter({key: count for key, (count, _) in ALLOWED.items()})
    new = counts - expected
    assert not new, f"write through evenhand.files, or say here why not: {new}"
    gone = {key for key in expected if key not in counts and (ROOT / key[0]).exists()}
    assert not gone, f"no longer there, so no longer allowed: {gone}"


def test_what_the_source_never_does_would_be_found():
    code = "open(p, 'w'); open(p); p.write_text(x); np.load(p); import pickle; eval(x)\n"
    code += "run(x, shell=y); run(x, shell=False); torch.load(p, weights_only=True)"
    tree = ast.parse(code)
    assert raw_writes(tree) == ["open", "write_text"]
    assert raw_reads(tree) == ["open", "np.load"]
    assert set(misdeeds(tree)) == {
        "eval", "import pickle", "np.load without allow_pickle=False", "shell=True",
    }  # fmt: skip
    safe = ast.parse("with atomic_path(p) as q:\n  open(q, 'w')\nopen_input(p); model.eval()")
    assert not raw_writes(safe) + raw_reads(safe) + misdeeds(safe)


# --- reading --------------------------------------------------------------------------------------

READS = {"read_text", "read_bytes", "fromfile", "memmap", "safe_open", "load_file", "ZipFile"}
READS_BY_FULL_NAME = {"open", "np.load", "gzip.open", "tarfile.open"}
# A pipe or a device in place of a file would be waited for, or read, without end: all others open
# by `open_input`, `read_text` or `read_json` of evenhand.files.
MAY_READ = {
    "files.py": "open_input itself, and who holds a lock, checked there; arrays, checked before",
    "cli/doctor.py": "files of the system",
    "evaluation/outcome.py": "from what open_input opened",
    "config.py": "files of the package",
    "data/text_io.py": "after check_is_file",
    "data/stream.py": "from what open_input opened",
    "tensor_store.py": "files that agree with the manifest",
}


def raw_reads(tree):
    """The names of all calls that open a file to read, by whatever library."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [full_name(call.func) for call in calls if not opens_to_write(call)]
    is_method = {full_name(call.func) for call in calls if isinstance(call.func, ast.Attribute)}
    return [
        name
        for name in names
        if name in READS_BY_FULL_NAME
        or (name.split(".")[-1] in READS and (name in is_method or "read" not in name))
    ]


def test_every_file_is_opened_by_what_refuses_pipes_and_devices_or_has_a_reason():
    found = {place for place, tree in TREES.items() if raw_reads(tree)}
    assert not found - set(MAY_READ), "open files by evenhand.files.open_input, or say here why not"
    assert not {name for name in set(MAY_READ) - found if (ROOT / name).exists()}


# --- what is never done ---------------------------------------------------------------------------

# Modules whose readers run what they read, or whose use is a command line from a string.
NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve",
                  "marshal", "yaml", "xml", "commands", "telnetlib", "ftplib"}  # fmt: skip
NEVER_CALLED = {
    "eval", "exec", "compile", "__import__", "execfile", "input", "os.system", "os.popen",
    "tempfile.mktemp", "pickle.load", "pickle.loads", "yaml.load", "marshal.loads",
    "os.execv", "os.execvp", "os.spawnv", "subprocess.getoutput", "ssl._create_unverified_context",
    "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "extractall",
}  # fmt: skip


NEEDED = {  # what a call must be given
    "torch.load": ("weights_only", True), "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False), "np.save": ("allow_pickle", False),
    "numpy.save": ("allow_pickle", False),
}  # fmt: skip


def misdeeds(tree):
    """What a file does that none may do."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            packages = {name.split(".")[0] for name in names}
            found += [f"import {name}" for name in packages & NEVER_IMPORTED]
        elif isinstance(node, ast.Call):
            name = full_name(node.func)
            given = {w.arg: getattr(w.value, "value", None) for w in node.keywords}
            if name in NEVER_CALLED or name.split(".")[-1] == "extractall":
                found.append(name)
            if name in NEEDED and given.get(NEEDED[name][0]) is not NEEDED[name][1]:
                found.append("{} without {}={}".format(name, *NEEDED[name]))
            if given.get("shell", False) is not False:
                found.append("shell=True")
    return found


def test_nothing_is_executed_from_data():
    found = {place: misdeeds(tree) for place, tree in TREES.items()}
    assert not {place: names for place, names in found.items() if names}


def test_what_docs_security_names_exists():
    page = (ROOT.parents[1] / "docs/security.md").read_text("utf-8")
    tests = "\n".join(path.read_text("utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 12
    assert not [name for name in named if f"def {name}(" not in tests]
    paths = set(re.findall(r"`([\w/]+\.py)`", page)) - {"tests/test_source.py"}
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).is_file()]
