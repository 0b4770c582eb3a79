"""Atheris (libFuzzer) over the same targets: guided by the code that an input reaches."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evenhand.files import write_json

ROOT = Path(__file__).parent.parent.parent
REACHED = re.compile(r"cov: (\d+) ft: (\d+)")
EXECUTED = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def run_atheris(
    names: Sequence[str], *, seconds: float, seed: int, out: Path, findings_folder: Path
) -> dict[str, Any]:
    """Gives each target its share of the time, in a process of its own."""
    results: dict[str, Any] = {"engine": "atheris", "python": platform.python_version()}
    results |= {"seed": seed, "total_inputs": 0, "targets": {}}
    results["started"] = datetime.now(UTC).isoformat(timespec="seconds")
    if out.is_file():
        results = json.loads(out.read_text("utf-8"))
    for name in names:
        result = _run(name, max(10, int(seconds / len(names))), seed, findings_folder)
        before = results["targets"].get(name, {"inputs": 0, "seconds": 0})
        result["inputs"] += before["inputs"]
        result["seconds"] += before["seconds"]
        results["targets"][name] = result
        results["total_inputs"] = sum(r["inputs"] for r in results["targets"].values())
        write_json(out, results)
        print(f"{name}: {result['inputs']:,} inputs, {result['edges']} edges", flush=True)
    return results


def _run(name: str, seconds: int, seed: int, findings_folder: Path) -> dict[str, Any]:
    reached = (findings_folder / "reached" / name).resolve()
    crashes = (findings_folder / name).resolve()
    for folder in (reached, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "tests.fuzz.atheris_child", name, str(reached),
        f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=25", "-rss_limit_mb=4096",
        "-max_len=16384", "-print_final_stats=1", f"-artifact_prefix={crashes}/",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
    told = ended.stderr
    executed, figures = EXECUTED.search(told), REACHED.findall(told)
    findings = []
    if ended.returncode:
        findings = [{"what": f"ended with {ended.returncode}", "told": told[-1500:]}]
        print(f"FINDING {name}: {told[-3000:]}", flush=True)
    return {
        "inputs": int(executed[1]) if executed else 0,
        "seconds": seconds,
        "edges": int(figures[-1][0]) if figures else 0,
        "features": int(figures[-1][1]) if figures else 0,
        "findings": findings,
    }
