"""`evenhand serve` as a process: its page in a real browser, and what docs/serving.md shows."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import small
from evenhand.data import Dataset, NgramFeaturizer, Strings, save_dataset
from evenhand.errors import UserError
from evenhand.serving.server import Runs, make_app
from small import part_of, settings_file
from test_serving import search

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/serving.md").read_text("utf-8")

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"></template><script>hack()</script>"
CITIES = {  # names, latitude, longitude
    "Cairo": ("القاهرة", "Каир", "カイロ", 30.0, 31.2),
    "Vienna": ("فيينا", "Вена", "ウィーン", 48.2, 16.4),
    "Warsaw": ("وارسو", "Варшава", "ワルシャワ", 52.2, 21.0),
    "Tokyo": ("طوكيو", "Токио", "東京", 35.7, 139.7),
    HOSTILE: ("ليما", "Лима", "リマ", -12.0, -77.0),
    "Nairobi": ("نيروبي", "Найроби", "ナイロビ", -1.3, 36.8),
}
BROWSER = shutil.which("chromium")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def cities():
    """Six cities by their names in four scripts; the test part has them without the last letter."""
    featurizer = NgramFeaturizer(max_length=3, num_buckets=512)
    names = [(name, label) for label, key in enumerate(CITIES) for name in (key, *CITIES[key][:3])]
    parts = {}
    for part, texts in (
        ("train", [name for name, _ in names] * 3),
        ("test", [name[:-1] for name, _ in names]),
    ):
        labels = [[label] for _, label in names] * (3 if part == "train" else 1)
        parts[part] = part_of(labels, featurizer.featurize(texts), texts=Strings.pack(texts))
    return Dataset(
        name="places-six",
        num_features=512,
        num_labels=len(CITIES),
        parts=parts,
        label_names=Strings.pack(CITIES),
        label_coordinates=np.array([city[3:] for city in CITIES.values()], np.float32),
        featurizer=featurizer.settings(),
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with runs/demo/s2m, and the same run once more as runs/demo/snm."""
    folder = tmp_path_factory.mktemp("served")
    save_dataset(cities(), folder / "data")
    changes = {"training__evaluate_every": 0, "mining__num_sampled_labels": 5}
    path = settings_file(folder / "a.toml", "data", **changes)
    assert small.run(folder, "train", path, "--run", "runs/demo/s2m").output
    shutil.copytree(folder / "runs/demo/s2m", folder / "runs/demo/snm")
    return folder


@pytest.fixture(scope="module")
def address(home):
    """Where a server of both runs listens; it ends by SIGTERM, with nothing on its streams."""
    process = small.start(home, "serve", "runs/demo/s2m", "runs/demo/snm", "--port", 0, "--quiet")
    out = process.streams / "out"
    small.wait_for(lambda: out.exists() and "http://" in out.read_text("utf-8"))
    yield re.search(r"http://\S+", out.read_text("utf-8"))[0]
    process.kill(signal.SIGTERM)
    answer = process.wait()
    assert (answer.code, answer.err) == (0, ""), answer


# --- the page in a browser ------------------------------------------------------------------------


@pytest.fixture
def wrong():
    """What the browser complains of."""
    return []


@pytest.fixture
def page(address, request, wrong):
    """The page at a width; nothing may go wrong on it, or be asked of another server."""
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("chromium is not installed: apt install chromium")
    asked = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": request.param, "height": 800})
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("section")
        yield page
        browser.close()
    assert wrong == []
    assert asked
    assert [url for url in asked if not url.startswith(address)] == []


@pytest.mark.parametrize("page", [1280, 390], indirect=True)
def test_a_name_in_arabic_script_is_found_as_one_types(page):
    page.keyboard.type("القاهرة")  # the query has the focus
    page.wait_for_selector("#status:has-text('Cairo')", state="attached")
    for name in ("s2m", "snm"):
        section = page.get_by_role("region", name=f"Answers of {name}")
        first = section.get_by_role("listitem").first
        assert first.locator(".label bdi").inner_text() == "Cairo"
        assert first.locator(".ngrams bdi").count() == 5
        assert section.locator(".map circle").count() == len(CITIES)
    is_phone = page.viewport_size["width"] < 500
    said = page.get_by_text("First answers. s2m: Cairo; snm: Cairo")
    assert (said.bounding_box()["height"] > 10) == is_phone  # else for screen readers alone
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width == page.viewport_size["width"]


@pytest.mark.parametrize("page", [1280], indirect=True)
def test_the_page_is_used_by_keyboard(page):
    page.keyboard.type("Вена")
    page.wait_for_selector("#status:has-text('Vienna')", state="attached")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Answers appear here.")
    assert page.locator("#query").input_value() == ""
    page.get_by_role("link", name="the interface").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "query"
    assert page.locator("#query").input_value() == ""


@pytest.mark.parametrize("page", [390], indirect=True)
def test_a_label_never_becomes_markup(page):
    page.keyboard.type("Лима")
    page.wait_for_selector("#status:has-text('onerror')", state="attached")
    assert page.locator(".label bdi").first.inner_text() == HOSTILE
    assert page.locator("li.answer img").count() == 0
    assert "hacked" not in page.title()


