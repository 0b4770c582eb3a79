"""Targets that read settings: TOML, --set, --search, command lines, names of scores and groups."""

import contextlib
import dataclasses
import io
import os

import numpy as np
import typer

from evenhand.cli.options import SettingsFlags
from evenhand.config import build_config, read_settings, to_toml, with_assignments
from evenhand.data.dataset import Dataset, Groups, Part, Rows
from evenhand.errors import UserError
from evenhand.evaluation import Score, selected_score
from evenhand.tuning.space import (
    count_members,
    default_space,
    get_setting,
    num_hard_examples_for,
    parse_space,
    with_settings,
)
from tests.small import parse_words

from .target import Target, answer, in_memory, require

DEFAULT = build_config({})


def _same_again(config) -> None:
    """What is written into a run folder is read back, and is the same."""
    if to_toml(config).count(".") > 1000:
        return  # readers refuse so many dots, even within a string: a key of them takes too long
    path = in_memory("again.toml", to_toml(config).encode("utf-8"))
    require(build_config(read_settings(path)) == config, "another config when read again")


def _read_config(data: bytes) -> Exception | None:
    path = in_memory("config.toml", data)
    config, refusal = answer(lambda: build_config(read_settings(path)))
    if refusal is None:
        _same_again(config)
        default_space(config)
    return refusal


SETTINGS = (
    b"seed = 3\n", b"[training]\n", b"[mining]\n", b"[evaluation.min_pairs]\n", b"num_steps = 10",
    b"learning_rate = 1e-3", b"cutoffs = [1, 2]", b"batch_size = 8", b"num_hard_examples = 4",
    b"nan",
    b'method = "s2m"', b'"""', b"'''", b"1979-05-27T07:32:00Z", b"{a = 1}", b"[[training]]",
    b"x.y.z",
    b'"\\ud800"', b"0xffff", b"true", b"hidden_widths = [3]", b'group = "country"', b"[0",
    b"\\u0000",
)  # fmt: skip

CONFIG = Target(
    "config",
    _read_config,
    (
        b'[data]\ndataset = "places"\n[training]\nnum_steps = 10\nlearning_rate = 0.5\n',
        to_toml(DEFAULT).encode(),
        b'[mining]\nmethod = "topk-sgd"\ntail_fraction = 0.25\n[model]\nhidden_widths = [3, 4]\n',
        b'[evaluation]\ncutoffs = [1, 10]\nmin_pairs = { script = 100, "a b" = 3 }\n',
        '[risk]\ngroup = "é\\u007f\\n"\n[loss]\nname = "softmax"\nlog_q = true\n'.encode(),
    ),
    SETTINGS,
)


def _words(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.replace(b"\x00", b"").split(b"\n")]


def _read_assignments(data: bytes) -> Exception | None:
    words = _words(data)
    config, refusal = answer(lambda: build_config(with_assignments({}, words)))
    if refusal is None:
        _same_again(config)
    return refusal


ASSIGNMENTS = Target(
    "assignments",
    _read_assignments,
    (
        b"training.num_steps=100\nmining.method=snm",
        b"loss.name=softmax\nmodel.hidden_widths=[1, 2]\nevaluation.min_pairs={a=1}",
        b"data.dataset=/a/b c\nrisk.group=\xc3\xa9",
    ),
    (*SETTINGS, b"=", b"training.", b"risk.group=\xff", b"mining.num_hard_labels=3", b'="'),
)


def _read_space(data: bytes) -> Exception | None:
    words = _words(data)
    space, refusal = answer(lambda: parse_space(words, DEFAULT))
    if refusal is not None:
        return refusal
    for name, axis in space.items():
        for share in (0.0, 0.3, 0.999999):
            value, refusal = axis.at(share), None
            config, refusal = answer(lambda n=name, v=value: with_settings(DEFAULT, {n: v}))
            is_it = refusal is not None or get_setting(config, name) == value
            require(is_it, f"{name} = {value!r}")
    again = parse_space([f"{name}={axis}" for name, axis in space.items()], DEFAULT)
    require(again == space, "another space when read again from tuning.json")
    return None


