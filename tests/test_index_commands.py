"""`evenhand index`: built, judged by group, pushed to a database, and searched by `--index`."""

import json
import re

import pytest

import small

NUM_LABELS = 600  # enough for clusters of them


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    sizes = {"train": 1500, "validation": 400, "test": 400}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "NUM_LABELS", NUM_LABELS)
        patch.setattr(small, "SIZES", sizes)
        return small.trained(tmp_path_factory, training__num_steps=100)


def search(home, index):
    """The answers to a query, and the sentence that says who answers."""
    answer = small.run(home, "search", "runs/a", "badoki7", "--json", "--index", index)
    lines = [json.loads(line) for line in answer.output.splitlines()]
    return [(line["label"], round(line["score"], 4)) for line in lines], answer.err


def test_an_index_is_built_checked_and_asked(home):
    pytest.importorskip("faiss")
    kinds = {"flat": "flat", "hnsw": "hnsw, efSearch", "ivf": "ivf, nprobe"}
    for kind, name in kinds.items():
        built = small.run(home, "index", "build", "runs/a", "--kind", kind)
        assert "written to runs/a/index: 600 labels" in built.output
        found, says = search(home, "faiss")
        assert f"FAISS {name}" in says
        assert found == search(home, "exact")[0]
        checked = small.run(home, "index", "check", "runs/a", "--strict")
        assert "no group pays more than the rest" in checked.output
        assert re.search(r"style plain +\d+ +[01]\.\d+", checked.output)


def test_a_badly_tuned_index_is_warned_of(home):
    """Of labels in 15 clusters, of which one is searched, most are missed."""
    pytest.importorskip("faiss")
    built = small.run(home, "index", "build", "runs/a", "--kind", "ivf", "--effort", 1)
    assert "below the target 0.99" in built.output
    checked = small.run(home, "index", "check", "runs/a")
    assert re.search(r"warning: .* has recall 0\.\d+, below the target 0.98", checked.output)
    strict = small.run(home, "index", "check", "runs/a", "--strict")
    strict.says("warnings about the index; give it more --effort, or build it again")


def test_damaged_indexes_are_refused(home):
    pytest.importorskip("faiss")
    small.run(home, "index", "build", "runs/a", "--kind", "hnsw")
    folder = home / "runs/a/index"
    about = json.loads((folder / "index.json").read_text("utf-8"))
    for changes in (
        {"kind": "../x"}, {"effort": "1"}, {"num_bytes": 1}, {"model": "0" * 64}, {"has_bias": True}
    ):  # fmt: skip
        (folder / "index.json").write_text(json.dumps(about | changes), "utf-8")
        answer = small.run(home, "search", "runs/a", "x", "--index", "faiss")
        assert "build it again: evenhand index build runs/a" in answer.sentence, changes
    (folder / "index.json").write_text(json.dumps(about), "utf-8")
    whole = (folder / "labels.faiss").read_bytes()
    (folder / "labels.faiss").write_bytes(b"x" * len(whole))
    small.run(home, "search", "runs/a", "x", "--index", "faiss").says("labels.faiss is damaged")


@pytest.mark.parametrize("kind", ["postgres", "milvus"])
def test_a_push_that_is_killed_is_not_seen_and_the_next_one_is(home, kind, request, tmp_path):
    if kind == "milvus":
        pytest.importorskip("milvus_lite")
        address, last_call = tmp_path / "labels.db", "evenhand.search.milvus._count"
    else:
        address, last_call = request.getfixturevalue("postgres"), "evenhand.search.pgvector._cells"
    killed = small.run(
        home, "index", "push", "runs/a", "--to", address, disturb=[last_call, 1, "kill"]
    )
    assert killed.code == -9
    answer = small.run(home, "search", "runs/a", "x", "--index", address)
    answer.says("does not exist; load it: evenhand index push RUN --to ADDRESS")
    pushed = small.run(home, "index", "push", "runs/a", "--to", address)
    assert "600 labels are in the" in pushed.output
    assert "of exact search's first 10 it finds 100.00%" in pushed.output
    assert search(home, address)[0] == search(home, "exact")[0]
    assert "postgres:@" not in pushed.out + pushed.err


@pytest.mark.parametrize("address", ["labels", "ftp://x", "mysql://x", "http", ""])
def test_what_is_no_address_is_refused(home, address):
    answer = small.run(home, "index", "push", "runs/a", "--to", address)
    answer.says("an index is 'exact', 'faiss', postgresql://")
