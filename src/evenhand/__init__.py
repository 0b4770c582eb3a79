"""Evenhand: retrieval models that work for every part of the data.

For a training loop of your own, everything is here: draw negatives with a sampler, score them,
`mask_positives`, and hand the scores to `s2m_loss`.
"""

import os
import sys

# As a command, threads that wait spin for a moment and then sleep. By default they spin for long,
# and when another program takes a core, a step takes several times as long. OpenMP reads this when
# torch is loaded, hence up here; a program that uses evenhand as a library keeps its own setting.
if os.path.basename((sys.argv or [""])[0]) == "evenhand":
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenhand.version import __version__

if TYPE_CHECKING:
    from evenhand.losses import (
        averaged_loss,
        bowl_loss,
        contrastive_loss,
        crammer_singer_loss,
        exponential,
        hinge,
        logistic,
        softmax_loss,
        squared_hinge,
    )
    from evenhand.mining import hardest_examples, hardest_labels, mask_positives
    from evenhand.objective import s2m_loss
    from evenhand.predictions import evaluate_predictions
    from evenhand.risk import (
        DualCvar,
        EvenMining,
        GroupRisk,
        StochasticMaximum,
        chi_square_weights,
        even_weights,
        kl_weights,
        mean_weights,
        nonzero_weights,
        ranked_range_weights,
        tail_weights,
        top_weights,
    )
    from evenhand.sampling import (
        Distinct,
        FrequencySampler,
        InBatchSampler,
        LabelSample,
        LabelSampler,
        LogUniformSampler,
        MixedSampler,
        UniformSampler,
        log_q_corrected,
    )

__all__ = [
    "Distinct",
    "DualCvar",
    "EvenMining",
    "FrequencySampler",
    "GroupRisk",
    "InBatchSampler",
    "LabelSample",
    "LabelSampler",
    "LogUniformSampler",
    "MixedSampler",
    "StochasticMaximum",
    "UniformSampler",
    "__version__",
    "averaged_loss",
    "bowl_loss",
    "chi_square_weights",
    "contrastive_loss",
    "crammer_singer_loss",
    "evaluate_predictions",
    "even_weights",
    "exponential",
    "hardest_examples",
    "hardest_labels",
    "hinge",
    "kl_weights",
    "log_q_corrected",
    "logistic",
    "mask_positives",
    "mean_weights",
    "nonzero_weights",
    "ranked_range_weights",
    "s2m_loss",
    "softmax_loss",
    "squared_hinge",
    "tail_weights",
    "top_weights",
]

_HOMES = ("losses", "mining", "objective", "risk", "sampling", "predictions")


def __getattr__(name: str) -> Any:
    """A name, when it is first asked for: torch takes seconds to load, and a command that only
    says what it can do, or that a word was wrong, does without."""
    if name in _HOMES:
        return import_module(f"evenhand.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"evenhand.{home}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
