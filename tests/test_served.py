"""`evenhand serve` as a process: its page in a real browser, and what docs/serving.md shows."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import small
from evenhand.data import Dataset, NgramFeaturizer, Strings, save_dataset
from small import part_of, settings_file

ROOT = Path(__file__).parent.parent

CITIES = {  # names, latitude, longitude
    "Cairo": ("القاهرة", "Каир", "カイロ", 30.0, 31.2),
    "Vienna": ("فيينا", "Вена", "ウィーン", 48.2, 16.4),
    "Warsaw": ("وارسو", "Варшава", "ワルシャワ", 52.2, 21.0),
    "Tokyo": ("طوكيو", "Токио", "東京", 35.7, 139.7),
    "Lima": ("ليما", "Лима", "リマ", -12.0, -77.0),
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
    """A folder with runs/demo/s2m and runs/demo/snm."""
    folder = tmp_path_factory.mktemp("served")
    save_dataset(cities(), folder / "data")
    changes = {"training__evaluate_every": 0, "mining__num_sampled_labels": 5}
    for name, method in (("s2m", "s2m-annealed"), ("snm", "snm")):
        path = settings_file(folder / "a.toml", "data", mining__method=method, **changes)
        assert small.run(folder, "train", path, "--run", f"runs/demo/{name}").output
    return folder


@pytest.fixture(scope="module")
def address(home):
    """Where a server of both runs listens; it ends by SIGTERM, with nothing on its streams."""
    words = ("runs/demo/s2m", "runs/demo/snm", "--port", 0, "--api-key-env", "EVENHAND_KEY")
    process = small.start(home, "serve", *words[:4], "--quiet")
    out = process.streams / "out"
    small.wait_for(lambda: "http://" in out.read_text("utf-8"))
    yield re.search(r"http://\S+", out.read_text("utf-8"))[0]
    process.kill(signal.SIGTERM)
    answer = process.wait()
    assert (answer.code, answer.err) == (0, ""), answer


# --- the page in a browser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("chromium is not installed: apt install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address, request):
    """The page at a width; nothing may go wrong on it, or be asked of another server."""
    wrong, asked = [], []
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("section")
    yield page
    context.close()
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