@pytest.mark.parametrize("page", [1280], indirect=True)
def test_a_key_is_asked_for_and_a_wrong_one_is_called_so(page, wrong):
    problem = {"status": 401, "json": {"detail": "a key is needed"}}

    def answer(route):
        has_key = route.request.headers.get("authorization") == "Bearer secret"
        route.continue_() if has_key else route.fulfill(**problem)

    page.route("**/runs", answer)
    page.reload()
    page.wait_for_selector("#key:focus")
    assert page.inner_text("#alert") == ""
    page.keyboard.type("other\n")
    page.wait_for_selector("text=The server does not know this key.")
    page.locator("#key").fill("secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("section")
    assert page.is_hidden("#key-form")
    assert page.evaluate("document.activeElement.id") == "query"
    assert len(wrong) == 2  # the browser's own words about the status
    wrong.clear()


# --- what docs/serving.md shows -------------------------------------------------------------------


def test_the_client_of_the_page_finds_what_it_asks_for(address, capsys):
    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"ADDRESS": address, "KEY": "not asked for"})
    assert capsys.readouterr().out.startswith("[('Vienna', ")


CURL = re.findall(r"^\$ (curl .*)", PAGE, re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt install curl")
@pytest.mark.parametrize("command", CURL)
def test_curl_as_the_page_calls_it_is_answered(address, command):
    words = shlex.split(command.replace("http://127.0.0.1:8000", address))
    words[1:1] = ["--silent", "--show-error", "--fail", "--max-time", "20"]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", check=True)
    if words[-1].endswith("/metrics"):
        assert "evenhand_requests_total" in done.stdout
        return
    value = json.loads(done.stdout)
    if "search" in command:
        assert {answers[0]["label"] for answers in value["results"]} == {"Vienna"}
        assert value["run"] == ("snm" if "snm" in command else "s2m")


def test_the_page_lists_every_route_that_answers_with_json():
    from evenhand.serving.gate import OPEN, PROTECTED

    asked = {re.search(r":8000(/\w+)", command)[1] for command in CURL}
    assert asked == {*OPEN, *PROTECTED} - {"/examples"}


# --- Dockerfile and compose.yaml ------------------------------------------------------------------


def dockerfile():
    """(instruction, rest of the line) of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]


def test_what_the_dockerfile_names_is_there():
    lines = dockerfile()
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line[0] == "!"
    }
    copied = {path for kind, rest in lines if kind == "COPY" for path in rest.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    said = dict(lines)
    words = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"])]
    verb, given = small.parse_words(words[1:])
    assert (verb, given["host"], given["port"]) == ("serve", "0.0.0.0", int(said["EXPOSE"]))
    assert said["USER"] in said["RUN"].split()
    assert f"127.0.0.1:{given['port']}/health'" in said["HEALTHCHECK"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.search(r"/source\[(.*?)\]", said["RUN"])[1].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
    assert {project["readme"], *project["license-files"]} <= copied


def test_compose_names_ports_variables_and_addresses_as_the_commands_do():
    from evenhand.cli.options import INDEX_VARIABLE
    from evenhand.run_search import is_postgres

    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    server, database = services["server"], services["database"]
    verb, given = small.parse_words(server["command"])
    assert (verb, given["host"]) == ("serve", "0.0.0.0")
    assert server["ports"] == [f"127.0.0.1:{given['port']}:{given['port']}"]
    assert set(server["environment"]) == {INDEX_VARIABLE, given["api_key_env"]}
    (volume,) = server["volumes"]
    assert str(given["runs"][0]).startswith(volume.split(":")[1])
    own = database["environment"]
    address = server["environment"][INDEX_VARIABLE]
    assert is_postgres(address)
    user, password = own["POSTGRES_USER"], own["POSTGRES_PASSWORD"]
    assert address == f"postgresql://{user}:{password}@database/{own['POSTGRES_DB']}"
    for variable in re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text("utf-8")):
        assert f"{variable}=%s" in PAGE


# --- a database -----------------------------------------------------------------------------------


def test_the_sql_of_the_page_finds_what_the_model_finds(home, postgres):
    psycopg = pytest.importorskip("psycopg")
    push = small.run(home, "index", "push", "runs/demo/s2m", "--to", postgres)
    assert "6 labels are in the table evenhand_s2m" in push.output
    run = Runs([home / "runs/demo/s2m"], device=torch.device("cpu")).find("s2m")
    (statement,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    vector = json.dumps(run.encode(["Вена"])[0])
    statement = statement.replace("[...]", vector).replace("evenhand_first", "evenhand_s2m")
    with psycopg.connect(postgres) as connection:
        found = connection.execute(statement).fetchall()
    wanted = [(answer["label"], answer["score"]) for answer in run.search(["Вена"], 10)[0]]
    assert found == [(label, pytest.approx(score, abs=1e-5)) for label, score in wanted]


def test_the_server_asks_a_database_and_says_when_it_does_not_answer(home, tmp_path, capsys):
    pytest.importorskip("milvus_lite")
    address = str(tmp_path / "labels.db")
    assert small.run(home, "index", "push", "runs/demo/s2m", "--to", address).output
    exact, stored = (
        Runs([home / "runs/demo/s2m"], device=torch.device("cpu"), index=index)
        for index in ("exact", address)
    )
    wanted, found = (search(make_app(runs), ["Вена", "リマ"]).json() for runs in (exact, stored))
    assert [[one["label"] for one in answers] for answers in found["results"]] == [
        [one["label"] for one in answers] for answers in wanted["results"]
    ]
    index = stored.find("s2m").searcher.index
    assert address in index.name

    def fail(*arguments):
        raise UserError("the database at db.example did not answer")

    index.search = fail
    answer = search(make_app(stored), ["Вена"])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "db.example" not in answer.text
    assert "evenhand: the database at db.example did not answer" in capsys.readouterr().err
