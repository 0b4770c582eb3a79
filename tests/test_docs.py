"""The words of README and docs are true: their Python runs, their commands exist."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import small
from evenhand.config import SECTIONS
from experiments import reproduce

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/tour.ipynb"]
BLOCK = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SHELL = ("console", "bash", "sh", "shell")
ENDS = ("|", ">", ">>", "&&", "||", ";", "&")


def text_of(page):
    """The text of a page; the code cells of a notebook are its Python blocks."""
    text = page.read_text("utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{s}\n```" if kind == "code" else s for s, kind in cells)


TEXTS = {page: text_of(page) for page in PAGES}


def blocks_of(text, *kinds):
    """(number of its first line, text) of every fenced block of these kinds."""
    return [
        (text.count("\n", 0, match.start("text")) + 1, match["text"])
        for match in BLOCK.finditer(text)
        if match["kind"] in kinds
    ]


def commands_of(text):
    """The `evenhand ...` commands of shell blocks: (line of the block, words after `evenhand`)."""
    commands = []
    for line_number, block in blocks_of(text, *SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            if "evenhand" not in line:
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                words = words[1:]  # VARIABLE=value before a command
            if words and Path(words[0]).name == "evenhand":
                ends = [words.index(end) for end in ENDS if end in words]
                commands.append((line_number, words[1 : min(ends, default=None)]))
    return commands


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_python_block_runs(page, tmp_path, monkeypatch):
    """In order, in one namespace; errors show the lines of the page."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line_number, block in blocks_of(TEXTS[page], "python"):
        exec(compile("\n" * (line_number - 1) + block, str(page), "exec"), namespace)


def test_every_command_is_one_the_parser_knows():
    for page, text in TEXTS.items():
        for line_number, words in commands_of(text):
            place = f"{page.name}, block of line {line_number}"
            try:
                with contextlib.suppress(typer.Exit):  # --help and --version
                    small.parse_words(words)
            except typer.TyperException as error:
                raise AssertionError(f"{place}: evenhand {shlex.join(words)}: {error}") from error


def test_every_experiment_is_one_its_parser_knows():
    for text in TEXTS.values():
        for command in re.findall(r"^python -m experiments\.reproduce (.*)", text, re.M):
            assert reproduce._parser().parse_args(shlex.split(command, comments=True))


def flags_by_command():
    """'data table' -> every flag that it takes, and so for all commands."""
    found = {
        name: {flag for param in command.params for flag in param.opts} | {"-h", "--help"}
        for name, command in small.all_verbs().items()
    }
    parser = reproduce._parser()
    tables = [
        inner for action in parser._subparsers._group_actions for inner in action.choices.values()
    ]
    found["python -m experiments.reproduce"] = {
        flag for inner in [parser, *tables] for flag in inner._option_string_actions
    }
    return found


def named_flags(text, commands):
    """(flag, commands it may belong to) of every flag in the running text of a page.

    A flag behind `evenhand verb` is of that verb, one alone of a command that the page names; what
    another program is called with is left alone.
    """
    names = sorted(commands, key=len, reverse=True)
    named = {
        name
        for words in re.findall(r"evenhand ([a-z][a-z ]+)", text)
        for name in names
        if name and f"{words.strip()} ".startswith(f"{name} ")
    }
    named |= {name for name in names if name.startswith("python") and name in text}
    for span in re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)):
        words = span.split()
        if words[0] == "evenhand":
            behind = " ".join(words[1:])
            of = {next(name for name in names if f"{behind} ".startswith(f"{name} ") or not name)}
        elif words[0].startswith("--"):
            of = named
        else:
            continue
        yield from ((word.partition("=")[0], of) for word in words if re.match("--[a-z]", word))


def test_every_flag_in_the_text_is_one_the_command_takes():
    commands, wrong = flags_by_command(), []
    for page, text in TEXTS.items():
        for flag, names in named_flags(text, commands):
            flag = flag.rstrip(".,;:")
            if not any(flag in commands[name] for name in names):
                of = ", ".join(sorted(names)) or "a command there"
                wrong.append(f"{page.name}: {flag} is no flag of {of}")
    assert not wrong, "\n".join(wrong)