SPACE = Target(
    "search-space",
    _read_space,
    (
        b"training.learning_rate=0.01..0.04\nmining.num_hard_examples=64,128",
        b"loss.margin=-0.5..0.5\nmining.method=snm,s2m",
        b'training.num_steps=1..100\nrisk.group="a b",c',
    ),
    (
        b"..",
        b",",
        b"=",
        b"1e-300..1e300",
        b"training.seed=0..9",
        b'"true"',
        b"model.scale=",
        b"'1'",
    ),
)

VERBS = (
    b"train", b"tune", b"--run", b"--set", b"--steps", b"--seed", b"--learning-rate", b"--method",
    b"--hard-examples", b"--smallest-share", b"--smallest-group", b"--trials", b"--max-drop",
    b"data",
    b"--search", b"--average", b"--criterion", b"places", b"extreme", b"table", b"--min-population",
    b"--validation-fraction", b"--validation-block", b"--group",
    b"search",
    b"--results", b"slices", b"--top",
    b"--conditions", b"evaluate", b"--part", b"--device", b"--", b"-", b"--version", b"-h",
    b"--s=1",
)  # fmt: skip


def _read_arguments(data: bytes) -> Exception | None:
    """The parser of the command line, and what the flags of `train` and `tune` come to."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            verb, values = parse_words(_words(data))
    except typer.Exit:  # --help
        return UserError("help")
    except typer.TyperException as error:
        require(bool(error.format_message()), "a usage error without a word")
        return UserError("usage")
    if verb not in ("train", "tune"):
        return None
    names = {field.name for field in dataclasses.fields(SettingsFlags)}
    flags = SettingsFlags(**{name: value for name, value in values.items() if name in names})
    settings, refusal = answer(lambda: with_assignments({}, flags.words()))
    if refusal is None:
        config, refusal = answer(lambda: build_config(settings))
    if refusal is None:
        _same_again(config)
    if flags.smallest_share is not None:
        count, refusal = answer(lambda: num_hard_examples_for(flags.smallest_share, batch_size=8))
        require(refusal is not None or 1 <= count <= 8, f"k' = {count}")
    return refusal


ARGUMENTS = Target(
    "arguments",
    _read_arguments,
    (
        b"train\n--run\nruns/a\n--steps\n5\n--learning-rate\n0.1\n--method\nsnm",
        b"tune\n--trials\n4\n--search\nloss.margin=0.1,0.2\n--smallest-share\n0.02\n--seed\n1",
        b"train\nconfig.toml\n--set\nloss.name=softmax\n--hard-examples\n7\n--data\nd",
        b"data\nextreme\n--train\na\n--test\nb\n--validation-fraction\n.1",
    ),
    tuple(b"\n" + verb + b"\n" for verb in VERBS),
)

SCORES = [
    Score("recall@10", column, group, value, value, value, 40, is_judged=True)
    for column, group, value in (
        ("all", "all", 0.5),
        ("frequency", "tail", 0.1),
        ("script", "THAI", 0.2),
        ("script", "worst 3", float("nan")),
    )
]


def _select(data: bytes) -> Exception | None:
    name = data.decode("utf-8", "surrogateescape")
    score, refusal = answer(lambda: selected_score(SCORES, name))
    if refusal is None:
        require(score in SCORES and score.value == score.value, f"{score}")
    return refusal


SELECTORS = Target(
    "selectors",
    _select,
    (b"recall@10", b"recall@10 on tail", b"recall@10 on script=THAI"),
    (b" on ", b" of ", b"worst 3 of script", b"=", b"all", b"frequency=tail", b"script"),
)

GROUPED = Dataset(
    "d", 3, 2,
    {"train": Part(
        Rows(np.array([0, 1, 2]), np.array([0, 1], np.int32)),
        Rows(np.array([0, 1, 2]), np.array([0, 1], np.int32)),
        {"script": Groups(np.array([0, -1], np.int32), ("THAI", "LATIN"))},
    )},
)  # fmt: skip


def _share(data: bytes) -> Exception | None:
    name = data.decode("utf-8", "surrogateescape")
    found, refusal = answer(lambda: count_members(GROUPED, name))
    require(refusal is not None or 0 < found[0] <= found[1], f"{found}")
    return refusal


SHARES = Target("group-shares", _share, (b"script=THAI", b" script = THAI "), (b"LATIN", b"="))

TARGETS = (CONFIG, ASSIGNMENTS, SPACE, ARGUMENTS, SELECTORS, SHARES)
