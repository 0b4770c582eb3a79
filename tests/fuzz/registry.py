"""Every target by its name."""

from . import (
    array_targets,
    binary_targets,
    network_targets,
    record_targets,
    saved_targets,
    settings_targets,
    text_targets,
)

MODULES = (
    text_targets, settings_targets, record_targets, array_targets, binary_targets, network_targets,
    saved_targets,
)  # fmt: skip
TARGETS = {target.name: target for module in MODULES for target in module.TARGETS}
