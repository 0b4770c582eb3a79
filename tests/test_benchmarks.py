"""The speed benchmark runs at a tiny shape and writes the form that its figure reads."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evenhand.data.dataset import Dataset, Part, Rows
from evenhand.search import ExactIndex, NeighbourIndex, RankedIndex
from evenhand.search.ranker import fit_ranker

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "cpu.py"
NUMBERS = ("labels", "batch_size", "sampled", "hard_labels", "hard_examples", "dim", "repeats")
TIMES = ("milliseconds", "milliseconds_min", "ratio_to_product")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("speed") / "speed.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return json.loads(path.read_text())


def test_every_way_has_a_row_of_the_same_form(rows):
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) >= 8
    assert names[0] == "score product alone"
    assert [name for name in names if name.startswith("evenhand")] == [
        "evenhand S2M step",
        "evenhand SNM step",
    ]
    for row in rows:
        assert row.keys() == rows[0].keys()
        assert all(isinstance(row[key], int) and row[key] > 0 for key in NUMBERS)
        assert all(row[key] > 0 for key in TIMES)
        assert row["milliseconds_min"] <= row["milliseconds"]
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
        assert "threads" in row["device"]
        assert {"python", "torch", "numpy"} <= row["versions"].keys()


def test_the_ways_that_mine_examples_train_the_same_table(monkeypatch):
    """Autograd over all scores, autograd over the survivors: one objective, one gradient."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    ways, cpu = importlib.import_module("ways"), importlib.import_module("cpu")
    tables = []
    for name in (
        "PyTorch shared negatives, sparse Adagrad",
        "PyTorch mined first, then autograd over the survivors",
    ):
        problem = ways.Problem(cpu.TINY)
        before = problem.table.clone()
        step = ways.WAYS[name].build(problem)
        for _ in range(3):
            step()
        assert not torch.equal(problem.table, before)
        tables.append(problem.table)
    torch.testing.assert_close(*tables)


def test_times_are_given_over_the_product_of_the_same_run(rows):
    for row in rows:
        assert row["ratio_to_product"] == pytest.approx(
            row["milliseconds"] / rows[0]["milliseconds"], rel=0.05
        )  # the milliseconds are rounded


def test_the_figure_is_drawn_from_such_rows(rows, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    figures = importlib.import_module("figures")
    more = [
        {**row, "labels": 10 * row["labels"]} for row in rows if row["name"] != rows[-1]["name"]
    ]
    (tmp_path / "speed-cpu.json").write_text(json.dumps(rows + more))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    drawn = figures.save_figure("speed", tmp_path, "svg").read_text()
    assert all(row["name"] in drawn for row in rows)


# --- quality --------------------------------------------------------------------------------------


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent / "quality"))
    return importlib.import_module("quality")


@pytest.fixture
def mixing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent / "quality"))
    return importlib.import_module("mixing")


def test_every_system_has_as_many_settings_to_try(quality):
    for grid, count in ((quality.FEW, 8), (quality.MANY, 3)):
        assert {len(settings) for settings in grid.values()} == {count}
        for settings in grid.values():
            assert len({json.dumps(setting) for setting in settings}) == count


def test_our_settings_have_nothing_of_the_presets_mixture(quality):
    for name in ("delicious", "debian-deps"):
        folder = BENCHMARK.parents[1] / "src" / "evenhand" / "presets"
        preset = quality.read_settings(folder / f"{name}.toml")
        settings = quality.our_settings(preset, 1.5, 2)
        config, before = quality.build_config(settings), quality.build_config(preset)
        assert config.training.num_steps == 1.5 * before.training.num_steps
        assert config.ranker.negative_cost == 2 * before.ranker.negative_cost
        assert (config.search.num_neighbours, config.search.frequency_discount) == (0, 0)
        assert config.ranker.weight == 1


