"""The command: `python -m tests.fuzz --minutes 30`, from the root of the repository."""

import argparse
import sys
from pathlib import Path

from . import atheris_engine, corpora, growth
from .campaign import run_campaign
from .registry import TARGETS
from .worker import try_one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the campaign (%(default)s)")
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many (0: by time)")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--engine", choices=("mutate", "atheris", "growth"), default="mutate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", default="fuzzing.json", help="figures (%(default)s)")
    parser.add_argument("--findings", default="fuzzing", help="folder (%(default)s)")
    parser.add_argument("--save-corpus", action="store_true", help="from what --findings reached")
    parser.add_argument("--try", nargs=2, dest="once", metavar=("TARGET", "FILE"))
    options = parser.parse_args()
    if options.once:
        return try_one(options.once[0], Path(options.once[1]))
    if options.save_corpus:
        corpora.save_corpus(Path(options.findings) / "reached", options.targets)
        return 0
    if options.engine == "growth":
        return growth.run_growth(options.targets)
    if options.engine == "atheris":
        results = atheris_engine.run_atheris(
            options.targets,
            seconds=60 * options.minutes,
            seed=options.seed,
            out=Path(options.out),
            findings_folder=Path(options.findings),
        )
    else:
        results = run_campaign(
            options.targets,
            seconds=60 * options.minutes,
            num_inputs=options.inputs,
            seed=options.seed,
            num_processes=options.processes,
            out=Path(options.out),
            findings_folder=Path(options.findings),
        )
    num_findings = sum(len(result["findings"]) for result in results["targets"].values())
    print(f"{results['total_inputs']:,} inputs, {num_findings} findings")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
