"""A campaign: `python -m tests.fuzz --minutes 30`, from the root of the repository.

Each target has its share of the time, in a process of its own. Findings are inputs in
fuzzing/<target>/; figures are in fuzzing.json.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evenhand.files import write_json

from .registry import TARGETS
from .target import FOLDER_BASE, forget_scratch

ROOT = Path(__file__).parents[2]
EXECUTED = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
GRACE_SECONDS = 300  # to start, and for the last input


def run_target(name: str, seconds: int, seed: int, findings: Path) -> dict[str, Any]:
    """The figures of one target; what ended its process is put into the folder of findings."""
    with tempfile.TemporaryDirectory(dir=FOLDER_BASE) as folder:
        command = [sys.executable, "-m", "tests.fuzz.child", name, str(seconds), str(seed), folder]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, errors="replace",
                timeout=seconds + GRACE_SECONDS, env={**os.environ, "EVENHAND_FUZZ_FOLDER": folder},
            )  # fmt: skip
            status, log = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired as error:
            status, log = -1, str(error.stderr)
        found = []
        if status:
            for path in sorted(Path(folder).glob("found-*")):
                kept = findings / name / hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept)
                found.append(str(kept))
            print(f"FINDING {name}: ended with {status}, inputs {found}\n{log[-3000:]}")
    executed = EXECUTED.search(log)
    num_inputs = int(executed[1]) if executed else 0
    print(f"{name}: {num_inputs:,} inputs", flush=True)
    return {"inputs": num_inputs, "seconds": seconds, "status": status, "findings": found}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of the campaign (%(default)s)")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--try", nargs=2, dest="once", metavar=("TARGET", "FILE"))
    options = parser.parse_args()
    if options.once:  # one input again, with the error that it raises, if any
        print(TARGETS[options.once[0]].check_fn(Path(options.once[1]).read_bytes()) or "read")
        forget_scratch()
        return 0
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install -e '.[fuzz]'")
    forget_scratch()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    share = 60 * options.minutes * options.processes / len(options.targets)
    with ThreadPoolExecutor(options.processes) as pool:
        runs = pool.map(
            lambda name: run_target(name, max(2, int(share)), options.seed, Path("fuzzing")),
            options.targets,
        )
        results = dict(zip(options.targets, runs, strict=True))
    total = sum(result["inputs"] for result in results.values())
    about = {"engine": "atheris", "python": platform.python_version(), "started": started}
    write_json(Path("fuzzing.json"), {**about, "total_inputs": total, "targets": results})
    failed = [name for name, result in results.items() if result["status"]]
    print(f"{total:,} inputs, findings of {', '.join(failed) or 'no target'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
