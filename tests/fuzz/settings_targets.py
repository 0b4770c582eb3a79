"""Targets that read settings: TOML, --set, --search, command lines, names of scores and groups."""

import contextlib
import dataclasses
import io
import os

import typer

from evenhand.cli.options import SettingsFlags
from evenhand.config import build_config, read_settings, to_toml, with_assignments
from evenhand.errors import UserError
from evenhand.tuning.space import (
    default_space,
    get_setting,
    parse_space,
    with_settings,
)
from tests.helpers.small import parse_words

from .target import answer, require, target, write

DEFAULT = build_config({})


def _same_again(config) -> None:
    """What is written into a run folder is read back, and is the same."""
    path = write("again.toml", to_toml(config).encode("utf-8"))
    require(build_config(read_settings(path)) == config, "another config when read again")


@target(
    "config",
    b'[data]\ndataset = "places"\n[training]\nnum_steps = 10\nlearning_rate = 0.5\n',
    to_toml(DEFAULT).encode(),
    b'[mining]\nmethod = "topk-sgd"\ntail_fraction = 0.25\n[model]\nhidden_widths = [3, 4]\n',
    b'[evaluation]\ncutoffs = [1, 10]\nmin_pairs = { script = 100, "a b" = 3 }\n',
    '[risk]\ngroup = "é\\u007f\\n"\n[loss]\nname = "softmax"\nlog_q = true\n'.encode(),
)
def read_config(data: bytes) -> Exception | None:
    path = write("config.toml", data)
    config, refusal = answer(lambda: build_config(read_settings(path)))
    if refusal is None:
        _same_again(config)
        default_space(config)
    return refusal


def _words(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.replace(b"\x00", b"").split(b"\n")]


@target(
    "assignments",
    b"training.num_steps=100\nmining.method=snm",
    b"loss.name=softmax\nmodel.hidden_widths=[1, 2]\nevaluation.min_pairs={a=1}",
    b"data.dataset=/a/b c\nrisk.group=\xc3\xa9",
)
def read_assignments(data: bytes) -> Exception | None:
    config, refusal = answer(lambda: build_config(with_assignments({}, _words(data))))
    if refusal is None:
        _same_again(config)
    return refusal


@target(
    "search-space",
    b"training.learning_rate=0.01,0.04\nmining.num_hard_examples=64,128",
    b"loss.margin=-0.5,0.5\nmining.method=snm,s2m",
    b'training.num_steps=1,100\nrisk.group="a b",c',
    b'risk.group=" b",c',
    b"risk.group=\"true\",'1',a-b",
)
def read_space(data: bytes) -> Exception | None:
    space, refusal = answer(lambda: parse_space(_words(data), DEFAULT))
    if refusal is not None:
        return refusal
    for name, values in space.items():
        for value in values:
            config, unfit = answer(lambda n=name, v=value: with_settings(DEFAULT, {n: v}))
            is_it = unfit is not None or get_setting(config, name) == value
            require(is_it, f"{name} = {value!r}")
    return None


@target(
    "arguments",
    b"train\n--run\nruns/a\n--steps\n5\n--learning-rate\n0.1\n--method\nsnm",
    b"tune\n--trials\n4\n--search\nloss.margin=0.1,0.2\n--seed\n1",
    b"train\nconfig.toml\n--set\nloss.name=softmax\n--hard-examples\n7\n--data\nd",
    b"data\nextreme\n--train\na\n--test\nb\n--validation-fraction\n.1",
)
def read_arguments(data: bytes) -> Exception | None:
    """The parser of the command line, and what the flags of `train` and `tune` come to."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            verb, values = parse_words(_words(data))
    except typer.Exit:  # --help
        return UserError("help")
    except typer.TyperException as error:
        require(bool(error.format_message()), "a usage error without a word")
        return UserError("usage")
    except UserError as error:  # of a flag that is checked where it is read
        return error
    if verb not in ("train", "tune"):
        return None
    names = {field.name for field in dataclasses.fields(SettingsFlags)}
    flags = SettingsFlags(**{name: value for name, value in values.items() if name in names})
    config, refusal = answer(lambda: build_config(with_assignments({}, flags.words())))
    if refusal is None:
        _same_again(config)
    return refusal
