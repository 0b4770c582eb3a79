"""The command `evenhand`: a module for each verb, or for a few that belong together.

A verb is a function with typed parameters, which typer turns into arguments and flags. What a verb
needs is imported inside of it: torch takes seconds to load, and `--help` does without.
"""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from evenhand.cli import (
    data,
    demo,
    doctor,
    evaluate,
    export,
    index,
    labels,
    search,
    serve,
    train,
    tune,
)
from evenhand.errors import (
    FIXABLE,
    NO_READER,
    STOPPED,
    StoppedError,
    UserError,
    format_out_of_memory,
    insist,
    is_out_of_memory,
    silence,
    without_controls,
)
from evenhand.methods import METHODS
from evenhand.version import __version__

EPILOG = """\
A first session:
  evenhand train --run runs/first              train S2M on places
  evenhand search runs/first "Wien" "ウィーン"   ask it
  evenhand train --method snm --run runs/snm   train the usual way, to compare
  evenhand compare runs/snm runs/first         who gains, who loses
  evenhand slices runs/first                   the worst subpopulations
  evenhand report runs/snm runs/first          the same as a page with a map

Your own table, CSV, Parquet or any other:
  evenhand train data.parquet --query title --label category --group country

Exit codes:
  0 done   1 something is broken   2 something you can mend
  130 stopped, can be continued   141 the reader of its output went away

Methods:
""" + "\n".join(f"  {name:15s}{method.summary}" for name, method in METHODS.items())


class GroupedVerbs(TyperGroup):
    """Lists the verbs by what a person wants to do."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            row = (name.ljust(width), command.get_short_help_str(limit=100))
            panels.setdefault(panel, []).append(row)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{self.epilog}\n" if self.epilog else "")  # as it is, not wrapped


class Verb(TyperCommand):
    """A verb that refuses a forgotten value, and a machine on which nothing works."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            flag for p in self.params if not getattr(p, "is_flag", True) for flag in p.opts
        }
        end = args.index("--") if "--" in args else len(args)
        for flag, word in pairwise(args[:end]):
            if flag in takes_value and word.startswith("--"):
                ctx.fail(f"Option {flag!r} requires an argument, got {word!r}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
            raise UserError(
                f"NUMBA_DISABLE_JIT={os.environ['NUMBA_DISABLE_JIT']} turns off the compiler, "
                f"without which Evenhand does not work; unset it"
            )
        return super().invoke(ctx)


PLAIN: dict[str, Any] = {  # help is read in pipes and narrow windows too, and printed at once
    "cls": GroupedVerbs,
    "rich_markup_mode": None,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
PURPOSE = "Train retrieval models that work for every part of the data."
app = typer.Typer(help=PURPOSE, epilog=EPILOG, **PLAIN)
data_app = typer.Typer(help="Prepare a data set, or look at one.", **PLAIN)
index_app = typer.Typer(help="Search faster: FAISS, PostgreSQL or Milvus.", **PLAIN)
labels_app = typer.Typer(help="Labels that a run did not know.", **PLAIN)
VERBS = {
    "Train a model": (train.train, tune.tune, demo.demo),
    "See who it serves": (evaluate.evaluate, evaluate.compare, evaluate.slices, evaluate.report),
    "Use it": (search.search, serve.serve, export.export),
    "Check this machine": (doctor.doctor,),
}
DATA_VERBS = {
    "Prepare": (data.places, data.extreme, data.stream, data.table),
    "Look at one": (data.show, data.check),
}
INDEX_VERBS = {"Commands": (index.build, index.check, index.push)}
LABEL_VERBS = {"Commands": (labels.add,)}
GROUPS = (
    (app, VERBS),
    (data_app, DATA_VERBS),
    (index_app, INDEX_VERBS),
    (labels_app, LABEL_VERBS),
)
for group, verbs_by_panel in GROUPS:
    for panel, verbs in verbs_by_panel.items():
        for verb in verbs:
            group.command(verb.__name__.rstrip("_"), cls=Verb, rich_help_panel=panel)(verb)
app.add_typer(index_app, name="index", rich_help_panel="Use it")
app.add_typer(labels_app, name="labels", rich_help_panel="Use it")
app.add_typer(data_app, name="data", rich_help_panel="Data")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"evenhand {__version__}")
        raise typer.Exit


@app.callback()
def _evenhand(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; see `guard`."""
    return guard(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(words: list[str]) -> int:
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are no UTF-8
            shown = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise UserError(
                f"{shown} is not UTF-8, in which settings, runs and data sets are described; "
                f"rename the file or folder"
            )
    command = typer.main.get_command(app)
    # Not command(words): that handles Ctrl-C, closed pipes and errors in ways of its own.
    try:
        with command.make_context("evenhand", words) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code
    except _UsageError as error:
        raise UserError(_format_usage_error(error)) from error


OUT_OF_RANGE = re.compile(r"Invalid value for '(--[\w-]+)': (\S+) is not in the range x>=(\d+)")
_UsageError: Any = typer.BadParameter.__mro__[1]  # the base of all that are about the words given


def _format_usage_error(error: Any) -> str:
    """One sentence: what is wrong with the words given, what was meant, and where to look."""
    words = error.format_message().strip().rstrip(".").replace(". Did you mean", "; did you mean")
    words = OUT_OF_RANGE.sub(r"\1 must be at least \3, got \2", words)
    if getattr(error, "possibilities", None):
        words = f"{error.message}; did you mean {error.possibilities[0]}?"
    command = error.ctx.command_path if error.ctx else "evenhand"
    return f"{words[0].lower()}{words[1:]} (see {command} --help)"


# --- exit codes -----------------------------------------------------------------------------------

DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip


def guard(command_fn: Callable[[], int]) -> int:
    """Runs a command; failures of the world around it become one sentence and an exit code.

    A failed disk, too little memory, a signal or a closed pipe is none of ours; a bug is raised.
    """
    for stream in (sys.stdout, sys.stderr):  # print what a terminal cannot show as '?'
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    try:
        code, sentence = _outcome(command_fn)
        if sentence:
            say(sentence)
        with contextlib.suppress(ValueError, AttributeError):  # one closed on purpose
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return NO_READER
    except OSError as error:
        silence(sys.stdout)
        say(f"the output could not be written ({error.strerror})")
        return FIXABLE


def _outcome(command_fn: Callable[[], int]) -> tuple[int, str]:
    """The exit code of a command, and a sentence where it failed; a bug is raised."""
    try:
        return command_fn(), ""
    except UserError as error:
        return FIXABLE, str(error)
    except StoppedError as error:
        return STOPPED, str(error)
    except KeyboardInterrupt:
        insist()
        return STOPPED, "interrupted"
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return FIXABLE, format_out_of_memory(error)
        if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
            place = error.filename or "a file, or the output,"
            return FIXABLE, (
                f"{place} could not be opened or written ({error.strerror}); what was complete "
                f"before is untouched"
            )
        raise


def say(sentence: str) -> None:
    """Prints one line to stderr, if that is still open."""
    lines = map(str.strip, without_controls(sentence).splitlines())
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()  # so that the line does not stand before what was printed earlier
    with contextlib.suppress(OSError):
        print("evenhand:", *lines, file=sys.stderr, flush=True)
