"""The benchmark of readers and feed runs at tiny sizes and writes figures of one form."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "readers.py"


def test_every_figure_is_named_and_says_where_it_was_measured(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "readers.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    rows = json.loads((tmp_path / "readers.json").read_text())
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert {
        "evenhand read_extreme",
        "evenhand NgramFeaturizer, names of places",
        "evenhand take_rows",
        "evenhand batch of documents, made",
        "evenhand batch of documents, waited for",
    } <= set(names)
    for row in rows:
        rates = [row[key] for key in ("rows_per_second", "milliseconds") if key in row]
        assert len(rates) == 1
        assert rates[0] > 0
        assert ("bytes_per_second" in row) == ("rows_per_second" in row)
        assert row["rows"] > 0
        assert row["threads"] in (1, 2)
        assert "cores" in row["device"]
        assert {"python", "torch", "numpy", "numba"} <= row["versions"].keys()
