"""The simulation of benchmarks/bounds.py says what the exact laws say."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

import theory_oracles as oracles
from test_theory_bounds import one_function_failure

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bounds.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("bounds_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_simulation_shows_what_the_exact_laws_say(benchmark, tmp_path):
    benchmark.main(["--sizes", "400", "--trials", "20000", "--json", str(tmp_path / "b.json")])
    results = json.loads((tmp_path / "b.json").read_text("utf-8"))
    one, memory, vectors, distances = results["cases"]
    assert one["violations"]["paper"]["low"] > 10 * one["failure_probability"]
    for name, exact in one["exact violations"].items():
        expected = one_function_failure(one["bounds"][name], 400, 0.5, 100.0)
        assert exact == pytest.approx(expected, rel=1e-6, abs=1e-300)
        rate = one["violations"][name]["rate"]
        assert abs(rate - exact) < 5 * math.sqrt(exact / 20_000) + 1e-4
    assert memory["violations"]["paper"]["rate"] == 1
    assert memory["violations"]["paper, factor 2"]["rate"] == 0
    assert vectors["violations"]["paper, factor 2"]["rate"] == 1
    for case in (one, memory, vectors, distances):
        assert case["violations"]["corrected"]["rate"] <= case["failure_probability"]
    assert distances["violations"]["paper"]["rate"] == 0  # a tame class shows nothing


def test_the_simulation_knows_the_true_values_of_its_tame_class(benchmark):
    points = (np.arange(40_000) + 0.5) / 40_000
    for centre in benchmark.CENTRES[::4]:
        expected = oracles.cvar_of_sample(np.abs(points - centre).tolist(), 0.25)
        assert benchmark.distance_cvar(centre, 0.25) == pytest.approx(expected, abs=1e-6)
