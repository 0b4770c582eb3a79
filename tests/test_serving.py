"""`evenhand serve` without its sockets: answers, refusals, batches, reload, log."""

import asyncio
import dataclasses
import json
import threading

import httpx
import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # beside threads pytest may fail to rewrite it
import torch
from hypothesis import given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

import small
from evenhand.data import save_dataset
from evenhand.errors import UserError
from evenhand.run_search import load_searcher
from evenhand.serving import gate, served_run, server
from evenhand.serving.batching import Batcher, QueueFullError, Work
from evenhand.serving.gate import Limits, RateLimit
from evenhand.serving.server import LIMITS, Runs, SearchResponse, make_app
from small import run_main, settings_file

CPU = torch.device("cpu")
QUERIES = ["badoki7", "Städte um", "ウィーン", "😀", "a\x00b", '"; drop', "x" * 1000]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data set and two runs of it, evaluated."""
    folder = tmp_path_factory.mktemp("serving")
    save_dataset(small.text_dataset(), folder / "data")
    for name, method in (("one", "snm"), ("two", "s2m-annealed")):
        path = settings_file(folder / f"{name}.toml", folder / "data", mining__method=method)
        answer = small.run(folder, "train", path, "--run", f"runs/{name}")
        assert answer.code == 0, answer.err
    return folder


@pytest.fixture(scope="module")
def runs(home):
    return Runs([home / "runs/one", home / "runs/two"], device=CPU)


def call(app, method, path, value=None, **more):
    """One request; bytes are sent as they are."""
    if isinstance(value, bytes):
        more = {"content": value, "headers": {"content-type": "application/json"}} | more
    elif value is not None:
        more["json"] = value

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def search(app, queries, **more):
    return call(app, "POST", "/search", {"queries": queries, **more})


def test_answers_are_those_of_the_searcher(runs, home):
    searcher = load_searcher(home / "runs/two", device=CPU)
    found = searcher.search(QUERIES, 5)
    answer = search(make_app(runs), QUERIES, num_results=5, run="two")
    assert answer.status_code == 200
    value = answer.json()
    SearchResponse.model_validate(value)
    assert value["run"] == "two"
    for answers, ids, scores in zip(value["results"], found.label_ids, found.scores, strict=True):
        assert [one["id"] for one in answers] == ids.tolist()
        assert [one["label"] for one in answers] == searcher.label_names(ids.tolist())
        assert [one["score"] for one in answers] == pytest.approx(scores.tolist(), abs=1e-5)
        places = small.text_dataset().label_coordinates[ids.numpy()].tolist()
        assert [one["place"] for one in answers] == [pytest.approx(p, abs=1e-3) for p in places]


def test_encoded_queries_are_those_of_the_searcher(runs, home):
    value = call(make_app(runs), "POST", "/encode", {"queries": QUERIES}).json()
    wanted = load_searcher(home / "runs/one", device=CPU).encode(QUERIES)
    torch.testing.assert_close(torch.tensor(value["vectors"]), wanted)


def test_what_ngrams_add_is_the_score(runs, monkeypatch):
    monkeypatch.setattr(served_run, "MOST_MATCHED", 1000)
    (answers,) = search(make_app(runs), ["badoki7"], explain=True).json()["results"]
    run = runs.find(None)
    rows = run.featurizer.featurize(["badoki7"]).ids
    table = run.searcher.encoder.weight
    length = table[rows.tolist()].mean(0).norm()
    for answer in answers:
        label = run.searcher.model.label_vectors(torch.tensor([answer["id"]]))[0]
        wanted = {}
        names = [("^badoki7$"[p : p + n], n) for n in (1, 2, 3) for p in range(10 - n)]
        names = [name for name, n in names if n > 1 or name not in "^$"]
        for name, row in zip(names, rows.tolist(), strict=True):
            part = float(table[row] @ label) * run.searcher.model.scale / len(rows) / float(length)
            wanted[name] = wanted.get(name, 0) + part
        assert sum(wanted.values()) == pytest.approx(answer["score"], abs=1e-4)
        matched = {one["ngram"]: one["score"] for one in answer["matched"]}
        positive = {name: part for name, part in wanted.items() if part > 1e-4}
        assert matched == pytest.approx(positive | matched, abs=1e-4)
        assert list(matched.values()) == sorted(matched.values(), reverse=True)
        assert positive.keys() <= matched.keys()


ODD = [  # body, status, what the sentence names
    (b'{"queries": [""]}', 422, "white space"),
    (b'{"queries": [" \\n\\u3000"]}', 422, "white space"),
    (b'{"queries": []}', 422, "queries"),
    (b'{"queries": "Wien"}', 422, "queries"),
    (b'{"queries": [1]}', 422, "queries.0"),
    (b'{"queries": ["\\ud800"]}', 422, "queries.0"),
    (b'{"queries": ["a"], "num_results": 100000}', 422, "num_results"),
    (b'{"queries": ["a"], "num_results": 0}', 422, "num_results"),
    (b'{"queries": ["a"], "num_results": "3"}', 422, "num_results"),
    (b'{"queries": ["a"], "num_results": true}', 422, "num_results"),
    (b'{"queries": ["a"], "num_results": 1e400}', 422, "num_results"),
    (b'{"queries": ["a", "b"], "explain": true}', 422, "explain"),
    (b'{"queries": ["a"], "runs": "one"}', 422, "runs"),
    (b'{"queries": ["a"], "run": "three"}', 404, "one, two"),
    (b'{"queries": ["a"]', 422, "JSON"),
    (b'{"queries": ["\xff"]}', 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"null", 422, ""),
    (b"", 422, "required"),
    (json.dumps({"queries": ["x" * 1001]}).encode(), 422, "1000"),
    (json.dumps({"queries": ["x"] * 101}).encode(), 422, "100"),
    (json.dumps({"queries": ["x" * 10_000_000]}).encode(), 413, "1,048,576"),
]


@pytest.mark.parametrize(("body", "status", "word"), ODD, ids=range(len(ODD)))
def test_what_is_odd_is_refused_in_a_sentence(runs, body, status, word):
    for path in ("/search", "/encode"):
        if path == "/encode" and (b"num_results" in body or b"explain" in body):
            continue
        answer = call(make_app(runs), "POST", path, body)
        assert answer.status_code == status, answer.text
        assert word in answer.json()["detail"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_body_without_a_length_ends_at_the_limit(runs):
    async def pieces():
        for _ in range(200):
            yield b" " * 10_000

    headers = {"content-type": "application/json"}
    answer = call(make_app(runs), "POST", "/search", content=pieces(), headers=headers)
    assert answer.status_code == 413


def test_a_key_is_asked_for_everywhere_but_on_the_page(runs):
    app = make_app(runs, api_key="söcret")
    paths = ["/runs", "/metrics", "/examples", "/runs/one/map", "/runs/one/report"]
    for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": b"Bearer s\xff"}):
        for path in paths:
            assert call(app, "GET", path, headers=wrong).status_code == 401
        assert call(app, "POST", "/search", {"queries": ["a"]}, headers=wrong).status_code == 401
    right = {"authorization": "Bearer söcret".encode()}
    assert call(app, "POST", "/search", {"queries": ["a"]}, headers=right).status_code == 200
    for path in ("/", "/page.js", "/health", "/ready", "/openapi.json"):
        assert call(app, "GET", path).status_code == 200


def test_a_client_that_asks_too_often_waits(runs):
    app = make_app(runs, Limits(rate=2))
    codes = [call(app, "GET", "/runs").status_code for _ in range(4)]
    assert codes[:2] == [200, 200]
    assert codes[-1] == 429
    assert call(app, "GET", "/health").status_code == 200


def test_rates_of_clients_are_apart_and_few_are_remembered(monkeypatch):
    monkeypatch.setattr(gate, "MOST_CLIENTS", 2)
    limit = RateLimit(1.0)
    assert [limit.allows(client, 0.0) for client in "aabbcc"] == [True, False] * 3
    assert len(limit._buckets) == 2
    assert limit.allows("a", 0.0)  # forgotten, and so free again


def test_every_answer_is_guarded_and_no_other_site_may_read_it(runs):
    app = make_app(runs)
    for path in ("/", "/runs", "/nothing", "/page.css"):
        answer = call(app, "GET", path, headers={"origin": "https://elsewhere.example"})
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "access-control-allow-origin" not in answer.headers
    assert call(app, "OPTIONS", "/search").status_code == 405


def test_a_report_runs_in_a_sandbox(runs, home):
    assert call(make_app(runs), "GET", "/runs/one/report").status_code == 404
    (home / "runs/report.html").write_text("<p>both", "utf-8")
    answer = call(make_app(runs), "GET", "/runs/one/report")
    assert answer.text == "<p>both"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    (home / "runs/report.html").unlink()


def test_the_log_says_neither_what_was_asked_nor_by_whom(runs):
    lines = []
    app = make_app(runs, log_fn=lines.append)
    search(app, ["secret one", "secret two"])
    call(app, "GET", "/secret?secret=1")
    search(app, ["secret"], run="secret")
    assert [line.split(" ", 1)[1].split(" ")[0::4] for line in lines] == [
        ["/search", "2"], ["other", "0"], ["/search", "0"],
    ]  # fmt: skip
    assert [line.split()[2] for line in lines] == ["200", "404", "404"]
    assert "secret" not in "".join(lines)
    assert "127.0.0.1" not in "".join(lines)


def test_metrics_count_requests_and_queries(runs):
    app = make_app(runs)
    search(app, ["a", "b"])
    search(app, [""])
    text = call(app, "GET", "/metrics").text
    assert 'evenhand_requests_total{route="/search",status="200"} 1.0' in text
    assert 'evenhand_requests_total{route="/search",status="422"} 1.0' in text
    assert "evenhand_queries_total 2.0" in text
    assert "evenhand_batch_size 2.0" in text


def test_a_mistake_of_ours_is_told_to_the_log_alone(runs, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("inner words")

    monkeypatch.setattr(runs.find("one"), "search", fail)
    answer = search(make_app(runs), ["a"])
    assert answer.status_code == 500
    assert "inner words" not in answer.text
    assert "inner words" in capsys.readouterr().err


# --- the queue ------------------------------------------------------------------------------------


class SlowRun:
    """Answers with the size of its batch, when it may."""

    name = "slow"

    def __init__(self):
        self.may_answer, self.batches = threading.Event(), []

    def search(self, texts, num_results, *, explains):
        assert self.may_answer.wait(10)
        self.batches.append((texts, num_results))
        return [f"{text}!" for text in texts]


def test_what_waits_is_answered_together_and_each_gets_its_own():
    run = SlowRun()

    async def ask():
        batcher = Batcher(most_waiting=100)
        asked = [["a"], ["b", "c"], ["d"], ["e"]]
        counts = [3, 3, 5, 3]
        work = [
            batcher.answers(Work(run, count), texts)
            for count, texts in zip(counts, asked, strict=True)
        ]
        first = asyncio.create_task(batcher.answers(Work(run, 3), ["first"]))
        await asyncio.sleep(0.05)  # it is with the worker now
        rest = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(0.05)
        assert batcher.num_waiting == 5
        run.may_answer.set()
        assert await first == ["first!"]
        found = await asyncio.gather(*rest)
        assert batcher.num_waiting == 0
        return found

    assert asyncio.run(ask()) == [["a!"], ["b!", "c!"], ["d!"], ["e!"]]
    assert run.batches == [(["first"], 3), (["a", "b", "c", "e"], 3), (["d"], 5)]


def test_a_full_queue_refuses_and_one_who_left_makes_room():
    run = SlowRun()

    async def ask():
        batcher = Batcher(most_waiting=3)
        first = asyncio.create_task(batcher.answers(Work(run, 1), ["first"]))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(batcher.answers(Work(run, 1), ["a", "b"]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batcher.answers(Work(run, 1), ["c", "d"])
        waiting.cancel()
        run.may_answer.set()
        await first
        assert await batcher.answers(Work(run, 1), ["c", "d", "e"]) == ["c!", "d!", "e!"]

    asyncio.run(ask())
    assert [texts for texts, _ in run.batches] == [["first"], ["c", "d", "e"]]


def test_a_slow_answer_is_504_and_a_full_queue_503(runs, monkeypatch):
    run = SlowRun()
    monkeypatch.setitem(runs.by_name, "slow", run)
    assert search(make_app(runs, Limits(seconds=0.05)), ["a"], run="slow").status_code == 504
    run.may_answer.set()
    answer = search(make_app(runs, Limits(most_waiting=1)), ["a", "b"])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


# --- runs -----------------------------------------------------------------------------------------


def test_a_reloaded_run_answers_anew_and_a_broken_one_is_refused(home, tmp_path):
    import shutil

    shutil.copytree(home / "runs/one", tmp_path / "one")
    runs = Runs([tmp_path / "one"], device=CPU)
    app = make_app(runs)

    def answers():
        return search(app, ["badoki7"]).json()["results"]

    wanted = load_searcher(home / "runs/two", device=CPU).search(["badoki7"]).scores[0]
    before = answers()
    small.weights_file(tmp_path / "one").write_bytes(b"broken")
    (sentence,) = runs.reload()
    assert "one is served as it was" in sentence
    assert answers() == before
    shutil.rmtree(tmp_path / "one")
    shutil.copytree(home / "runs/two", tmp_path / "one")
    assert runs.reload() == []
    (after,) = answers()
    assert [answer["score"] for answer in after] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_examples_are_pairs_that_one_run_finds_and_the_other_misses(home, monkeypatch):
    from evenhand.data import open_dataset
    from evenhand.serving import examples

    assert examples.telling_queries([home / "runs/one"]) == []
    monkeypatch.setattr(examples, "CUTOFF", 1)
    folders = [home / "runs/one", home / "runs/two"]
    for folder in folders:
        small.run(home, "evaluate", folder)
    found = examples.telling_queries(folders)
    assert found
    test = open_dataset(home / "data").parts["test"]
    for example in found:
        hit, miss = (
            load_searcher(home / "runs" / example[key], device=CPU).search([example["query"]], 1)
            for key in ("found_by", "missed_by")
        )
        assert example["query"] in test.texts
        assert hit.label_ids.item() == example["label_id"] != miss.label_ids.item()


def test_runs_of_one_name_and_runs_without_texts_are_refused(home, tmp_path):
    with pytest.raises(UserError, match="have one name, one; rename one"):
        Runs([home / "runs/one", home / "runs/one"], device=CPU)
    save_dataset(small.dense_dataset(), tmp_path / "data")
    path = settings_file(tmp_path / "dense.toml", tmp_path / "data", training__num_steps=5)
    assert small.run(tmp_path, "train", path, "--run", "runs/dense").code == 0
    with pytest.raises(UserError, match="trained on features, not on texts"):
        Runs([tmp_path / "runs/dense"], device=CPU)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--api-key-env", "EVENHAND_NO_SUCH"], "no such variable"),
        (["--rate", "0"], "--rate must be between 0 and a million, got 0.0"),
        (["--timeout", "nan"], "--timeout must be"),
        (["--port", "70000"], "--port must be between 0 and 65535"),
        (["--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
    ],
)
def test_flags_that_cannot_be_are_refused(capsys, home, words, sentence):
    assert sentence in run_main(capsys, "serve", home / "runs/one", *words).sentence


def test_the_schema_knows_the_limits(runs):
    schema = call(make_app(runs), "GET", "/openapi.json").json()
    fields = schema["components"]["schemas"]["SearchRequest"]["properties"]
    assert fields["num_results"]["maximum"] == LIMITS.num_results
    assert fields["queries"]["maxItems"] == LIMITS.num_queries
    assert fields["queries"]["items"]["maxLength"] == LIMITS.query_length
    assert set(schema["paths"]) == {
        "/search", "/encode", "/runs", "/runs/{name}/map", "/runs/{name}/report", "/examples",
        "/health", "/ready", "/metrics",
    }  # fmt: skip
    assert dataclasses.asdict(LIMITS)["body_bytes"] > 4 * LIMITS.num_queries * LIMITS.query_length
    assert server.PAGE.joinpath("index.html").is_file()


def test_no_request_that_the_schema_can_name_breaks_the_server(runs):
    check_schema(make_app(runs), max_examples=20)


def check_schema(app, *, max_examples):
    """Sends what the schema allows and what it forbids; every answer must be one it names."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(max_examples=max_examples, deadline=None)
        def send(case):
            # What the schema cannot say, such as a query of white space, is refused as well.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        send()