# Tables that are made from something else.


def test_tables_of_results_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages, methods = map(importlib.import_module, ("pages", "methods"))
    for options in ({"noise": 0.0}, {"noise": 0.2}, {"noise": 0.0, "no_longer_there": True}):
        table = methods.table_of(methods.RESULTS, **options)
        assert table in (ROOT / "docs/methods.md").read_text("utf-8"), options
    assert len(pages.PAGES) >= 5
    for name, tables in pages.PAGES.items():
        page = (ROOT / "docs" / name).read_text("utf-8")
        assert pages.with_tables(page, tables()) == page, name


@pytest.mark.parametrize("name", ["settings", "commands"])
def test_a_generated_reference_is_that_of_the_source(name):
    reference = importlib.import_module(f"docs.{name}")
    assert reference.PAGE.read_text("utf-8") == reference.page(), f"run: python -m docs.{name}"


def test_every_setting_says_what_it_means():
    from docs import settings

    for section, cls in SECTIONS.items():
        meanings = settings.comments_of(cls)
        missing = [field.name for field in dataclasses.fields(cls) if not meanings[field.name]]
        assert not missing, f"[{section}] in config.py: no comment beside {missing}"


def theory_rows():
    """(functions, tests) of every row of the tables of docs/theory.md."""
    for line in (ROOT / "docs/theory.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and "`test_" in cells[2]:
            yield re.findall(r"`([\w.]+)`", cells[1]), re.findall(r"`(\w+)`", cells[2])


def test_every_function_of_the_theory_exists_and_so_does_its_test():
    sources = [path.read_text("utf-8") for path in Path(__file__).parent.rglob("test_*.py")]
    known_tests = set(re.findall(r"^def (test_\w+)", "\n".join(sources), re.MULTILINE))
    rows = list(theory_rows())
    assert len(rows) > 50
    for functions, tests in rows:
        assert functions
        for name in functions:
            module, _, function = name.rpartition(".")
            in_core = module in ("losses", "objective", "risk")
            home = f"evenhand.{module}" if in_core else f"evenhand.theory.{module}"
            assert hasattr(importlib.import_module(home), function), name
        assert set(tests) <= known_tests, set(tests) - known_tests


THEORY = (  # without the certificate, which has a page of its own
    "bias", "bounds", "consistency", "cvar", "even", "expected", "order_weights", "rademacher",
    "retrieval",
)  # fmt: skip


def test_every_public_function_of_the_theory_is_in_its_tables():
    homes = [importlib.import_module(f"evenhand.theory.{name}") for name in THEORY]
    named = {name.rpartition(".")[2] for functions, _ in theory_rows() for name in functions}
    functions = {
        name
        for home in homes
        for name, found in vars(home).items()
        if inspect.isfunction(found) and found.__module__ == home.__name__ and name[0] != "_"
    }
    assert functions <= named, functions - named


# README.md is also shown by package indexes, which know no other file of this repository.
HOME = re.compile(r"https://(github|raw\.githubusercontent)\.com/evenhand/evenhand/(blob/)?main/")


def test_every_link_to_a_file_leads_somewhere():
    broken = []
    for page, text in TEXTS.items():
        inline = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
        for target in inline + re.findall(r"^\[[^]]+\]: (\S+)", text, re.MULTILINE):
            local = ROOT / HOME.sub("", target) if HOME.match(target) else page.parent / target
            is_elsewhere = "://" in target and not HOME.match(target)
            if not is_elsewhere and not local.exists():
                broken.append(f"{page.name}: {target}")
    assert not broken, "\n".join(broken)


def test_the_readme_can_be_read_on_a_package_index():
    text = PAGES[0].read_text("utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    used = set(re.findall(r"\]\[([^]]+)\]", text))
    assert used == set(re.findall(r"^\[([^]]+)\]: ", text, re.MULTILINE))
