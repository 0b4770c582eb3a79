"""The command `evenhand`: its words and flags, and what it says when something is wrong."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from evenhand.errors import UserError
from evenhand.faults import guarded
from evenhand.methods import METHODS
from evenhand.version import __version__

EPILOG = """\
a first session:
  evenhand train --run runs/first                 train S2M on places, the default data set
  evenhand search runs/first "Wien" "ウィーン"      ask it
  evenhand train --method snm --run runs/snm      train the usual way, to compare
  evenhand compare runs/snm runs/first            who gains, who loses, with intervals
  evenhand slices runs/first                      who is failed: the worst subpopulations
  evenhand report runs/snm runs/first             the same as a page with a map

exit codes:
  0 done   1 something is broken   2 something you can mend   130 stopped, can be continued
  141 the reader of its output went away

methods:
""" + "\n".join(f"  {name:16s}{text}" for name, text in METHODS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; what a user can mend is one sentence and exit code 2 (see `faults`)."""

    def run() -> int:
        _check_words(sys.argv[1:] if arguments is None else arguments)
        options = _parser().parse_args(arguments)
        if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
            raise UserError(
                f"NUMBA_DISABLE_JIT={os.environ['NUMBA_DISABLE_JIT']} turns off the compiler, "
                f"without which Evenhand does not work; unset it"
            )
        # Only now: commands need torch, which takes seconds to load, and `--help` does not.
        commands = importlib.import_module("evenhand.commands")
        code: int = getattr(commands, options.command)(options)
        return code

    return guarded(run)


