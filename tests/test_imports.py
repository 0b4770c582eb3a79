import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import evenhand
import small

MODULES = [module.name for module in pkgutil.walk_packages(evenhand.__path__, "evenhand.")]


def test_every_module_imports_says_what_it_is_and_has_the_names_that_it_exports():
    problems = []
    for name in ["evenhand", *MODULES]:
        module = importlib.import_module(name)
        if not module.__doc__:
            problems.append(f"{name} says nothing about itself: give it a docstring")
        exported = getattr(module, "__all__", [])
        if len(exported) != len(set(exported)):
            problems.append(f"{name}.__all__ lists a name twice")
        problems += [
            f"{name}.__all__ lists {export!r}, which is not there"
            for export in exported
            if not hasattr(module, export)
        ]
    assert not problems, "\n".join(problems)


def test_the_package_lists_all_that_it_imports():
    tree = ast.parse(Path(evenhand.__file__).read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("evenhand.")
        for alias in node.names
    }
    assert set(getattr(evenhand, "__all__", [])) == imported


def test_every_verb_is_a_typed_function_that_says_what_it_does():
    for name, command in small.all_verbs().items():
        assert command.help, f"evenhand {name} says nothing about itself"
        for param in command.params:
            assert param.help, f"evenhand {name}: {param.name} says nothing about itself"
            if not name:
                continue
            assert param.name in inspect.signature(command.callback).parameters


def said_by(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()


def test_names_of_the_package_are_loaded_when_they_are_asked_for():
    code = (
        "import sys, evenhand; print('torch' in sys.modules or 'numpy' in sys.modules); "
        "from evenhand import s2m_loss, losses; print('torch' in sys.modules); "
        "print(s2m_loss is evenhand.s2m_loss is sys.modules['evenhand.objective'].s2m_loss); "
        "print(losses is evenhand.losses, 'UniformSampler' in dir(evenhand)); "
        "from evenhand import *; print(UniformSampler.__name__)"
    )
    assert said_by(code) == ["False", "True", "True", "True", "True", "UniformSampler"]


def test_a_name_that_is_not_there_is_said_to_be_missing():
    with pytest.raises(AttributeError, match="module 'evenhand' has no attribute 's3m_loss'"):
        evenhand.s3m_loss  # noqa: B018


def test_what_needs_no_model_does_not_wait_for_torch():
    code = (
        "import sys; from evenhand.cli import main\n"
        "for words in (['--version'], ['--help'], ['train', '--help'], ['trian']): main(words)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert said_by(code)[-2:] == ["False", "False"]


@pytest.mark.parametrize(
    ("is_torch_loaded", "given", "expected"),
    [
        (False, {}, ["2000", "0"]),
        (False, {"GOMP_SPINCOUNT": "7"}, ["7", "0"]),
        (False, {"OMP_WAIT_POLICY": "active"}, ["None", "0"]),
        (True, {}, ["None", "1"]),
        (True, {"GOMP_SPINCOUNT": "7"}, ["7", "0"]),
    ],
)
def test_threads_sleep_when_they_wait_or_the_user_is_told_once(is_torch_loaded, given, expected):
    code = (
        "import importlib, os, sys, types, warnings\n"
        f"if {is_torch_loaded}: sys.modules['torch'] = types.ModuleType('torch')\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    import evenhand\n"
        "    import evenhand.methods\n"
        "assert all('import evenhand first' in str(warning.message) for warning in told)\n"
        "print(os.environ.get('GOMP_SPINCOUNT'), len(told))"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    clean = {name: value for name, value in os.environ.items() if name not in names} | given
    answer = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.split() == expected, answer.stderr
