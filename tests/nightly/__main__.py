"""What is too slow for `make test`: `python -m tests.nightly [--only STAGE] [WORD ...]`.

mutants   small mistakes put into copies of the package; each must make a test fail
tests     the long tests in tests/nightly/test_*.py
fuzz      minutes of damaged inputs for every parser (see tests/fuzz)
kills     runs on two ranks, of which one is killed; each must end as if it had not been
wheel     the wheel, installed into an empty environment: the docs' Python must run there

All by default. With words, only the mutants in whose line one of them occurs.
"""

import argparse
import os
import subprocess
import sys

from .mutation import ROOT, run_mutants

STAGES = ("mutants", "tests", "fuzz", "kills", "wheel")


def run_stage(stage: str, options: argparse.Namespace) -> int:
    """The exit status of a stage; 0 if nothing was found."""
    if stage == "mutants":
        return run_mutants(options.words, options.processes)
    if stage == "wheel":
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/helpers")]
        from .wheel import run_docs_on_wheel

        return run_docs_on_wheel()
    command = {
        "tests": ["-m", "pytest", "--timeout=1800", "tests/nightly"],
        "fuzz": ["-m", "tests.fuzz", "--minutes", str(options.minutes)],
        "kills": ["benchmarks/kills.py", "--runs", str(options.runs)],
    }[stage]
    status = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
    return 0 if stage == "tests" and status == 5 else status  # 5: there are none


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help="only the mutants in whose line one occurs")
    parser.add_argument("--only", choices=STAGES, action="append", help="this stage; repeatable")
    parser.add_argument("--processes", type=int, default=max(2, os.cpu_count() or 1))
    parser.add_argument("--minutes", type=float, default=5.0, help="of fuzzing (%(default)s)")
    parser.add_argument("--runs", type=int, default=50, help="that are killed (%(default)s)")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stages = options.only or (["mutants"] if options.words else STAGES)
    failed = []
    for stage in stages:
        print(f"--- {stage}")
        if run_stage(stage, options):
            failed.append(stage)
    print(f"failed: {', '.join(failed)}" if failed else f"{', '.join(stages)}: nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