def _check_words(words: Sequence[str]) -> None:
    """Refuses names that could not be written into a settings file or a run folder."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are no UTF-8
            shown = word.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise UserError(
                f"{shown} is not UTF-8, in which settings, runs and data sets are described; "
                f"rename the file or folder"
            )


# --- the parser -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evenhand",
        description="Trains retrieval models that work for every part of the data.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"evenhand {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="command")
    _add_train(verbs)
    _add_tune(verbs)
    _add_readers(verbs)
    _add_data(verbs)
    demo = _verb(verbs, "demo", "SNM and S2M on places, side by side, in minutes")
    demo.add_argument("--run", default="runs/demo", help="folder to write to (%(default)s)")
    _finish(demo, "demo_command")
    doctor = _verb(verbs, "doctor", "what is installed, usable and slow on this machine")
    doctor.add_argument("folder", nargs="?", default="runs", help="of the runs (%(default)s)")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(command="doctor_command")
    return parser


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a model into a run folder",
        description="Trains a model, evaluates it on the test part and writes a run folder. "
        "Settings come from the TOML file, then from the flags; every one that is not given has a "
        "default, and all of them are written to config.toml in the run folder.",
    )
    parser.add_argument("--run", help="run folder (runs/<data>-<method>-seed<n>)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--ranks", type=int, help="processes of this machine to train together (1), by torchrun"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        help="of --ranks, when one of them fails (%(default)s)",
    )
    _add_rank_timeout(parser)
    _add_settings(parser)
    _finish(parser, "train_command")


def _add_rank_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=600.0,
        help="seconds that a rank waits for the others before it names the late one and ends "
        "(%(default)s)",
    )


def _add_tune(verbs: Any) -> None:
    parser = verbs.add_parser(
        "tune",
        help="choose k' and other settings on the validation part",
        description="Tries settings, and chooses those that serve the worst groups of the "
        "validation part best while the average stays near its best. The first trials are SNM and "
        "the settings as given. The test part is never read.",
    )
    parser.add_argument("--run", help="folder to write (runs/<data>-tune)")
    parser.add_argument("--resume", action="store_true", help="continue the search in --run")
    parser.add_argument("--trials", type=int, help="settings to try (16)")
    parser.add_argument(
        "--criterion",
        help='what is made as high as it can be, such as "recall@10 on worst 3 of script" (worst '
        "tenth of the column with the most groups, or else the tail)",
    )
    parser.add_argument("--average", help="what must stay near its best (recall@10)")
    parser.add_argument(
        "--max-drop", type=float, help="how far below its best the average may be (0.005)"
    )
    parser.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUES",
        help="a setting to vary, as 64,128,256 or 0.01..0.04; repeatable, and then no other is "
        "(k', k, learning rate, steps, anneal_fraction)",
    )
    parser.add_argument("--seed", dest="search_seed", type=int, help="of the search (0)")
    _add_settings(parser)
    parser.set_defaults(seed=None)
    _finish(parser, "tune_command")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="TOML file with settings, or a preset's name")
    parser.add_argument("--data", help="'places' or a folder made by `evenhand data`")
    parser.add_argument("--method", help=", ".join(METHODS))
    parser.add_argument("--hard-labels", type=int, help="k: hardest labels kept for an example")
    parser.add_argument("--hard-examples", type=int, help="k': hardest examples kept of a batch")
    parser.add_argument(
        "--smallest-share", type=float, help="k' from the share of the smallest group, such as 0.02"
    )
    parser.add_argument("--smallest-group", help="the same, from its name, such as script=THAI")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, such as loss.name=softmax or model.embedding_dim=512",
    )


def _add_readers(verbs: Any) -> None:
    evaluate = _verb(verbs, "evaluate", "evaluate a run on a part of its data")
    evaluate.add_argument("run", help="run folder")
    _add_part(evaluate)
    _add_rank_timeout(evaluate)
    _add_place(evaluate)
    _finish(evaluate, "evaluate_command")
    export = _verb(verbs, "export", "write a run's vectors as files, for any vector store")
    export.add_argument("run", help="run folder")
    export.add_argument("--out", required=True, help="folder to write, which must not exist")
    export.add_argument(
        "--format",
        default="npy",
        choices=("npy", "parquet"),
        help="parquet needs the extra evenhand[parquet] (%(default)s)",
    )
    export.add_argument("--shards", type=int, help="files of label vectors (each below 1 GiB)")
    export.add_argument(
        "--queries",
        choices=("train", "validation", "test"),
        help="part of the data whose query vectors are written as well",
    )
    _add_place(export)
    _finish(export, "export_command")
    average = _verb(verbs, "average", "several runs as one, by the mean of their scores")
    average.add_argument("runs", nargs="+", help="trained run folders, of dot products")
    average.add_argument("--run", required=True, help="folder to write")
    _add_place(average)
    _finish(average, "average_command")
    compare = _verb(verbs, "compare", "two or more runs, with paired intervals")
    compare.add_argument("runs", nargs="+", help="run folders; the others are held to the first")
    compare.add_argument("--metric", default="recall@10", help="of the differences (%(default)s)")
    _add_part(compare)
    _add_place(compare)
    _finish(compare, "compare_command")
    slices = _verb(verbs, "slices", "the subpopulations that explain a run's failures")
    slices.add_argument("run", help="run folder, evaluated")
    slices.add_argument(
        "--metric",
        default="recall@10",
        help="or another cut-off, or 'reciprocal rank' (%(default)s)",
    )
    slices.add_argument(
        "--units",
        default="queries",
        choices=("queries", "labels"),
        help="that chance is judged over; by labels, it allows for new ones (%(default)s)",
    )
    slices.add_argument(
        "--conditions",
        type=int,
        default=2,
        choices=(1, 2, 3),
        help="that a slice may have at most (%(default)s)",
    )
    slices.add_argument(
        "--min-pairs", type=int, help="that a slice must hold (30, or 0.1 %% of all pairs)"
    )
    slices.add_argument(
        "--permutations", type=int, default=200, help="more make p finer (%(default)s)"
    )
    slices.add_argument("--top", type=int, default=20, help="slices to show (%(default)s)")
    slices.add_argument("--seed", type=int, default=0, help="of the permutations (%(default)s)")
    slices.add_argument(
        "--check-on", choices=("validation", "test"), help="other part to take the figures from"
    )
    slices.add_argument("--json", help="file to write beside evaluation/<part>/slices.json")
    _add_part(slices)
    _add_place(slices)
    _finish(slices, "slices_command")
    report = _verb(verbs, "report", "one page about one or more runs")
    report.add_argument("runs", nargs="+", help="run folders")
    report.add_argument("--out", help="file to write (report.html in the first run)")
    _add_part(report)
    _add_place(report)
    _finish(report, "report_command")
    search = _verb(verbs, "search", "ask a trained model")
    search.add_argument("run", help="run folder")
    search.add_argument("queries", nargs="+", help="what to look for, in quotes")
    search.add_argument("--results", type=int, default=5, help="labels to show (%(default)s)")
    _add_place(search)
    _finish(search, "search_command")


def _add_data(verbs: Any) -> None:
    data = _verb(verbs, "data", "prepare a data set, or look at one")
    kinds = data.add_subparsers(required=True, metavar="kind")
    places = _verb(kinds, "places", "cities by their names, from GeoNames (CC BY 4.0)")
    places.add_argument("--min-population", type=int, default=15000, help="(%(default)s)")
    places.add_argument("--num-buckets", type=int, default=2**18, help="(%(default)s)")
    extreme = _verb(kinds, "extreme", "the Extreme Classification text format")
    extreme.add_argument("public", nargs="?", help="a public data set, such as EURLex-4K")
    _add_folder(extreme)
    extreme.add_argument("--train", help="instead of a name: a file, or archive.zip/member")
    extreme.add_argument("--test")
    extreme.add_argument("--name")
    extreme.add_argument("--label-names", help="a name a line")
    extreme.add_argument("--train-groups", help="TSV: id, group; a line a document")
    extreme.add_argument("--test-groups")
    table = _verb(kinds, "table", "a CSV or TSV of queries and labels")
    table.add_argument("table", help="file with a header and one right answer a line")
    table.add_argument("--query-column", default="query", help="(%(default)s)")
    table.add_argument("--label-column", default="label", help="(%(default)s)")
    table.add_argument(
        "--group", action="append", default=[], help="a column of groups; repeatable"
    )
    table.add_argument("--test-fraction", type=float, default=0.2, help="(%(default)s)")
    stream = _verb(kinds, "stream", "the same format, of any size, in bounded memory, shuffled")
    _add_stream(stream)
    for parser in (extreme, stream):
        parser.add_argument(
            "--validation-block", type=int, default=1, help="rows that stay together (%(default)s)"
        )
    for parser in (extreme, stream, table):
        parser.add_argument("--validation-fraction", type=float, default=0.1, help="(%(default)s)")
    for parser, command in (
        (places, "data_places_command"),
        (extreme, "data_extreme_command"),
        (stream, "data_stream_command"),
        (table, "data_table_command"),
    ):
        parser.add_argument("--out", help="folder to write (datasets/<name>)")
        _finish(parser, command)
    show = _verb(kinds, "show", "what a prepared data set holds")
    show.add_argument("folder")
    _finish(show, "data_show_command")
    check = _verb(kinds, "check", "compare the files of a streamed data set with their checksums")
    check.add_argument("folder")
    _finish(check, "data_check_command")
    _add_public(kinds)


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", required=True, help="a file, or archive.zip/member")
    parser.add_argument("--test")
    parser.add_argument("--name", help="(that of the folder of --train)")
    parser.add_argument("--label-names", help="a name a line")
    parser.add_argument("--seed", type=int, default=0, help="of the random order (%(default)s)")
    parser.add_argument(
        "--memory", type=int, default=512, help="megabytes to use, about (%(default)s)"
    )


def _add_public(kinds: Any) -> None:
    listed = _verb(kinds, "list", "the public data sets that are known, and which are here")
    fetch = _verb(kinds, "fetch", "public data sets over the network, continued and checked")
    fetch.add_argument("names", nargs="+", metavar="name", help="such as EURLex-4K, Wiki10-31K")
    verify = _verb(kinds, "verify", "check the files of public data sets in a folder")
    verify.add_argument("name", nargs="?", help="(all that are there)")
    for parser, command in (
        (listed, "data_list_command"),
        (fetch, "data_fetch_command"),
        (verify, "data_verify_command"),
    ):
        _add_folder(parser)
        _finish(parser, command)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", default="downloads", help="of public data sets, or of one (%(default)s)"
    )


def _verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    """A command that says of itself, in the list and in its own help, what it does."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    return parser


def _add_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        default="test",
        choices=("train", "validation", "test"),
        help="of the data (%(default)s)",
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", help="folder of the data set, where it has moved since the run was trained"
    )


def _finish(parser: argparse.ArgumentParser, command: str) -> None:
    """The last flag, and which function of `commands` does it."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (the GPU if there is one)")
    parser.set_defaults(command=command)


if __name__ == "__main__":
    raise SystemExit(main())
