"""Every target by its name: to import a module of targets is to register them."""

# ruff: noqa: F401
from . import array_targets, record_targets, settings_targets, text_targets
from .target import TARGETS