def sparse_dataset():
    """Few rows of features and labels at random: train, and test."""
    generator = np.random.default_rng(0)

    def rows(count, width, share):
        dense = generator.random((count, width)) * (generator.random((count, width)) < share)
        dense[:, 0] += 0.1  # no row is empty
        offsets = np.concatenate([[0], np.cumsum((dense > 0).sum(1))])
        return Rows(offsets, np.nonzero(dense)[1].astype(np.int32), dense[dense > 0].astype("f4"))

    parts = {
        name: Part(rows(count, 9, 0.4), Rows(*rows(count, 30, 0.1)[:2]))
        for name, count in (("train", 120), ("test", 25))
    }
    return Dataset("random", 9, 30, parts)


def test_a_mixture_is_what_the_search_of_a_model_finds(mixing, monkeypatch):
    monkeypatch.setattr(mixing, "CUTOFFS", (5, 10))
    dataset, generator = sparse_dataset(), torch.Generator().manual_seed(0)
    train, part = dataset.parts["train"], dataset.parts["test"]
    vectors, table = (torch.randn(count, 4, generator=generator) for count in (25, 30))
    every = np.tile(np.arange(30, dtype=np.int32), (120, 1))
    ranker = fit_ranker(train.features, train.positives, every, num_features=9, num_labels=30)
    mixture = mixing.Mixture(20, 2.0, 3.0, 0.4, 1.5)
    discounts = 0.4 * torch.log1p(torch.from_numpy(dataset.label_counts()).float())
    voted = NeighbourIndex(
        ExactIndex(table, label_bias=-discounts), train.features, train.positives,
        num_features=9, num_neighbours=20, weight=3.0, power=2.0,
    )  # fmt: skip
    index = RankedIndex(voted, ranker, weight=1.5, num_candidates=12)
    wanted = index.search(index.asked(vectors, part.features), 10)

    judge = mixing.Judge(dataset, "test")
    exact = ExactIndex(table)
    ids = mixing.with_labels(exact.search(vectors, 7).label_ids, judge.most_voted())
    ranker_scores = torch.from_numpy(ranker.scores(part.features, ids.numpy()))
    scored = mixing.Scored(ids, exact.scores_of(vectors, ids), ranker_scores, 12)
    found = mixing.Mixer(scored, judge).found(mixture)
    assert (found == wanted.label_ids).float().mean() > 0.9  # 7 candidates of 30 are few
    whole = mixing.with_labels(exact.search(vectors, 30).label_ids, judge.most_voted())
    ranker_scores = torch.from_numpy(ranker.scores(part.features, whole.numpy()))
    scored = mixing.Scored(whole, exact.scores_of(vectors, whole), ranker_scores, 12)
    assert mixing.Mixer(scored, judge).found(mixture).tolist() == wanted.label_ids.tolist()


def test_labels_that_a_peer_left_out_count_as_its_worst(mixing):
    ids, scores = torch.tensor([[3, 1, -1]]), torch.tensor([[0.9, 0.2, -torch.inf]])
    found = mixing.with_worst_scores(ids, scores, torch.tensor([[1, 5, -1]]))
    assert found.label_ids.tolist() == [[3, 1, -1, -1, 5, -1]]
    torch.testing.assert_close(found.scores[0, [0, 1, 4]], torch.tensor([0.9, 0.2, 0.2]))
    assert found.scores[0, [2, 3, 5]].isneginf().all()


def test_every_system_and_stage_has_the_same_draws(mixing):
    class Recorder(mixing.Mixer):
        def figures(self, mixture):
            tried.append(mixture)
            return {"mean": mixture.neighbour_weight}

    dataset = sparse_dataset()
    judge = mixing.Judge(dataset, "test")
    scores = torch.rand(25, 30)
    found = []
    for factor in (1.0, 7.0):
        tried = []
        scored = mixing.Scored(torch.arange(30).expand(25, -1), factor * scores)
        Recorder(scored, judge).best(("neighbour_weight",), may_take_logs=False)
        assert len(tried) == mixing.NUM_WIDE + mixing.NUM_NEAR
        assert all(mixture.frequency_discount == 0 for mixture in tried)
        found.append([mixture.neighbour_weight / factor for mixture in tried])
    assert found[0] == pytest.approx(found[1], rel=0.02)  # weights are rounded
