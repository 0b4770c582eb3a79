import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import evenhand

MODULES = [module.name for module in pkgutil.walk_packages(evenhand.__path__, "evenhand.")]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} says nothing about itself: give it a docstring"


@pytest.mark.parametrize("name", ["evenhand", *MODULES])
def test_every_exported_name_exists_and_is_listed_once(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported))
    for export in exported:
        assert hasattr(module, export), f"{name}.__all__ lists {export!r}, which is not there"


def test_the_package_lists_all_that_it_imports():
    tree = ast.parse(Path(evenhand.__file__).read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(getattr(evenhand, "__all__", [])) == imported


@pytest.mark.parametrize(("program", "policy"), [("bin/evenhand", "2000"), ("train.py", "None")])
def test_only_the_command_chooses_how_threads_wait(program, policy):
    code = (
        "import os, sys; sys.argv = sys.argv[1:]; import evenhand; "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    answer = subprocess.run(
        [sys.executable, "-c", code, program], env=clean, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == policy
