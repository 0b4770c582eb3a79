"""The page itself: header, sections in the order a reader wants them, and how it was made."""

import base64
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from evenhand.data.dataset import Dataset
from evenhand.files import write_text
from evenhand.report.certificate import certificate_section
from evenhand.report.curves import recall_section, training_section
from evenhand.report.examples import examples_section
from evenhand.report.maps import map_section
from evenhand.report.markup import (
    NOTHING,
    Html,
    data_row,
    element,
    folded,
    head_row,
    listed,
    note,
    number,
    section,
    table,
)
from evenhand.report.slices import slices_section
from evenhand.report.study import Study, study_of
from evenhand.report.tables import groups_section, main_section
from evenhand.report.verdict import verdict
from evenhand.run_folder import RunResult
from evenhand.version import __version__

ABOUT = {  # run.json, in the order it is shown
    "method": "Method",
    "seed": "Seed",
    "started": "Started",
    "num_steps": "Steps",
    "training_seconds": "Training time",
    "ranker_seconds": "Time to fit the ranker",
    "device": "Device",
    "step": "Training step",
    "num_ranks": "Ranks",
    "bytes_sent_a_step": "Bytes a rank sent in a step",
    "interruptions": "Interrupted",
    "commit": "Commit",
    "command": "Command",
    "versions": "Versions",
    "dataset": "Data set",
}
SECTIONS = {  # what the page says at its top, where the section is there
    "summary": "Who is served",
    "groups": "Subpopulations",
    "slices": "Who is failed",
    "certificate": "What is guaranteed",
    "map": "Map",
    "cutoffs": "Cut-offs",
    "training": "Training",
    "examples": "Examples",
    "making": "How it was made",
}


def write_report(
    results: Sequence[RunResult], dataset: Dataset, path: Path, *, title: str | None = None
) -> None:
    """Writes one HTML file about one run, or several side by side; it needs no network.

    Args:
        results: evaluated on the same part of `dataset`; the first is the one others are
            compared with.
        title: if not given, the names of the runs and of the data set.
    """
    study = study_of(results, dataset)
    title = title or f"{listed(study.run_names)} on {dataset.name}"
    sections = [
        main_section(study),
        groups_section(study),
        slices_section(study),
        certificate_section(study),
        map_section(study),
        recall_section(study),
        training_section(study),
        examples_section(study),
        making_section(study),
    ]
    body = [_header(study, title), _contents(sections), *sections, _footer(study)]
    write_text(path, page(title, body))


def page(title: str, body: Sequence[Html]) -> str:
    """A whole HTML page, with style and script inside it."""
    style, script = (
        Html(files("evenhand.report").joinpath(name).read_text(encoding="utf-8"))
        for name in ("report.css", "report.js")
    )
    policy = (  # nothing is loaded from anywhere; only this very style and script count
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        {},
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", {}, title),
        element("style", {}, style),
    )
    whole = element("body", {}, element("main", {}, *body), element("script", {}, script))
    return f'<!doctype html>\n<html lang="en">{head.text}{whole.text}</html>\n'


def _digest(source: Html) -> str:
    digest = hashlib.sha256(source.text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _header(study: Study, title: str) -> Html:
    part, outcome = study.part, study.results[0].outcome
    runs = [
        element("li", {}, element("bdi", {}, name), _about_run(result.about))
        for name, result in zip(study.run_names, study.results, strict=True)
    ]
    sentence, figures = verdict(study)
    return element(
        "header",
        {},
        element("h1", {}, title),
        element("p", {"class": "verdict"}, sentence),
        element("ul", {"class": "runs"}, *(element("li", {}, line) for line in figures)),
        note(
            "In brackets: 95 % intervals over queries, for each run alone. They do not say how "
            "much another seed would change; run several seeds to know that.",
            *_finer(study),
        ),
        element("ul", {"class": "runs"}, *runs),
        note(
            f"Evaluated on the {study.part_name} part of {study.dataset.name}: "
            f"{number(len(part))} queries, {number(len(outcome.ranks))} (query, label) pairs, "
            f"{number(study.dataset.num_labels)} labels."
        ),
    )


def _about_run(about: Mapping[str, Any]) -> str:
    said = [
        f"{key} {_shown(key, about[key])}"
        for key in ("method", "seed", "started", "device")
        if about.get(key) is not None
    ]
    return f": {', '.join(said)}" if said else ""


def _contents(sections: Sequence[Html]) -> Html:
    present = "".join(part.text for part in sections)
    links = [
        element("li", {}, element("a", {"href": f"#{name}"}, title))
        for name, title in SECTIONS.items()
        if f'<section id="{name}"' in present
    ]
    return element("nav", {"aria-label": "Contents"}, element("ul", {}, *links))


def _footer(study: Study) -> Html:
    said = f"Made by evenhand {__version__}. {study.dataset.attribution}"
    return element("footer", {}, element("p", {}, said))


def _finer(study: Study) -> list[Html | str]:
    """Intervals of single runs are blunt, and the verdict must not look like the last word."""
    if len(study.results) < 2:
        return []
    command = element("code", {}, "evenhand compare")
    return [" Runs whose intervals overlap may still differ: ", command, " pairs their queries."]


# --- how it was made ------------------------------------------------------------------------------


def making_section(study: Study) -> Html:
    abouts = [result.about for result in study.results]
    others = [
        key
        for key in dict.fromkeys(key for about in abouts for key in about)
        if key not in (*ABOUT, "name", "is_running")
    ]
    rows = [
        data_row(ABOUT.get(key, key), *(_shown(key, about.get(key)) for about in abouts))
        for key in [*ABOUT, *others]
        if any(about.get(key) is not None for about in abouts)
    ]
    head = head_row("", *(element("bdi", {}, name) for name in study.run_names))
    about = [table("What was run, and where", [head], rows, css_class="prose")] if rows else []
    settings = [
        folded(f"Settings of {name}", element("pre", {}, element("code", {}, result.config_text)))
        for name, result in zip(study.run_names, study.results, strict=True)
        if result.config_text.strip()
    ]
    return section("making", "How it was made", *about, *settings)


def _shown(key: str, value: Any) -> str:
    """One value of run.json, for a person."""
    if value is None or value != value:
        return NOTHING
    if key in ("training_seconds", "ranker_seconds") and isinstance(value, int | float):
        return _duration(value)
    if key == "started":
        return _moment(str(value))
    if key == "interruptions" and isinstance(value, list):
        return "; ".join(_interruption(item) for item in value if isinstance(item, Mapping))
    if key == "step" and isinstance(value, Mapping):
        kind, reason = str(value.get("kind", NOTHING)), value.get("reason")
        return f"{kind} (no CUDA graph: {reason})" if reason else kind
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown('', item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return number(value) if isinstance(value, int) and key != "seed" else str(value)


def _interruption(told: Mapping[str, Any]) -> str:
    """'resumed at step 50 (20 steps trained again), 2025-11-15 09:06': what was lost, and when."""
    step, lost = told.get("resumed_at_step", 0), told.get("lost_steps", 0)
    again = f" ({lost} steps trained again)" if lost else ""
    sentences = told.get("damaged_checkpoints")
    damaged = "".join(f"; {said}" for said in sentences) if isinstance(sentences, list) else ""
    return f"resumed at step {step}{again}, {_moment(str(told.get('at', '')))}{damaged}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "under 1 s"


def _moment(text: str) -> str:
    """'2025-11-15 09:06' of an ISO time; anything else as it is."""
    try:
        return datetime.datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text
